"""`draft_length`: lengths that follow from what earlier steps accepted change the speed alone.

Tests of distributions have a false-alarm rate of 1e-6 or less in all; controllers that look at a
draw that was not used yet are the negative controls.
"""

import numpy as np
import pytest
import torch
from architectures import VOCAB
from diagonal import diagonal
from drafter_table import DRAFTERS, GREEDY, MODEL, make
from drafting import ConstantDrafter, perturbed, ragged_prompts
from text_laws import DRAFT, PROMPT, TARGET, tiny

from specdec import CouplingSampler, ModelDrafter, SpeculativeGenerator, Stream, Tree, certify
from specdec.loop import lengths
from specdec.loop.lengths import Acceptance, AutoLength, lengths_to_measure
from specdec.row_step import RowStep

IDS, MASK = ragged_prompts(VOCAB, 3, 9, 1, 6)
COSTS = {(1, 64): {0: [10.0], 1: [11.0], 2: [12.5], 3: [14.0], 4: [15.0], 5: [17.0]}}
SAMPLED = {"do_sample": True, "seed": [5, 6, 7, 8], "top_k": 0}
ACROSS = ["lookup", "suffix", "model", "mtp, looped", "self, top", "eagle3, fewer ids, tree"]
LONG = torch.randint(VOCAB, (2, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _costs_are_measured_briefly(monkeypatch):
    monkeypatch.setattr(lengths, "SECONDS", 0.2)


def restless(acceptance, rows, tokens):
    """Depends on all that is known: acceptance, rows and length."""
    return int(1e6 * sum(acceptance.rates) + rows + tokens) % 6


def lengths_of(result, row=0):
    return [len(step.draft_tokens) for step in result.steps[row]]


def generator_of(choose, num_draft_tokens=5, sampler="auto", **options):
    drafter = ModelDrafter(perturbed(MODEL), num_draft_tokens)
    return SpeculativeGenerator(MODEL, drafter, sampler, draft_length=choose, **options)


@pytest.mark.parametrize(
    ("choose", "steps_ahead"), [("auto", 1), (AutoLength(COSTS), 0), (restless, 0), (restless, 1)]
)
def test_greedy_and_coupled_texts_do_not_depend_on_the_lengths(choose, steps_ahead):
    for sampler, options in (("auto", {"do_sample": False}), ("coupling", SAMPLED)):
        plain = SpeculativeGenerator(MODEL, None, sampler)
        generator = generator_of(choose, sampler=sampler, steps_ahead=steps_ahead)
        expected = plain.generate(IDS, MASK, max_new_tokens=24, **options)
        found = generator.generate(IDS, MASK, max_new_tokens=24, **options)
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert sum(map(len, found.steps)) < sum(map(len, expected.steps))
        assert found.stats.num_draft_tokens == 5
        if choose is restless:
            assert len({*lengths_of(found), *lengths_of(found, 1)}) > 2


@pytest.mark.parametrize("way", ["trace", "check", "stream", "hook"])
def test_every_way_of_generating_chooses_lengths(way):
    generator = generator_of(restless, graphs=way == "check")
    call = {"max_new_tokens": 20, "do_sample": False}
    if way == "stream":
        lengths = [len(r.rows[0].draft_tokens) for r in generator.stream(IDS[:1], **call)]
    elif way == "hook":
        MODEL.generate(IDS[:1], custom_generate=generator, **call)
        lengths = lengths_of(generator.last_result)
    else:
        result = generator.generate(IDS[:1], **call, **{way: True})
        lengths = lengths_of(result)
        if way == "trace":
            drafted = [len(numbers.draft_probs) for numbers in result.trace.numbers[0]]
            assert drafted == lengths
            assert result.trace.about["num_draft_tokens"] == 5
    assert len(set(lengths)) > 2


def test_a_call_that_names_a_length_has_it_and_known_costs_repeat_a_call():
    options = {"max_new_tokens": 12, "num_draft_tokens": 2, "do_sample": False}
    result = generator_of(restless).generate(IDS[:1], **options)
    assert set(lengths_of(result)) == {2}
    generator = generator_of(AutoLength(COSTS))
    one, two = (generator.generate(IDS, MASK, max_new_tokens=24, **SAMPLED) for _ in range(2))
    assert one.sequences.tolist() == two.sequences.tolist()
    assert lengths_of(one) == lengths_of(two)


@pytest.mark.parametrize("choose", [lambda *_: 4, "auto"])
def test_trees_have_lengths_too(choose):
    tree = ModelDrafter(perturbed(MODEL), tree=Tree(6, 3))
    plain = SpeculativeGenerator(MODEL, None).generate(IDS, MASK, max_new_tokens=16)
    generator = SpeculativeGenerator(MODEL, tree, draft_length=choose)
    found = generator.generate(IDS, MASK, max_new_tokens=16)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert choose == "auto" or set(lengths_of(found)) == {4}


def test_costs_are_measured_once_for_each_size(monkeypatch):
    generator, one = generator_of("auto", 2), {"max_new_tokens": 4, "do_sample": False}

    def costs():
        return [line for line in generator.explain().splitlines() if " tokens: 0: " in line]

    assert not costs()
    generator.generate(IDS[:1], **one)
    (first,) = costs()
    for batch in ((IDS[:1],), (IDS, MASK)):
        generator.generate(*batch, **one)
        assert first in costs()
    assert any("greedy, 4 x 64 tokens: 0: " in line for line in costs())
    describe = AutoLength.describe

    def while_another_call_measures(auto):
        generator.generate(IDS[:1], max_new_tokens=4, do_sample=True, seed=0)
        return describe(auto)

    monkeypatch.setattr(AutoLength, "describe", while_another_call_measures)
    generator.explain()
    monkeypatch.undo()
    assert any("sampled, 1 x 64" in line for line in costs())


class Notes(ConstantDrafter):
    """Notes where each step begins, and how many tokens the one before it committed."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.seen = []

    def propose(self, context, state, drawing):
        self.seen.append((context.start.tolist(), context.num_new.tolist()))
        return super().propose(context, state, drawing)


def test_measuring_leaves_nothing_behind():
    """A drafter with memory would otherwise draft from a text that the same noise has written."""
    drafter = Notes(5, 1)
    generator = SpeculativeGenerator(MODEL, drafter, draft_length="auto")
    result = generator.generate(IDS[:1], max_new_tokens=8, do_sample=True, seed=1)
    own = len(result.steps[0])
    assert len(drafter.seen) > 2 * own
    assert all(num_new == [0] for _, num_new in drafter.seen[1:-own])


def test_costs_are_measured_at_the_beginning_and_at_the_end_of_a_call():
    """Where the rows stand is read off the context that the drafter gets."""
    drafter = Notes(2, 1)
    generator = SpeculativeGenerator(MODEL, drafter, draft_length="auto")
    generator.warm_up(2, 100, do_sample=False)
    (auto,) = generator._lengths._of.values()
    assert set(auto.costs) == {(2, 64), (2, 100)}
    starts = {start for row, _ in drafter.seen for start in row}
    assert {63, 99} < starts < set(range(100))
    generator.generate(IDS[:2], max_new_tokens=60, do_sample=False)
    generator.generate(IDS[2:, -1:], max_new_tokens=12, do_sample=False)  # of less than 64 tokens
    assert set(auto.costs) == {(2, 64), (2, 100)}
    assert generator.last_result.stats.steps


@pytest.mark.parametrize(
    ("name", "graphs"),
    diagonal(ACROSS, [False, True])
    + diagonal([n for n in DRAFTERS if n not in ACROSS], [False, True], is_quick=False),
)
def test_every_drafter_chooses_lengths_in_a_call_across_two_sizes(name, graphs, monkeypatch):
    """60 tokens and 33 new ones: costs are measured with 64 tokens and with 93. The text is HF's,
    and the steps are those of the same lengths where nothing was measured.
    """
    chosen, choose = [], AutoLength.__call__
    monkeypatch.setattr(lengths, "SECONDS", 0)
    note = lambda *given: chosen.append(choose(*given)) or chosen[-1]  # noqa: E731
    monkeypatch.setattr(AutoLength, "__call__", note)
    expected = MODEL.generate(LONG, attention_mask=LONG >= 0, max_new_tokens=33, **GREEDY)
    call = {"max_new_tokens": 33, "do_sample": False, "eos_token_id": []}
    generator = SpeculativeGenerator(MODEL, make(name), draft_length="auto", graphs=graphs)
    found = generator.generate(LONG, **call)
    (auto,) = generator._lengths._of.values()
    assert {size for _, size in auto.costs} == {64, 93}
    assert found.sequences.tolist() == expected.tolist()
    rest = iter(chosen)
    again = SpeculativeGenerator(MODEL, make(name), draft_length=lambda *_: next(rest))
    for rows in zip(found.steps, again.generate(LONG, **call).steps, strict=True):
        mine, others = ([(s.draft_tokens, s.num_accepted) for s in row] for row in rows)
        assert mine == others


# Law 2.


def follows(acceptance, rows, tokens):
    """2 after the last step of a row alone accepted, 1 or 0 else."""
    return int(np.clip(round(3 * acceptance.rates[0]) - 1, 0, 2))


FEW = {"num_samples": 64, "batch_size": 4, "audit_tokens": 12, "max_new_tokens": 12}


@pytest.mark.parametrize(
    ("sampler", "choose"),
    [
        ("rejection", follows),
        *(pytest.param(s, "auto", marks=pytest.mark.slow) for s in ("block", "coupling")),
    ],
)
def test_generators_that_choose_lengths_are_certified(sampler, choose):
    own = ModelDrafter(tiny(DRAFT), num_draft_tokens=2)
    generator = SpeculativeGenerator(tiny(TARGET), own, sampler, draft_length=choose)
    report = certify(generator, [PROMPT], **FEW)
    assert report.passed, report


class Peeks(SpeculativeGenerator):
    """Drafts where the accept draw of the step to come is small enough to accept: a
    point mass of probability p comes out with p / 2 more if p < 1 / 2, (1 - p) / 2 if p > 1 / 2.
    """

    def step(self, generation):
        """Looks at a draw that was not used yet."""
        state = generation.state
        noise = state.noise.at(state.buffer.root_position, 2)
        generation.num_draft_tokens = int(noise.uniform(Stream.ACCEPT)[0, 0] < 0.5)
        return super().step(generation)


def test_a_length_that_looks_at_a_draw_to_come_is_found_by_the_certificate():
    own = ModelDrafter(tiny(DRAFT), num_draft_tokens=1, proposal="argmax")
    fewer = FEW | {"batch_size": 1, "num_samples": 400, "audit_tokens": 2}
    report = certify(Peeks(tiny(TARGET), own), [PROMPT], **fewer)
    assert not report.passed
    assert report.text.num_tokens < 4800 / 4  # drawing ends where it is sure: a wide margin
    assert report.greedy.passed
    assert report.noise.passed
    assert not report.text.passed


def test_rows_that_share_a_seed_are_refused_where_lengths_could_tell_their_draws():
    options = {"max_new_tokens": 4, "do_sample": True, "seed": 3}
    generator = generator_of(restless)
    for call in (generator.generate, generator.stream):
        with pytest.raises(ValueError, match=r"rows that share a seed.*pass one seed per row"):
            call(IDS, MASK, **options)
    for one in (generator_of(restless, sampler=CouplingSampler()), generator_of(None)):
        one.generate(IDS, MASK, **options)
    generator.generate(IDS, MASK, **options | {"seed": [1, 2, 3, 4]})
    generator.generate(IDS, MASK, num_draft_tokens=3, **options)


# What is chosen.


def steps(*accepted, drafted):
    return [RowStep([1] * drafted, n, [1] * n + [2]) for n in accepted]


def test_rates_are_those_of_the_steps_that_reached_a_position():
    acceptance = Acceptance(4)
    acceptance.update(steps(0, 1, 2, 3, 3, drafted=3) * 1000 + [None], 3)
    assert acceptance.rates == pytest.approx([4 / 5, 3 / 4, 2 / 3, 2 / 3], abs=1e-3)
    lengths = [1, 1.8, 2.4, 2.8, 2.8 + 0.4 * 2 / 3]
    assert acceptance.tokens_per_step() == pytest.approx(lengths, abs=1e-2)
    acceptance = Acceptance(3)  # tokens that a drafter did not have count as rejected
    acceptance.update(steps(1, drafted=1) * 1000, 3)
    assert acceptance.rates[1] < 0.01
    acceptance = Acceptance(3, is_tree=True)  # whose nodes are counted by their index
    step = RowStep([4, 5, 6], 2, [5, 6, 7], parents=[-1, -1, 1], path=[1, 2])
    acceptance.update([step] * 1000, 3)
    assert acceptance.rates == pytest.approx([0, 1, 1], abs=1e-2)
    assert acceptance.tokens_per_step() == pytest.approx([1, 1, 2, 3], abs=1e-2)


def test_the_fastest_length_is_chosen_and_follows_the_text():
    choose, acceptance = AutoLength(COSTS), Acceptance(5)
    chosen = []
    for accepted in [5] * 60 + [0] * 60 + [5] * 60:
        k = choose(acceptance, 1, 64)
        chosen.append(k)
        acceptance.update(steps(min(accepted, k), drafted=k), k)
    assert set(chosen[5:60]) == {5}
    assert set(chosen[110:120]) <= {0, 1}
    assert set(chosen[165:]) == {5}


def test_costs_of_the_nearest_size_are_taken_and_noise_makes_no_draft_cheaper():
    cheap, dear = {0: [10.0], 4: [10.1]}, {0: [10.0], 4: [90.0]}
    choose = AutoLength({(1, 64): cheap, (8, 64): dear, (8, 4096): cheap})
    acceptance = Acceptance(4)
    assert [choose(acceptance, *size) for size in ((2, 50), (6, 90), (8, 9000))] == [4, 0, 4]
    known = [choose.knows(*size) for size in ((8, 75), (8, 100), (8, 3500), (4, 64))]
    assert known == [True, False, True, False]
    choose.add(8, 512, cheap)
    assert [choose.knows(8, size) for size in (50, 52, 100, 600, 5000, 6000)] == [
        *(False, True, True, True, True, False)
    ]
    noisy = AutoLength({(1, 64): {0: [10.0], 1: [12.0], 4: [9.0]}})
    assert list(noisy.describe()) == ["1 x 64 tokens: 0: 10.00, 1: 12.00, 4: 12.00"]
    assert AutoLength({(1, 64): {0: [10.0], 9: [10.0]}})(acceptance, 1, 64) == 0


def test_costs_between_two_contexts_are_linear_in_the_tokens():
    """Drafting two tokens pays from the context on where its step costs less than twice a step of
    none: 12 + t / 100 < 2 (1 + t / 100), t > 1000.
    """
    times = {t: {0: [1 + t / 100], 2: [12 + t / 100]} for t in (100, 900, 3000)}
    choose, all_or_nothing = AutoLength({(4, t): ms for t, ms in times.items()}), Acceptance(2)
    all_or_nothing.update([RowStep([5, 6], 2, [5, 6, 9])] * 10**4, 2)
    all_or_nothing.update([RowStep([5, 6], 0, [9])] * (10**4 - 1), 2)
    assert all_or_nothing.tokens_per_step()[2] == pytest.approx(2, abs=0.06)
    assert [choose(all_or_nothing, 4, t) for t in (850, 1150)] == [0, 2]
    assert [choose(all_or_nothing, 4, t) for t in (10, 5000)] == [0, 2]
    choose.add(4, 2000, {1: [5.0]})  # not the same lengths: the nearest context alone counts
    assert [choose(all_or_nothing, 4, t) for t in (1500, 2900)] == [1, 2]


def described(times):
    (line,) = AutoLength({(1, 64): times}).describe()
    return [float(part.split(": ")[1]) for part in line.split(" tokens: ")[1].split(", ")]


def test_noise_is_taken_for_noise_and_a_step_for_a_step():
    draws = np.random.default_rng(0)
    line = {k: (10 + k + 3 * draws.standard_normal(12)).tolist() for k in (0, 1, 2, 3, 4, 6, 8)}
    raw = [np.median(each) for each in line.values()]
    off = [np.abs(np.array(ms) - 10 - np.array(list(line))).mean() for ms in (raw, described(line))]
    assert off[1] < 0.7 * off[0]
    step = {k: [ms - 0.01, ms, ms + 0.01] for k, ms in ((0, 10.0), (1, 10.0), (2, 20.0), (4, 20.0))}
    assert described(step) == pytest.approx([10, 10, 20, 20], abs=0.01)


def test_lengths_to_measure_end_with_the_drafters_own():
    assert [lengths_to_measure(k)[-1] for k in (0, 1, 7, 32)] == [0, 1, 7, 32]
    assert lengths_to_measure(5) == [0, 1, 2, 3, 4, 5]


WRONG = [
    (r"draft_length must be None, \"auto\" or a function.*got 3.*num_draft_tokens=", 3),
    *(
        (
            f"that draft_length returned must be an integer in 0.*got {wrong!r}",
            lambda *_, w=wrong: w,
        )
        for wrong in (6, 1.5, None, "2")
    ),
    ("no costs are known.*AutoLength", AutoLength()),
    ("drafts of 7 tokens.*at most 5; pass", AutoLength({(1, 64): {7: [9.0], 9: [9.5]}})),
    ("draft_length must be .* a function.*got the class int", int),
    ("draft_length must be .* a function.*got the class AutoLength", AutoLength),
]
WRONG_COSTS = [
    *(
        ("milliseconds above 0 by draft length.*got {", {(1, 64): t})
        for t in ({}, {2: []}, {1: [0.0]}, {-1: [1.0]})
    ),
    ("the rows of costs must be .*1.*got 0", {(0, 64): {0: [1.0]}}),
    ("the tokens of costs must be .*1.*got 0", {(1, 0): {0: [1.0]}}),
]


@pytest.mark.parametrize(("message", "choose"), WRONG)
def test_what_cannot_be_a_length_is_refused(message, choose):
    with pytest.raises((TypeError, ValueError), match=message):
        generator_of(choose).generate(IDS[:1], max_new_tokens=9)


@pytest.mark.parametrize(("message", "costs"), WRONG_COSTS)
def test_costs_that_cannot_be_right_are_refused(message, costs):
    with pytest.raises(ValueError, match=message):
        AutoLength(costs)


def test_costs_may_be_added_in_the_middle_of_a_choice():
    """As another thread would: each comparison of a size adds one."""
    auto = AutoLength({(2, 64): {0: [1.0], 2: [1.1]}})

    class Growing(int):
        def grow(self):
            auto.add(len(auto.costs) + 2, 64, {0: [1.0], 2: [1.1]})

        def __rtruediv__(self, other):
            self.grow()
            return other / int(self)

        def __eq__(self, other):
            self.grow()
            return int(self) == other

        __hash__ = int.__hash__

    assert auto(Acceptance(2), Growing(3), 64) == 2
    assert auto.knows(Growing(2), 64)
    lines = [next(auto.describe())]
    for line in auto.describe():
        Growing(1).grow()
        lines.append(line)
    assert len(auto.costs) > len(lines) > 3
