"""What drafters and samplers must keep to: what breaks it stops the generation before a token of
the step is emitted, with the name of the class, and harms nothing on the way.
"""

import copy

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import (
    BlockSampler,
    ModelDrafter,
    NoDrafter,
    RejectionSampler,
    Sampler,
    SpeculativeGenerator,
    TypicalSampler,
)
from specdec.loop.outcome import find_faults
from specdec.types import PAD_TOKEN, Draft, Fault, Verdict

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 5, 2, 6)
K = 3
GREEDY, SAMPLED = {}, {"do_sample": True, "seed": 1}


class Fixed(NoDrafter):
    """Proposes what it is told to."""

    num_draft_tokens = K

    def __init__(self, make):
        super().__init__()
        self.make = make

    def propose(self, context, state, drawing):
        """The same draft at every step."""
        return self.make(len(context.start), drawing.num_draft_tokens)


class Saying(Sampler):
    """Takes what a sound sampler says and changes it."""

    lossless = False

    def __init__(self, change):
        super().__init__()
        self.change = change

    def accept(self, draft, target_logits, warp, noise):
        """The changed verdict."""
        return self.change(RejectionSampler().accept(draft, target_logits, warp, noise))

    def accept_greedily(self, draft, target_logits):
        """The changed verdict."""
        return self.change(super().accept_greedily(draft, target_logits))


def ids(value):
    return lambda rows, k: Draft(torch.full((rows, k), value))


def counts(value):
    return lambda rows, k: Draft(torch.full((rows, k), 3), None, torch.full((rows,), value))


def probs(table):
    return lambda rows, k: Draft(torch.full((rows, k), 3), table(rows, k))


def negative(rows, k):
    table = torch.zeros(rows, k, VOCAB)
    table[..., 3], table[..., 4], table[..., 5] = 0.7, 0.5, -0.2  # the sum is 1
    return table


BAD_DRAFTS = {
    "an id beyond the vocabulary": (ids(VOCAB), "outside the target's vocabulary"),
    "a huge id": (ids(2**40), "outside the target's vocabulary"),
    "a negative id": (ids(-1), "outside the target's vocabulary"),
    "more valid tokens than K": (counts(K + 1), "num_valid"),
    "fewer valid tokens than none": (counts(-1), "num_valid"),
    "negative probabilities": (probs(negative), "probabilities are negative"),
}
BAD_VERDICTS = {
    "fewer than none": (lambda v: Verdict(v.tokens, v.num_accepted - 9), "num_accepted"),
    "more than drafted": (lambda v: Verdict(v.tokens, v.num_accepted * 0 + K + 1), "num_accepted"),
    "an emitted id": (lambda v: Verdict(v.tokens + VOCAB, v.num_accepted), "emitted"),
    "no token": (lambda v: Verdict(torch.full_like(v.tokens, PAD_TOKEN), v.num_accepted), "emit"),
    "other tokens than the draft's": (
        lambda v: Verdict((v.tokens + 1) % VOCAB, v.num_accepted * 0 + 2),
        "accepted tokens that are not the draft's",
    ),
    "more considered than drafted": (
        lambda v: Verdict(v.tokens, v.num_accepted, v.num_accepted * 0 + 77),
        "num_drafted",
    ),
    "fewer considered than accepted": (
        lambda v: Verdict(v.tokens, v.num_accepted, v.num_accepted * 0 - 1),
        "num_drafted",
    ),
}
CASES = [("Fixed", name, SAMPLED) for name in BAD_DRAFTS]
CASES += [("Fixed", name, GREEDY) for name in BAD_DRAFTS if "probabilities" not in name]
CASES += [("Saying", name, GREEDY) for name in BAD_VERDICTS]


@pytest.mark.parametrize(("who", "name", "options"), CASES, ids=str)
def test_values_that_cannot_be_right_stop_the_generation(who, name, options):
    if who == "Fixed":
        make, words = BAD_DRAFTS[name]
        generator = SpeculativeGenerator(MODEL, Fixed(make))
    else:
        change, words = BAD_VERDICTS[name]
        generator = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), K), Saying(change))
    with pytest.raises(ValueError, match=f"row 0 after 0 new tokens.*{who}: .*{words}"):
        generator.generate(IDS, MASK, max_new_tokens=9, **options)


def on_meta(verdict):
    return Verdict(verdict.tokens.to("meta"), verdict.num_accepted.to("meta"))


NO_DRAFTS = {
    "nothing": (lambda rows, k: None, TypeError, "Fixed must return .*Draft"),
    "a pair": (lambda rows, k: (torch.zeros(rows, k), None), TypeError, "must return .*Draft"),
    "floats": (lambda rows, k: Draft(torch.zeros(rows, k)), TypeError, "draft.tokens"),
    "int32": (lambda rows, k: Draft(torch.zeros(rows, k).int()), TypeError, "draft.tokens"),
    "a row": (lambda rows, k: Draft(torch.zeros(k).long()), ValueError, "draft.tokens"),
    "other rows": (lambda rows, k: ids(3)(rows + 1, k), ValueError, r"\[4, 3\].*\[3, 3\]"),
    "other width": (lambda rows, k: ids(3)(rows, k + 1), ValueError, r"Fixed.*\[3, 4\].*\[3, 3\]"),
    "other device": (
        lambda rows, k: Draft(torch.zeros(rows, k, dtype=torch.long, device="meta")),
        ValueError,
        "Fixed.*on meta, expected .* on cpu",
    ),
    "half": (probs(lambda rows, k: torch.zeros(rows, k, VOCAB).half()), TypeError, "draft.probs"),
    "another vocabulary": (
        probs(lambda rows, k: torch.zeros(rows, k, 9)),
        ValueError,
        f"Fixed.*vocabulary of 9, .*{VOCAB}",
    ),
    "float counts": (
        lambda rows, k: Draft(torch.zeros(rows, k).long(), None, torch.zeros(rows)),
        TypeError,
        "draft.num_valid",
    ),
}
NO_VERDICTS = {
    "nothing": (lambda v: None, TypeError, "Saying must return .*Verdict"),
    "a tuple": (lambda v: (v.tokens, v.num_accepted), TypeError, "must return .*Verdict"),
    "int32": (lambda v: Verdict(v.tokens.int(), v.num_accepted), TypeError, "verdict.tokens"),
    "floats": (lambda v: Verdict(v.tokens, v.num_accepted / 1), TypeError, "verdict.num_accepted"),
    "K tokens": (
        lambda v: Verdict(v.tokens[:, 1:], v.num_accepted),
        ValueError,
        r"Saying.*\[3, 3\].*\[3, 4\]",
    ),
    "other rows": (
        lambda v: Verdict(v.tokens[:1], v.num_accepted[:1]),
        ValueError,
        r"\[1, 4\].*\[3, 4\]",
    ),
    "other device": (on_meta, ValueError, "Saying.*on meta, expected .* on cpu"),
}


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("draft", name) for name in NO_DRAFTS] + [("verdict", name) for name in NO_VERDICTS],
)
def test_what_is_no_record_of_the_step_is_refused_before_it_is_committed(kind, name, options):
    table = NO_DRAFTS if kind == "draft" else NO_VERDICTS
    part, error, words = table[name]
    drafter = Fixed(part if kind == "draft" else ids(3))
    sampler = Saying(part if kind == "verdict" else lambda verdict: verdict)
    generator = SpeculativeGenerator(MODEL, drafter, sampler)
    generation = generator.start(IDS, MASK, max_new_tokens=9, **options)
    before = generation.lengths.clone()
    with pytest.raises(error, match=words):
        generator.step(generation)
    assert torch.equal(generation.lengths, before)


def test_a_token_beyond_num_valid_may_be_anything():
    expected = MODEL.generate(IDS, attention_mask=MASK, max_new_tokens=9, do_sample=False)

    def make(rows, k):
        tokens = torch.tensor([5, -7, 2**50])[:k].expand(rows, -1)
        return Draft(tokens, None, torch.ones(rows, dtype=torch.long))

    found = SpeculativeGenerator(MODEL, Fixed(make)).generate(IDS, MASK, max_new_tokens=9)
    assert torch.equal(found.sequences, expected)
    assert sum(found.stats.drafted) > 0


@pytest.mark.parametrize(
    ("value", "words"), [(1.0, "sum to 1"), (0.0, "sum to 1"), (None, "has probability 0")]
)
def test_probabilities_that_a_users_sampler_does_not_look_at_are_looked_at_once(value, words):
    def table(rows, k):
        found = torch.full((rows, k, VOCAB), value or 0.0)
        if value is None:
            found[..., 7] = 1.0
        return found

    sampler = Saying(lambda verdict: Verdict(verdict.tokens, verdict.num_accepted))  # no faults
    generator = SpeculativeGenerator(MODEL, Fixed(probs(table)), sampler)
    with pytest.raises(ValueError, match=f"row 0 of the first step Fixed: .*{words}"):
        generator.generate(IDS, MASK, max_new_tokens=9, **SAMPLED)


@pytest.mark.parametrize("sampler", [TypicalSampler(), BlockSampler()], ids=["typical", "block"])
def test_nan_from_a_drafter_stops_a_sampled_generation(sampler):
    draft = copy.deepcopy(MODEL)
    generator = SpeculativeGenerator(MODEL, ModelDrafter(draft, K), sampler)
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="ModelDrafter: draft probabilities"):
        generator.generate(IDS, MASK, max_new_tokens=9, **SAMPLED)


@pytest.mark.parametrize("drawn", [5, None, (None, None), (torch.zeros(3, 1), None)])
def test_what_a_users_rule_draws_is_checked(drawn):
    sampler = Saying(lambda verdict: verdict)
    sampler.draw_draft = lambda *inputs, **options: drawn
    generator = SpeculativeGenerator(MODEL, ModelDrafter(MODEL, K), sampler)
    with pytest.raises(TypeError, match="sampler's draw_draft"):
        generator.generate(IDS, MASK, max_new_tokens=9, **SAMPLED)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        *(("Fixed.num_draft_tokens", value) for value in ("3", None, True, -1)),
        ("Fixed.feature_layers", 5),
        ("Saying.uses_draft_probs", "no"),
        ("Saying.draw_draft", None),
        ("Saying.noise_type", 5),
    ],
)
def test_attributes_of_users_parts_are_checked_when_they_are_joined(attribute, value):
    drafter, sampler = Fixed(ids(3)), Saying(lambda verdict: verdict)
    owner, name = attribute.split(".")
    setattr(drafter if owner == "Fixed" else sampler, name, value)
    with pytest.raises((TypeError, ValueError), match=attribute):
        SpeculativeGenerator(MODEL, drafter, sampler)


def test_a_part_that_forgets_its_base_class_is_refused():
    class Forgetful(NoDrafter):
        def __init__(self):
            self.num_draft_tokens = 3

    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__"):
        SpeculativeGenerator(MODEL, Forgetful())


class Leaving(NoDrafter):
    """Its state gets lost when rows leave, or is none."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        """What it was given."""
        return self.state


class Lost:
    """A state that forgets to return itself."""

    def keep(self, rows):
        """Nothing."""

    def reset(self):
        """Nothing to do."""


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "Leaving.init_state returned a NoneType"),
        ({"rows": 3}, "Leaving.init_state returned a dict"),
        (Lost, r"Leaving.init_state returned the class Lost; return Lost\(\)"),
        (Lost(), r"Leaving.init_state\(\).keep returned a NoneType"),
    ],
)
def test_a_state_that_is_none_is_refused(state, words):
    first = MODEL.generate(IDS[:1], attention_mask=MASK[:1], max_new_tokens=1, do_sample=False)
    generator = SpeculativeGenerator(MODEL, Leaving(state))
    with pytest.raises(TypeError, match=words):
        generator.generate(IDS, MASK, max_new_tokens=9, eos_token_id=int(first[0, -1]))


def test_a_generation_of_another_generator_is_refused():
    generator, other = (SpeculativeGenerator(MODEL, ModelDrafter(MODEL, k)) for k in (2, 3))
    generation = other.start(IDS, MASK, max_new_tokens=9)
    with pytest.raises(ValueError, match="another generator"):
        generator.step(generation)
    with pytest.raises(TypeError, match="must be a Generation"):
        generator.step(IDS)
    other.step(generation)


integers = st.one_of(st.integers(-3, VOCAB + 3), st.sampled_from([2**40, -(2**40)]))


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_the_faults_of_a_row_are_those_that_lists_show(data, rows, width):
    def drawn(count):
        values = data.draw(st.lists(integers, min_size=rows * count, max_size=rows * count))
        return np.array(values, dtype=np.int64).reshape(rows, count)

    emitted, drafted = drawn(width + 1), drawn(width)
    accepted, valid, seen = (drawn(1)[:, 0] for _ in range(3))
    for row, faults in enumerate(find_faults(emitted, drafted, accepted, valid, seen, VOCAB)):
        found, said, proposed = Fault(int(faults)), emitted[row].tolist(), drafted[row].tolist()
        n, num_valid, num_drafted = int(accepted[row]), int(valid[row]), int(seen[row])
        assert (Fault.NUM_VALID in found) == (num_valid not in range(width + 1))
        assert (Fault.NUM_ACCEPTED in found) == (not 0 <= n <= num_valid)
        assert (Fault.NUM_DRAFTED in found) == (not n <= num_drafted <= num_valid)
        outside = [token not in range(VOCAB) for token in proposed[: max(num_valid, 0)]]
        assert (Fault.DRAFT_ID in found) == any(outside)
        outside = [token not in range(VOCAB) for token in said[: max(n, 0) + 1]]
        assert (Fault.EMITTED_ID in found) == any(outside)
        differ = any(map(int.__ne__, said[: max(n, 0)], proposed))
        assert (Fault.ACCEPTED_TOKEN in found) == differ


@settings(max_examples=10)
@given(st.data(), st.sampled_from([GREEDY, SAMPLED]))
def test_what_a_part_returns_harms_nothing_before_its_faults_are_read(data, options):
    """Steps go on, as they do on a GPU whose host reads late: ids and counts stay in range."""

    def drawn(rows, *shape):
        size = rows * (shape[0] if shape else 1)
        values = data.draw(st.lists(integers, min_size=size, max_size=size))
        return torch.tensor(values).view(rows, *shape)

    drafter = Fixed(lambda rows, k: Draft(drawn(rows, k), None, drawn(rows)))
    sampler = Saying(lambda v: Verdict(drawn(len(v.tokens), K + 1), drawn(len(v.tokens))))
    generator = SpeculativeGenerator(MODEL, drafter, sampler)
    generation = generator.start(IDS, MASK, max_new_tokens=9, **options)
    for _ in range(3):
        outcome = generator.step(generation)
        assert bool(((outcome.draft.tokens >= 0) & (outcome.draft.tokens < VOCAB)).all())
        assert bool(((outcome.num_new >= 0) & (outcome.num_new <= K + 1)).all())
    for row, length in zip(generation.tokens, generation.lengths, strict=True):
        assert bool(((row[:length] >= 0) & (row[:length] < VOCAB)).all())
