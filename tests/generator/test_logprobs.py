"""Log-probabilities of emitted tokens, of every rule on chains and trees, captured and streamed.

The oracle is HF's own forward over the finished text of each row, alone and without a cache, with
HF's own processors and warpers after it.
"""

import pytest
import torch
from architectures import ARCHITECTURES, RECURRENT, VOCAB, build
from diagonal import diagonal, first
from drafter_table import MODEL, make
from drafting import perturbed, ragged_prompts
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specdec import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    ModelDrafter,
    NoDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    TypicalSampler,
)

IDS, MASK = ragged_prompts(VOCAB, 1, 4, 6, 9)
FILTERS = [
    {},  # greedy: HF's scores are the logits then
    {"do_sample": True, "temperature": 1.0, "top_k": 0},
    {"do_sample": True, "temperature": 0.7, "top_k": 12},
    {"do_sample": True, "temperature": 1.6, "top_k": 0, "top_p": 0.8, "min_p": 0.01},
]
ROWS = {
    "temperature": [0.0, 1.0, 0.7, 1.6],
    "top_k": [0, 0, 12, 0],
    "top_p": [1.0, 1.0, 1.0, 0.8],
    "min_p": [0.0, 0.0, 0.0, 0.01],
    "seed": [1, 2, 3, 4],
}
ASKED = {"max_new_tokens": 22, "eos_token_id": 7, "pad_token_id": 0, "output_logprobs": True}
RULES = {
    "rejection": RejectionSampler(),
    "block": BlockSampler(),
    "coupling": CouplingSampler(),
    "ensemble": EnsembleSampler(0.5),
    "typical": TypicalSampler(),
}


def recomputed(model, prompt, text, **config):
    """`[n]` twice: of the tokens of a text after its prompt, as drawn and by the model alone."""
    ids = torch.tensor([[*prompt, *text]], device=model.device)
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    processors = model._get_logits_processor(GenerationConfig(**config), len(prompt))
    scores = [
        processors(ids[:, : len(prompt) + i], row[None].clone())[0] for i, row in enumerate(logits)
    ]
    of_text = ids[0, len(prompt) :, None]
    return [
        table.log_softmax(dim=-1).gather(1, of_text)[:, 0].cpu()
        for table in (torch.stack(scores), logits)
    ]


def assert_recomputed(model, result, configs, atol=1e-5):
    """Both tables of a result are HF's, and 0 after a row's end."""
    columns = max(result.lengths)
    for row, (length, config) in enumerate(zip(result.lengths, configs, strict=True)):
        prompt = IDS[row, MASK[row].bool()].tolist()
        expected = recomputed(model, prompt, result.new_tokens[row, :length].tolist(), **config)
        for table, own in zip((result.logprobs, result.raw_logprobs), expected, strict=True):
            assert table.dtype == torch.float32
            assert table.shape == (len(IDS), columns)
            torch.testing.assert_close(table[row, :length].cpu(), own, rtol=0, atol=atol)
            assert table[row, length:].eq(0).all()


def assert_equal(found, expected, **tolerances):
    """Two results have the same text and log-probabilities."""
    assert found.sequences.equal(expected.sequences)
    for name in ("logprobs", "raw_logprobs"):
        own = getattr(found, name), getattr(expected, name)
        torch.testing.assert_close(*own, **({"rtol": 0, "atol": 0} | tolerances))


QUICK = ["gemma2", "gpt_oss", "gpt2", "mpt", "deepseek_v3", "qwen3_5"]


@pytest.mark.parametrize("name", first([*ARCHITECTURES, *RECURRENT], QUICK))
def test_every_architectures_are_those_of_hfs_forward(name):
    """Recurrent layers round: HF's own cached decoding is up to 9e-5 off its forward with these."""
    model = build(name)
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), 4))
    result = generator.generate(IDS, MASK, **ROWS, **ASKED)
    assert 0 < result.stats.acceptance_rate < 1
    assert_recomputed(model, result, FILTERS, atol=1e-4 if name in RECURRENT else 1e-5)


@pytest.mark.parametrize(
    ("name", "rule"),
    diagonal(["model", "lookup", "model, tree", "eagle3, fewer ids, tree"], RULES),
)
def test_every_rules_are_those_of_hfs_forward_on_chains_and_trees(name, rule):
    result = SpeculativeGenerator(MODEL, make(name), RULES[rule]).generate(
        IDS, MASK, **ROWS, **ASKED
    )
    assert_recomputed(MODEL, result, FILTERS)


@pytest.mark.parametrize(
    "logits_filter", [FILTERS[0], {"do_sample": True, "temperature": 0.9, "top_k": 0}]
)
@pytest.mark.parametrize("drafter", [NoDrafter(), make("model")], ids=["none", "model"])
def test_without_drafts_and_in_batches_of_one_kind(logits_filter, drafter):
    result = SpeculativeGenerator(MODEL, drafter).generate(IDS, MASK, **logits_filter, **ASKED)
    assert_recomputed(MODEL, result, [logits_filter] * len(IDS))
    assert result.logprobs.equal(result.raw_logprobs) == (logits_filter == {})


def filled(result, name="logprobs"):
    """As `compute_transition_scores` has them: NaN after a row's end."""
    after = torch.arange(max(result.lengths)) >= torch.tensor(result.lengths)[:, None]
    return getattr(result, name).masked_fill(after, torch.nan)


def hfs_own(record, scores):
    return MODEL.compute_transition_scores(record.sequences, scores, normalize_logits=True)


@pytest.mark.parametrize("name", ["model", "model, tree"])
def test_processors_change_the_one_and_not_the_other(name):
    generator = SpeculativeGenerator(MODEL, make(name))
    own = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    result = generator.generate(IDS, MASK, **ROWS, **ASKED, logits_processor=own)
    assert_recomputed(
        MODEL, result, [{**logits_filter, "repetition_penalty": 1.7} for logits_filter in FILTERS]
    )


def test_hfs_record_holds_what_hfs_function_computes_from_it():
    """The hook's batch is HF's: one value for all rows."""
    options = {"do_sample": True, "temperature": 0.8, "top_k": 15, "seed": 3, **ASKED}
    options |= {"attention_mask": MASK, "repetition_penalty": 1.2}
    generator = SpeculativeGenerator(MODEL, make("eagle3, fewer ids, tree"))
    outputs = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    record = MODEL.generate(IDS, custom_generate=generator, **options, **outputs)
    result = generator.last_result
    for name, scores in (("logprobs", record.scores), ("raw_logprobs", record.logits)):
        torch.testing.assert_close(
            hfs_own(record, scores), filled(result, name), rtol=0, atol=1e-5, equal_nan=True
        )
        assert record[name] is getattr(result, name)
    ids = MODEL.generate(IDS, custom_generate=generator, **options)
    assert ids.equal(record.sequences)
    assert_equal(generator.last_result, result)
    with pytest.raises(ValueError, match="output_logprobs must be"):
        MODEL.generate(IDS, custom_generate=generator, **options | {"output_logprobs": 1})


@pytest.mark.parametrize("name", ["model", "eagle3, fewer ids, tree"])
def test_streams_traces_and_replayed_steps_have_the_same(name):
    """Rows leave the eager batch; the captured one has a bucket's rows, and is read a step late."""
    parts = MODEL, make(name)
    options = {key: values[1:] for key, values in ROWS.items()} | ASKED
    prompts = IDS[1:], MASK[1:]
    eager = SpeculativeGenerator(*parts)
    captured = SpeculativeGenerator(*parts, graphs=True, steps_ahead=1)
    expected = eager.generate(*prompts, **options)
    assert len(set(expected.lengths)) > 1
    assert_equal(eager.generate(*prompts, **options, trace=True), expected)
    unasked = {**options, "output_logprobs": False}
    for one in (eager, captured):  # the storage serves both kinds of calls
        for _ in range(2):
            found = one.generate(*prompts, **unasked)
            assert found.sequences.equal(expected.sequences)
            assert found.logprobs is found.raw_logprobs is None
            assert found.steps[0][0].logprobs is None
            assert_equal(one.generate(*prompts, **options), expected, rtol=1e-5, atol=1e-5)
        assert_equal(one.generate(*prompts, **options), one.last_result)
    checked = captured.generate(*prompts, **options, check=True)
    assert_equal(checked, expected, rtol=1e-5, atol=1e-5)
    assert "replays" in captured.explain()
    streamed = [[], [], []]
    for record in eager.stream(*prompts, **options):
        for row, step in enumerate(record.rows):
            streamed[row] += zip(*(step.logprobs, step.raw_logprobs) if step else (), strict=True)
    for row, length in enumerate(expected.lengths):
        pair = expected.logprobs[row, :length], expected.raw_logprobs[row, :length]
        assert torch.tensor(streamed[row]).T.equal(torch.stack(pair))


def test_a_row_that_a_criterion_cuts_keeps_those_of_its_tokens():
    generator = SpeculativeGenerator(MODEL, make("itself"))
    whole = generator.generate(IDS, MASK, **ROWS, **ASKED)
    last = [steps[-1] for steps in whole.steps]
    assert any(len(step.new_tokens) <= step.num_accepted for step in last), "none ends in a step"
    assert_recomputed(MODEL, whole, FILTERS)
    row = max(range(4), key=lambda row: whole.lengths[row])
    stop = whole.new_tokens[row, : whole.lengths[row] - 3].tolist()

    def ends(ids, scores):
        return torch.tensor([ids[0, -len(stop) :].tolist() == stop])

    cut = generator.generate(IDS, MASK, **ROWS, **ASKED, stopping_criteria=[ends])
    assert cut.finish_reasons[row] == "stop"
    assert_recomputed(MODEL, cut, FILTERS)


def test_half_precision_is_widened_first():
    model = build("llama", dtype=torch.bfloat16)
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), 3))
    result = generator.generate(IDS, MASK, **ROWS, **ASKED, output_logits=True, output_scores=True)
    for name, tables in (("logprobs", result.scores), ("raw_logprobs", result.logits)):
        table = torch.stack(tables, dim=1).log_softmax(dim=-1)
        assert table.dtype == torch.float32
        own = table.gather(2, result.new_tokens[..., None])[..., 0]
        torch.testing.assert_close(filled(result, name), own, rtol=0, atol=1e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["model", "model, tree"])
def test_captured_steps_compute_those_of_eager_ones_on_a_gpu(name, rule):
    model = build("llama").to("cuda")
    ids, mask = IDS.to("cuda"), MASK.to("cuda")
    tree = {"tree": make("model, tree").tree} if "tree" in name else {}
    drafter = ModelDrafter(perturbed(model), **tree)
    eager = SpeculativeGenerator(model, drafter, RULES[rule], graphs=False)
    captured = SpeculativeGenerator(model, drafter, RULES[rule], graphs=True)
    expected = eager.generate(ids, mask, **ROWS, **ASKED)
    for _ in range(2):
        found = captured.generate(ids, mask, **ROWS, **ASKED)
        assert_equal(found, expected, rtol=0, atol=1e-4)
    assert "replays" in captured.explain()
    assert_recomputed(model, found, FILTERS, atol=1e-4)
