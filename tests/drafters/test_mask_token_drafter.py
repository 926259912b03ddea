"""`MaskTokenDrafter` in the whole loop: laws 2, 3, 5 and 7, for every alignment.

Greedy text is HF's for random heads and for heads that are often right, a row does not depend on
its neighbours, and a head that was fitted to one text is never rejected on it, but is as soon as a
feature, token, position or slot is not the one that it should be.
"""

from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from head_laws import (
    IDS,
    LENGTHS,
    MASK,
    NUM_NEW,
    TAMPERING,
    check_company,
    check_first_draft,
    check_greedy_text,
    check_is_exercised,
    greedy_text,
    misled,
    num_accepted,
)
from mask_heads import ALIGNMENTS, config_for, head_for, informed, learned
from state_tensors import addresses
from text_laws import ALPHA, TARGET, p_values_of_texts, sample, tiny

from specdec import MaskTokenDrafter, SpeculativeGenerator
from specdec.drafters import MaskTokenHead
from specdec.samplers import CouplingSampler

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
    return greedy_text(model)


@pytest.mark.parametrize("kind", [kind for kind in HEADS if "random" not in kind])
def test_greedy_text_is_that_of_hf_in_ragged_batches_and_alone(model, text, kind):
    drafter = MaskTokenDrafter(HEADS[kind](model), model, num_draft_tokens=4)
    check_is_exercised(check_greedy_text(model, drafter, text))


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


@pytest.mark.parametrize(
    ("name", "sampler"),
    [*((name, "auto") for name in DRAFTERS), ("p-eagle", CouplingSampler())],
    ids=str,
)
def test_a_row_is_the_same_alone_and_in_any_batch_order_padding_and_chunking(name, sampler):
    check_company(LLAMA, DRAFTERS[name], sampler)


@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_row_of_one_token_proposes_nothing_until_there_are_features(name):
    # A language model needs no features.
    check_first_draft(LLAMA, DRAFTERS[name], first=4 if name == "pard" else 0)


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


CASES = [(name, tampering) for name in ALIGNMENTS for tampering in TAMPERING]
CASES = [(n, t) for n, t in CASES if not (n == "pard" and "features" in t)]


@pytest.mark.parametrize(("name", "tampering"), CASES)
def test_the_oracle_notices_whatever_is_out_of_place(name, tampering):
    drafter = misled(MaskTokenDrafter(ORACLES[name], LLAMA, 3), tampering)
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
