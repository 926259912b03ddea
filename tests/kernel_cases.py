"""Cases and checks for the Triton kernels, the same for the interpreter and for a GPU.

The oracle is the definition in plain PyTorch. Over tables whose every sum is exact in float32 a
kernel must equal it. Over random tables it must too, unless a draw lies within MARGIN of a
boundary: then it must equal what the definition gives when the draws are moved by MARGIN, and that
is asserted, not skipped.
"""

from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from step_faults import faults_of
from torch import Tensor

pytest.importorskip("triton", reason="Triton is there on Linux only")

from specdec.kernels import FilterParams, draw, filtered_probs, verify
from specdec.kernels.race import triton as triton_race
from specdec.kernels.race.reference import exponentials
from specdec.kernels.sample import triton as triton_sample
from specdec.kernels.truncate import triton as triton_truncate
from specdec.kernels.truncate.reference import find_cutoff, is_kept, scale
from specdec.kernels.types import Cutoff, Truncation, VerifyUniforms
from specdec.kernels.verify import triton as triton_verify
from specdec.kernels.verify.reference import block_rule, token_rule
from specdec.types import PAD_TOKEN, Draft, Verdict

MARGIN = 1e-5
LARGEST_UNIFORM = 1 - 2.0**-52
RULES = ["point", "token", "block"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 128256
SMALL = {"block": 16, "num_warps": 2}
"""So that rows of a few dozen tokens have many chunks and a ragged last one."""
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=3)
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="here kernels are compiled; see the tests marked gpu"
)
quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, at 0 / 0 and the like


@dataclass
class Case:
    """The arguments of `verify`."""

    draft_tokens: Tensor
    draft_probs: Tensor
    num_valid: Tensor | None
    logits: Tensor
    params: FilterParams
    accept: Tensor
    resample: Tensor

    def draft(self, rule: str) -> Draft:
        probs = None if rule == "point" else self.draft_probs
        return Draft(self.draft_tokens, probs, self.num_valid)

    @property
    def uniforms(self) -> VerifyUniforms:
        return VerifyUniforms(self.accept, self.resample)

    def by_kernel(self, rule: str, **options) -> tuple[Tensor, Tensor]:
        """Tokens and num_accepted, by the kernels."""
        inputs = self.draft(rule), self.logits, self.params, self.uniforms
        return parts(triton_verify.verify(*inputs, by_block=rule == "block", **options))

    def by_definition(self, rule: str) -> tuple[Tensor, Tensor]:
        draft, define = self.draft(rule), block_rule if rule == "block" else token_rule
        probs = filtered_probs(self.logits, self.params)
        return define(draft, probs, self.uniforms)

    def faults(self, rule: str, found: tuple[Tensor, Tensor]) -> list[int]:
        """What the loop finds wrong where tokens and num_accepted are these."""
        return faults_of(self.draft(rule), self.logits, Verdict(*found, self.num_valid))

    def cuda(self) -> "Case":
        """The same case on a GPU; draws stay slices of a table."""
        return Case(*(on_gpu(value) for value in vars(self).values()))

    def moved(self, accept: float, resample: float) -> "Case":
        """With other draws."""

        def move(uniforms: Tensor, by: float) -> Tensor:
            return (uniforms + by).clamp(0, LARGEST_UNIFORM)

        draws = move(self.accept, accept), move(self.resample, resample)
        return replace(self, accept=draws[0], resample=draws[1])


def on_gpu(value):
    """Tensors, and tuples of them, on a GPU."""
    if isinstance(value, tuple):
        items = [on_gpu(item) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value.cuda() if isinstance(value, Tensor) else value


def by_definition(operation, *args, **kwargs):
    """What an operation's definition gives, on a GPU too."""
    with mock.patch(f"{operation.__module__}.suits_kernels", return_value=False):
        return operation(*args, **kwargs)


def launches_of(op) -> list[str]:
    """Names of what a call launches on a GPU; refuses one that waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        op()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


def graph_of(op):
    """A CUDA graph of a call, and the tensors that it fills."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op()
    return graph, result


def parts(verdict: Verdict) -> tuple[Tensor, Tensor]:
    return verdict.tokens, verdict.num_accepted


def by_library(case: Case, rule: str) -> tuple[Tensor, Tensor]:
    """By the library's operations."""
    inputs = case.draft(rule), case.logits, case.params, case.uniforms
    return parts(verify(*inputs, by_block=rule == "block"))


def assert_equal(ours: tuple, theirs: tuple) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one, other)


def assert_near(case: Case, rule: str, ours: tuple) -> int:
    """The rows that differ from the definition lie beside a boundary; returns their number."""
    tokens, count = ours
    theirs = case.by_definition(rule)
    is_equal = (tokens == theirs[0]).all(1)
    if bool(is_equal.all()):
        return 0
    is_near = is_equal.clone()
    extra = tokens.gather(1, count[:, None])[:, 0]
    for accept in (0.0, -MARGIN, MARGIN):
        low, high = (case.moved(accept, by).by_definition(rule) for by in (-MARGIN, MARGIN))
        ends = [t.gather(1, count[:, None])[:, 0] for t in (low[0], high[0])]
        is_near |= (low[1] == count) & (ends[0] <= extra) & (extra <= ends[1])
    index = torch.arange(tokens.shape[1], device=tokens.device)
    drafted = torch.nn.functional.pad(case.draft_tokens, (0, 1))
    is_prefix = (tokens == drafted) | (index >= count[:, None])
    is_padded = (tokens == PAD_TOKEN) | (index <= count[:, None])
    assert bool((is_near & is_prefix.all(1) & is_padded.all(1)).all()), (ours, theirs)
    return int((~is_equal).sum())


def sample_by_kernel(logits: Tensor, params: FilterParams, uniforms: Tensor, **options) -> tuple:
    """Tokens and probabilities; every one of the latter is written."""
    probs = torch.full(logits.shape, torch.nan, device=logits.device)
    return triton_sample.sample(logits, params, uniforms, probs, **options), probs


def assert_sample_near(logits: Tensor, params: FilterParams, uniforms: Tensor, **options) -> None:
    tokens, probs = sample_by_kernel(logits, params, uniforms, **options)
    expected = filtered_probs(logits, params)
    assert probs.shape == logits.shape
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(probs > 1e-37, expected > 1e-37)
    assert bool((probs.gather(-1, tokens[..., None]) > 0).all())
    ends = [(uniforms + by).clamp(0, LARGEST_UNIFORM) for by in (-MARGIN, MARGIN)]
    low, high = (draw(expected, u) for u in ends)
    assert bool(((low <= tokens) & (tokens <= high)).all())
    assert torch.equal(triton_sample.sample(logits, params, uniforms, None, **options), tokens)
    table = probs.new_full((len(probs), 3, *probs.shape[1:]), 7.0)
    again = triton_sample.sample(logits, params, uniforms, table[:, 1], **options)
    assert torch.equal(again, tokens)
    assert torch.equal(table[:, 1], probs)
    assert bool((table[:, ::2] == 7).all())  # its neighbours are untouched


def assert_race_near(
    logits: Tensor, params: FilterParams, key: Tensor, position: Tensor, stream: int, **options
) -> Tensor:
    """Returns the winners; one that is not the definition's is as fast, to float32."""
    tokens = triton_race.race(logits, params, key, position, stream, **options)
    probs = filtered_probs(logits, params)
    times = exponentials(key, position, stream, logits.shape[-1]) / probs
    times = times.masked_fill(probs <= 0, torch.inf)
    ours, best = times.gather(-1, tokens[..., None])[..., 0], times.amin(-1)
    assert bool((ours <= best * (1 + MARGIN)).all())
    assert bool(((tokens == times.argmin(-1)) | (ours > best)).all())
    return tokens


def assert_cutoff_near(
    logits: Tensor, temperature: Tensor | None, truncation: Truncation, **options
) -> None:
    """The kernel keeps what the definition keeps, or keeps with edges moved by up to MARGIN."""
    scaled = scale(logits, temperature)

    def kept(by: float) -> Tensor:
        top_p, min_p = truncation.top_p, truncation.min_p
        moved = truncation._replace(
            top_p=None if top_p is None else torch.where(top_p < 1, moved_top_p(top_p, by), top_p),
            min_p=None if min_p is None else (min_p * (1 + by)).clamp(0, 1),
        )
        return is_kept(scaled, by_definition(find_cutoff, logits, temperature, moved))

    cutoff = triton_truncate.find_cutoff(logits, temperature, truncation, **options)
    ours, is_possible = is_kept(scaled, cutoff), scaled > -torch.inf
    assert not bool((ours & ~kept(-MARGIN) & is_possible).any())
    assert not bool((kept(MARGIN) & ~ours & is_possible).any())


def moved_top_p(top_p: Tensor, by: float) -> Tensor:
    """With `by` more mass that may be dropped; less than 1, which would keep all."""
    return (top_p - by).clamp(0, 1 - 2.0**-40)


def powers_of_two(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """A distribution `[V]` of about `count` positive probabilities, all powers of two."""
    exponents = [0]
    while len(exponents) < min(count, vocab):
        split = exponents.pop(int(torch.randint(len(exponents), (1,), generator=generator)))
        exponents += [split + 1, split + 1]
    probs, ids = torch.zeros(vocab), torch.randperm(vocab, generator=generator)
    probs[ids[: len(exponents)]] = 0.5 ** torch.tensor(exponents)
    return probs


def exact_case(
    rows: int, width: int, vocab: int, seed: int, *, is_ragged: bool, is_mixed: bool
) -> Case:
    """Target distributions uniform over 2**n tokens, draft probabilities that are powers of two,
    and uniforms on a grid of 64 and on the ends of their range; every third acceptance is a tie.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, high: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    logits = torch.full((rows, width + 1, vocab), -torch.inf)
    for row in logits.flatten(0, 1):
        count = 2 ** int(random(1, high=min(vocab.bit_length(), 6)))
        row[torch.randperm(vocab, generator=generator)[:count]] = float(random(1, high=9))
    drafts = [powers_of_two(int(random(1, high=9)), vocab, generator) for _ in range(rows * width)]
    probs = torch.stack(drafts).view(rows, width, vocab) if width else torch.zeros(rows, 0, vocab)
    tokens = (probs + 1e-3).flatten(0, 1).multinomial(1, generator=generator) if width else probs
    tokens = tokens.view(rows, width).long()
    is_greedy = random(rows, high=3) == 0 if is_mixed else None
    temperature = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)[random(rows, high=3)]
    params = FilterParams(temperature if is_mixed else None, is_greedy)
    p, q = (
        t.gather(2, tokens[..., None])[..., 0].double()
        for t in (filtered_probs(logits, params)[:, :width], probs)
    )
    ties = torch.where((random(rows, width, high=3) == 0) & (p < q), p / q, 2.0)
    accept, resample = random(rows, width, high=65) / 64.0, random(rows, high=65) / 64.0
    accept = torch.where(ties < 1, ties, accept.double()).clamp(max=LARGEST_UNIFORM)
    num_valid = random(rows, high=width + 1) if is_ragged else None
    resample = resample.double().clamp(max=LARGEST_UNIFORM)
    case = Case(tokens, probs, num_valid, logits, params, accept, resample)
    return with_garbage(case) if is_ragged else case


def with_garbage(case: Case) -> Case:
    """The same case with garbage where nothing is up for decision."""
    index = torch.arange(case.draft_tokens.shape[1] + 1)
    is_garbage = index[:-1] >= case.num_valid[:, None]
    return replace(
        case,
        draft_tokens=case.draft_tokens.masked_fill(is_garbage, PAD_TOKEN),
        draft_probs=case.draft_probs.masked_fill(is_garbage[..., None], torch.nan),
        logits=case.logits.masked_fill((index > case.num_valid[:, None])[..., None], torch.nan),
    )


def random_logits(*shape: int, seed: int, dtype: torch.dtype, spread: float = 2.0) -> Tensor:
    """With some ties and some forbidden tokens; rows are slices of a larger table."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*shape[:-1], shape[-1] + 3, generator=generator)[..., : shape[-1]] * spread
    if seed % 3 == 0:
        logits = (logits * 2).round() / 2
    is_forbidden = torch.rand(shape, generator=generator) < 0.1
    is_forbidden[..., seed % shape[-1]] = False
    return logits.masked_fill_(is_forbidden, -torch.inf).to(dtype)


def random_truncation(rows: int, seed: int) -> Truncation:
    """Of each kind, with rows that do not use it."""
    generator = torch.Generator().manual_seed(seed)

    def some(values: Tensor, off: float) -> Tensor:
        return values.where(torch.rand(rows, generator=generator) < 0.7, off)

    top_k = some(torch.randint(1, 60, (rows,), generator=generator), 0)
    top_k[seed % rows] = 7
    top_p = some(1 - torch.rand(rows, generator=generator).double() ** 2, 1.0)
    min_p = some(torch.rand(rows, generator=generator).double() ** 3, 0.0)
    return Truncation(top_k, top_p, min_p, int(top_k.max()))


def random_params(logits: Tensor, seed: int) -> FilterParams:
    """Temperature, greedy rows and a cutoff."""
    generator = torch.Generator().manual_seed(seed)
    rows = logits.shape[0]
    temperature = torch.rand(rows, generator=generator).double() + 0.4
    cutoff = find_cutoff(logits, temperature, random_truncation(rows, seed))
    return FilterParams(temperature, torch.rand(rows, generator=generator) < 0.3, cutoff)


def at_index(params: FilterParams, index: int) -> FilterParams:
    """The parameters of one index of a window."""
    return params._replace(cutoff=Cutoff(*(values[:, index] for values in params.cutoff)))


def random_case(
    rows: int, width: int, vocab: int, seed: int, *, dtype: torch.dtype, is_filtered: bool
) -> Case:
    """Draft probabilities near the target's and tokens drawn from them; uniforms are slices of a
    table.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, width + 1, vocab, seed=seed, dtype=dtype)
    params = random_params(logits, seed) if is_filtered else FilterParams()
    noise = torch.randn(rows, width, vocab, generator=generator).softmax(-1)
    probs = 0.7 * filtered_probs(logits, params)[:, :width] + 0.3 * noise
    tokens = torch.empty(rows, width, dtype=torch.long)
    if width:
        tokens = probs.flatten(0, 1).multinomial(1, generator=generator).view(rows, width)
    draws = torch.rand(rows, 3, width + 1, dtype=torch.float64, generator=generator)
    return Case(tokens, probs, None, logits, params, draws[:, 1, :width], draws[:, 2, 0])
