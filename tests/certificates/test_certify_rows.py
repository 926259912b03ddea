"""`certify(generator, prompts)` fails rows that do not repeat, and names the way in which they do
not: every fault here is lossless, so no other audit sees it.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_certify_runs import QUICK, Stateless, drafter
from text_laws import DRAFT, PROMPT, TARGET, VOCAB, tiny
from torch import Tensor

from specdec import (
    CouplingSampler,
    Draft,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    certify,
    zoo,
)
from specdec.graphs import shared
from specdec.graphs.rows import keep_rows
from specdec.kernels import draw
from specdec.lab.certificates.generator.rows import ADVICE, audit_rows
from specdec.request import Sampling
from specdec.samplers import ScriptedNoise, Stream

TEXT = [1, 4, 1, 2, 1, 3, 1, 5, 0, 1]  # 1 is followed by 5, last
PROMPTS = [[*PROMPT, 2], PROMPT, PROMPT[1:], PROMPT[:3]]


def audit(drafter, sampler="auto", prompts=(PROMPT,), model=None, **settings):
    model = tiny(TARGET) if model is None else model
    generator = SpeculativeGenerator(model, drafter, sampler, **settings)
    return audit_rows(generator, list(prompts), 14, Sampling(top_k=4))


@dataclass
class Aside:
    """A state whose rows the loop is told nothing of, and `[B]` one more than the number of each
    row in it.
    """

    hidden: Any = shared()
    numbers: Tensor | None = None


class Successors(Stateless):
    """Drafts what followed each token last, with one fault. The table `[B, V + 1]` has where each
    token was last followed, times V, plus what followed it there.
    """

    def __init__(self, fault=None):
        super().__init__()
        self.num_draft_tokens, self.fault = 2, fault

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        table = torch.zeros(batch_size, vocab_size + 1, dtype=torch.long, device=device)
        numbers = torch.zeros(batch_size, dtype=torch.long)
        return Aside(table, numbers) if self.fault in ("not kept", "not cleared") else table

    def read(self, context, state, start):
        """Takes down the new pairs of tokens; returns the table of the context's rows."""
        before, after = context.tokens[:, :-1], context.tokens[:, 1:]
        steps = torch.arange(after.shape[1])
        num_new = context.num_new + (self.fault == "reads beyond num_new")
        is_new = steps < num_new[:, None]
        codes = (start[:, None] + steps + 1) * VOCAB + after
        index = torch.where(is_new, before, VOCAB).clamp(min=0)
        rows = torch.arange(len(start))
        if self.fault == "not cleared":
            rows = state.numbers - 1
        table = state if isinstance(state, Tensor) else state.hidden
        table[rows] = table[rows].scatter_reduce(1, index, codes.clamp(min=0), "amax")
        return table[rows]

    def prefill(self, context, state):
        if self.fault == "not kept":
            state.hidden.masked_fill_((context.start == 0)[:, None], 0)
        if self.fault == "not cleared":
            state.numbers.copy_(torch.arange(1, len(state.numbers) + 1))
        is_off = self.fault == "positions within the chunk"
        self.read(context, state, context.start * 0 if is_off else context.start)

    def propose(self, context, state, drawing):
        table = self.read(context, state, context.start)
        table = table[:1].expand_as(table) if self.fault == "row 0" else table
        tokens = [context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])]
        for _ in range(drawing.num_draft_tokens):
            tokens.append(table.gather(1, tokens[-1]) % VOCAB)
        return Draft(torch.cat(tokens, dim=1)[:, 1:])


SEVERAL = [TEXT, [3], [5, 0, 5, 0, 2], [4, 4]]


@pytest.mark.parametrize(
    ("fault", "ways", "prompts"),
    [
        (None, [], [TEXT]),
        (None, [], SEVERAL),
        ("not kept", ["after rows have ended"], SEVERAL),
        ("not cleared", ["over used storage"], [TEXT]),
        ("positions within the chunk", ["in other chunks"], [TEXT]),
        ("row 0", ["alone"], SEVERAL),
    ],
)
def test_a_fault_of_a_drafters_state_is_found_and_named(fault, ways, prompts):
    found = audit(Successors(fault), prompts=prompts)
    assert found.ways == ways
    assert found.passed is not bool(ways)
    assert found.num_rows == 4
    for way in ways:
        assert f"look at {ADVICE[way]}" in str(found)


def test_tokens_that_are_no_part_of_a_row_are_found():
    found = audit(Successors("reads beyond num_new"), prompts=[TEXT, [3], [5, 0, 2], [4, 4]])
    assert not found.passed


class DrawsOfItsOwn(ModelDrafter):
    """Lossless, since the probabilities are those of the draws; but nobody can repeat them."""

    def propose(self, context, state, drawing):
        draft = super().propose(context, state, drawing)
        if draft.probs is None:  # greedy
            return draft
        return Draft(torch.multinomial(draft.probs[:, 0], 1), draft.probs)


def test_draws_from_the_global_generator_are_found_and_named_in_the_report():
    generator = SpeculativeGenerator(tiny(TARGET), DrawsOfItsOwn(tiny(DRAFT), num_draft_tokens=1))
    torch.manual_seed(0)
    report = certify(generator, [PROMPT], **QUICK)
    assert all(part.passed for part in (report.greedy, report.noise, report.text))
    assert report.rows.ways == ["again"]  # no other way is tried
    assert not report.passed
    assert "FAIL    rows: 4 rows differ again\n" in str(report)
    assert "draw through Proposal, or with drawing.noise.uniform(Stream.PROPOSE)" in str(report)


class DrawsByRow(ModelDrafter):
    """The same draws in every call, but by the number of the row."""

    def propose(self, context, state, drawing):
        """Probabilities agree to the last bit, so these must not excuse the tokens."""
        draft = super().propose(context, state, drawing)
        if draft.probs is None:  # greedy
            return draft
        own = (context.start * 0.37 + torch.arange(len(context.start)) * 0.19).double() % 1
        return Draft(draw(draft.probs[:, 0], own)[:, None], draft.probs)


class WrongKeep(ModelDrafter):
    """A soft drafter whose rows are those that were in front."""

    def init_state(self, *sizes, **target):
        return Aside(super().init_state(*sizes, **target))

    def prefill(self, context, state):
        super().prefill(context, state.hidden)

    def propose(self, context, state, drawing):
        front = keep_rows(state.hidden, list(range(len(context.start))))
        return super().propose(context, front, drawing)


@pytest.mark.parametrize(
    ("wrong", "way"), [(DrawsByRow, "alone"), (WrongKeep, "after rows have ended")]
)
def test_agreeing_probabilities_excuse_nothing_else(wrong, way):
    found = audit(wrong(tiny(DRAFT), num_draft_tokens=1))
    assert found.ways == [way]
    assert all(difference.is_of_draft for difference in found.differences)


class OwnUniforms(RejectionSampler):
    """Lossless, from other random numbers."""

    def accept(self, draft, target_logits, logits_filter, noise):
        width = target_logits.shape[1]
        uniforms = torch.rand(len(target_logits), len(Stream), width, dtype=torch.float64)
        return super().accept(draft, target_logits, logits_filter, ScriptedNoise(uniforms))


def test_a_samplers_draws_of_its_own_are_found_and_not_laid_to_the_drafter():
    torch.manual_seed(0)
    found = audit(Successors(), OwnUniforms())
    assert found.ways == ["again"]
    assert any(not difference.is_of_draft for difference in found.differences)
    assert "look at sampler and target" in str(found)


class AtTheEdge(Stateless):
    """Its uniform lies between two tokens, and on another side of that edge in a batch of one."""

    def __init__(self, shift):
        super().__init__()
        self.num_draft_tokens, self.shift = 1, shift

    def propose(self, context, state, drawing):
        tokens = context.tokens[:, : drawing.num_draft_tokens]
        if not tokens.numel() or not drawing.wants_probs or drawing.logits_filter.is_greedy:
            return Draft(tokens * 0)
        u = drawing.noise.uniform(Stream.PROPOSE)[:, 0]
        edge = (u + (self.shift if len(u) == 1 else -self.shift)).clamp(0, 1)
        probs = torch.zeros(len(u), 1, VOCAB, dtype=torch.float64)
        probs[:, 0, 0], probs[:, 0, 1] = edge, 1 - edge
        return Draft(draw(probs, u[:, None]), probs)


@pytest.mark.parametrize(("shift", "passes"), [(1e-6, True), (1e-2, False)])
def test_rounding_is_excused_and_no_more(shift, passes):
    found = audit(AtTheEdge(shift), prompts=PROMPTS)
    assert found.passed is passes
    assert len(found.differences) >= 4
    assert ("; rounding" in str(found)) is passes


class OtherAlone(AtTheEdge):
    """Without probabilities: drafts another token in a batch of one, up to a position."""

    def __init__(self, position, rounds=True):
        super().__init__(position)
        self.register_buffer("numbers", torch.zeros(1) if rounds else torch.zeros(1).long())

    def propose(self, context, state, drawing):
        tokens = context.tokens[:, : drawing.num_draft_tokens] * 0
        is_other = (context.start <= self.shift) & (len(tokens) == 1)
        return Draft(tokens + is_other[:, None])


@pytest.mark.parametrize(("position", "passes"), [(1, True), (2, False)])
def test_one_row_without_probabilities_may_be_rounding_but_not_two(position, passes):
    found = audit(OtherAlone(position), prompts=PROMPTS)
    assert {d.way for d in found.differences if d.is_of_draft} >= {"alone"}
    assert found.passed is passes


def test_a_drafter_without_floating_point_numbers_has_no_rounding():
    assert not audit(OtherAlone(1, rounds=False), prompts=PROMPTS).passed


def test_half_precision_is_not_judged_without_probabilities():
    half = copy.deepcopy(tiny(TARGET)).to(torch.bfloat16)
    found = audit(OtherAlone(3), prompts=PROMPTS, model=half)
    assert len(found.differences) >= 2
    assert found.passed


@pytest.mark.parametrize(
    ("make", "sampler"),
    [
        (drafter, "auto"),
        (drafter, CouplingSampler()),
        (lambda: PromptLookupDrafter(2), "auto"),
        (lambda: None, "auto"),
    ],
)
def test_sound_rows_repeat_in_every_way_also_where_steps_are_replayed(make, sampler):
    found = audit(make(), sampler, prompts=[PROMPT, [3]], graphs=True)
    assert found.passed
    assert not found.differences
    assert found.num_steps > 50
    assert "drafts and texts repeat again, alone, in other chunks" in str(found)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sampler", ["auto", "coupling"])
@pytest.mark.parametrize("name", ["model", "eagle3", "mask-token", "mtp"])
def test_rows_repeat_on_a_gpu(name, sampler, dtype):
    """Replayed steps of the whole batch against eager ones of every row alone."""
    target, tokenizer = zoo.load_target().to("cuda", dtype), zoo.load_tokenizer()
    drafter = zoo.load_drafter(name, target).to("cuda", dtype)
    prompts = [tokenizer(text).input_ids for text in ("def main(argv):", "import os, sys")]
    generator = SpeculativeGenerator(target, drafter, sampler)
    found = audit_rows(generator, prompts, 64, Sampling(top_k=20))
    assert found.passed, str(found)
    assert found.num_rows == 4


class OneRowSharper(RejectionSampler):
    """Row 3 of a batch has sharper logits in the rule alone, so that no probabilities differ."""

    def accept(self, draft, target_logits, logits_filter, noise):
        logits = target_logits.clone()
        logits[3:4] *= 1.5
        return super().accept(draft, logits, logits_filter, noise)


@pytest.mark.parametrize("rule", [OneRowSharper, RejectionSampler])
def test_a_verdict_by_the_place_of_a_row_is_no_rounding(rule):
    prompts = [[*PROMPT, token] for token in range(6)]
    found = audit(ModelDrafter(tiny(DRAFT)), rule(), prompts)
    assert found.passed == (rule is RejectionSampler)
    if not found.passed:
        assert "row 3" in str(found)
        assert "look at sampler and target" in str(found)
