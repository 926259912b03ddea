"""Law 2: with the library's own noise, whole generations have exactly the target's law.

10000 rows with seeds 0..9999 continue one prompt under a target of six tokens. Chi-square compares
counts with exact laws, which HF's own warpers and the two models' logits give in float64: the first
token, pairs, triples (they cross the border between two steps), and what the first step did: how
many drafts it accepted, jointly with what it emitted, and what it emitted given that it accepted
none, or all.

False-alarm rate 1e-9 per assertion (seeded, so a pass stays a pass). Resolution: n = ncp / (4 TV^2)
rows show a law at total variation TV from the exact one with 99 % power, where ncp is the
noncentrality that power asks for, because chi-square >= n * 4 TV^2. For 10000 rows that is TV
0.046 for the first token (5 degrees of freedom), 0.057 for pairs (35) and 0.076 for triples (215).
Two biased samplers and a biased drafter are the negative control: each must fail.
"""

from collections import Counter

import pytest
import scipy.stats
from text_laws import (
    ALPHA,
    DRAFT,
    DRAFTERS,
    POWER,
    ROWS,
    WARPS,
    conditional,
    p_value,
    p_values_of_texts,
    run,
    sample,
    step_law,
    tiny,
)

from specdec import (
    ModelDrafter,
    RejectionSampler,
    Sampler,
)
from specdec.samplers.noise import Stream
from specdec.types import Draft, Verdict

CASES = [(name, "plain") for name in DRAFTERS]
CASES += [("model", warp) for warp in WARPS if warp not in ("plain", "typical")]
# HF's own warper runs on the host, row by row.
CASES += [pytest.param("model", "typical", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("drafter", "warp"), CASES)
def test_texts_have_the_targets_law(drafter, warp):
    result = run(drafter, warp)
    for length, p in p_values_of_texts(result, warp).items():
        assert p > ALPHA, f"texts of {length} tokens"
    if drafter != "none":
        assert 0.1 < result.stats.acceptance_rate < 0.95  # both branches are exercised


@pytest.mark.parametrize("warp", ["plain", "truncated"])
def test_the_first_step_accepts_and_emits_by_the_exact_joint_law(warp):
    result, laws = sample(DRAFTERS["model"](), RejectionSampler(), warp), step_law(warp)
    steps = [row[0] for row in result.trace]
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
        assert sum(given.values()) > 1000
        assert p_value(given, conditional(laws, count)) > ALPHA, f"given {count} accepted"


class SharedNoise:
    """Noise that takes one stream for another."""

    def __init__(self, noise, stream: Stream, source: Stream):
        self._noise, self._stream, self._source = noise, stream, source

    def uniform(self, stream, *args):
        """Of the source, where the stream is asked for."""
        return self._noise.uniform(self._source if stream == self._stream else stream, *args)


class Biased(Sampler):
    """A sampler with one classical mistake."""

    lossless = False

    def __init__(self, mistake: str):
        super().__init__()
        self.mistake, self.right = mistake, RejectionSampler()

    def accept(self, draft, target_logits, warp, noise) -> Verdict:
        """A verdict of the wrong law."""
        if self.mistake == "acceptance shares its noise with the proposal":
            noise = SharedNoise(noise, Stream.ACCEPT, Stream.PROPOSE)
        if self.mistake == "recovery shares its noise with acceptance":
            noise = SharedNoise(noise, Stream.RESAMPLE, Stream.ACCEPT)
        return self.right(draft, target_logits, warp, noise)


MISTAKES = [
    "acceptance shares its noise with the proposal",
    "recovery shares its noise with acceptance",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_biased_sampler_is_found_out(mistake):
    """Mistakes in the rule itself are found by enumeration: `certify/test_certify.py`."""
    result = sample(DRAFTERS["model"](), Biased(mistake), "plain")
    assert min(p_values_of_texts(result, "plain").values()) < ALPHA


class ArgmaxWithSoftLaw(ModelDrafter):
    """Proposes the likeliest token and claims to have drawn it."""

    def propose(self, context, state, drawing) -> Draft:
        """The wrong law beside the token."""
        probs = super().propose(context, state, drawing).probs
        return Draft(probs.argmax(dim=-1), probs)


def test_a_biased_drafter_is_found_out():
    drafter = ArgmaxWithSoftLaw(tiny(DRAFT), num_draft_tokens=1)
    result = sample(drafter, "auto", "plain")
    assert min(p_values_of_texts(result, "plain").values()) < ALPHA


@pytest.mark.parametrize(("cells", "resolution"), [(6, 0.046), (36, 0.057), (216, 0.076)])
def test_the_resolution_is_what_the_docstring_says(cells, resolution):
    critical = scipy.stats.chi2.isf(ALPHA, cells - 1)
    power = scipy.stats.ncx2.sf(critical, cells - 1, ROWS * 4 * resolution**2)
    assert power == pytest.approx(POWER, abs=0.005)
