"""The compiled kernels of attention are their definition, at the sizes of real models: `python -m
pytest -m gpu`. They are one graph of one or two launches that never waits, read other lengths in
every replay, and cost what the lengths cost.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

from architectures import VOCAB, build
from attention_cases import Sizes, ancestors, assert_near, random_case, with_visible
from kernel_cases import DTYPES, by_definition, graph_of, launches_of

from specdec import Target
from specdec.kernels import ragged_attention, write_slots
from specdec.kernels.attention.reference import MAX_WINDOW, attends_raggedly
from specdec.kernels.slots.reference import writes_slots
from specdec.types import Draft

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
LENGTHS = [1, 511, 513, 4097, 8192]


def by_library(case):
    """By the library's operation, which is the kernel's here."""
    has_mask = case.options.window_visible is not None
    assert attends_raggedly(case.query, case.keys, has_window_mask=has_mask)
    return ragged_attention(*case.arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("queries", [1, 4])
def test_long_and_short_rows_are_the_definition(queries, rows, dtype):
    sizes = Sizes(rows, queries, 2, 4, 128, 128, slots=8192)
    starts = range(len(LENGTHS)) if rows == 1 else [0]
    for start in starts:
        lengths = [max(LENGTHS[(start + i) % len(LENGTHS)], queries) for i in range(rows)]
        case = random_case(sizes, start, dtype=dtype, lengths=lengths).cuda()
        assert_near(by_library(case), case)


WIDTHS = [(64, 64, 8), (80, 80, 1), (96, 96, 2), (128, 128, 5), (192, 128, 1), (256, 256, 2)]
OPTIONS = {"scale": 0.1, "softcap": 5.0, "sliding_window": 100, "num_first": 4, "has_sinks": True}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "value_width", "group"), [*WIDTHS, (576, 512, 16)])
def test_all_options_at_the_widths_of_real_models_are_the_definition(
    width, value_width, group, dtype
):
    """One shape for each dtype and two more in bfloat16: the time goes into compiling."""
    shapes = {(3, 4): OPTIONS}
    if dtype == torch.bfloat16:
        shapes |= {(2, 9): {"sliding_window": 33, "num_first": 70, "has_mask": True}, (40, 2): {}}
    for (rows, queries), options in shapes.items():
        sizes = Sizes(rows, queries, 2, group, width, value_width, slots=784)
        case = random_case(sizes, width, dtype=dtype, forgets=True, **options).cuda()
        assert_near(by_library(case), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_trees_blocks_and_wide_windows_are_the_definition(dtype):
    tree = ancestors([-1, *((node - 1) // 3 for node in range(1, MAX_WINDOW))])
    for visible in (tree, torch.ones(MAX_WINDOW, MAX_WINDOW, dtype=torch.bool)):
        case = random_case(Sizes(3, MAX_WINDOW, 2, 8, 128, 128, 2048), 1, dtype=dtype)
        case = with_visible(case, visible).cuda()
        assert_near(by_library(case), case)


def test_chunks_of_a_prompt_keep_to_dense_masks():
    keys = torch.empty(1, 8, 4096, 128, device="cuda", dtype=torch.bfloat16)
    few, many = (keys.new_empty(1, 32, count, 128) for count in (4, 512))
    assert attends_raggedly(few, keys)
    assert not attends_raggedly(many, keys)
    assert not attends_raggedly(few.double(), keys.double())
    assert not attends_raggedly(few.requires_grad_(), keys)


@pytest.mark.parametrize(("rows", "num_launches"), [(1, 2), (16, 2), (80, 1)])
def test_one_captured_graph_serves_all_lengths(rows, num_launches, monkeypatch):
    monkeypatch.undo()  # filling fresh memory would be launches, too
    sizes = Sizes(rows, 4, 8, 4, 128, 128, slots=2048)
    cases = [
        random_case(sizes, seed, dtype=torch.bfloat16, lengths=[length] * rows).cuda()
        for seed, length in enumerate((4, 513, 2048, 70))
    ]
    static = cases[0]
    assert len(launches_of(lambda: by_library(static))) == num_launches
    graph, out = graph_of(lambda: by_library(static))
    for case in (*cases, *reversed(cases)):
        expected = by_library(case)
        for name in ("query", "keys", "values", "slots"):
            getattr(static, name).copy_(getattr(case, name).clone())
        graph.replay()
        assert torch.equal(out, expected)
        if case is not static:
            assert_near(out, case)


def test_repetitions_give_the_same_bits():
    case = random_case(Sizes(4, 4, 8, 4, 128, 128, 4096), 1, dtype=torch.bfloat16).cuda()
    expected = by_library(case)
    for _ in range(100):
        assert torch.equal(by_library(case), expected)


def test_storage_of_more_than_2_31_numbers_is_read_where_it_is():
    rows, slots = 2200, 1024
    shape = rows, slots, 8, 128
    storage = [torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda") for _ in "kv"]
    assert storage[0].numel() > 2**31
    case = random_case(Sizes(2, 4, 8, 4, 128, 128, slots), 1, dtype=torch.bfloat16).cuda()
    for states, part in zip(storage, (case.keys, case.values), strict=True):
        states[-2:] = part.transpose(1, 2)
        states[:-2, 0] = 1.0
    query = torch.zeros(rows, 32, 4, 128, dtype=torch.bfloat16, device="cuda")
    query[-2:] = case.query
    window = torch.full((rows, 4), slots, device="cuda")
    window[:, 0], window[-2:] = 0, case.slots
    keys, values = (states.transpose(1, 2) for states in storage)
    out = ragged_attention(query, keys, values, window)
    assert_near(out[-2:], case)
    assert bool((out[:-2, 0] == 1).all())
    new = torch.full((rows, 8, 1, 128), 3.0, dtype=torch.bfloat16, device="cuda")
    write_slots(*storage, new, -new, torch.full((rows, 1), 1023, device="cuda"))
    assert bool((storage[0][:, 1023] == 3).all() & (storage[1][:, 1023] == -3).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_a_windows_states_are_written_in_one_launch(rows, dtype, monkeypatch):
    monkeypatch.undo()
    generator = torch.Generator("cuda").manual_seed(1)
    slots = torch.rand(rows, 300, generator=generator, device="cuda").argsort(1)[:, :5]
    for width, value_width in ((128, 128), (192, 128), (80, 96)):
        states, ours = [], []
        for size in (width, value_width):
            made = torch.randn(rows, 5, 8, size, generator=generator, device="cuda").to(dtype)
            states.append(made.transpose(1, 2))
            ours.append(torch.full((rows, 300, 8, size), torch.nan, device="cuda", dtype=dtype))
        theirs = [storage.clone() for storage in ours]
        by_definition(write_slots, *theirs, *states, slots)
        assert writes_slots(states[0], ours[0])
        write_slots(*ours, *states, slots)
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))
    assert len(launches_of(lambda: write_slots(*ours, *states, slots))) == 1


def no_mask(*_):
    raise AssertionError("a dense mask was made that nobody needs")


HALF_TOO = ["llama", "gemma2", "gemma3"]
EXPERTS = ["gpt_oss", "deepseek_v3"]  # in half precision a token may get another expert


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in HALF_TOO for dtype in DTYPES),
        *((name, torch.float32) for name in EXPERTS),
    ],
)
@torch.no_grad()
def test_a_target_verifies_without_masks_and_reads_nothing_beyond_a_length(
    name, dtype, monkeypatch
):
    """Against its own forward over the text without a cache."""
    model = build(name, dtype=dtype).cuda()
    target = Target(model)
    monkeypatch.setattr("specdec.slots.attention.window_mask", no_mask)
    tokens = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0)).cuda()
    lengths = torch.tensor([2, 7, 4], device="cuda")
    cache = target.init_cache(3, 32)
    for buffer in (*cache.keys.values(), *cache.values.values()):
        buffer.fill_(torch.nan)
    target.prefill(cache, tokens[:, :7], lengths, offset=0)
    root, draft = tokens[:, 7], Draft(tokens[:, 8:11])
    ours = target.verify(cache, lengths, root, draft).logits.double()
    model = model.float()
    for row, length in enumerate(lengths.tolist()):
        text = torch.cat([tokens[row, :length], tokens[row, 7:11]])[None]
        theirs = model(text, use_cache=False).logits[0, -4:].double()
        error = (ours[row] - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
        assert float(error) < {torch.float32: 1e-4}.get(dtype, 0.1), float(error)
