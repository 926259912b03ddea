"""Prompts with pictures in evaluations and certificates, and sampled."""

import json

import pytest
import torch
from diagonal import first
from pictured_models import OTHERS, ROWS, build, of_row, prompts, text_of_hf
from scipy.stats import chisquare

from specdec import RejectionSampler, SpeculativeGenerator, TypicalSampler
from specdec.lab.certificates import certify_generator
from specdec.lab.evaluation import HFGenerate, Prompt, compare, evaluate

FAMILIES = ["qwen3_vl", "gemma3", "paligemma", "qwen2_audio"]
NUM_NEW = 12


def one_by_one(name):
    return [of_row(name, rows, i) for rows in (ROWS, OTHERS) for i in range(len(rows))]


@pytest.mark.parametrize("name", first(FAMILIES, ["paligemma", "qwen3_vl"]))
def test_prompts_that_are_read_one_by_one_are_those_of_a_batch(name):
    generator = SpeculativeGenerator(build(name), "lookup", prefill_chunk_size=5)
    batch = prompts(name)
    options = {"row_inputs": {"prompt": one_by_one(name)[:3]}, "max_new_tokens": NUM_NEW}
    alone = generator.generate(batch["input_ids"], batch["attention_mask"], **options)
    together = generator.generate(**batch, max_new_tokens=NUM_NEW)
    assert torch.equal(alone.sequences, together.sequences)
    right = {key: batch[key].clone() for key in ("input_ids", "attention_mask")}
    for row, length in enumerate(batch["attention_mask"].sum(dim=1).tolist()):
        right["input_ids"][row] = batch["input_ids"][row].roll(length)
        right["attention_mask"][row] = batch["attention_mask"][row].roll(length)
    assert generator.generate(**right, **options).texts == alone.texts
    if name != "paligemma":  # of which text alone has types, too
        options["row_inputs"]["prompt"][1] = None
        assert generator.generate(*batch_of(batch), **options).texts == alone.texts


def batch_of(inputs):
    return inputs["input_ids"], inputs["attention_mask"]


WRONG = [
    (r"has 2 values for 3 prompts", lambda rows: rows[:2]),
    (r"\[0\] must be of one prompt, with input_ids", lambda rows: [rows[1], *rows[1:]]),
    (r"\[2\] must be what the processor returns", lambda rows: [*rows[:2], 7]),
    (r"does not know colours of", lambda rows: [rows[0] | {"colours": 1}, *rows[1:]]),
    (r"must be a list of what the processor returns", lambda rows: rows[0]),
]


@pytest.mark.parametrize(("words", "change"), WRONG)
def test_prompts_one_by_one_that_cannot_be_right(words, change):
    generator, inputs = SpeculativeGenerator(build("qwen3_vl"), None), prompts("qwen3_vl")
    rows = change(one_by_one("qwen3_vl")[:3])
    with pytest.raises((TypeError, ValueError), match=words):
        generator.generate(*batch_of(inputs), row_inputs={"prompt": rows})
    with pytest.raises(TypeError, match="says what prompts are, and so do"):
        generator.generate(**inputs, row_inputs={"prompt": one_by_one("qwen3_vl")[:3]})


@pytest.mark.parametrize("name", first(FAMILIES, ["gemma3"]))
def test_evaluations_write_what_hf_writes(name):
    model, given = build(name), one_by_one(name)
    wanted = [text_of_hf(model, inputs, NUM_NEW)[0] for inputs in given]
    generator = SpeculativeGenerator(model, "lookup")
    for size in (1, 4):
        run = evaluate(generator, given, max_new_tokens=NUM_NEW, batch_size=size)
        assert [row.new_tokens for row in run.rows] == wanted
    by_hf = evaluate(HFGenerate(model), given, max_new_tokens=NUM_NEW)
    assert [row.new_tokens for row in by_hf.rows] == wanted
    drawn = evaluate(generator, given, max_new_tokens=NUM_NEW, temperature=1.0, certify=True)
    assert len(drawn.rows) == len(given)


def test_runs_over_other_pictures_are_other_runs(tmp_path):
    generator, given = SpeculativeGenerator(build("llava"), None), one_by_one("llava")[:1]
    options = {"max_new_tokens": 4, "output": tmp_path / "run.jsonl"}
    evaluate(generator, [Prompt.of("a", given[0])], **options)
    again = evaluate(generator, [Prompt.of("a", given[0])], **options)
    assert len(again.rows) == 1
    other = given[0] | {"pixel_values": given[0]["pixel_values"] + 1}
    with pytest.raises(ValueError, match="prompts"):
        evaluate(generator, [Prompt.of("a", other)], **options)
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[0])
    with pytest.raises(ValueError, match="is more than ids and longer than max_prompt_tokens"):
        evaluate(generator, given, max_prompt_tokens=3, max_new_tokens=2)
    with pytest.raises(TypeError, match="put what a processor returns for each prompt"):
        evaluate(generator, given[0], max_new_tokens=2)


def test_comparisons_take_turns_on_them():
    model, given = build("qwen3_vl"), one_by_one("qwen3_vl")
    ways = {"plain": SpeculativeGenerator(model, None)}
    ways |= {"lookup": SpeculativeGenerator(model, "lookup"), "HF": HFGenerate(model)}
    study = compare(ways, given, max_new_tokens=6, rounds=1)
    assert study.ratio({"drafter": "plain"}, {"drafter": "lookup"}).value > 0


@pytest.mark.parametrize("name", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_certified(name):
    """The witness is HF's own `generate`, led along the texts."""
    sizes = {"num_samples": 6, "max_new_tokens": 12, "audit_tokens": 10}
    given = one_by_one(name)[:3]
    report = certify_generator(SpeculativeGenerator(build(name), "lookup"), given, **sizes)
    assert report.passed, str(report)


def test_a_lossy_rule_is_found_on_pictures():
    """The negative control."""
    lossy = SpeculativeGenerator(build("qwen3_vl"), "lookup", TypicalSampler(0.0, 1.0))
    sizes = {"num_samples": 16, "max_new_tokens": 16, "audit_tokens": 4}
    report = certify_generator(lossy, one_by_one("qwen3_vl")[:3], **sizes)
    assert not report.passed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_sampled_tokens_have_the_distribution_of_hf(name):
    """The second new token, whose distribution hangs on the picture and on the first."""
    model, inputs, count = build(name), of_row(name, ROWS, 0), 4000
    generator = SpeculativeGenerator(model, "lookup", RejectionSampler())
    options = {"temperature": 2.0, "max_new_tokens": 3, "top_k": 8, "eos_token_id": []}
    options |= {"num_return_sequences": count, "seed": list(range(count))}
    texts = torch.tensor(generator.generate(**inputs, **options).texts)
    law = torch.zeros(99, 99, dtype=torch.float64)
    first = probs(model, inputs, [])
    for token in first.nonzero()[:, 0].tolist():
        law[token] = first[token] * probs(model, inputs, [token])
    found = torch.zeros(99, 99, dtype=torch.float64)
    found.index_put_((texts[:, 0], texts[:, 1]), torch.ones(count).double(), accumulate=True)
    possible = law > 0
    assert found[~possible].sum() == 0
    assert chisquare(found[possible], count * law[possible]).pvalue > 1e-4
    shuffled = law[possible].flip(0)  # the negative control
    assert chisquare(found[possible], count * shuffled).pvalue < 1e-9


def probs(model, inputs, led):
    """HF's distribution after these new tokens."""

    def lead(ids, scores):
        place = ids.shape[1] - inputs["input_ids"].shape[1]
        if place < len(led):
            scores = torch.full_like(scores, -torch.inf)
            scores[:, led[place]] = 0
        return scores

    options = {"max_new_tokens": len(led) + 1, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    out = model.generate(**inputs, **options, logits_processor=[lead])
    logits = out.logits[-1][0].double() / 2.0
    return logits.masked_fill(logits < logits.topk(8).values[-1], -torch.inf).softmax(0)
