"""Llama 4: layers that see their own chunk of the text only, and queries whose temperature depends
on their position.

The oracle is HF's `generate` of each row alone: in a padded batch HF counts the temperature's
positions from the padding.
"""

from functools import cache

import pytest
import torch
from agreement import check_captured
from architectures import VOCAB, build
from diagonal import first
from drafting import WrongDrafter, perturbed
from kernel_cases import interpreted
from target_laws import RaggedBatch, check_found
from transformers import AttentionInterface

from specdec import ModelDrafter, Target, Tree
from specdec.kernels import ragged_attention
from specdec.kernels.attention import reference, triton
from specdec.kernels.types import CAUSAL
from specdec.slots import attention, visible
from specdec.slots.attention import window_mask
from specdec.slots.cache import Window
from specdec.slots.spans import Chunk
from specdec.targets import discovery, queries
from specdec.targets.attention import ATTENTION, slot_attention
from specdec.targets.trial.probe import HFMask

SIZE, BATCH = 8, RaggedBatch(VOCAB, (1, 9, 16, 21), 24, num_ids=21)
TEMPERATURE = {"floor_scale": 5, "attn_scale": 0.5}


@cache
def model_of(seed=0):
    return build("llama4", seed=seed, **TEMPERATURE)


DRAFTERS = {
    "good": lambda: ModelDrafter(perturbed(model_of()), 4),
    "random": lambda: ModelDrafter(model_of(1), 3),
    "wrong": lambda: WrongDrafter(model_of(), 3),
    "tree": lambda: ModelDrafter(perturbed(model_of()), tree=Tree(nodes=9, depth=4, top_k=3)),
    "itself": lambda: ModelDrafter(model_of(), 4),
}


@pytest.mark.parametrize("kind", first(DRAFTERS, ["tree", "wrong", "itself"]))
def test_greedy_text_is_that_of_hf_beyond_several_chunks(kind):
    rate = BATCH.check_greedy(model_of(), DRAFTERS[kind](), 5).stats.acceptance_rate
    assert rate == {"wrong": 0, "itself": 1}[kind] if kind in ("wrong", "itself") else 0 < rate < 1


@pytest.mark.parametrize("kind", ["good", "tree"])
def test_captured_steps_are_the_eager_ones(kind):
    check_captured(model_of(), DRAFTERS[kind](), BATCH.ids, BATCH.mask, **BATCH.options)


# Masks.


@pytest.mark.parametrize("size", [1, 3, 8, 40])
def test_a_query_sees_what_its_chunk_has_before_it(size):
    slots = torch.tensor([[5, 6, 7, 8, 9], [14, 15, 16, 17, 18]])
    mask = window_mask(Window(slots, 32), 5, torch.float32, Chunk(size))
    by_hand = [
        [[k <= q and k // size == q // size for k in range(32)] for q in row]
        for row in slots.tolist()
    ]
    assert (mask[:, 0] == 0).tolist() == by_hand


def test_nodes_of_a_tree_are_in_the_chunk_of_their_position():
    """Two siblings end a chunk: the node that hangs on one of them sees the next chunk's alone."""
    slots, positions = torch.arange(14, 19)[None], torch.tensor([[14, 15, 15, 16, 17]])
    visible = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 1, 1, 1]]
    ).bool()[None]
    window = Window(slots, 32, positions=positions, visible=visible)
    mask = window_mask(window, 5, torch.float32, Chunk(SIZE))[0, 0] == 0
    found = [row.nonzero().flatten().tolist() for row in mask]
    before = list(range(8, 14))
    assert found == [[*before, 14], [*before, 14, 15], [*before, 14, 16], [17], [17, 18]]


@interpreted
@pytest.mark.parametrize("kernel", [ragged_attention, triton.ragged_attention])
@pytest.mark.parametrize("has_tree", [False, True])
def test_kernels_see_of_a_chunk_what_the_dense_mask_shows(has_tree, kernel, monkeypatch):
    """On a GPU a chunk is the sliding window of its last position."""
    generator = torch.Generator().manual_seed(0)
    slots, tree = torch.tensor([[5, 6, 7, 8, 9], [14, 15, 16, 17, 18]]), {}
    if has_tree:
        tree["positions"] = slots[:, :1] + torch.tensor([0, 1, 1, 2, 3])
        tree["visible"] = torch.ones(5, 5).tril().bool()[None]
        tree["visible"][:, 2:, 1] = False
    query, keys, values = (
        torch.randn(2, heads, count, 16, generator=generator)
        for heads, count in ((4, 5), (2, 32), (2, 32))
    )
    options = CAUSAL._replace(sliding_window=Chunk(SIZE))
    case = query, keys, values, options
    dense = attention.attend(Window(slots, 32, **tree), *case)
    calls = []

    def counted(*args):
        calls.append(args)
        return kernel(*args)

    monkeypatch.setattr(reference, "attends_raggedly", lambda *args, **kwargs: True)
    monkeypatch.setattr("specdec.slots.ragged.ragged_attention", counted)
    ours = attention.attend(Window(slots, 32, has_kernels=True, **tree), *case)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-5)
    assert len(calls) == 1
    full = attention.attend(Window(slots, 32, **tree), query, keys, values, CAUSAL)
    assert (full - dense).abs().max() > 1e-2


# Faults.


def boundary_off_by(offset):
    def first_seen(queries, window):
        chunk = (queries + offset) // window.size * window.size - offset
        return chunk.clamp(min=0)

    return first_seen


HF_FIRST_SEEN = visible.first_seen
FAULTS = {
    "a chunk begins late": boundary_off_by(-1),
    "a chunk begins early": boundary_off_by(1),
    "a sliding window": lambda queries, window: HF_FIRST_SEEN(queries, window.size),
    "no chunks": lambda queries, window: torch.zeros_like(queries),
}


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, torch.bfloat16) for fault in FAULTS), ("a chunk begins late", torch.float32)],
)
def test_the_self_test_finds_a_wrong_chunk(fault, dtype, monkeypatch):
    """Masks of HF are read without the fault, which is then in one layer of three."""
    model = build("llama4", dtype=dtype, **TEMPERATURE)

    def faulty(module, *args, **options):
        with pytest.MonkeyPatch.context() as inner:
            if module.layer_idx == 1:
                options["slot_window"].masks.clear()
                inner.setattr(visible, "first_seen", FAULTS[fault])
            out = slot_attention(module, *args, **options)
            options["slot_window"].masks.clear()
        return out

    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, faulty)
    check_found(model, monkeypatch, r"layers\.1\.self_attn differs from its plain forward")


TEMPERED = queries.tempered


def of_the_first_row(module, query, window):
    return TEMPERED(module, query, Window(window.slots[:1].expand_as(window.slots), 16))


def by_slots(module, query, window):
    return TEMPERED(module, query, Window(window.slots, window.num_attended))


@pytest.mark.parametrize("fault", [of_the_first_row, lambda module, query, window: query])
def test_the_self_test_finds_a_wrong_temperature(fault, monkeypatch):
    monkeypatch.setattr(queries, "tempered", fault)
    model = build("llama4", **TEMPERATURE)
    check_found(model, monkeypatch, r"layers\.3\.self_attn differs from its plain forward")


def test_a_temperature_by_slots_is_no_temperature_of_a_tree(monkeypatch):
    model = build("llama4", **TEMPERATURE)
    monkeypatch.setattr(queries, "tempered", by_slots)
    with pytest.raises(ValueError, match="cannot read the window of a tree"):
        Target(model).check_trees()


def test_a_mask_that_only_resembles_chunks_is_refused():
    """Chunks that begin one position later are none."""
    for late in (0, 1):
        mask = HFMask(
            SIZE, lambda row, head, q, k, d=late: (k <= q) & ((k - d) // SIZE == (q - d) // SIZE)
        )
        fitting = [window for window in mask.windows if mask.is_causal_within(window, None)]
        assert fitting == ([] if late else [Chunk(SIZE)])


def test_chunks_that_are_declared_must_be_there(monkeypatch):
    model = build("llama4")
    empty = {"shapes": {}, "mixers": {}}
    monkeypatch.setattr(discovery, "stored_of", lambda *args, **options: empty)
    with pytest.raises(ValueError, match="layer 0 is chunked_attention but has no chunks"):
        Target(model)
