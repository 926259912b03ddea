"""Steps on a GPU: `python -m pytest -m gpu tests/graphs`. Float32 with TF32 off, and bfloat16.

The oracle of a text is HF's; of a captured step the same step run eagerly (`check=True` compares
tokens, acceptance by position, lengths and drafts after every step), and a generator that captures
nothing. That a step does not wait for the device is CUDA's own check, where `no_host_sync` is a
model of it.
"""

from concurrent.futures import ThreadPoolExecutor

import mask_heads
import mtp_heads
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from mtp_checkpoints import write_numbered
from steps import account, texts_beside_poison, texts_by_many_lengths

from specdec import (
    EagleDrafter,
    EnsembleSampler,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
    Target,
)
from specdec.drafters import EagleHead
from specdec.drafters.tree import Tree
from specdec.graphs import Captured
from specdec.graphs.capture import CaptureError
from specdec.graphs.storage import StorageMovedError
from specdec.lab.training.eagle import eagle_config
from specdec.loop.check import ReplayMismatchError
from specdec.loop.replay import NUM_EAGER
from specdec.loop.state import TokenBuffer
from specdec.slots.cache import SlotCache

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
TREE = Tree(nodes=6, depth=3, top_k=2, rates=(0.6, 0.3))
CORRECTED = "dspark, rnn", "dflash2", "domino", "xpress", "lilicorr"
DRAFTERS = {
    "none": lambda model: None,
    "model": lambda model: ModelDrafter(perturbed(model), 3),
    "model, recurrent": lambda model: ModelDrafter(build("bamba", dtype=model.dtype).cuda(), 3),
    "lookup": lambda model: PromptLookupDrafter(3),
    "eagle1": lambda model: EagleDrafter(head(model, "eagle1"), model, 3),
    "eagle3": lambda model: EagleDrafter(head(model, "eagle3"), model, 3),
    **{
        name: lambda model, name=name: masks(model, name)
        for name in (
            "p-eagle",
            "dflash",
            "dspark, rnn",
            "dflash2",
            "domino",
            "xpress",
            "lilicorr",
            "dflash, windows",
        )
    },
    "mtp": lambda model: modules(model, 3),
    "mtp, looped": lambda model: modules(model, 2),
    "model, tree": lambda model: ModelDrafter(perturbed(model), tree=TREE),
    "lookup, tree": lambda model: PromptLookupDrafter(6, num_continuations=2),
    "eagle3, tree": lambda model: EagleDrafter(head(model, "eagle3"), model, tree=TREE),
    "p-eagle, tree": lambda model: masks(model, "p-eagle", tree=TREE),
    "dspark, rnn, tree": lambda model: masks(model, "dspark, rnn", tree=TREE),
}
SAMPLERS = ["block", "rejection", "coupling", EnsembleSampler(0.8), "typical"]
GATES = {
    "greedy": [{"do_sample": False}],
    "sampled": [
        {"do_sample": True, "temperature": [0.0, 0.8, 1.3], "seed": [1, 2, 3]},
        {"do_sample": True, "temperature": [0.9, 0.0, 0.6], "seed": [7, 8, 9]},
    ],
    "truncated": [
        {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.02, "seed": 4},
    ],
}
by_drafter = pytest.mark.parametrize("drafter", DRAFTERS)
PAIRS = [(name, SAMPLERS[0]) for name in DRAFTERS]
PAIRS += [(name, s) for name in ("eagle3", "eagle3, tree") for s in SAMPLERS[1:]]
"""Every drafter with one sampler, every sampler with a chain and a tree."""


def masks(model, name, **options):
    head = mask_heads.head_for(model, name).to("cuda", model.dtype)
    return MaskTokenDrafter(head, model, 3, **options)


def modules(model, num_depths):
    head = mtp_heads.head_for(model, num_depths=num_depths).to("cuda", model.dtype)
    return MTPDrafter(head, model, 3)


def head(model, kind):
    return EagleHead(eagle_config(model, kind)).to("cuda", model.dtype)


def prompts(seed=0, lengths=(5, 1, 9)):
    return [x.cuda() for x in ragged_prompts(VOCAB, *lengths, seed=seed)]


def pair(drafter, sampler="auto", *, dtype=torch.float32, name="llama"):
    """A generator that captures, and one that does not, over the same parts."""
    model = build(name, dtype=dtype).cuda()
    parts = model, DRAFTERS[drafter](model), sampler
    capturing = SpeculativeGenerator(*parts, graphs=True)
    return capturing, SpeculativeGenerator(*parts, graphs=False)


ROOM = {"max_new_tokens": 64, "eos_token_id": None}
"""New tokens of each call; the tiny models have 128 positions."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("drafter", "sampler"), PAIRS, ids=str)
def test_a_captured_step_is_the_eager_one_over_changing_calls(drafter, sampler, dtype):
    """Two calls with other prompts, seeds and temperatures go through the same graph."""
    generator, eager = pair(drafter, sampler, dtype=dtype)
    for gate, calls in GATES.items():
        for seed, options in enumerate(calls):
            found = generator.generate(*prompts(seed), **ROOM, **options, check=True)
            if dtype == torch.float32:
                expected = eager.generate(*prompts(seed), **ROOM, **options)
                assert account(found) == account(expected), gate
    assert "captured in" in generator.explain()


@by_drafter
def test_the_draft_length_changes_between_captured_steps(drafter):
    generator, eager = pair(drafter)
    options = {"max_new_tokens": 100, "eos_token_id": None, "do_sample": False}
    texts = texts_by_many_lengths(generator, prompts(), 40, **options)
    expected = eager.generate(*prompts(), **options).new_tokens.tolist()
    assert all(t == row[: len(t)] for t, row in zip(texts, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *(
            (name, "model")
            for name in ("qwen3_moe", "gemma3", "gpt_oss", "gpt2", "deepseek_v3", "gptj")
        ),
        *(("llama", drafter) for drafter in DRAFTERS),
        *(("gemma2", drafter) for drafter in ("none", "model", "lookup", "eagle3", "dflash")),
    ],
)
def test_greedy_text_equals_that_of_hugging_face(name, drafter):
    generator, _ = pair(drafter, name=name)
    (ids, mask), options = prompts(), {"max_new_tokens": 24, "do_sample": False}
    expected = generator.target.model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(generator.generate(ids, mask, **options).sequences, expected)


@pytest.mark.parametrize("gate", GATES)
@by_drafter
def test_no_step_waits_for_the_device(drafter, gate):
    """Eager or replayed; constants are copied to the device once."""
    for generator in pair(drafter):
        options = {"max_new_tokens": 60, "eos_token_id": None} | GATES[gate][0]
        generation = generator.start(*prompts(), **options)
        for _ in range(NUM_EAGER + 1):
            generator.step(generation)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(4):
                generator.step(generation)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe"])
def test_modules_of_the_targets_own_class_draft_the_tokens_of_a_cpu(tmp_path, family):
    model, _ = write_numbered(tmp_path, family, num_depths=3, seed=2, vocab_size=7)
    ids = torch.tensor([[5, 1, 4, 2, 6], [3, 3, 1, 2, 5]])
    drafts = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        generator = SpeculativeGenerator(model, MTPDrafter.from_pretrained(tmp_path, model, 4))
        there, mask = ids.to(device), torch.ones_like(ids).to(device)
        result = generator.generate(there, mask, max_new_tokens=24, do_sample=False)
        drafts.append([[step.draft_tokens for step in row] for row in result.steps])
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("count", [1, 3, 5, 9])
def test_rows_that_fill_a_bucket_are_never_read(count):
    generator, eager = pair("eagle3")
    inputs = prompts(0, [(3 * i) % 7 + 1 for i in range(count)])
    options = {"max_new_tokens": 40, "do_sample": True, "seed": list(range(count))}
    options["eos_token_id"] = None
    expected = eager.generate(*inputs, **options).new_tokens.tolist()
    assert texts_beside_poison(generator, inputs, **options) == expected


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


def plant_a_length_that_is_not_advanced(monkeypatch):
    commit = TokenBuffer.commit

    def planted(self, tokens, num_accepted):
        before = self.root_position.clone()
        ends = commit(self, tokens, num_accepted)
        if capturing():
            self.root_position.copy_(before)
        return ends

    monkeypatch.setattr(TokenBuffer, "commit", planted)


def plant_a_tensor_that_is_bound_to_a_new_one(monkeypatch):
    commit = TokenBuffer.commit

    def planted(self, tokens, num_accepted):
        if capturing():
            self.root_position = self.root_position.clone()
        return commit(self, tokens, num_accepted)

    monkeypatch.setattr(TokenBuffer, "commit", planted)


def plant_a_stale_slot_table(monkeypatch):
    open_window, seen = SlotCache.open_window, {}

    def planted(self, slots, **options):
        key = id(self), tuple(slots.shape)
        if capturing():  # as if the host had made the table, once
            slots = seen[key]
        else:
            seen[key] = slots.clone()
        return open_window(self, slots, **options)

    monkeypatch.setattr(SlotCache, "open_window", planted)


@pytest.mark.parametrize(
    "plant",
    [
        plant_a_length_that_is_not_advanced,
        plant_a_tensor_that_is_bound_to_a_new_one,
        plant_a_stale_slot_table,
    ],
)
@pytest.mark.parametrize("drafter", ["none", "model", "eagle3"])
def test_check_catches_planted_faults(drafter, plant, monkeypatch):
    generator, _ = pair(drafter)
    options = {"max_new_tokens": 60, "eos_token_id": None, "do_sample": False}
    generator.generate(*prompts(), **options, check=True)
    generator.release()
    plant(monkeypatch)
    with pytest.raises((ReplayMismatchError, StorageMovedError)):
        generator.generate(*prompts(), **options, check=True)


ARCHITECTURES = ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "gemma2", "qwen3_5", "bamba"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_mixtures_and_other_architectures_are_captured(name):
    generator, eager = pair("lookup", name=name)
    for options in (GATES["greedy"][0], GATES["truncated"][0]):
        options = options | {"max_new_tokens": 40, "eos_token_id": None}
        found = generator.generate(*prompts(), **options, check=True)
        assert account(found) == account(eager.generate(*prompts(), **options))
    assert "captured in" in generator.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_fused_pointwise_work_is_captured(name, dtype):
    model = build(name, dtype=dtype).cuda()
    target = Target(model, fuse=True)
    assert target.is_fused, target.notes
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=True)
    options = {"max_new_tokens": 60, "eos_token_id": None, "do_sample": False}
    for seed in range(2):
        found = generator.generate(*prompts(seed), **options, check=True)
        if dtype == torch.float32:
            plain = SpeculativeGenerator(model, None, graphs=False)
            assert found.sequences.equal(plain.generate(*prompts(seed), **options).sequences)


def test_auto_captures_on_a_gpu_and_explain_says_so():
    model = build("llama").cuda()
    generator = SpeculativeGenerator(model, PromptLookupDrafter(3))
    generator.generate(*prompts(), max_new_tokens=40, eos_token_id=None)
    assert "captured in" in generator.explain()
    (storage,) = generator._storages
    assert storage.replay.graphs[3].capture_seconds < 3


def test_threads_that_share_a_generator_replay_graphs_of_their_own():
    generator, eager = pair("model")
    options = {"max_new_tokens": 40, "eos_token_id": None}

    def texts(which):
        with torch.cuda.stream(torch.cuda.Stream()):
            return [
                account(which.generate(*prompts(seed), **options, do_sample=True, seed=seed))
                for seed in range(4)
            ]

    torch.cuda.synchronize()
    expected = texts(eager)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(texts, [generator] * 3):
            assert found == expected


def test_a_released_function_is_captured_again():
    total = torch.zeros(3, device="cuda")

    def add(x):
        x = x.clone()
        x[x < 0] = 0.0  # torch fills by mask, and waits for nothing
        return total.add_(x) * 1

    x = torch.tensor([1.0, -2.0, 3.0], device="cuda")
    captured = Captured(add, (x,))
    total.zero_()
    assert captured(x).tolist() == [1, 0, 3]
    first = captured(-x)
    captured.release()
    assert captured.outputs is None
    assert captured(x).tolist() == [2, 2, 6]
    assert first.tolist() == [1, 2, 3]
    assert captured(x) is captured(x)


def test_a_capture_that_fails_names_the_line_and_leaves_the_device_usable():
    def waits(x):
        torch.cuda.synchronize()  # the guilty line
        return x + 1

    x = torch.zeros(4, device="cuda")
    with pytest.raises(CaptureError, match="the guilty line"):
        Captured(waits, (x,), warmup=0)
    with pytest.raises(CaptureError, match=r"item|_local_scalar_dense"):
        Captured(lambda x: x * float(x.sum()), (x,))
    torch.cuda.synchronize()
    assert torch.rand(4, device="cuda").max() < 1  # the user's generator is in no capture
    assert (x + 1).sum().item() == 4
    assert Captured(lambda x: x + 1, (x,))(x).sum().item() == 4
    torch.cuda.empty_cache()


def test_a_graph_inside_of_a_captured_function_is_refused():
    """Its memory is reused by whoever owns it."""
    x = torch.ones(4, 4, device="cuda")
    inner = Captured(torch.neg, (x,))
    with pytest.raises(CaptureError, match="replays a graph of its own"):
        Captured(inner, (x,), warmup=0)
    assert inner(x).equal(-x)
    compiled = torch.compile(lambda x: (x @ x).relu(), mode="reduce-overhead", dynamic=False)
    with torch.inference_mode():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x)
    with pytest.raises(CaptureError, match="cannot be captured"):
        Captured(compiled, (x,), warmup=0)
    torch.compiler.reset()


def test_a_check_on_a_gpu_names_what_a_graph_has_frozen():
    count = {"host": 0, "device": torch.zeros((), device="cuda")}

    def by(name, x):
        count["host"] += 1
        count["device"].add_(1)
        return {"scaled": x * count[name]}

    x = torch.ones(3, device="cuda")
    sound = Captured(lambda x: by("device", x), (x,), check=True)
    assert [sound(x)["scaled"].tolist() for _ in range(3)] == [[n] * 3 for n in (4, 5, 6)]
    frozen = Captured(lambda x: by("host", x), (x,), check=True)
    with pytest.raises(CaptureError, match=r"^output \['scaled'\]: 3 of 3 numbers"):
        frozen(x)


def test_a_step_that_cannot_be_captured_goes_on_eagerly_in_the_middle_of_a_text():
    class WaitingDrafter(PromptLookupDrafter):
        def propose(self, context, state, drawing):
            """As its parent, after a look at the device."""
            torch.cuda.current_stream().synchronize()
            return super().propose(context, state, drawing)

    model = build("llama").cuda()
    generator = SpeculativeGenerator(model, WaitingDrafter(3))
    options = {"max_new_tokens": 40, "eos_token_id": None}
    expected = SpeculativeGenerator(model, PromptLookupDrafter(3), graphs=False)
    for seed in range(2):
        found = generator.generate(*prompts(seed), **options)
        assert account(found) == account(expected.generate(*prompts(seed), **options))
    assert "eager, because" in generator.explain()
    assert "synchronize" in generator.explain()
