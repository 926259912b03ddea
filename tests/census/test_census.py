"""The census finds what it is there to find, and all types of transformers pass it."""

import os
import re
import time

import pytest
import torch
import transformers
from diagonal import PLACES

from census import run as census
from census.judge import (
    CRASHED,
    EQUAL,
    HF_CANNOT,
    NOT_CAPTURED,
    REFUSED,
    WRONG,
    judge,
    judge_captured,
)
from census.shapes import VOCAB, build, model_classes, remembers
from specdec import Target

PROMPTS = [torch.arange(50) * 7 % 90 + 3, torch.arange(9) * 5 % 90 + 3]


def through(model, **changed):
    """Decoders that run HF's `generate` of a model, row by row, in the place of specdec."""

    def generate(ids, mask, count):
        options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, **changed}
        rows = [ids[i, mask[i] > 0][None] for i in range(len(ids))]
        return torch.cat([model.generate(row, **options)[:, -count:] for row in rows])

    return lambda _: iter([("HF", generate)])


def judged(model, decoders):
    return judge(model, PROMPTS, decoders=decoders, new_tokens=12)


def test_hf_itself_is_equal():
    model = build("llama")
    assert judged(model, through(model)).kind == EQUAL


def test_a_window_that_hides_keys_is_wrong():
    right, wrong = (build("gpt_neo", window=window) for window in (512, 30))
    found = judged(right, through(wrong))
    assert found.kind == WRONG
    assert "prompt of 50" in found.remark  # the short one fits into the window


def test_a_fault_of_the_batch_alone_is_wrong():
    model = build("llama")

    def generate(ids, mask, count):
        unmasked = {"attention_mask": torch.ones_like(mask), "eos_token_id": None}
        return model.generate(ids, max_new_tokens=count, do_sample=False, **unmasked)[:, -count:]

    found = judged(model, lambda _: iter([("without a mask", generate)]))
    assert found.kind == WRONG
    assert "in a batch, prompt of 9" in found.remark


def test_a_text_that_is_too_short_is_wrong():
    model = build("llama")

    def generate(ids, mask, count):
        return next(iter(through(model)(None)))[1](ids, mask, count)[:, :-1]

    assert judged(model, lambda _: iter([("short", generate)])).kind == WRONG


def test_steps_that_wait_for_the_device_are_not_captured_and_their_text_is_judged():
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda *args: args[2].sum().item() and None)
    found = judge_captured(model, PROMPTS, new_tokens=12)
    assert found.kind == NOT_CAPTURED
    assert "Tensor.item()" in found.remark
    assert judge_captured(build("llama"), PROMPTS, new_tokens=12).kind == EQUAL


@pytest.mark.parametrize(("gap", "kind"), [(0.0, EQUAL), (1e-7, EQUAL), (1e-2, WRONG)])
def test_tied_tokens_may_be_exchanged(gap, kind):
    """Every token has a twin that scores less by the gap; what is judged takes the twins."""
    model, half = build("llama"), VOCAB // 2
    weight = model.lm_head.weight.data
    weight[-1], weight[half : 2 * half] = 0.0, weight[:half] * (1 - gap)

    def generate(ids, mask, count):
        rows = []
        for row, seen in zip(ids, mask, strict=True):
            text = row[seen > 0]
            for _ in range(count):
                best = int(model(text[None]).logits[0, -1].argmax()) % half
                text = torch.cat([text, torch.tensor([best + half])])
            rows.append(text[-count:])
        return torch.stack(rows)

    assert judged(model, lambda _: iter([("twins", torch.no_grad()(generate))])).kind == kind


@pytest.mark.parametrize(("error", "kind"), [(ValueError, REFUSED), (RuntimeError, CRASHED)])
def test_a_refusal_is_an_error_of_values(error, kind):
    def decoders(_):
        raise error("layer 3 counts backwards")

    found = judged(build("llama"), decoders)
    assert found.kind == kind
    assert "layer 3 counts backwards" in found.remark


def test_what_hf_cannot_generate_with_is_nobodys_fault():
    assert judged(build("gemma4_assistant"), None).kind == HF_CANNOT


def test_a_type_that_hangs_or_dies_is_reported_and_others_go_on(monkeypatch):
    tricks = {"hangs": lambda: time.sleep(60), "dies": lambda: os._exit(3), "lives": lambda: None}
    monkeypatch.setattr(
        census, "verdict_on", lambda case: tricks[case.model_type]() or census.Verdict(EQUAL)
    )
    cases = [census.Case("causal", name) for name in tricks]
    done = census.run(cases, processes=2, limit_s=2)
    found = {case.model_type: verdict for case, verdict, _ in done}
    assert found["lives"].kind == EQUAL
    assert found["hangs"] == census.Verdict(CRASHED, "not done in 2 s")
    assert found["dies"] == census.Verdict(CRASHED, "the process ended with 3")


def test_a_table_is_written_between_its_own_marks(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    marks = "a\n<!-- census {} -->\n<!-- /census -->\n"
    page.write_text(marks.format("causal") + marks.format("multimodal"))
    monkeypatch.setattr(census, "PAGE", page)
    for _ in range(2):
        for group, name in (("multimodal", "llava"), ("causal", "llama")):
            census.write(group, {name: census.Verdict(EQUAL)}, ["70"])
    causal, multimodal = page.read_text().split("<!-- census multimodal -->")
    assert causal.count("| equal | 1: llama |") == multimodal.count("| equal | 1: llava |") == 1
    assert causal.count("<!-- /census -->") == multimodal.count("<!-- /census -->") == 1


@pytest.mark.parametrize(
    ("remark", "short"),
    [
        (
            "GPTNeoForCausalLM cannot be decoded over specdec's cache: its layers mask by a buffer "
            "(TypeError: +; then layer 1 differs by 1.36). Use HF generate for this model",
            "the model cannot be decoded over specdec's cache: its layers mask by a buffer",
        ),
        (
            "XForCausalLM fails (layer 2 of 4; then layer 2 of 4). Use HF generate for this model"
            "; HF's forward of the whole text and its steps differ from token 3 on, prompt of 20",
            "the model fails (layer N of N); HF differs from itself",
        ),
        ("AForConditionalGeneration has a_m3_sparse", "the model has a_m3_sparse"),
    ],
)
def test_reasons_are_those_of_a_kind_of_models(remark, short):
    assert census.reason(census.Verdict(REFUSED, remark)) == short


def test_the_worst_window_counts():
    verdicts = {"5": census.Verdict(EQUAL), "30": census.Verdict(WRONG, "token 2")}
    assert census.merged(verdicts) == census.Verdict(WRONG, "with windows of 30: token 2")


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("qwen2", EQUAL),
        ("minimax", REFUSED),
        pytest.param("olmo_hybrid", EQUAL, marks=pytest.mark.slow),
        pytest.param("axk2", EQUAL, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("device", PLACES)
def test_some_types(model_type, kind, device):
    assert census.verdict_on(census.Case("causal", model_type, "30", device)).kind == kind


@pytest.mark.swept
@pytest.mark.parametrize("seed", census.SEEDS)
def test_types_that_remember_are_right_or_refused_whatever_their_weights(seed):
    found = {
        name: census.verdict_on(census.Case("causal", name, seed=seed))
        for name in model_classes()["causal"]
        if remembers(name)
    }
    assert len(found) > 10
    assert not {n: v.remark for n, v in found.items() if v.kind not in (EQUAL, REFUSED)}


def test_a_model_that_hf_reads_otherwise_itself_is_refused_with_the_cause():
    found = census.verdict_on(census.Case("causal", "zamba2", seed=5))
    assert found.kind == REFUSED
    assert "HF differs from itself" in found.remark
    assert "time_step_limit, (0.001, inf)" in found.remark


def test_without_the_limit_of_time_steps_hf_is_itself():
    model = build("zamba2", seed=5)
    with pytest.raises(ValueError, match=r"With time_step_limit = \(0.0, float\('inf'\)\) in each"):
        Target(model)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, float("inf"))
    Target(model)


def test_the_worst_seed_counts():
    verdicts = {"0": census.Verdict(EQUAL), "4": census.Verdict(REFUSED, "a scan")}
    assert census.merged(verdicts, "seeds") == census.Verdict(REFUSED, "with seeds of 4: a scan")


def test_a_type_that_cannot_be_built_is_said():
    found = census.verdict_on(census.Case("causal", "no such type"))
    assert found.kind == census.NOT_BUILT


@pytest.mark.parametrize("marked", [*model_classes(), "causal, captured"])
def test_the_page_lists_every_type_and_none_is_wrong(marked):
    of_group = rf"<!-- census {marked} -->\n(.*?)<!-- /census -->"
    table = re.search(of_group, census.PAGE.read_text(), re.DOTALL)[1]
    version = re.search(r"transformers ([\d.]+)", table)[1]
    rows = re.findall(r"^\| (.+) \| (\d+): (.+) \|$", table, re.MULTILINE)
    listed = [name for _, _, names in rows for name in names.split(", ")]
    assert not [row for row in rows if row[0].startswith((WRONG, CRASHED))]
    assert len(listed) == sum(int(count) for _, count, _ in rows) == len(set(listed))
    if version == transformers.__version__:
        assert set(listed) == set(model_classes()[marked.split(",")[0]])


@pytest.mark.slow
@pytest.mark.parametrize("window", census.WINDOWS)
@pytest.mark.parametrize("model_type", model_classes()["causal"])
def test_no_type_is_wrong(model_type, window):
    found = census.verdict_on(census.Case("causal", model_type, window))
    assert found.kind not in (WRONG, CRASHED), found.remark
