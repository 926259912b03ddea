"""A replay says of runs with other settings what these runs do.

Its formulas are compared with an exact enumeration of both rules; a greedy replay with the runs
themselves, step for step; a sampled one with runs that have texts and draws of their own.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from agreement import agree
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from hypothesis import given
from hypothesis import strategies as st

from examples.replay import Replay, _block_rule, _token_rule, every_position, replay
from specdec import (
    BlockSampler,
    CouplingSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
)
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.lab.evaluation import measure_costs
from specdec.lab.evaluation.costs import CostCurve
from specdec.lab.evaluation.sweep import with_draft_length

TARGET = build("llama")
DRAFT = perturbed(TARGET, scale=0.15)
RULES = {RejectionSampler: _token_rule, BlockSampler: _block_rule}
V, K = 2, 2


def tables(seed: int):
    """Target and draft distributions after every prefix of up to K tokens."""
    rng = np.random.default_rng(seed)
    prefixes = [p for n in range(K + 1) for p in itertools.product(range(V), repeat=n)]
    return ({p: rng.dirichlet([1] * V) for p in prefixes} for _ in range(2))


def exact(rule, target, draft) -> dict:
    """P(n accepted, text) of one round that the target completes to K + 1 tokens, by enumeration of
    drafts and accept events, as the papers write the rules (not as `replay` does).
    """
    law = {}
    for drafted in itertools.product(range(V), repeat=K):
        prefixes = [drafted[:i] for i in range(K + 1)]
        p = [target[prefixes[i]][drafted[i]] for i in range(K)]
        q = [draft[prefixes[i]][drafted[i]] for i in range(K)]
        path = [1.0]
        for i in range(K):
            path.append(min(1.0, path[-1] * p[i] / q[i]))
        scale = [1.0] * (K + 1) if rule is RejectionSampler else path
        residual = [
            np.maximum(scale[n] * target[prefixes[n]] - draft[prefixes[n]], 0) for n in range(K)
        ]
        if rule is RejectionSampler:
            accept = [min(1.0, p[i] / q[i]) for i in range(K)]
            chance = [np.prod(accept[:n]) * (1 - accept[n]) for n in range(K)] + [np.prod(accept)]
        else:  # the longest accepted prefix, each accepted on its own
            mass = [r.sum() for r in residual[1:]]
            h = [1.0] + [m / (m + 1 - path[i + 1]) for i, m in enumerate(mass)] + [path[K]]
            chance = [h[n] * np.prod([1 - x for x in h[n + 1 :]]) for n in range(K + 1)]
        for n in range(K + 1):
            if not chance[n]:
                continue
            extra = target[prefixes[K]] if n == K else residual[n] / residual[n].sum()
            for token in range(V):
                begun = (*drafted[:n], token)
                for rest in itertools.product(range(V), repeat=K - n):
                    text = begun + rest
                    completed = [target[text[:i]][text[i]] for i in range(n + 1, K + 1)]
                    weight = np.prod(q) * chance[n] * extra[token] * np.prod(completed)
                    law[n, text] = law.get((n, text), 0.0) + weight
    return law


@pytest.mark.parametrize("rule", RULES)
@given(st.integers(0, 10**6))
def test_the_formulas_are_the_exact_conditional_law_of_the_rules(rule, seed):
    target, draft = tables(seed)
    law = exact(rule, target, draft)
    for text in itertools.product(range(V), repeat=K + 1):
        total = sum(law.get((n, text), 0.0) for n in range(K + 1))
        plain = np.prod([target[text[:i]][text[i]] for i in range(K + 1)])
        assert total == pytest.approx(plain)  # lossless, so the text says nothing about the rule
        ratios = [draft[text[:i]][text[i]] / target[text[:i]][text[i]] for i in range(K)]
        found = RULES[rule](np.array(ratios))
        for n in range(1, K + 1):
            at_least = sum(law.get((m, text), 0.0) for m in range(n, K + 1)) / total
            assert at_least == pytest.approx(found[n - 1])


def runs(count: int, *, temperature: float, seed: int, k: int = 4, draft=DRAFT):
    """A generator, prompts and options of sampled or greedy text."""
    ids, mask = ragged_prompts(VOCAB, *(3 + i % 5 for i in range(count)))
    options = {"do_sample": False}
    if temperature:
        seeds = list(range(seed, seed + count))
        options = {"do_sample": True, "temperature": temperature, "top_k": 30, "seed": seeds}
    generator = SpeculativeGenerator(TARGET, ModelDrafter(draft, k), RejectionSampler())
    return generator, ids, mask, options


@pytest.mark.parametrize(("drafter", "k"), [("model", 1), ("model", 4), ("lookup", 2)])
def test_a_greedy_replay_is_the_run_itself(drafter, k):
    generator, ids, mask, options = runs(8, temperature=0.0, seed=0)
    if drafter == "lookup":  # what it proposes first depends on K
        generator = SpeculativeGenerator(TARGET, PromptLookupDrafter(k, max_ngram=2))
    trace = generator.generate(ids, mask, max_new_tokens=40, trace=True, **options).trace
    found = replay(every_position(generator, trace), num_draft_tokens=k, sampler=BlockSampler())
    real = SpeculativeGenerator(TARGET, with_draft_length(generator.drafter, k))
    rows = real.generate(ids, mask, max_new_tokens=40, **options).steps
    for totals, steps in zip(found.totals, rows, strict=True):
        starts = np.cumsum([0, *(len(step.new_tokens) for step in steps)])
        whole = [s for s, start in zip(steps, starts, strict=False) if start + k <= 40]
        expected = [
            len(whole),
            sum(len(step.draft_tokens) for step in whole),
            sum(step.num_accepted for step in whole),
            *(sum(step.num_accepted > i for step in whole) for i in range(k)),
            *(
                sum(s.num_accepted >= i and len(s.draft_tokens) > i for s in whole)
                for i in range(k)
            ),
        ]
        assert totals.tolist() == pytest.approx(expected)


def test_runs_with_texts_of_their_own_accept_what_was_expected():
    generator, ids, mask, options = runs(48, temperature=0.9, seed=0)
    trace = generator.generate(ids, mask, max_new_tokens=24, trace=True, **options).trace
    whole = every_position(generator, trace)
    for number, (sampler, k) in enumerate(
        itertools.product((RejectionSampler(), BlockSampler()), (1, 2, 4))
    ):
        found = replay(whole, num_draft_tokens=k, sampler=sampler).acceptance_length
        real = SpeculativeGenerator(TARGET, with_draft_length(generator.drafter, k), sampler)
        *_, options = runs(48, temperature=0.9, seed=1000 * (number + 1))
        stats = real.generate(ids, mask, max_new_tokens=24, **options).stats
        assert agree(found, stats, errors=4)
        assert found.high - found.low < 0.2 * found.value


def heads() -> dict:
    """A head of every family, right often enough and wrong often enough."""
    import eagle_heads
    import mask_heads
    import mtp_heads

    wide = {"hidden_size": 128, "intermediate_size": 256}
    wide |= {"has_embed_tokens": True, "has_lm_head": True}
    masks = mask_heads.informed(TARGET, mask_heads.head_for(TARGET, "p-eagle", **wide), 3)
    eagle = eagle_heads.informed(TARGET, eagle_heads.head_for(TARGET))
    return {
        "eagle": EagleDrafter(eagle, TARGET, 3),
        "mask-token": MaskTokenDrafter(masks, TARGET, 3, proposal="sample"),
        "mtp": MTPDrafter(mtp_heads.informed(TARGET), TARGET, 3),
    }


HEADS = heads()


@pytest.mark.parametrize(("name", "k"), [("eagle", 2), ("mask-token", 3), ("mtp", 2)])
def test_runs_with_learned_heads_lie_in_their_interval(name, k):
    ids, mask = ragged_prompts(VOCAB, *(3 + i % 5 for i in range(64)))
    generator = SpeculativeGenerator(TARGET, HEADS[name], RejectionSampler())
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8}
    seeds = list(range(64))
    trace = generator.generate(ids, mask, trace=True, seed=seeds, **options).trace
    found = replay(every_position(generator, trace), num_draft_tokens=k, sampler=BlockSampler())
    real = SpeculativeGenerator(TARGET, with_draft_length(HEADS[name], k), BlockSampler())
    stats = real.generate(ids, mask, seed=[s + 1000 for s in seeds], **options).stats
    assert agree(found.acceptance_length, stats, errors=4)
    assert 1.1 < stats.acceptance_length < k + 1


def test_every_anchor_holds_both_models_probabilities_of_the_text_after_every_token():
    generator, ids, mask, options = runs(3, temperature=0.9, seed=4)
    result = generator.generate(ids, mask, max_new_tokens=12, trace=True, **options)
    whole = every_position(generator, result.trace)
    from specdec.samplers import LogitsFilter

    logits_filter = LogitsFilter(1, temperature=0.9, top_k=30)
    for row, (steps, numbers) in enumerate(zip(whole.steps, whole.numbers, strict=True)):
        text = [token for step in result.trace[row] for token in step.new_tokens]
        assert [step.new_tokens for step in steps] == [[token] for token in text]
        ids = torch.tensor([whole.prompts[row] + text])
        with torch.no_grad():
            p, q = (
                logits_filter(m(input_ids=ids, use_cache=False).logits)[0] for m in (TARGET, DRAFT)
            )
        first = len(whole.prompts[row])
        for root, (step, their) in enumerate(zip(steps, numbers, strict=True)):
            after = text[root : root + 4]
            assert step.draft_tokens == after
            where = torch.arange(len(after)) + first + root - 1, torch.tensor(after)
            assert their.target_probs == pytest.approx(p[where].tolist(), abs=1e-4)
            assert their.draft_probs == pytest.approx(q[where].tolist(), abs=1e-4)


def test_prompts_of_other_lengths_rows_that_end_and_argmax_proposals():
    ids, mask = ragged_prompts(VOCAB, 3, 7, 5, 4, 6, 2, 9, 3)
    generator = SpeculativeGenerator(TARGET, ModelDrafter(DRAFT, 3, proposal="argmax"))
    options = {"do_sample": True, "seed": 3, "eos_token_id": 34, "pad_token_id": 0}
    result = generator.generate(ids, mask, max_new_tokens=30, trace=True, **options)
    whole = every_position(generator, result.trace)
    assert [len(row) for row in whole] == result.lengths
    found = replay(whole, num_draft_tokens=3, sampler=RejectionSampler())
    assert 1 < found.acceptance_length.value < 4
    kinds = {q for row in whole.numbers for their in row for q in their.draft_probs}
    assert kinds == {1.0}  # point masses


def exactly(found) -> np.ndarray:
    """`[K + 1]`: the share of steps that accept 0..K tokens."""
    joint = [found.estimates[f"joint_rate_{i + 1}"].value for i in range(found.num_draft_tokens)]
    return -np.diff(joint, prepend=1.0, append=0.0)


def test_shares_and_speedups_follow_from_the_counts():
    generator, ids, mask, options = runs(8, temperature=0.9, seed=0)
    trace = generator.generate(ids, mask, max_new_tokens=24, trace=True, **options).trace
    found = replay(every_position(generator, trace), num_draft_tokens=4, sampler=BlockSampler())
    shares = exactly(found)
    assert 1 + (shares * np.arange(5)).sum() == pytest.approx(found.acceptance_length.value)
    costs = CostCurve([10.0] * 3, {0: [10.0] * 3, 4: [18.0] * 3})
    speed = found.speedup(costs)
    assert speed.value == pytest.approx(found.acceptance_length.value * 10 / 18)
    assert speed.covers(speed.value)
    oracle = found.oracle_speedup(costs)
    ms = (shares * np.array([10, 12, 14, 16, 18])).sum()
    assert oracle.value == pytest.approx(found.acceptance_length.value * 10 / ms)
    assert oracle.value > speed.value


def test_no_choice_of_draft_lengths_is_faster_than_the_oracle():
    """Against all choices for each number of accepted tokens, on curves of any shape. On the last
    one the best choice at the rate of K tokens is not the best one: lengths are chosen twice.
    """
    generator, ids, mask, options = runs(8, temperature=0.9, seed=0)
    trace = generator.generate(ids, mask, max_new_tokens=24, trace=True, **options).trace
    found = replay(every_position(generator, trace), num_draft_tokens=3, sampler=BlockSampler())
    shares = exactly(found)
    curves = [np.random.default_rng(seed).uniform(5, 25, 4) for seed in range(8)]
    for costs in [*curves, np.array([1.0, 1.5, 5.0, 50.0])]:
        speeds = []
        curve = CostCurve([10.0] * 3, {k: [cost] * 3 for k, cost in enumerate(costs)})
        for drafted in itertools.product(range(4), repeat=4):  # by the number that fits
            emitted = 1 + np.minimum(np.arange(4), drafted)
            speeds.append((shares @ emitted) / (shares @ costs[list(drafted)]) * 10)
        assert found.oracle_speedup(curve).value == pytest.approx(max(speeds))
        assert found.speedup(curve).value == pytest.approx(speeds[-1])


def test_costs_are_measured_at_every_length_in_every_round():
    generator, ids, mask, _ = runs(2, temperature=0.0, seed=0)
    curve = measure_costs(generator, ids, mask, num_steps=2, rounds=3)
    assert sorted(curve.step_ms) == [0, 1, 2, 3, 4]
    assert {len(ms) for ms in [curve.plain_ms, *curve.step_ms.values()]} == {3}
    plain, table = curve.medians(4)
    assert table.shape == (5,)
    assert table[4] > table[0] > 0 < plain


def test_what_a_trace_does_not_hold_is_not_replayed():
    generator, ids, mask, options = runs(8, temperature=0.9, seed=0)
    short = generator.generate(ids, mask, max_new_tokens=3, trace=True, **options).trace
    whole = every_position(generator, short)
    steps, numbers = ([row[:2] for row in rows] for rows in (whole.steps, whole.numbers))
    whole = replace(whole, steps=steps, numbers=numbers)
    with pytest.raises(ValueError, match="no text of the trace has more than 2 tokens"):
        replay(whole, num_draft_tokens=2, sampler=BlockSampler())


def test_trees_are_not_replayed():
    tree = PromptLookupDrafter(6, num_continuations=2)
    generator, ids, mask, options = runs(2, temperature=0.9, seed=0)
    trace = generator.generate(ids, mask, max_new_tokens=4, trace=True, **options).trace
    with pytest.raises(ValueError, match="PromptLookupDrafter drafts trees"):
        every_position(SpeculativeGenerator(TARGET, tree), trace)
    with pytest.raises(ValueError, match="PromptLookupDrafter drafts trees"):
        with_draft_length(tree, 2)


def replayed(texts: int) -> Replay:
    """One step per text with two draft tokens, of which one is accepted."""
    totals = np.tile([1.0, 2.0, 1.0, 1.0, 0.0, 1.0, 1.0], (texts, 1))
    return Replay(2, "BlockSampler", totals)


CURVE = CostCurve([2.0, 4.0], {0: [2.0, 4.0], 4: [3.0, 9.0]})


def test_a_replay_has_tables_and_a_line_for_each_text():
    pytest.importorskip("pandas")
    found = replayed(8)
    assert len(found.tables()) == 2
    lines = found.to_frame()
    assert len(lines) == 8
    assert 1 + lines.accepted.sum() / lines.steps.sum() == 2.0
    (row,) = Replay(1, "BlockSampler", np.array([[2.0, 2.0, 1.0, 1.0, 2.0]])).tables()[1].rows
    assert row == ["1", "2", "0.50", "0.50"]


@pytest.mark.parametrize("texts", [1, 5, 6])
def test_fewer_than_six_texts_say_so_instead_of_an_interval(texts):
    few, note = texts < 6, f"no interval: {texts} text{'s' * (texts > 1)}"
    found = replayed(texts)
    for estimate in (found.acceptance_length, found.speedup(CURVE)):
        assert estimate.has_interval is not few
        assert (f"({note})" in str(estimate)) is few
    assert (note in str(found)) is few
    assert (note in found.to_markdown()) is few


IDS = torch.tensor([[5, 6, 7, 5, 6]])
SMALL = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 3))
TRACE = SMALL.generate(IDS, max_new_tokens=9, do_sample=True, seed=0, trace=True).trace
WHOLE = every_position(SMALL, TRACE)


def asking(trace=WHOLE, sampler=None, k=2):
    return lambda: replay(trace, num_draft_tokens=k, sampler=sampler or BlockSampler())


REFUSED = [
    (lambda: every_position(SMALL, None), TypeError, "trace=True"),
    (
        lambda: every_position(SMALL, [TRACE]),
        TypeError,
        "trace must be a Trace, got .*trace=Tr",
    ),
    (
        asking(None),
        TypeError,
        r"got None; a result has a trace where generate\(..., trace=True\)",
    ),
    (asking(TRACE), ValueError, "roots of its own run only"),
    (asking(sampler=CouplingSampler()), TypeError, "replay knows"),
    (asking(k=4), ValueError, "num_draft_tokens"),
    (
        lambda: asking()().speedup(CostCurve([1.0], {0: [1.0], 1: [1.0]})),
        ValueError,
        "measure it",
    ),
]


@pytest.mark.parametrize(("call", "error", "word"), REFUSED)
def test_what_cannot_be_replayed_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call()


def test_a_text_of_another_target_is_not_replayed():
    options = {"max_new_tokens": 9, "do_sample": True, "seed": 0, "top_k": 2, "trace": True}
    trace = SpeculativeGenerator(build("llama", seed=3), None).generate(IDS, **options).trace
    read = every_position(SMALL, trace)
    with pytest.raises(ValueError, match="probability 0, so it cannot have written it"):
        replay(read, num_draft_tokens=1, sampler=BlockSampler())
