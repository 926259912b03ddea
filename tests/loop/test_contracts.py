"""What drafters and samplers must keep to: what breaks it stops the generation before a token of
the step is emitted, and harms nothing on the way.
"""

import copy

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from hypothesis import given
from hypothesis import strategies as st

from specdec import (
    BlockSampler,
    ModelDrafter,
    NoDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    Sampler,
    SpeculativeGenerator,
    TypicalSampler,
)
from specdec.graphs import no_host_sync
from specdec.loop.contracts import broken_contracts, harmless_draft, harmless_verdict
from specdec.types import PAD_TOKEN, Draft, Fault, Verdict

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 5, 2, 6)
K = 3


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


def negative(rows, k):
    probs = torch.zeros(rows, k, VOCAB)
    probs[..., 3], probs[..., 4], probs[..., 5] = 0.7, 0.5, -0.2  # the sum is 1
    return Draft(torch.full((rows, k), 3), probs)


DRAFTS = {
    "an id beyond the vocabulary": (ids(VOCAB), "draft token lies outside the target's vocab"),
    "a huge id": (ids(2**40), "draft token lies outside the target's vocabulary"),
    "a negative id": (ids(-1), "draft token lies outside the target's vocabulary; mark"),
    "more valid tokens than K": (counts(K + 1), r"num_valid is outside 0..K"),
    "fewer valid tokens than none": (counts(-1), r"num_valid is outside 0..K"),
    "negative probabilities": (negative, "draft probabilities are negative"),
}


GREEDY, SAMPLED = {}, {"do_sample": True, "seed": 1}
CASES = [(name, SAMPLED) for name in DRAFTS]
CASES += [(name, GREEDY) for name in DRAFTS if "probabilities" not in name]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_draft_that_cannot_be_right_stops_the_generation(name, options):
    make, message = DRAFTS[name]
    generator = SpeculativeGenerator(MODEL, Fixed(make))
    with pytest.raises(ValueError, match=f"row 0 after 0 new tokens.*{message}"):
        generator.generate(IDS, MASK, max_new_tokens=9, **options)


def test_a_token_beyond_num_valid_may_be_anything():
    expected = MODEL.generate(IDS, attention_mask=MASK, max_new_tokens=9, do_sample=False)

    def make(rows, k):
        tokens = torch.tensor([5, -7, 2**50])[:k].expand(rows, -1)
        return Draft(tokens, None, torch.ones(rows, dtype=torch.long))

    found = SpeculativeGenerator(MODEL, Fixed(make)).generate(IDS, MASK, max_new_tokens=9)
    assert torch.equal(found.sequences, expected)
    assert sum(found.stats.drafted) > 0


VERDICTS = {
    "fewer than none": (lambda v: Verdict(v.tokens, v.num_accepted - 9), "accepted fewer than 0"),
    "more than drafted": (
        lambda v: Verdict(v.tokens, v.num_accepted * 0 + K + 1),
        "accepted fewer",
    ),
    "an emitted id": (lambda v: Verdict(v.tokens + VOCAB, v.num_accepted), "emitted a token outs"),
    "no token": (
        lambda v: Verdict(torch.full_like(v.tokens, PAD_TOKEN), v.num_accepted),
        "emitted a token outside the target's vocabulary",
    ),
}


VERDICTS |= {
    "other tokens than the draft's": (
        lambda v: Verdict((v.tokens + 1) % VOCAB, v.num_accepted * 0 + 2),
        "Saying: the sampler accepted tokens that are not the draft's.*2 accepted, emitted",
    ),
    "more considered than drafted": (
        lambda v: Verdict(v.tokens, v.num_accepted, v.num_accepted * 0 + 77),
        "Saying: Verdict.num_drafted is less than were accepted or more than were drafted",
    ),
    "fewer considered than accepted": (
        lambda v: Verdict(v.tokens, v.num_accepted, v.num_accepted * 0 - 1),
        "Saying: Verdict.num_drafted",
    ),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_verdict_that_cannot_be_right_stops_the_generation(name):
    change, message = VERDICTS[name]
    drafter = ModelDrafter(perturbed(MODEL), K)
    generator = SpeculativeGenerator(MODEL, drafter, Saying(change))
    with pytest.raises(ValueError, match=f"row 0 after 0 new tokens.*{message}"):
        generator.generate(IDS, MASK, max_new_tokens=9)


NO_DRAFTS = {
    "nothing": (lambda rows, k: None, TypeError, "Fixed.propose must return a .*Draft, got None"),
    "a pair": (lambda rows, k: (torch.zeros(rows, k), None), TypeError, "must return .*a tuple"),
    "floats": (lambda rows, k: Draft(torch.zeros(rows, k)), TypeError, "tokens must be int64, got"),
    "a row": (lambda rows, k: Draft(torch.zeros(k).long()), ValueError, r"shape \[any, any\], got"),
    "other rows": (lambda rows, k: ids(3)(rows + 1, k), ValueError, "4 rows for a batch of 3"),
    "other width": (lambda rows, k: ids(3)(rows, k + 1), ValueError, "proposed 4 .* asked for 3"),
    "other device": (
        lambda rows, k: Draft(torch.zeros(rows, k, dtype=torch.long, device="meta")),
        ValueError,
        "a draft on meta, expected cpu",
    ),
    "half probabilities": (
        lambda rows, k: Draft(ids(3)(rows, k).tokens, torch.zeros(rows, k, VOCAB).half()),
        TypeError,
        "draft.probs must be float32 or float64, got float16",
    ),
    "another vocabulary": (
        lambda rows, k: Draft(ids(3)(rows, k).tokens, torch.zeros(rows, k, 9)),
        ValueError,
        f"draft.probs over a vocabulary of 9, but target logits have {VOCAB}",
    ),
    "int32 tokens": (
        lambda rows, k: Draft(torch.zeros(rows, k, dtype=torch.int32)),
        TypeError,
        "draft.tokens must be int64, got int32",
    ),
    "float counts": (
        lambda rows, k: Draft(ids(3)(rows, k).tokens, None, torch.zeros(rows)),
        TypeError,
        "draft.num_valid must be int64",
    ),
}


@pytest.mark.parametrize("name", NO_DRAFTS)
def test_what_is_no_draft_is_refused_before_the_target_reads_it(name):
    make, error, message = NO_DRAFTS[name]
    with pytest.raises(error, match=message):
        SpeculativeGenerator(MODEL, Fixed(make)).generate(IDS, MASK, max_new_tokens=9)


NO_VERDICTS = {
    "nothing": (lambda v: None, TypeError, "Saying must return a .*Verdict, got None"),
    "a tuple": (lambda v: (v.tokens, v.num_accepted), TypeError, "must return .*, got a tuple"),
    "int32": (lambda v: Verdict(v.tokens.int(), v.num_accepted), TypeError, "tokens must be int64"),
    "float counts": (lambda v: Verdict(v.tokens, v.num_accepted / 1), TypeError, "num_accepted mu"),
    "K tokens": (
        lambda v: Verdict(v.tokens[:, 1:], v.num_accepted),
        ValueError,
        r"Saying returned verdict.tokens of shape \[3, 3\], expected \[3, 4\]",
    ),
    "other rows": (
        lambda v: Verdict(v.tokens[:1], v.num_accepted[:1]),
        ValueError,
        r"of shape \[1, 4\], expected \[3, 4\]",
    ),
    "other device": (
        lambda v: Verdict(v.tokens.to("meta"), v.num_accepted.to("meta")),
        ValueError,
        "Saying returned a verdict on meta, expected cpu",
    ),
}


@pytest.mark.parametrize("name", NO_VERDICTS)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_what_is_no_verdict_is_refused_before_it_is_committed(name, options):
    change, error, message = NO_VERDICTS[name]
    generator = SpeculativeGenerator(MODEL, Fixed(ids(3)), Saying(change))
    generation = generator.start(IDS, MASK, max_new_tokens=9, **options)
    before = generation.lengths.clone()
    with pytest.raises(error, match=message):
        generator.step(generation)
    assert torch.equal(generation.lengths, before)


@pytest.mark.parametrize(
    ("probs", "message"),
    [(1.0, "do not sum to 1"), (0.0, "do not sum to 1"), (None, "has probability 0")],
)
def test_probabilities_that_a_users_sampler_does_not_look_at_are_looked_at_once(probs, message):
    def make(rows, k):
        table = torch.full((rows, k, VOCAB), probs or 0.0)
        if probs is None:
            table[..., 7] = 1.0
        return Draft(torch.full((rows, k), 3), table)

    def without_faults(verdict):
        return Verdict(verdict.tokens, verdict.num_accepted)

    generator = SpeculativeGenerator(MODEL, Fixed(make), Saying(without_faults))
    with pytest.raises(ValueError, match=f"row 0 of the first step Fixed: .*{message}"):
        generator.generate(IDS, MASK, max_new_tokens=9, do_sample=True, seed=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_draft_tokens", "3", "Fixed.num_draft_tokens must be an integer.*, got '3'"),
        ("num_draft_tokens", None, "Fixed.num_draft_tokens must be an integer.*, got None"),
        ("num_draft_tokens", True, "Fixed.num_draft_tokens must be an integer.*, got True"),
        ("num_draft_tokens", -1, "Fixed.num_draft_tokens must be an integer >= 0, got -1"),
        ("feature_layers", 5, "Fixed.feature_layers must be a tuple .*got 5"),
        ("feature_layers", [2], "Fixed.feature_layers must be a tuple"),
        ("uses_draft_probs", "no", "Saying.uses_draft_probs must be True or False, got 'no'"),
        ("draw_draft", None, "Saying.draw_draft must be a function, got None"),
        ("noise_type", 5, "Saying.noise_type must be a subclass of Noise, got 5"),
    ],
)
def test_attributes_of_users_parts_are_checked_when_they_are_joined(name, value, message):
    drafter, sampler = Fixed(ids(3)), Saying(lambda verdict: verdict)
    setattr(drafter if "Fixed" in message else sampler, name, value)
    with pytest.raises((TypeError, ValueError), match=message):
        SpeculativeGenerator(MODEL, drafter, sampler)


def test_a_part_that_forgets_its_base_class_is_refused():
    class Forgetful(NoDrafter):
        def __init__(self):
            self.num_draft_tokens = 3

    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__"):
        SpeculativeGenerator(MODEL, Forgetful())


def test_a_number_of_draft_tokens_set_between_calls_is_checked():
    generator = SpeculativeGenerator(MODEL, Fixed(ids(3)))
    generator.drafter.num_draft_tokens = "x"
    with pytest.raises(TypeError, match=r"num_draft_tokens must be an integer.*, got 'x'"):
        generator.generate(IDS, MASK, max_new_tokens=9)


@pytest.mark.parametrize("drawn", [5, None, (None, None), (torch.zeros(3, 1), None)])
def test_what_a_users_rule_draws_is_checked(drawn):
    sampler = Saying(lambda verdict: verdict)
    sampler.draw_draft = lambda *inputs, **options: drawn
    generator = SpeculativeGenerator(MODEL, ModelDrafter(MODEL, K), sampler)
    with pytest.raises(TypeError, match="sampler's draw_draft must"):
        generator.generate(IDS, MASK, max_new_tokens=9, do_sample=True, seed=0)


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
    ("state", "message"),
    [
        (None, "Leaving.init_state returned a NoneType without keep and reset"),
        (Lost, r"Leaving.init_state returned the class Lost; return Lost\(\)"),
        (Lost(), r"Leaving.init_state\(\).keep returned a NoneType without"),
    ],
)
def test_a_state_that_is_none_is_refused(state, message):
    first = MODEL.generate(IDS[:1], attention_mask=MASK[:1], max_new_tokens=1, do_sample=False)
    with pytest.raises(TypeError, match=message):
        SpeculativeGenerator(MODEL, Leaving(state)).generate(
            IDS, MASK, max_new_tokens=9, eos_token_id=int(first[0, -1])
        )


integers = st.one_of(st.integers(-3, VOCAB + 3), st.sampled_from([2**40, -(2**40)]))


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_what_the_device_repairs_is_harmless_and_what_is_sound_is_left_alone(data, rows, width):
    def drawn(count):
        values = data.draw(st.lists(integers, min_size=rows * count, max_size=rows * count))
        return torch.tensor(values, dtype=torch.long).view(rows, count)

    draft = Draft(drawn(width), None, drawn(1)[:, 0] if data.draw(st.booleans()) else None)
    verdict = Verdict(drawn(width + 1), drawn(1)[:, 0])
    with no_host_sync():
        sound = harmless_draft(draft, VOCAB)
        tokens, num_accepted = harmless_verdict(verdict, VOCAB)
    limit = [width] * rows if draft.num_valid is None else draft.num_valid.tolist()
    for row in range(rows):
        drafted, emitted = draft.tokens[row].tolist(), verdict.tokens[row].tolist()
        accepted, valid = int(verdict.num_accepted[row]), limit[row]
        found = Fault(broken_contracts(emitted, drafted, accepted, valid, VOCAB))
        assert (Fault.NUM_VALID in found) == (valid not in range(width + 1))
        assert (Fault.NUM_ACCEPTED in found) == (not 0 <= accepted <= valid)
        shown = drafted[: max(valid, 0)]
        assert (Fault.DRAFT_ID in found) == any(t not in range(VOCAB) for t in shown)
        shown = emitted[: max(accepted, 0) + 1]
        assert (Fault.EMITTED_ID in found) == any(t not in range(VOCAB) for t in shown)
        harmless = [*sound.tokens[row].tolist(), *tokens[row].tolist()]
        assert all(token in range(VOCAB) for token in harmless)
        assert int(num_accepted[row]) in range(width + 1)
        if not found:
            count = valid if draft.num_valid is not None else width
            assert sound.tokens[row, :count].tolist() == drafted[:count]
            assert int(num_accepted[row]) == accepted
            assert tokens[row, : accepted + 1].tolist() == emitted[: accepted + 1]


@pytest.mark.parametrize("sampler", [TypicalSampler(), BlockSampler()], ids=["typical", "block"])
def test_nan_from_a_drafter_stops_a_sampled_generation(sampler):
    draft = copy.deepcopy(MODEL)
    generator = SpeculativeGenerator(MODEL, ModelDrafter(draft, K), sampler)
    with torch.no_grad():
        draft.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="draft probabilities are negative or do not sum to 1"):
        generator.generate(IDS, MASK, max_new_tokens=9, do_sample=True, seed=0)


def forwards(model):
    """How many tokens per row each forward of a model gets."""
    calls = []

    def hook(module, args, kwargs):
        calls.append(kwargs["input_ids"].shape[1])

    return calls, model.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_more_draft_tokens_than_a_call_has_room_for_change_no_text(max_new_tokens):
    generator = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 50))
    result = generator.generate(IDS, MASK, max_new_tokens=max_new_tokens)
    expected = MODEL.generate(
        IDS, attention_mask=MASK, max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0
    )
    assert torch.equal(result.sequences, expected)


def test_an_ngram_longer_than_any_text_costs_nothing():
    drafter = PromptLookupDrafter(3, max_ngram=10**9)
    result = SpeculativeGenerator(MODEL, drafter).generate(IDS, MASK, max_new_tokens=6)
    assert result.lengths == [6, 6, 6]


@pytest.mark.parametrize("options", [{"max_ngram": 2.5}, {"min_ngram": "1"}, {"max_ngram": True}])
def test_an_ngram_size_that_is_no_integer_is_refused(options):
    with pytest.raises(TypeError, match=r"_ngram must be an integer"):
        PromptLookupDrafter(3, **options)


def test_a_generation_of_another_generator_is_refused():
    generator, other = (SpeculativeGenerator(MODEL, ModelDrafter(MODEL, k)) for k in (2, 3))
    generation = other.start(IDS, MASK, max_new_tokens=9)
    with pytest.raises(ValueError, match="started by another generator"):
        generator.step(generation)
    other.step(generation)
