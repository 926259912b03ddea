"""Cases and checks for the Triton kernels, the same for the interpreter and for a GPU.

The oracle is the definition in plain PyTorch. Over tables whose every sum is exact in float32 a
kernel must equal it. Over random tables it must too, unless a draw lies within MARGIN of a
boundary: then it must equal what the definition gives when the draws are moved by MARGIN, and that
is asserted, not skipped.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.kernels import gate as gates
from specdec.kernels import (
    reference,
    triton_floor,
    triton_race,
    triton_sample,
    triton_verify,
    verify_blocks,
    verify_tokens,
)
from specdec.kernels.gate import Gate, Truncation
from specdec.types import PAD_TOKEN

MARGIN = 1e-5
LARGEST_UNIFORM = 1 - 2.0**-52
RULES = ["point", "chain", "block"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VOCAB = 128256


@dataclass
class Case:
    """The arguments of `verify_tokens` and `verify_blocks`."""

    draft_tokens: Tensor
    draft_probs: Tensor
    num_valid: Tensor | None
    logits: Tensor
    gate: Gate
    accept: Tensor
    resample: Tensor

    def draft(self, rule: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        probs = None if rule == "point" else self.draft_probs
        return self.draft_tokens, probs, self.num_valid

    def decided(self, rule: str, **options) -> tuple[Tensor, Tensor, Tensor]:
        """By the kernels."""
        uniforms = self.accept, self.resample
        by_block = rule == "block"
        return triton_verify.verify(
            *self.draft(rule), self.logits, self.gate, *uniforms, by_block=by_block, **options
        )

    def defined(self, rule: str) -> tuple[Tensor, Tensor, Tensor]:
        """By the definition."""
        define = reference.verify_block if rule == "block" else reference.verify_chain
        law = gates.law(self.logits, self.gate)
        tokens, count = define(*self.draft(rule), law, self.accept, self.resample)
        largest = self.logits.amax(-1)
        return tokens, count, reference.find_faults(*self.draft(rule), largest, count)

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


def decided(case: Case, rule: str) -> tuple[Tensor, Tensor, Tensor]:
    """By the library's operations."""
    op = verify_blocks if rule == "block" else verify_tokens
    return op(*case.draft(rule), case.logits, case.gate, case.accept, case.resample)


def assert_equal(ours: tuple, theirs: tuple) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other), (one, other)


def assert_near(case: Case, rule: str, ours: tuple) -> int:
    """The rows that differ from the definition lie beside a boundary; returns their number."""
    tokens, count, faults = ours
    theirs = case.defined(rule)
    is_equal = (tokens == theirs[0]).all(1) & (faults == theirs[2])
    if bool(is_equal.all()):
        return 0
    is_near = is_equal.clone()
    extra = tokens.gather(1, count[:, None])[:, 0]
    for accept in (0.0, -MARGIN, MARGIN):
        low, high = (case.moved(accept, by).defined(rule) for by in (-MARGIN, MARGIN))
        ends = [t.gather(1, count[:, None])[:, 0] for t in (low[0], high[0])]
        is_same = (low[1] == count) & (low[2] == faults)
        is_near |= is_same & (ends[0] <= extra) & (extra <= ends[1])
    places = torch.arange(tokens.shape[1], device=tokens.device)
    drafted = torch.nn.functional.pad(case.draft_tokens, (0, 1))
    is_prefix = (tokens == drafted) | (places >= count[:, None])
    is_padded = (tokens == PAD_TOKEN) | (places <= count[:, None])
    assert bool((is_near & is_prefix.all(1) & is_padded.all(1)).all()), (ours, theirs)
    return int((~is_equal).sum())


def assert_sample_near(logits: Tensor, gate: Gate, uniforms: Tensor, **options) -> None:
    tokens, law = triton_sample.sample(logits, gate, uniforms, **options)
    expected = gates.law(logits, gate)
    assert law.shape == logits.shape
    assert law.dtype == torch.float32
    torch.testing.assert_close(law, expected, rtol=1e-5, atol=1e-7)
    assert torch.equal(law > 1e-37, expected > 1e-37)
    assert bool((law.gather(-1, tokens[..., None]) > 0).all())
    ends = [(uniforms + by).clamp(0, LARGEST_UNIFORM) for by in (-MARGIN, MARGIN)]
    low, high = (reference.draw(expected, u) for u in ends)
    assert bool(((low <= tokens) & (tokens <= high)).all())
    assert torch.equal(triton_sample.choose(logits, gate, uniforms, **options), tokens)
    table = law.new_full((len(law), 3, *law.shape[1:]), 7.0)
    again, filled = triton_sample.sample(logits, gate, uniforms, table[:, 1], **options)
    assert torch.equal(again, tokens)
    assert torch.equal(table[:, 1], law)
    assert filled.data_ptr() == table[:, 1].data_ptr()
    assert bool((table[:, ::2] == 7).all())  # its neighbours are untouched


def assert_race_near(
    logits: Tensor, gate: Gate, key: Tensor, position: Tensor, stream: int, **options
) -> Tensor:
    """Returns the winners; one that is not the definition's is as fast, to float32."""
    tokens = triton_race.race(logits, gate, key, position, stream, **options)
    law = gates.law(logits, gate)
    times = reference.exponentials(key, position, stream, logits.shape[-1]) / law
    times = times.masked_fill(law <= 0, torch.inf)
    ours, best = times.gather(-1, tokens[..., None])[..., 0], times.amin(-1)
    assert bool((ours <= best * (1 + MARGIN)).all())
    assert bool(((tokens == times.argmin(-1)) | (ours > best)).all())
    return tokens


def assert_floor_near(
    logits: Tensor, temperature: Tensor | None, truncation: Truncation, **options
):
    """The kernel keeps what the definition keeps; in between, where edges move by MARGIN."""
    scaled = gates.scale(logits, temperature)

    def kept(by: float) -> Tensor:
        tail, min_p = truncation.tail, truncation.min_p
        moved = truncation._replace(
            tail=None if tail is None else torch.where(tail >= 0, (tail + by).clamp(0, 1), tail),
            min_p=None if min_p is None else (min_p * (1 + by)).clamp(0, 1),
        )
        return gates.is_kept(scaled, gates.find_floor(logits, temperature, moved))

    floor = triton_floor.find_floor(logits, temperature, truncation, **options)
    ours, is_possible = gates.is_kept(scaled, floor), scaled > -torch.inf
    assert not bool((ours & ~kept(-MARGIN) & is_possible).any())
    assert not bool((kept(MARGIN) & ~ours & is_possible).any())


def powers_of_two(count: int, vocab: int, generator: torch.Generator) -> Tensor:
    """A law `[V]` of about `count` positive probabilities, all powers of two."""
    parts = [0]
    while len(parts) < min(count, vocab):
        part = parts.pop(int(torch.randint(len(parts), (1,), generator=generator)))
        parts += [part + 1, part + 1]
    law = torch.zeros(vocab)
    law[torch.randperm(vocab, generator=generator)[: len(parts)]] = 0.5 ** torch.tensor(parts)
    return law


def exact_case(
    rows: int, width: int, vocab: int, seed: int, *, is_ragged: bool, is_mixed: bool
) -> Case:
    """Target laws uniform over 2**n tokens, draft laws of powers of two, and draws on a grid of 64
    and on the ends of their range; every third acceptance is a tie.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, high: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    logits = torch.full((rows, width + 1, vocab), -torch.inf)
    for row in logits.flatten(0, 1):
        count = 2 ** int(random(1, high=min(vocab.bit_length(), 6)))
        row[torch.randperm(vocab, generator=generator)[:count]] = float(random(1, high=9))
    laws = [powers_of_two(int(random(1, high=9)), vocab, generator) for _ in range(rows * width)]
    probs = torch.stack(laws).view(rows, width, vocab) if width else torch.zeros(rows, 0, vocab)
    tokens = (probs + 1e-3).flatten(0, 1).multinomial(1, generator=generator) if width else probs
    tokens = tokens.view(rows, width).long()
    is_greedy = random(rows, high=3) == 0 if is_mixed else None
    temperature = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)[random(rows, high=3)]
    gate = Gate(temperature if is_mixed else None, is_greedy)
    p, q = (
        t.gather(2, tokens[..., None])[..., 0].double()
        for t in (gates.law(logits, gate)[:, :width], probs)
    )
    ties = torch.where((random(rows, width, high=3) == 0) & (p < q), p / q, 2.0)
    accept, resample = random(rows, width, high=65) / 64.0, random(rows, high=65) / 64.0
    accept = torch.where(ties < 1, ties, accept.double()).clamp(max=LARGEST_UNIFORM)
    num_valid = random(rows, high=width + 1) if is_ragged else None
    case = Case(
        tokens, probs, num_valid, logits, gate, accept, resample.double().clamp(max=LARGEST_UNIFORM)
    )
    return with_garbage(case) if is_ragged else case


def with_garbage(case: Case) -> Case:
    """The same case with garbage where nothing is up for decision."""
    places = torch.arange(case.draft_tokens.shape[1] + 1)
    is_behind = places[:-1] >= case.num_valid[:, None]
    return replace(
        case,
        draft_tokens=case.draft_tokens.masked_fill(is_behind, PAD_TOKEN),
        draft_probs=case.draft_probs.masked_fill(is_behind[..., None], torch.nan),
        logits=case.logits.masked_fill((places > case.num_valid[:, None])[..., None], torch.nan),
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
    tail = some(torch.rand(rows, generator=generator).double() ** 2, -1.0)
    min_p = some(torch.rand(rows, generator=generator).double() ** 3, 0.0)
    return Truncation(top_k, tail, min_p, int(top_k.max()))


def random_gate(logits: Tensor, seed: int) -> Gate:
    """Temperature, greedy rows and a floor."""
    generator = torch.Generator().manual_seed(seed)
    rows = logits.shape[0]
    temperature = torch.rand(rows, generator=generator).double() + 0.4
    floor = gates.find_floor(logits, temperature, random_truncation(rows, seed))
    return Gate(temperature, torch.rand(rows, generator=generator) < 0.3, floor)


def random_case(
    rows: int, width: int, vocab: int, seed: int, *, dtype: torch.dtype, is_gated: bool
) -> Case:
    """Draft laws near the target's, their tokens drawn from them; draws are slices of a table."""
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, width + 1, vocab, seed=seed, dtype=dtype)
    gate = random_gate(logits, seed) if is_gated else Gate()
    noise = torch.randn(rows, width, vocab, generator=generator).softmax(-1)
    probs = 0.7 * gates.law(logits, gate)[:, :width] + 0.3 * noise
    tokens = torch.empty(rows, width, dtype=torch.long)
    if width:
        tokens = probs.flatten(0, 1).multinomial(1, generator=generator).view(rows, width)
    draws = torch.rand(rows, 3, width + 1, dtype=torch.float64, generator=generator)
    return Case(tokens, probs, None, logits, gate, draws[:, 1, :width], draws[:, 2, 0])
