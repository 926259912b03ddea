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
Four biased samplers and a biased drafter are the negative control: each must fail.
"""

import itertools
from collections import Counter
from functools import cache

import pytest
import scipy.stats
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specdec import (
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    Sampler,
    SpeculativeGenerator,
)
from specdec.kernels import draw
from specdec.samplers.noise import Stream
from specdec.types import Draft, Verdict

VOCAB, ROWS, NUM_NEW = 6, 10_000, 3
TARGET, DRAFT = 3, 27  # they share 60 % of their first token's law
ALPHA, POWER = 1e-9, 0.99
PROMPT = [1, 4, 2, 1, 4]  # n-gram lookup proposes 2, 1 behind it
WARPS = {
    "plain": ({"temperature": 1.0, "top_k": 0}, []),
    "truncated": (
        {"temperature": 0.8, "top_k": 4, "top_p": 0.9},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(4), TopPLogitsWarper(0.9)],
    ),
    "typical": (  # which the library leaves to HF's own processors
        {"generation_config": GenerationConfig(temperature=0.8, top_k=5, typical_p=0.7)},
        [TemperatureLogitsWarper(0.8), TopKLogitsWarper(5), TypicalLogitsWarper(0.7)],
    ),
}


@cache
def tiny(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3, generator=generator)
    return model


DRAFTERS = {
    "none": lambda: None,
    "model": lambda: ModelDrafter(tiny(DRAFT), num_draft_tokens=2),
    "lookup": lambda: PromptLookupDrafter(num_draft_tokens=2),
}


@cache
def law(seed: int, warp: str) -> dict[tuple, list[float]]:
    """The next token's law behind every continuation of the prompt by at most two tokens."""
    table = {}
    model = tiny(seed)
    for length in range(NUM_NEW):
        ends = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *end] for end in ends])
        with torch.no_grad():
            logits = model(ids).logits[:, -1].double()
        logits = LogitsProcessorList(WARPS[warp][1])(ids, logits)
        table |= dict(zip(ends, logits.softmax(dim=-1).tolist(), strict=True))
    return table


def text_law(warp: str, length: int) -> dict[tuple, float]:
    """The law of the first `length` tokens."""
    table, laws = law(TARGET, warp), {(): 1.0}
    for _ in range(length):
        laws = {(*e, x): p * table[e][x] for e, p in laws.items() for x in range(VOCAB)}
    return laws


def step_law(warp: str) -> dict[tuple, float]:
    """The law of (drafts accepted, tokens emitted) in the first step; the model drafts, K = 2."""
    target, draft = law(TARGET, warp), law(DRAFT, warp)
    laws, reached = {}, {(): 1.0}
    for count in range(2):
        accepted = {}
        for end, mass in reached.items():
            for x, (p, q) in enumerate(zip(target[end], draft[end], strict=True)):
                accepted[(*end, x)] = mass * min(p, q)
                laws[count, (*end, x)] = mass * max(0.0, p - q)
        reached = accepted
    laws |= {(2, (*e, x)): m * target[e][x] for e, m in reached.items() for x in range(VOCAB)}
    return laws


def conditional(laws: dict[tuple, float], count: int) -> dict[tuple, float]:
    total = sum(p for (accepted, _), p in laws.items() if accepted == count)
    return {end: p / total for (accepted, end), p in laws.items() if accepted == count}


def p_value(observed: Counter, laws: dict) -> float:
    """Of Pearson's chi-square; cells that expect fewer than 10 are merged into one."""
    assert sum(laws.values()) == pytest.approx(1)
    num_seen = sum(observed.values())
    if any(laws.get(cell, 0.0) <= 0 for cell in observed):
        return 0.0  # something impossible happened
    expected = {cell: num_seen * p for cell, p in laws.items() if p > 0}
    small = [cell for cell, count in expected.items() if count < 10]
    pairs = [(observed[c], count) for c, count in expected.items() if count >= 10]
    pairs.append((sum(observed[c] for c in small), sum(expected[c] for c in small)))
    pairs = [pair for pair in pairs if pair[1] > 0]
    statistic = sum((seen - count) ** 2 / count for seen, count in pairs)
    return float(scipy.stats.chi2.sf(statistic, len(pairs) - 1))


@cache
def run(drafter: str, warp: str):
    return sample(DRAFTERS[drafter](), "auto", warp)


def sample(drafter, sampler, warp: str):
    generator = SpeculativeGenerator(tiny(TARGET), drafter, sampler)
    return generator.generate(
        torch.tensor([PROMPT]).expand(ROWS, -1),
        max_new_tokens=NUM_NEW,
        do_sample=True,
        seed=list(range(ROWS)),
        trace=True,
        **WARPS[warp][0],
    )


def p_values_of_texts(result, warp: str) -> dict[int, float]:
    texts = [tuple(text) for text in result.new_tokens.tolist()]
    return {n: p_value(Counter(text[:n] for text in texts), text_law(warp, n)) for n in (1, 2, 3)}


@pytest.mark.parametrize("warp", WARPS)
@pytest.mark.parametrize("drafter", DRAFTERS)
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

    def decide(self, draft, target_logits, warp, noise) -> Verdict:
        """A verdict of the wrong law."""
        if self.mistake == "acceptance shares its noise with the proposal":
            noise = SharedNoise(noise, Stream.ACCEPT, Stream.PROPOSE)
        if self.mistake == "recovery shares its noise with acceptance":
            noise = SharedNoise(noise, Stream.RESAMPLE, Stream.ACCEPT)
        verdict = self.right(draft, target_logits, warp, noise)
        if self.mistake == "the residual is not subtracted":
            laws, is_wrong = warp(target_logits), ~verdict.is_bonus
        elif self.mistake == "bonus tokens come from the draft":
            laws, is_wrong = torch.cat([draft.probs, draft.probs[:, -1:]], 1), verdict.is_bonus
        else:
            return verdict
        rows = torch.arange(len(laws))
        extra = draw(laws[rows, verdict.num_accepted], noise.uniform(Stream.RESAMPLE)[:, 0])
        found = verdict.tokens[rows, verdict.num_accepted]
        tokens = verdict.tokens.clone()
        tokens[rows, verdict.num_accepted] = torch.where(is_wrong, extra, found)
        return Verdict(tokens, verdict.num_accepted, verdict.num_drafted)


MISTAKES = [
    "the residual is not subtracted",
    "bonus tokens come from the draft",
    "acceptance shares its noise with the proposal",
    "recovery shares its noise with acceptance",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_biased_sampler_is_found_out(mistake):
    result = sample(DRAFTERS["model"](), Biased(mistake), "plain")
    assert min(p_values_of_texts(result, "plain").values()) < ALPHA


class ArgmaxWithSoftLaw(ModelDrafter):
    """Proposes the likeliest token and claims to have drawn it."""

    def propose(self, context, state, warp, noise) -> Draft:
        """The wrong law beside the token."""
        probs = super().propose(context, state, warp, noise).probs
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
