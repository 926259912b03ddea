"""What drafters and samplers must keep to: what breaks it stops the generation before a token of
the step is emitted, with the name of the class, and harms nothing on the way.

Values are looked at on the host when it reads the step (`Fault`), so that a step still waits for
nothing.
"""

from dataclasses import dataclass

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from step_faults import faults_of

from specdec import (
    BlockSampler,
    EnsembleSampler,
    ModelDrafter,
    NoDrafter,
    RejectionSampler,
    Sampler,
    SpeculativeGenerator,
    TypicalSampler,
)
from specdec.drafters.proposal import Proposal
from specdec.graphs import shared
from specdec.loop.outcome import Fault, find_faults
from specdec.samplers import Drawing, LogitsFilter, Noise, draw_by_inversion
from specdec.types import PAD_TOKEN, Draft, Verdict

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 5, 2, 6)
K = 3
GREEDY, SAMPLED = {}, {"do_sample": True, "seed": 1}
CHECKING = [BlockSampler(), RejectionSampler(), EnsembleSampler(0.5), TypicalSampler()]


class Fixed(NoDrafter):
    """Proposes what it is told to, of (rows, K), at every step."""

    num_draft_tokens = K

    def __init__(self, make):
        super().__init__()
        self.make = make

    def propose(self, context, state, drawing):
        return self.make(len(context.start), drawing.num_draft_tokens)


class Saying(Sampler):
    """Takes what a sound sampler says and changes it."""

    lossless = False

    def __init__(self, change=lambda verdict: verdict):
        super().__init__()
        self.change = change

    def accept(self, draft, target_logits, logits_filter, noise):
        return self.change(RejectionSampler().accept(draft, target_logits, logits_filter, noise))

    def accept_greedily(self, draft, target_logits):
        return self.change(super().accept_greedily(draft, target_logits))


def ids(value, *, wider=0, more_rows=0):
    return lambda rows, k: Draft(torch.full((rows + more_rows, k + wider), value))


def counts(value):
    return lambda rows, k: Draft(torch.full((rows, k), 3), None, torch.full((rows,), value))


def probs(table):
    return lambda rows, k: Draft(torch.full((rows, k), 3), table(rows, k))


def generator_of(part, is_draft):
    if is_draft:
        return SpeculativeGenerator(MODEL, Fixed(part))
    return SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), K), Saying(part))


BAD_DRAFTS = [
    ("outside the target's vocabulary", ids(VOCAB)),
    ("outside the target's vocabulary", ids(2**40)),
    ("outside the target's vocabulary", ids(-1)),
    ("num_valid", counts(K + 1)),
    ("num_valid", counts(-1)),
]
BAD_VERDICTS = [
    ("num_accepted", lambda v: Verdict(v.tokens, v.num_accepted - 9)),
    ("num_accepted", lambda v: Verdict(v.tokens, v.num_accepted * 0 + K + 1)),
    ("emitted", lambda v: Verdict(v.tokens + VOCAB, v.num_accepted)),
    ("emit", lambda v: Verdict(torch.full_like(v.tokens, PAD_TOKEN), v.num_accepted)),
    ("not the draft's", lambda v: Verdict((v.tokens + 1) % VOCAB, v.num_accepted * 0 + 2)),
    ("num_drafted", lambda v: Verdict(v.tokens, v.num_accepted, v.num_accepted * 0 + 77)),
]


@pytest.mark.parametrize(
    ("words", "part", "is_draft", "options"),
    [
        *((*case, True, options) for case in BAD_DRAFTS for options in (SAMPLED, GREEDY)),
        *((*case, False, GREEDY) for case in BAD_VERDICTS),
    ],
)
def test_values_that_cannot_be_right_stop_the_generation(words, part, is_draft, options):
    who = "Fixed" if is_draft else "Saying"
    with pytest.raises(ValueError, match=f"row 0 after 0 new tokens.*{who}: .*{words}"):
        generator_of(part, is_draft).generate(IDS, MASK, max_new_tokens=9, **options)


NO_DRAFTS = [
    ("Draft", lambda rows, k: None),
    ("Draft", lambda rows, k: (ids(3)(rows, k).tokens, None)),
    ("draft.tokens", ids(3.0)),
    ("draft.tokens", lambda rows, k: Draft(torch.full((k,), 3))),
    ("draft.tokens", ids(3, more_rows=1)),
    ("draft.tokens", ids(3, wider=1)),
    ("draft.tokens", lambda rows, k: Draft(ids(3)(rows, k).tokens.to("meta"))),
    ("draft.probs", probs(lambda rows, k: torch.zeros(rows, k, VOCAB).half())),
    ("draft.probs", probs(lambda rows, k: torch.zeros(rows, k, 9))),
    ("draft.num_valid", counts(1.0)),
]
NO_VERDICTS = [
    ("Verdict", lambda v: None),
    ("Verdict", lambda v: (v.tokens, v.num_accepted)),
    ("verdict.tokens", lambda v: Verdict(v.tokens.int(), v.num_accepted)),
    ("verdict.num_accepted", lambda v: Verdict(v.tokens, v.num_accepted / 1)),
    ("verdict.tokens", lambda v: Verdict(v.tokens[:, 1:], v.num_accepted)),
    ("verdict.tokens", lambda v: Verdict(v.tokens[:1], v.num_accepted[:1])),
    ("verdict.tokens", lambda v: Verdict(v.tokens.to("meta"), v.num_accepted.to("meta"))),
]


@pytest.mark.parametrize(
    ("words", "part", "is_draft"),
    [*((*case, True) for case in NO_DRAFTS), *((*case, False) for case in NO_VERDICTS)],
)
def test_what_is_no_record_of_the_step_is_refused_before_it_is_committed(words, part, is_draft):
    generator = generator_of(part, is_draft)
    for options in (GREEDY, SAMPLED):
        generation = generator.start(IDS, MASK, max_new_tokens=9, **options)
        before = generation.lengths.clone()
        with pytest.raises((TypeError, ValueError), match=words):
            generator.step(generation)
        assert torch.equal(generation.lengths, before)


class Tampered(ModelDrafter):
    """A draft model whose probabilities are changed on the way out, after two proposals."""

    def __init__(self, change, after=2):
        super().__init__(perturbed(MODEL), K)
        self.change, self.left = change, after

    def propose(self, *args):
        draft = super().propose(*args)
        self.left -= 1
        changed = draft.probs if self.left >= 0 else self.change(draft.probs, draft.tokens)
        return Draft(draft.tokens, changed, draft.num_valid)


def with_a_negative_entry(p, tokens):
    """The sums stay 1."""
    half = torch.full_like(p[..., :1], 0.5)
    p = p.scatter_add(-1, p.argmin(-1, keepdim=True), -half)
    return p.scatter_add(-1, p.argmax(-1, keepdim=True), half)


def impossible_token(p, tokens):
    p = p.scatter(-1, tokens[..., None], 0)
    return p / p.sum(-1, keepdim=True)


CHANGES = [
    *(("do not sum to 1", lambda p, _: p * 0.9, sampler) for sampler in (*CHECKING, Saying())),
    ("do not sum to 1", lambda p, _: p.log(), BlockSampler()),  # logits
    ("do not sum to 1", lambda p, _: p * torch.nan, BlockSampler()),
    ("probabilities are negative", with_a_negative_entry, BlockSampler()),
    ("probability 0 in Draft.probs", impossible_token, BlockSampler()),
    ("probability 0 in Draft.probs", impossible_token, Saying()),  # whatever a rule looks at
    ("vocabulary", lambda p, _: p[..., :-1], BlockSampler()),
]


@pytest.mark.parametrize(("words", "change", "sampler"), CHANGES)
def test_wrong_probabilities_stop_the_generation_before_their_step_is_emitted(
    words, change, sampler
):
    sound = SpeculativeGenerator(MODEL, Tampered(None, after=99), sampler)
    expected = sound.generate(IDS, MASK, max_new_tokens=16, **SAMPLED).steps
    generator, seen = SpeculativeGenerator(MODEL, Tampered(change), sampler), []
    with pytest.raises(ValueError, match=words):
        seen.extend(generator.stream(IDS, MASK, max_new_tokens=16, **SAMPLED))
    assert len(seen) == 2
    for index, record in enumerate(seen):
        new = [step.new_tokens for step in record.rows]
        assert new == [row[index].new_tokens for row in expected]


def test_probabilities_that_nobody_asks_for_cannot_be_wrong():
    generator = SpeculativeGenerator(MODEL, Tampered(lambda p, t: torch.full((3, K, VOCAB), 0.9)))
    result = generator.generate(IDS, MASK, max_new_tokens=16, draft_probs=False, **SAMPLED)
    assert result.lengths == [16] * len(IDS)


@pytest.mark.parametrize("sampler", CHECKING, ids=lambda s: type(s).__name__)
def test_rounding_of_a_wide_distribution_is_no_fault(sampler):
    vocab, generator = 150_000, torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1, 3, vocab, generator=generator)
    logits_filter, noise = LogitsFilter(1), Noise([1]).at(torch.tensor([4]), 3)
    drafting = Proposal().begin(Drawing(2, logits_filter, noise, draw_by_inversion))
    for i in (0, 1):
        drafting.draw(logits[:, i : i + 1])
    draft = drafting.end()
    assert faults_of(draft, logits, sampler(draft, logits, logits_filter, noise)) == [0]


# What is no part.


@pytest.mark.parametrize("drawn", [5, None, (None, None), (torch.zeros(3, 1), None)])
def test_what_a_users_rule_draws_is_checked(drawn):
    sampler = Saying()
    sampler.draw_draft = lambda *inputs, **options: drawn
    generator = SpeculativeGenerator(MODEL, ModelDrafter(MODEL, K), sampler)
    with pytest.raises(TypeError, match="sampler's draw_draft"):
        generator.generate(IDS, MASK, max_new_tokens=9, **SAMPLED)


class Forgetful(NoDrafter):
    """Does not call its base class."""

    def __init__(self):
        self.num_draft_tokens = 3


WRONG_PARTS = [
    *(("Fixed.num_draft_tokens", value) for value in ("3", None, -1)),
    ("Fixed.feature_layers", 5),
    *((f"Saying.{flag}", "no") for flag in ("uses_draft_probs", "lossless", "takes_trees")),
    ("Saying.lossless", None),
    ("Saying.draw_draft", None),
    ("Saying.noise_type", 5),
]


@pytest.mark.parametrize(("attribute", "value"), WRONG_PARTS)
def test_attributes_of_users_parts_are_checked_when_they_are_joined(attribute, value):
    drafter, sampler = Fixed(ids(3)), Saying()
    owner, name = attribute.split(".")
    setattr(drafter if owner == "Fixed" else sampler, name, value)
    with pytest.raises((TypeError, ValueError), match=attribute):
        SpeculativeGenerator(MODEL, drafter, sampler)
    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__"):
        SpeculativeGenerator(MODEL, Forgetful())


class Starting(NoDrafter):
    """Returns a state from elsewhere."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        return self.state


class Own:
    """A state as an object with methods."""

    def __init__(self):
        self.tokens = torch.zeros(3, 5)

    def keep(self, rows):
        return self

    def reset(self):
        self.tokens.zero_()


@dataclass
class Counted:
    """Of each text, and of all."""

    counts: torch.Tensor
    angles: torch.Tensor = shared()


THREE = torch.zeros(3, dtype=torch.long)
NO_STATES = {
    "object": (Own(), r"state = .*Own.*a dataclass, a tuple, a list or a dict of tensors"),
    "class": (Counted, r"the class Counted; return Counted\(\.\.\.\)"),
    "number": ({"a": [THREE, 3]}, r"state\['a'\]\[1\] = 3; .* a number of each row is a tensor"),
    "other rows": ((THREE, THREE[:2]), r"state\[1\] of shape \[2\] for 3 rows; .*rows first"),
    "no rows": (Counted(THREE.sum(), THREE), r"state.counts of shape \[\] .*specdec.graphs.shared"),
    "device": (THREE.to("meta"), "state on meta, and the target is on cpu"),
}


@pytest.mark.parametrize("kind", NO_STATES)
def test_a_state_that_is_none_is_refused(kind):
    state, words = NO_STATES[kind]
    generator = SpeculativeGenerator(MODEL, Starting(state))
    with pytest.raises((TypeError, ValueError), match=f"Starting.init_state returned {words}"):
        generator.generate(IDS, MASK, max_new_tokens=9)


@pytest.mark.parametrize("state", [None, (), {"a": [THREE, None]}, Counted(THREE, THREE[:2])])
def test_a_state_is_any_tree_of_tensors(state):
    expected = MODEL.generate(IDS, attention_mask=MASK, max_new_tokens=3, do_sample=False)
    generator = SpeculativeGenerator(MODEL, Starting(state))
    assert generator.generate(IDS, MASK, max_new_tokens=3).sequences.equal(expected)


def test_a_generation_of_another_generator_is_refused():
    generator, other = (SpeculativeGenerator(MODEL, ModelDrafter(MODEL, k)) for k in (2, 3))
    generation = other.start(IDS, MASK, max_new_tokens=9)
    for no_generation, error in ((generation, ValueError), (IDS, TypeError)):
        with pytest.raises(error, match="generation"):
            generator.step(no_generation)
    other.step(generation)


# Sound as they are, or harmless until they are found.


def test_a_token_beyond_num_valid_may_be_anything():
    expected = MODEL.generate(IDS, attention_mask=MASK, max_new_tokens=9, do_sample=False)

    def make(rows, k):
        tokens = torch.tensor([5, -7, 2**50])[:k].expand(rows, -1)
        return Draft(tokens, None, torch.ones(rows, dtype=torch.long))

    found = SpeculativeGenerator(MODEL, Fixed(make)).generate(IDS, MASK, max_new_tokens=9)
    assert torch.equal(found.sequences, expected)
    assert sum(found.stats.drafted) > 0


integers = st.one_of(st.integers(-3, VOCAB + 3), st.sampled_from([2**40, -(2**40)]))


def drawn_table(data, rows, width):
    values = data.draw(st.lists(integers, min_size=rows * width, max_size=rows * width))
    return torch.tensor(values, dtype=torch.long).view(rows, width)


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_the_faults_of_a_row_are_those_that_lists_show(data, rows, width):
    emitted, drafted = (drawn_table(data, rows, w).numpy() for w in (width + 1, width))
    accepted, valid, seen = (drawn_table(data, rows, 1)[:, 0].numpy() for _ in range(3))
    told = {"emitted": emitted, "drafted": drafted}
    told |= {"num_accepted": accepted, "num_valid": valid, "num_drafted": seen}

    def is_outside(tokens, count):
        return any(token not in range(VOCAB) for token in tokens[: max(count, 0)])

    for row, faults in enumerate(find_faults(told, VOCAB)):
        found, said, proposed = Fault(int(faults)), emitted[row].tolist(), drafted[row].tolist()
        n, num_valid, num_drafted = (int(counts[row]) for counts in (accepted, valid, seen))
        assert (Fault.NUM_VALID in found) == (num_valid not in range(width + 1))
        assert (Fault.NUM_ACCEPTED in found) == (not 0 <= n <= num_valid)
        assert (Fault.NUM_DRAFTED in found) == (not n <= num_drafted <= num_valid)
        assert (Fault.DRAFT_ID in found) == is_outside(proposed, num_valid)
        assert (Fault.EMITTED_ID in found) == is_outside(said, max(n, 0) + 1)
        differ = any(map(int.__ne__, said[: max(n, 0)], proposed))
        assert (Fault.ACCEPTED_TOKEN in found) == differ


@settings(max_examples=10)
@given(st.data(), st.sampled_from([GREEDY, SAMPLED]))
def test_what_a_part_returns_harms_nothing_before_its_faults_are_read(data, options):
    """Steps go on, as they do on a GPU whose host reads late: ids and counts stay in range."""

    def drawn(rows, width):
        return drawn_table(data, rows, width)

    drafter = Fixed(lambda rows, k: Draft(drawn(rows, k), None, drawn(rows, 1)[:, 0]))
    sampler = Saying(lambda v: Verdict(drawn(len(IDS), K + 1), drawn(len(IDS), 1)[:, 0]))
    generator = SpeculativeGenerator(MODEL, drafter, sampler)
    generation = generator.start(IDS, MASK, max_new_tokens=9, **options)
    for _ in range(3):
        outcome = generator.step(generation)
        assert bool(((outcome.draft.tokens >= 0) & (outcome.draft.tokens < VOCAB)).all())
        assert bool(((outcome.num_new >= 0) & (outcome.num_new <= K + 1)).all())
    for row, length in zip(generation.tokens, generation.lengths, strict=True):
        assert bool(((row[:length] >= 0) & (row[:length] < VOCAB)).all())
