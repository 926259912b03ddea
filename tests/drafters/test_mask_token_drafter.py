"""`MaskTokenDrafter` in the whole loop: laws 2, 3, 5 and 7, for every alignment.

Greedy text is HF's for random heads and for heads that are often right, a row does not depend on
its neighbours, and a head that was fitted to one text is never rejected on it, but is as soon as a
feature, token, position or slot is not the one that it should be.
"""

from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts, to_right_padding
from mask_heads import ALIGNMENTS, config_for, head_for, informed, learned
from state_tensors import addresses
from text_laws import ALPHA, TARGET, p_values_of_texts, sample, tiny

from specdec import MaskTokenDrafter, SpeculativeGenerator
from specdec.drafters import MaskTokenHead
from specdec.samplers import CouplingSampler

LENGTHS = 1, 4, 6, 9
NUM_NEW = 24
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
TARGETS = "llama", "qwen3", "gemma3", "gpt_oss", "deepseek_v3"
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "has_embed_tokens": True,
    "has_lm_head": True,
}
HEADS = {
    **{f"random {name}": lambda model, name=name: head_for(model, name) for name in ALIGNMENTS},
    **{
        f"informed {name}": lambda model, name=name: informed(
            model, head_for(model, name, **WIDE), 4
        )
        for name in ALIGNMENTS
    },
    "fewer ids": lambda model: informed(
        model, head_for(model, "p-eagle", draft_vocab_size=40, **WIDE), 4
    ),
}


@pytest.fixture(scope="module", params=TARGETS, name="model")
def _model(request):
    return build(request.param)


@pytest.fixture(scope="module", name="text")
def _text(model):
    """HF's own greedy text of the padded batch."""
    return model.generate(
        IDS, attention_mask=MASK, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
    )


def steps_of(result):
    return [[vars(step) for step in row] for row in result.trace]


def num_accepted(result):
    return [[step.num_accepted for step in row] for row in result.trace]


@pytest.mark.parametrize("kind", [kind for kind in HEADS if "random" not in kind])
def test_greedy_text_is_that_of_hf_in_ragged_batches_and_alone(model, text, kind):
    drafter = MaskTokenDrafter(HEADS[kind](model), model, num_draft_tokens=4)
    generator = SpeculativeGenerator(model, drafter)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, trace=True)
    assert result.sequences.tolist() == text.tolist()
    assert 0 < sum(result.stats.accepted) < sum(result.stats.drafted)
    assert any(len(set(counts)) > 1 for counts in zip(*num_accepted(result), strict=False))
    for row, length in ((0, LENGTHS[0]), (3, LENGTHS[3])):
        alone = generator.generate(IDS[row : row + 1, -length:], max_new_tokens=NUM_NEW, trace=True)
        assert alone.sequences[0].tolist() == text[row, -length - NUM_NEW :].tolist()
        assert steps_of(alone) == [steps_of(result)[row]]  # what was drafted, too


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_greedy_text_is_that_of_hf_also_where_hardly_anything_is_accepted(model, text, name):
    drafter = MaskTokenDrafter(HEADS[f"random {name}"](model), model, num_draft_tokens=5)
    result = SpeculativeGenerator(model, drafter).generate(IDS, MASK, max_new_tokens=NUM_NEW)
    assert result.sequences.tolist() == text.tolist()


LLAMA = build("llama")
DRAFTERS = {
    **{
        name: MaskTokenDrafter(HEADS[f"informed {name}"](LLAMA), LLAMA, 4, proposal="sample")
        for name in ALIGNMENTS
    },
    "fewer ids": MaskTokenDrafter(
        HEADS["fewer ids"](LLAMA), LLAMA, 4, proposal="sample", draft_temperature=0.6
    ),
    "argmax": MaskTokenDrafter(HEADS["informed p-eagle"](LLAMA), LLAMA, 4, proposal="argmax"),
}
SETTINGS = {
    "temperature": [0.7, 1.0, 0.0, 1.3],
    "top_k": [0, 5, 3, 40],
    "top_p": [1.0, 0.9, 0.5, 0.8],
    "min_p": [0.0, 0.0, 0.1, 0.02],
    "seed": [11, 2**64 - 1, 7, 0],
}


def sampled(generator, rows=(0, 1, 2, 3), *, ids=IDS, mask=MASK):
    """Every step of the rows, generated together, each with settings of its own."""
    own = {name: [values[row] for row in rows] for name, values in SETTINGS.items()}
    own |= {"max_new_tokens": 16, "do_sample": True, "trace": True}
    result = generator.generate(ids[list(rows)], mask[list(rows)], **own)
    return dict(zip(rows, steps_of(result), strict=True))


@pytest.mark.parametrize(
    ("name", "sampler"),
    [*((name, "auto") for name in DRAFTERS), ("p-eagle", CouplingSampler())],
    ids=str,
)
def test_a_row_is_the_same_alone_and_in_any_batch_order_padding_and_chunking(name, sampler):
    generator = SpeculativeGenerator(LLAMA, DRAFTERS[name], sampler)
    alone = {}
    for row, length in enumerate(LENGTHS):
        alone |= sampled(generator, (row,), ids=IDS[:, -length:], mask=MASK[:, -length:])
    assert sampled(generator) == alone
    assert sampled(generator, (3, 1, 0, 2)) == alone
    assert sampled(generator, (2, 1)) == {row: alone[row] for row in (2, 1)}
    ids, mask = to_right_padding(IDS, MASK)
    assert sampled(generator, ids=ids, mask=mask) == alone
    options = {"prefill_chunk_size": 3, "keep_storage": 1}
    chunked = SpeculativeGenerator(LLAMA, DRAFTERS[name], sampler, **options)
    assert sampled(chunked) == alone
    assert sampled(chunked) == alone  # over the storage of the call before


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_row_of_one_token_proposes_nothing_until_there_are_features(name):
    generator = SpeculativeGenerator(LLAMA, DRAFTERS[name])
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, trace=True)
    drafted = [[len(step.draft_tokens) for step in row] for row in result.trace]
    first = 4 if name == "pard" else 0  # a language model needs none
    assert drafted[0] == [first] + [4] * (len(drafted[0]) - 1)
    assert all(counts == [4] * len(counts) for counts in drafted[1:])


# Law 2.


LAW = {"p-eagle": (0, 1, "final"), "pard": (), "dflash": (0, 1), "dspark": (1,)}


@pytest.mark.parametrize(
    ("name", "warp", "proposal"),
    [
        ("p-eagle", "truncated", "argmax"),
        ("pard", "truncated", "sample"),
        ("dflash", "plain", "sample"),
    ],
)
def test_texts_have_the_targets_law(name, warp, proposal):
    """Chi-square of 10000 rows; false-alarm rate and resolution as in `test_sampling_runs`. The
    heads cannot propose two of the six ids, but for PARD's.
    """
    model = tiny(TARGET)
    count = 6 if name == "pard" else 4
    flags = {"feature_layers": LAW[name], "draft_vocab_size": count, "mask_token_id": 5}
    head = head_for(model, name, has_lm_head=True, **flags)
    drafter = MaskTokenDrafter(head, model, 2, proposal=proposal)
    result = sample(drafter, "auto", warp)
    for length, p in p_values_of_texts(result, warp).items():
        assert p > ALPHA, f"texts of {length} tokens"
    assert 0.1 < result.stats.acceptance_rate < 0.95  # both branches are exercised


# Law 7.


def of_the_target(model) -> MaskTokenHead:
    """The target itself as a language model with masks: for K = 1 it needs none."""
    text = model.config
    layer = replace(
        config_for(model, "pard").layer,
        intermediate_size=text.intermediate_size,
        head_dim=text.head_dim,
        rms_norm_eps=text.rms_norm_eps,
        rope=text.rope_parameters,
    )
    config = replace(config_for(model, "pard"), layer=layer, num_layers=text.num_hidden_layers)
    head = MaskTokenHead(config)
    names = {name.removeprefix("model."): t for name, t in model.state_dict().items()}
    head.load_state_dict(names, strict=True)
    return head.eval()


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": [1, 2, 3, 4]}], ids=str)
def test_the_target_as_its_own_drafter_accepts_one_token_at_every_step(options):
    proposal = "sample" if options else "argmax"
    drafter = MaskTokenDrafter(of_the_target(LLAMA), LLAMA, 1, proposal=proposal)
    result = SpeculativeGenerator(LLAMA, drafter).generate(
        IDS, MASK, max_new_tokens=NUM_NEW, trace=True, eos_token_id=None, **options
    )
    assert num_accepted(result) == [[1] * (NUM_NEW // 2)] * len(LENGTHS)


ORACLE_IDS, ORACLE_MASK = ragged_prompts(VOCAB, 8, 5)
ORACLE_TEXT = LLAMA.generate(
    ORACLE_IDS, attention_mask=ORACLE_MASK, max_new_tokens=26, do_sample=False, pad_token_id=0
)
ORACLE_ROWS = [ORACLE_TEXT[0], ORACLE_TEXT[1, 3:]]
ORACLES = {name: learned(LLAMA, name, 3, ORACLE_ROWS) for name in ALIGNMENTS}


def oracle_acceptance(drafter, chunk=2048):
    generator = SpeculativeGenerator(LLAMA, drafter, prefill_chunk_size=chunk)
    result = generator.generate(
        ORACLE_IDS, ORACLE_MASK, max_new_tokens=20, trace=True, eos_token_id=None
    )
    return num_accepted(result)


@pytest.mark.parametrize(("width", "chunk"), [(1, 100), (2, 1), (3, 3), (3, 100)])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_head_that_knows_the_text_by_heart_is_never_rejected(name, width, chunk):
    drafter = MaskTokenDrafter(ORACLES[name], LLAMA, width)
    assert oracle_acceptance(drafter, chunk) == [[width] * -(-20 // (width + 1))] * 2


class Misled(MaskTokenDrafter):
    """Gets contexts that have been tampered with."""

    def prefill(self, context, state):
        super().prefill(self.tamper(context), state)

    def propose(self, context, state, drawing):
        return super().propose(self.tamper(context), state, drawing)


def with_features(change):
    return lambda c: replace(c, features=c.features if c.features is None else change(c.features))


TAMPERING = {
    "features one position late": with_features(lambda f: f.roll(1, dims=1)),
    "features one position early": with_features(lambda f: f.roll(-1, dims=1)),
    "no features": with_features(torch.zeros_like),
    "tokens one position late": lambda c: replace(c, tokens=c.tokens.roll(1, dims=1).clamp(min=0)),
    "a row of a rejected token": lambda c: replace(
        c, tokens=c.tokens.clamp(min=0), num_new=(c.num_new + 1).clamp(max=4)
    ),
}
CASES = [(name, tampering) for name in ALIGNMENTS for tampering in TAMPERING]
CASES = [(n, t) for n, t in CASES if not (n == "pard" and "features" in t)]


@pytest.mark.parametrize(("name", "tampering"), CASES)
def test_the_oracle_notices_whatever_is_out_of_place(name, tampering):
    drafter = MaskTokenDrafter(ORACLES[name], LLAMA, 3)
    drafter.__class__, drafter.tamper = Misled, TAMPERING[tampering]
    counts = [count for row in oracle_acceptance(drafter) for count in row]
    assert sum(counts) < 0.6 * 3 * len(counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_head_of_another_data_type_than_the_target_drafts_for_it(dtype):
    text = SpeculativeGenerator(LLAMA, None).generate(IDS, MASK, max_new_tokens=NUM_NEW).sequences
    for name in ALIGNMENTS:
        head = HEADS[f"random {name}"](LLAMA).to(dtype)
        generator = SpeculativeGenerator(LLAMA, MaskTokenDrafter(head, LLAMA, 3))
        assert generator.generate(IDS, MASK, max_new_tokens=NUM_NEW).sequences.equal(text)
        generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, do_sample=True, seed=1)


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_storage_does_not_grow_and_does_not_move(name):
    generator = SpeculativeGenerator(LLAMA, DRAFTERS[name])
    generation = generator.start(IDS, MASK, max_new_tokens=50, eos_token_id=None)
    before = addresses(generation.state.drafter_state)
    size = generation.state.drafter_state.cache.size_bytes
    for _ in range(60):  # rows end on the way
        generator.step(generation)
    assert bool(generation.has_ended.all())
    assert addresses(generation.state.drafter_state) == before
    assert generation.state.drafter_state.cache.size_bytes == size
