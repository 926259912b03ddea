"""Plans and their schedules, who optimises what, and the losses of language models."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import build
from training_runs import objective_of, plan_of, random_text

from specdec.training import Distillation, NextToken, TrainingPlan, TrainingProgress
from specdec.training.loop import build_optimizers


def test_steps_and_minutes_give_the_same_curve():
    by_steps, by_minutes = TrainingPlan(steps=100), TrainingPlan(minutes=5.0)
    for done in (0, 1, 30, 60, 99, 100):
        progress = TrainingProgress(num_steps=done, wall_s=3.0 * done)
        assert progress.fraction(by_steps) == pytest.approx(progress.fraction(by_minutes))
    factors = [by_steps.lr_factor_at(f) for f in (0.0, 0.01, 0.02, 0.51, 1.0, 1.5)]
    assert factors == pytest.approx([0.005, 0.5, 1.0, 0.51, 0.02, 0.02])
    assert [by_steps.length_at(f) for f in (0, 0.59, 0.6, 0.88, 1, 1.1)] == [
        *(256, 256, 512, 1024, 1024, 1024)
    ]
    flat = TrainingPlan(steps=1, warmup_fraction=0.0, final_lr_ratio=1.0)
    assert [flat.lr_factor_at(f) for f in (0.0, 0.5, 1.0)] == [1.0] * 3


BAD_PLANS = {
    "no length": ({}, "either steps or minutes, got steps=None, minutes=None"),
    "two lengths": ({"steps": 1, "minutes": 2.0}, "either steps or minutes"),
    "no steps": ({"steps": 0}, "steps must be an integer >= 1, got 0"),
    "no time": ({"minutes": -1.0}, "minutes must be a number > 0, got -1.0"),
    "nan": ({"minutes": math.nan}, "minutes must be a number, got nan"),
    "no tokens": ({"steps": 1, "tokens_per_step": 0}, "tokens_per_step must be an integer >= 1"),
    "endless": ({"minutes": math.inf}, "minutes must be a number, got inf"),
    "checkpoints": (
        {"steps": 1, "checkpoint_minutes": -1.0},
        "minutes must be a number >= 0",
    ),
    "evaluations": ({"steps": 1, "evaluate_every": -1}, "evaluate_every must be an integer >= 0"),
    **{
        f"{name} {rate}": (
            {"steps": 1, name: rate},
            f"{name} must be a number{' > 0' if math.isfinite(rate) else ''}, got {rate}",
        )
        for name in ("lr_matrices", "lr_others")
        for rate in (0.0, -1e-3, math.inf, math.nan)
    },
    "no batches": ({"steps": 1, "accumulation": 0}, "accumulation must be an integer >= 1"),
    "empty rows": (
        {"steps": 1, "lengths": ((1.0, 0),)},
        "row of lengths must be an integer >= 1",
    ),
    "no rows": (
        {"steps": 1, "lengths": ()},
        r"must be pairs .*, got \(\)",
    ),
    "no pairs": ({"steps": 1, "lengths": 5}, "lengths must be pairs"),
    "words": ({"steps": 1, "lengths": ((1.0, "x"),)}, "must be an integer >= 1, got 'x'"),
    "falling": ({"steps": 1, "lengths": ((0.5, 8), (0.4, 9), (1.0, 9))}, "rising fractions"),
    "open end": ({"steps": 1, "lengths": ((0.5, 8),)}, r"end at 1, got \(\(0.5, 8\),\)"),
    "only warm-up": (
        {"steps": 1, "warmup_fraction": 1.0},
        "fraction must be a number < 1, got 1.0",
    ),
    "half a step": ({"steps": 1.5}, "steps must be an integer >= 1, got 1.5"),
    "true steps": ({"steps": True}, "steps must be an integer >= 1, got True"),
    "seed": ({"steps": 1, "seed": -1}, "seed must be an integer >= 0, got -1"),
    "word of a seed": ({"steps": 1, "seed": "x"}, "seed must be an integer >= 0, got 'x'"),
    "word of a rate": ({"steps": 1, "lr_others": "x"}, "lr_others must be a number, got 'x'"),
    "word of a flag": ({"steps": 1, "compiled": "x"}, "compiled must be True or False, got 'x'"),
    "precision": ({"steps": 1, "precision": "fp16"}, "must be 'bf16' or 'no', got 'fp16'"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_a_plan_that_cannot_be_followed_is_refused(case):
    options, message = BAD_PLANS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        TrainingPlan(**options)


def test_muon_has_the_hidden_matrices_and_adamw_the_rest():
    objective = objective_of("eagle3")
    (muon, muon_lr), (adamw, adamw_lr) = build_optimizers(objective, plan_of(1))
    assert (muon_lr, adamw_lr) == (0.02, 0.01)
    name_of = {id(p): key.removeprefix("drafter.head.") for key, p in objective.named_parameters()}
    names = [
        {name_of[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in (muon, adamw)
    ]
    norms = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    assert names[1] == {f"layers.0.{n}.weight" for n in norms} | {"norm.weight", "lm_head.weight"}
    assert names[0] == set(name_of.values()) - names[1]
    # GPT-2 names its tables otherwise; one is tied to the vocabulary head, one is of positions.
    model = build("gpt2")
    transformer = model.transformer
    tables = {id(m.weight) for m in (transformer.wte, transformer.wpe, model.lm_head)}
    (muon, _), (adamw, _) = build_optimizers(model, plan_of(1))
    assert tables <= {id(p) for p in adamw.param_groups[0]["params"]}
    assert all(p.ndim == 2 for p in muon.param_groups[0]["params"])


def test_next_token_is_the_loss_of_hf():
    model, ids = build("llama"), torch.from_numpy(np.stack(random_text()))
    expected = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(NextToken(model)(ids), expected)


def test_distillation_is_the_divergence_from_the_target_plus_its_entropy():
    target, draft = build("llama"), build("qwen3", seed=1)
    ids = torch.from_numpy(np.stack(random_text()))
    law = target(input_ids=ids[:, :-1]).logits.softmax(-1)
    entropy = -(law * law.log()).sum(-1).mean()
    student = draft(input_ids=ids[:, :-1]).logits.log_softmax(-1)
    divergence = F.kl_div(student, law, reduction="none").sum(-1).mean()
    objective = Distillation(draft, target)
    torch.testing.assert_close(objective(ids), divergence + entropy)
    assert {key for key, _ in objective.named_parameters()} == {
        f"model.{key}" for key, _ in draft.named_parameters()
    }
    own = Distillation(copy.deepcopy(target).requires_grad_(True), target)
    loss = own(ids)
    torch.testing.assert_close(loss, entropy)
    loss.backward()
    assert max(p.grad.abs().max() for p in own.parameters()) < 1e-6
