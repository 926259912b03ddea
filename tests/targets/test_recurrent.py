"""Models that remember: what was rejected is taken back.

The oracle is HF's own `generate`, and the plain forward where the two differ.
"""

import itertools
from functools import cache

import mask_heads
import mtp_heads
import pytest
import text_laws
import torch
import transformers
from architectures import RECURRENT, VOCAB, build
from diagonal import case, diagonal, first
from drafting import NumberedRows, ragged_prompts
from eagle_heads import head_for as eagle_head_for
from refusals import refused
from target_laws import check_found

from specdec import (
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
    Target,
    Tree,
)
from specdec.graphs.owned import size_bytes
from specdec.graphs.tree import tables
from specdec.samplers import BlockSampler
from specdec.slots import room as room_module
from specdec.targets import mixers
from specdec.targets.edits import memory
from specdec.targets.edits.memory import Memory, _MixerCall
from specdec.types import Draft

NUM_NEW = 15  # three steps of four draft tokens, all accepted
HAS_LFM3 = hasattr(transformers, "Lfm3ForCausalLM")
SUPPORTED = [name for name in RECURRENT if name != "lfm3" or HAS_LFM3]
LONG = {"kimi_linear", "zamba", "jamba", "olmo_hybrid", "qwen3_5_moe", "falcon_mamba"}
LONG |= {"lfm2_moe", "zamba2", "granite_hybrid", "mamba2"}
"""Families that take HF itself long, and are compared in the slow tests."""
QUICK = {"qwen3_5", "bamba", "mamba", "lfm2"}
MOST = [
    pytest.param(n, marks=pytest.mark.slow) if n in LONG else case([n], n in QUICK)
    for n in SUPPORTED
]
IDS, MASK = ragged_prompts(VOCAB, 9, 1, 6, 4)
LENGTHS = MASK.sum(dim=1).tolist()


class Reciter(NumberedRows):
    """Proposes known texts: all right, all wrong, or with every third token wrong."""

    def __init__(self, texts, mistakes, num_draft_tokens=4):
        super().__init__()
        self.num_draft_tokens, self.mistakes = num_draft_tokens, mistakes
        self.texts = torch.stack([torch.cat([t, t.new_zeros(99 - len(t))]) for t in texts])

    def propose(self, context, rows, drawing):
        last = context.start + context.num_new
        index = last[:, None] + 1 + torch.arange(drawing.num_draft_tokens)
        tokens = self.texts[rows - 1].gather(1, index.clamp(max=98))
        is_wrong = {"none": index < 0, "all": index >= 0, "some": index % 3 == 0}[self.mistakes]
        return Draft(torch.where(is_wrong, (tokens + 1) % VOCAB, tokens))


@cache
def model_of(name):
    return build(name)


@torch.no_grad()
def continued(model, text, num_new):
    """A text and its greedy continuation, by plain forwards over all of it."""
    for _ in range(num_new):
        logits = model(input_ids=text, use_cache=False).logits
        text = torch.cat([text, logits[:, -1:].argmax(dim=-1)], dim=1)
    return text


@cache
def texts_of(name):
    """Of each row, without padding."""
    rows = [IDS[row : row + 1, -length:] for row, length in enumerate(LENGTHS)]
    return [continued(model_of(name), ids, NUM_NEW)[0] for ids in rows]


@torch.no_grad()
@pytest.mark.parametrize("name", MOST)
def test_greedy_text_is_hfs_whatever_is_rejected(name):
    model, texts = model_of(name), texts_of(name)
    for row in (0, 1):
        alone = texts[row][None, : LENGTHS[row]]
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
        assert model.generate(alone, **options)[0].tolist() == texts[row].tolist()
    target = Target(model)
    for mistakes in ("none", "some", "all"):
        generator = SpeculativeGenerator(target, Reciter(texts, mistakes), prefill_chunk_size=4)
        result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW)
        found = [r[-n - NUM_NEW :].tolist() for r, n in zip(result.sequences, LENGTHS, strict=True)]
        assert found == [text.tolist() for text in texts]
        rate = result.stats.acceptance_rate
        assert {"none": rate == 1, "some": 0 < rate < 1, "all": rate == 0}[mistakes]
        alone = generator.generate(texts[0][None, : LENGTHS[0]], max_new_tokens=NUM_NEW)
        assert alone.sequences[0].tolist() == texts[0].tolist()


SAMPLED = {
    "do_sample": True,
    "temperature": [0.0, 0.8, 1.3, 1.0],
    "top_p": [1.0, 0.9, 0.8, 1.0],
    "seed": [1, 2, 3, 4],
    "max_new_tokens": NUM_NEW,
    "eos_token_id": None,
}
BY_ROW = ("temperature", "top_p", "seed")
KINDS = ["qwen3_5", "nemotron_h", "lfm2", "mamba"]
"""A gated delta net, Mamba 2 with a bound of its time step, convolutions, and token by token."""


@pytest.mark.parametrize("name", first(KINDS, ["qwen3_5", "mamba"]))
def test_captured_steps_are_the_eager_ones(name):
    target, drafter = Target(model_of(name)), Reciter(texts_of(name), "some")
    results = []
    for graphs in (False, True):
        generator = SpeculativeGenerator(target, drafter, BlockSampler(), graphs=graphs)
        results.append(generator.generate(IDS, MASK, check=graphs, **SAMPLED))
    assert "replays" in generator.explain()
    eager, replayed = results
    assert eager.sequences.equal(replayed.sequences)
    assert eager.finish_reasons == replayed.finish_reasons
    assert eager.stats.to_dict() == replayed.stats.to_dict()


@pytest.mark.parametrize("name", KINDS)
def test_a_row_is_the_same_alone_and_when_others_have_ended(name):
    """Rows of other lengths end at other times, and their places are given up."""
    drafter = PromptLookupDrafter(3, max_ngram=1)
    generator = SpeculativeGenerator(Target(model_of(name)), drafter, prefill_chunk_size=3)
    ends = SAMPLED | {"eos_token_id": list(range(0, VOCAB, 11))}
    whole = generator.generate(IDS, MASK, **ends)
    for row, length in enumerate(LENGTHS):
        options = ends | {name: ends[name][row] for name in BY_ROW}
        alone = generator.generate(IDS[row : row + 1, -length:], **options)
        count = whole.lengths[row]
        assert whole.new_tokens[row, :count].tolist() == alone.new_tokens[0, :count].tolist()
    assert len(set(whole.lengths)) > 1


@pytest.mark.parametrize("name", KINDS)
def test_draft_lengths_change_from_step_to_step(name):
    """A window may be wider or narrower than the last one, of which it takes back the rest."""
    texts = texts_of(name)
    generator = SpeculativeGenerator(Target(model_of(name)), Reciter(texts, "some"))
    generation = generator.start(IDS, MASK, max_new_tokens=NUM_NEW)
    for step in range(12):
        generation.num_draft_tokens = (3, 0, 4, 1)[step % 4]
        generator.step(generation)
    lengths = generation.lengths.tolist()
    assert max(lengths[row] - LENGTHS[row] for row in range(4)) > 12  # some drafts were accepted
    for tokens, length, text in zip(generation.tokens, lengths, texts, strict=True):
        assert tokens[:length].tolist() == text[:length].tolist()


HEADS = {
    "eagle3": lambda model: EagleDrafter(eagle_head_for(model), model, 3),
    "p-eagle": lambda model: MaskTokenDrafter(
        mask_heads.head_for(model, "p-eagle", feature_layers=(1, 2, "final"), has_lm_head=True),
        model,
        3,
    ),
    "mtp": lambda model: MTPDrafter(mtp_heads.informed(model, num_depths=3), model, 3),
}


@pytest.mark.parametrize(("head", "name"), diagonal(HEADS, ["qwen3_next", "falcon_h1"]))
def test_heads_draft_for_targets_that_remember(name, head):
    """Features of every kind are those of the committed text, whatever was rejected before."""
    texts, drafter = texts_of(name), HEADS[head](model_of(name))
    generator = SpeculativeGenerator(model_of(name), drafter, prefill_chunk_size=3)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW)
    found = [r[-n - NUM_NEW :].tolist() for r, n in zip(result.sequences, LENGTHS, strict=True)]
    assert found == [text.tolist() for text in texts]
    alone = generator.generate(texts[2][None, : LENGTHS[2]], max_new_tokens=NUM_NEW)
    assert alone.sequences[0].tolist() == texts[2].tolist()
    assert [vars(step) for step in alone.steps[0]] == [vars(step) for step in result.steps[2]]


@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_nothing_of_a_rejected_token_is_left(name):
    """Two histories that differ in what was rejected leave the same states, to the last bit."""
    target = Target(model_of(name))
    tokens = torch.stack([text[:16] for text in texts_of(name)[:2]])
    caches = []
    for wrong in (1, 2):
        cache = target.init_cache(2, 32, max_window=5)
        target.prefill(cache, tokens, torch.tensor([4, 2]), offset=0)
        start = torch.tensor([4, 2])
        for kept in ([1, 3], [4, 1], [2, 4]):
            window = start[:, None] + torch.arange(5)
            draft = tokens.gather(1, window)
            is_rejected = torch.arange(5) >= torch.tensor(kept)[:, None]
            draft = torch.where(is_rejected, (draft + wrong) % VOCAB, draft)
            target.verify(cache, start, draft[:, 0], Draft(draft[:, 1:]))
            start = start + torch.tensor(kept)
        target.verify(cache, start, tokens[:, 0], Draft(tokens[:, :0]))
        caches.append(cache)
    for place, state in caches[0].memory.states.items():
        assert state.isfinite().all()
        assert state.equal(caches[1].memory.states[place])
        assert state.abs().sum() > 0


# Sampled texts.


@pytest.mark.parametrize(
    ("name", "rows"), [("lfm2", 2000), pytest.param("bamba", 4000, marks=pytest.mark.slow)]
)
def test_texts_have_the_targets_distribution(name, rows, monkeypatch):
    """Chi-square, false-alarm rate 1e-9 per length; a state that is ahead fails."""
    model = build(name, vocab_size=text_laws.VOCAB)
    drafter = ModelDrafter(text_laws.tiny(text_laws.DRAFT), 2)
    generator = SpeculativeGenerator(model, drafter)
    assert min(text_laws.p_values_of_model(generator, rows)) > text_laws.ALPHA
    ahead(monkeypatch)
    assert min(text_laws.p_values_of_model(generator, rows)) < text_laws.ALPHA


# Faults.


def ahead(patch):
    """The state of a token more than were kept."""

    def one_more(memory, *args, **kwargs):
        OPEN(memory, *args, **kwargs)
        memory.kept.add_(1)

    patch.setattr(Memory, "open", one_more)


def convolution_ahead(patch):
    """That of the whole window; gates are looked for without the fault."""

    def gates(*args):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(_MixerCall, "left", LEFT)
            return CLOSED(*args)

    patch.setattr(mixers, "_closed", gates)
    patch.setattr(_MixerCall, "left", lambda run, counts=None, rows=None: LEFT(run, None, rows))


def of_other_rows(patch):
    patch.setattr(memory, "TwoWindows", lambda kept, *sizes: LINE(kept.flip(0), *sizes))


def gates_left_open(patch):
    patch.setattr(mixers, "with_gates", lambda plan, _: iter([plan._replace(gates={})]))
    patch.setattr(mixers, "_closed", lambda model, route: list(route.mixers))


OPEN, LEFT, LINE, CLOSED = Memory.open, _MixerCall.left, memory.TwoWindows, mixers._closed


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *(("qwen3_5", fault) for fault in (ahead, convolution_ahead)),
        *(("bamba", fault) for fault in (of_other_rows, gates_left_open, convolution_ahead)),
    ],
)
def test_the_self_test_finds_faults_of_the_memory(name, fault, monkeypatch):
    fault(monkeypatch)
    check_found(build(name), monkeypatch)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *diagonal(KINDS, [torch.bfloat16, torch.float16]),
        *diagonal([n for n in SUPPORTED if n not in KINDS], [torch.bfloat16], is_quick=False),
    ],
)
def test_no_recurrent_model_is_refused_in_half_precision(name, dtype):
    """Some have no attention, of which two implementations could differ, and a residual stream in
    float32 over products that are not.
    """
    Target(build(name, dtype=dtype))


@pytest.mark.swept
def test_a_mixer_that_enlarges_rounding_is_not_refused():
    """By five times here: what it puts out is compared with what a rounded input does to it. In the
    wider ones the layer around it has seven times the rounding of its own state.
    """
    Target(build("jamba", seed=3))
    for seed in range(3):
        Target(build("jamba", seed=seed, hidden_size=64, intermediate_size=96, mamba_d_state=16))


@pytest.mark.swept
def test_an_attention_implementation_that_fails_is_no_reason_to_refuse_the_model():
    """HF's eager attention of Kimi Linear repeats keys that there is one of for each head already.
    Its sdpa does so, too, where a mask is needed or heads of keys and values differ in width.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model, ids = build("kimi_linear", **heads, v_head_dim=16), torch.arange(1, 8)[None]
    expected = continued(model, ids, 9)
    found = SpeculativeGenerator(model, PromptLookupDrafter(3)).generate(ids, max_new_tokens=9)
    assert torch.equal(found.sequences, expected)
    with refused("its own plain forward raises RuntimeError"):
        Target(build("kimi_linear", **heads))


HALF = itertools.cycle([torch.bfloat16, torch.float16, torch.float16])
FAULTS = [ahead, convolution_ahead, of_other_rows, gates_left_open]
PLANTED = [
    *itertools.product(["qwen3_5", "bamba", "mamba2"], FAULTS),
    *itertools.product(["mamba", "falcon_mamba"], [ahead, gates_left_open]),  # token by token
]


OFTEN = [*zip(["mamba2", "qwen3_5", "bamba", "mamba2"], FAULTS, strict=True)]
"""Of half precision, by default each fault once."""


@pytest.mark.parametrize(
    ("name", "fault", "dtype"), [case([*c, next(HALF)], c in OFTEN) for c in PLANTED]
)
def test_the_self_test_finds_faults_in_half_precision(name, fault, dtype, monkeypatch):
    """States of random models hardly count beside what goes past them, and decay within few tokens:
    here time steps are longer, decays slower, and nothing goes past.
    """
    model = build(name, dtype=dtype)
    for parameter_name, parameter in model.named_parameters():
        for end, value in {"dt_bias": 1, "dt_proj.bias": 1, "A_log": -3, ".D": 0}.items():
            if parameter_name.endswith(end):
                parameter.data.fill_(value)
    fault(monkeypatch)
    check_found(model, monkeypatch)


@pytest.mark.parametrize("name", KINDS)
def test_states_count_when_it_is_asked_whether_there_is_room(name, monkeypatch):
    """As many bytes as a cache holds, but for its padding slot and four numbers of each row."""
    target = Target(model_of(name))
    slots, window = 32, 5
    held = target.init_cache(1, slots, max_window=window)
    padding_slot = sum(store[:, :, -1].nbytes for store in held.stores)
    memory = held.memory
    numbers = size_bytes([memory.start, memory.count, memory.kept, memory.valid])
    needed = size_bytes(tables(held)) - padding_slot - numbers
    monkeypatch.setattr(room_module, "memory_bytes", lambda device: 3 * needed)
    target.init_cache(3, slots, max_window=window)
    with refused("keys, values and recurrent states of 4 rows of 32 tokens take .. at most 3 rows"):
        target.init_cache(4, slots, max_window=window)
    with refused("at most 2 rows"):
        target.init_cache(3, slots, max_window=window + 1)


def test_what_cannot_be_taken_back_is_refused():
    recurrent, tree = build("qwen3_5"), Tree(nodes=4, depth=2, top_k=2)
    with refused("cannot read the window of a tree"):
        ModelDrafter(recurrent, tree=tree)
    with refused("cannot read the window of a tree"):
        SpeculativeGenerator(recurrent, ModelDrafter(build("llama"), tree=tree))
    target = Target(recurrent)
    cache = target.init_cache(1, 16, max_window=2)
    draft = Draft(torch.zeros(1, 2, dtype=torch.long))
    with refused("this cache was made for at most 2; pass max_window"):
        target.verify(cache, torch.tensor([0]), torch.tensor([1]), draft)
