"""Law 2: with the library's own noise, whole generations have exactly the target's law.

Rows with seeds 0, 1, 2, ... continue one prompt under a target of six tokens. Chi-square compares
counts with exact laws, which HF's own warpers and the two models' logits give in float64: the first
token, pairs, triples (they cross the border between two steps), and what the first step did: how
many drafts it accepted, jointly with what it emitted, and what it emitted given that number.

False-alarm rate 1e-9 per assertion (seeded, so a pass stays a pass). Resolution: n = ncp / (4 TV^2)
rows show a law at total variation TV from the exact one with 99 % power, where ncp is the
noncentrality that power asks for, because chi-square >= n * 4 TV^2. For the 3000 rows of the
ordinary run that is TV 0.084 for the first token (5 degrees of freedom), 0.104 for pairs (35) and
0.139 for triples (215); for the 10000 rows of the slow one 0.046, 0.057 and 0.076.
Two biased samplers and a biased drafter are the negative control: each must fail.
"""

from collections import Counter

import pytest
import scipy.stats
from text_laws import (
    ALPHA,
    DRAFT,
    MANY,
    POWER,
    ROWS,
    p_value,
    p_values_of_texts,
    sample,
    step_law,
    tiny,
)

from specdec import ModelDrafter, NoDrafter, PromptLookupDrafter, RejectionSampler, Sampler
from specdec.samplers.noise import Stream
from specdec.types import Draft, Verdict


def model():
    return ModelDrafter(tiny(DRAFT), num_draft_tokens=2)


def lookup():
    return PromptLookupDrafter(num_draft_tokens=2)


CASES = [(NoDrafter, "plain"), (lookup, "plain"), (model, "truncated")]
MORE = [*CASES, (model, "plain"), (model, "typical")]
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("make", "logits_filter", "rows"),
    [*((*case, ROWS) for case in CASES), *(pytest.param(*case, MANY, marks=slow) for case in MORE)],
)
def test_texts_have_the_targets_law(make, logits_filter, rows):
    result = sample(make(), "auto", logits_filter, rows)
    for length, p in p_values_of_texts(result, logits_filter).items():
        assert p > ALPHA, f"texts of {length} tokens"
    if make is not NoDrafter:
        assert 0.1 < result.stats.acceptance_rate < 0.95  # both branches are exercised


@pytest.mark.parametrize("rows", [ROWS, pytest.param(MANY, marks=slow)])
@pytest.mark.parametrize("logits_filter", ["plain", "truncated"])
def test_the_first_step_accepts_and_emits_by_the_exact_joint_law(logits_filter, rows):
    result, laws = sample(model(), RejectionSampler(), logits_filter, rows), step_law(logits_filter)
    steps = [row[0] for row in result.steps]
    seen = Counter((step.num_accepted, tuple(step.new_tokens)) for step in steps)
    assert p_value(seen, laws) > ALPHA
    firsts, first_law = Counter(), Counter()
    for (count, end), times in seen.items():
        firsts[count, end[0]] += times
    for (count, end), p in laws.items():
        first_law[count, end[0]] += p
    assert p_value(firsts, first_law) > ALPHA
    for count in range(3):
        given = Counter({end: times for (a, end), times in seen.items() if a == count})
        law = {end: p for (a, end), p in laws.items() if a == count}
        total = sum(law.values())
        assert sum(given.values()) > rows / 10
        assert p_value(given, {end: p / total for end, p in law.items()}) > ALPHA, count


class SharedNoise:
    """Noise that takes one stream for another."""

    def __init__(self, noise, stream: Stream, source: Stream):
        self._noise, self._stream, self._source = noise, stream, source

    def uniform(self, stream, *args):
        return self._noise.uniform(self._source if stream == self._stream else stream, *args)


class Biased(Sampler):
    """A sampler of which one stream repeats another. (Mistakes in the rule itself are found by
    enumeration: `certificates/test_certify.py`.)
    """

    lossless = False

    def __init__(self, stream, source):
        super().__init__()
        self.streams = stream, source

    def accept(self, draft, target_logits, logits_filter, noise) -> Verdict:
        return RejectionSampler()(
            draft, target_logits, logits_filter, SharedNoise(noise, *self.streams)
        )


class ArgmaxWithSoftLaw(ModelDrafter):
    """Proposes the likeliest token and claims to have drawn it."""

    def propose(self, context, state, drawing) -> Draft:
        probs = super().propose(context, state, drawing).probs
        return Draft(probs.argmax(dim=-1), probs)


@pytest.mark.parametrize(
    ("drafter", "sampler"),
    [
        (model(), Biased(Stream.ACCEPT, Stream.PROPOSE)),
        (model(), Biased(Stream.RESAMPLE, Stream.ACCEPT)),
        (ArgmaxWithSoftLaw(tiny(DRAFT), num_draft_tokens=1), "auto"),
    ],
)
def test_a_biased_sampler_or_drafter_is_found_out(drafter, sampler):
    result = sample(drafter, sampler, "plain")
    assert min(p_values_of_texts(result, "plain").values()) < ALPHA


@pytest.mark.parametrize(
    ("cells", "rows", "resolution"),
    [
        *((6, ROWS, 0.084), (36, ROWS, 0.104), (216, ROWS, 0.139)),
        *((6, MANY, 0.046), (36, MANY, 0.057), (216, MANY, 0.076)),
    ],
)
def test_the_resolution_is_what_the_docstring_says(cells, rows, resolution):
    critical = scipy.stats.chi2.isf(ALPHA, cells - 1)
    power = scipy.stats.ncx2.sf(critical, cells - 1, rows * 4 * resolution**2)
    assert power == pytest.approx(POWER, abs=0.005)
