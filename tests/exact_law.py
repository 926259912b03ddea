"""The exact law of one round of a sampler, found by enumeration and bisection of a black box.

A sampler's only randomness are uniforms. For every draft path (a batch row each) the points where
its decisions flip are found by bisecting the uniforms: `u_i` at which draft token i stops being
accepted, and the `u` at which the extra token moves on to the next id. Intervals between them are
probabilities, exact to 2**-52. Nothing of the sampler's rule is assumed except that decisions are
step functions, and that is checked: `check_certificate` predicts, from the flips alone, what the
sampler does at random uniforms.

The law of what one round emits is completed to K + 1 tokens with the target's own law. If the
result is the target's law for every context, then by induction so is that of any number of rounds
(one-round completion).

Legend: W worlds (independent contexts, together in one batch), V vocabulary, K draft tokens. A
table of level i is `[W, V**i, V]`: one law, or row of logits, behind each prefix of i tokens
(prefixes are numbered in base V).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.samplers import StepNoise, Stream, Warp
from specdec.types import PAD_TOKEN, Draft, Verdict

LARGEST_UNIFORM = 1 - 2.0**-52


@dataclass
class Worlds:
    """What a sampler sees: target logits (levels 0..K), draft laws (0..K-1), gate by world."""

    logits: list[Tensor]
    draft: list[Tensor]
    num_valid: list[int] | None = None
    is_point_mass: bool = False
    warp: dict[str, list] | None = None

    @property
    def num_draft_tokens(self) -> int:
        """K."""
        return len(self.draft)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.logits[0].shape[-1]


class Rows:
    """One batch row per world and draft path of positive probability, each `copies` times."""

    def __init__(self, sampler: Callable[..., Verdict], worlds: Worlds):
        self.sampler, self.worlds = sampler, worlds
        width, vocab = worlds.num_draft_tokens, worlds.vocab_size
        num_worlds = len(worlds.logits[0])
        code = torch.arange(vocab**width).repeat(num_worlds)
        world = torch.arange(num_worlds).repeat_interleave(vocab**width)
        prefix = [code // vocab ** (width - i) for i in range(width + 1)]
        prefix = torch.stack(prefix, dim=1)  # [R, K + 1]
        tokens = prefix[:, 1:] % vocab
        valid = torch.tensor(worlds.num_valid or [width] * num_worlds)[world]
        laws = [worlds.draft[i][world, prefix[:, i]] for i in range(width)]
        weight = torch.ones(len(code), dtype=torch.float64)
        for i, law in enumerate(laws):
            chosen = law.gather(1, tokens[:, i : i + 1])[:, 0]
            weight *= torch.where(i < valid, chosen, 1 / vocab)  # beyond num_valid is anything
        is_beyond = torch.arange(width) >= valid[:, None]
        keep = weight > 0
        self.world, self.prefix, self.weight = world[keep], prefix[keep], weight[keep]
        self.tokens = tokens.masked_fill(is_beyond, PAD_TOKEN)[keep]
        self.valid = valid[keep] if worlds.num_valid else None
        logits = [level[world, prefix[:, i]] for i, level in enumerate(worlds.logits)]
        self.logits = torch.stack(logits, dim=1)[keep]  # [R, K + 1, V]
        self.laws = None
        if width and not worlds.is_point_mass:
            self.laws = torch.stack(laws, 1).masked_fill(is_beyond[..., None], torch.nan)[keep]

    def runner(self, copies: int) -> Callable[[Tensor, Tensor], Verdict]:
        """The sampler over `[R * copies]` rows.

        Takes uniforms: accept `[R, copies, K]` and resample `[R, copies]`; all others are NaN.
        """

        def spread(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.repeat_interleave(copies, 0)

        draft = Draft(spread(self.tokens), spread(self.laws), spread(self.valid))
        logits, width = spread(self.logits), self.worlds.num_draft_tokens
        of_row = spread(self.world).tolist()
        gate = {name: [v[w] for w in of_row] for name, v in (self.worlds.warp or {}).items()}
        warp = Warp(len(logits), **gate)

        def run(accept: Tensor, resample: Tensor) -> Verdict:
            shape = len(logits), len(Stream), width + 1
            uniforms = torch.full(shape, torch.nan, dtype=torch.float64)
            uniforms[:, Stream.ACCEPT, :width] = accept.flatten(0, 1)
            uniforms[:, Stream.RESAMPLE, 0] = resample.flatten()
            return self.sampler(draft, logits, warp, StepNoise(uniforms))

        return run


def bisect(is_below: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """Where each of many decisions, True at small u, turns False: in (0, 1], to 2**-52."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(52):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high


@dataclass
class Flips:
    """Where decisions flip: `accept [R, K]`, `resample [R, K + 1, V]` by number accepted."""

    rows: Rows
    accept: Tensor
    resample: Tensor


def find_flips(sampler: Callable[..., Verdict], worlds: Worlds) -> Flips:
    """Bisects every decision of a sampler over all draft paths."""
    rows = Rows(sampler, worlds)
    count, width, vocab = len(rows.tokens), worlds.num_draft_tokens, worlds.vocab_size

    run = rows.runner(max(width, 1))
    diagonal = torch.eye(width, dtype=torch.float64)  # copy i moves u_i, accepts what is before

    def is_accepted(u: Tensor) -> Tensor:
        verdict = run(u[..., None] * diagonal, torch.zeros(count, width))
        return verdict.num_accepted.view(count, width) > torch.arange(width)

    accept = torch.zeros(count, 0, dtype=torch.float64)
    if width:
        accept = bisect(is_accepted, count, width)

    run = rows.runner((width + 1) * (vocab - 1))
    reject = torch.eye(width + 1, dtype=torch.float64)[:, :width]  # copy n rejects token n
    reject = LARGEST_UNIFORM * reject.repeat_interleave(vocab - 1, 0).expand(count, -1, -1)
    place = torch.arange(width + 1).repeat_interleave(vocab - 1)[:, None]

    def is_at_most(u: Tensor) -> Tensor:
        tokens = run(reject, u).tokens.view(count, -1, width + 1)
        extra = tokens.gather(2, place.expand(count, -1, 1)).view(count, width + 1, vocab - 1)
        return extra <= torch.arange(vocab - 1)

    resample = bisect(lambda u: is_at_most(u.view(count, -1)), count, width + 1, vocab - 1)
    return Flips(rows, accept, torch.nn.functional.pad(resample, (0, 1), value=1.0))


def check_certificate(flips: Flips, generator: torch.Generator, copies: int = 4) -> None:
    """At random uniforms the sampler does exactly what its flips predict."""
    rows, (count, width) = flips.rows, flips.accept.shape
    accept = torch.rand(count, copies, width, dtype=torch.float64, generator=generator)
    resample = torch.rand(count, copies, dtype=torch.float64, generator=generator)
    is_accepted = accept < flips.accept[:, None]
    num_accepted = is_accepted.long().cumprod(-1).sum(-1)  # [R, copies]
    vocab = flips.resample.shape[-1]
    cuts = flips.resample.gather(1, num_accepted[..., None].expand(-1, -1, vocab))
    extra = (cuts <= resample[..., None]).sum(-1)
    steps = torch.arange(width + 1)
    expected = torch.nn.functional.pad(rows.tokens, (0, 1))[:, None].expand(-1, copies, -1)
    expected = expected.masked_fill(steps >= num_accepted[..., None], PAD_TOKEN)
    expected = torch.where(steps == num_accepted[..., None], extra[..., None], expected)
    verdict = rows.runner(copies)(accept, resample)
    assert torch.equal(verdict.num_accepted.view(count, copies), num_accepted)
    assert torch.equal(verdict.tokens.view(count, copies, width + 1), expected)


def completed_law(flips: Flips, target: list[Tensor]) -> Tensor:
    """`[W, V**(K + 1)]`: the law of the emitted tokens, completed with that of the target."""
    rows, (_, width) = flips.rows, flips.accept.shape
    worlds, vocab = len(target[0]), target[0].shape[-1]
    law = torch.zeros(worlds, vocab ** (width + 1), dtype=torch.float64)
    reached = rows.weight.clone()  # probability of the path and of accepting its first n tokens
    extra = flips.resample.diff(dim=-1, prepend=torch.zeros_like(flips.resample[..., :1]))
    for n in range(width + 1):
        stops = reached * (1 - flips.accept[:, n]) if n < width else reached
        emitted = torch.zeros(worlds, vocab**n, vocab, dtype=torch.float64)
        place = rows.world, rows.prefix[:, n]
        emitted.index_put_(place, stops[:, None] * extra[:, n], accumulate=True)
        law += continued(emitted.flatten(1), target[n + 1 :])
        reached = reached * flips.accept[:, n] if n < width else reached
    return law


def continued(law: Tensor, levels: list[Tensor]) -> Tensor:
    """The law of longer sequences: `[W, V**n]` extended by one token per level."""
    for level in levels:
        law = (law[..., None] * level).flatten(1)
    return law


def law_error(sampler: Callable[..., Verdict], worlds: Worlds, target: list[Tensor]) -> float:
    """Largest deviation of the sampler's completed one-round law from the target's joint law."""
    law = completed_law(find_flips(sampler, worlds), target)
    joint = continued(torch.ones(len(target[0]), 1, dtype=torch.float64), target)
    return (law - joint).abs().max().item()


def random_weights(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Integer weights 0..4, one positive in each row; zeros, ties and one-hot rows are common."""
    weights = torch.randint(0, 5, shape, generator=generator)
    spare = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator)
    is_empty = (weights.sum(-1, keepdim=True) == 0).long()
    return weights.scatter_add(-1, spare, is_empty).double()


def random_draft_weights(target: Tensor, generator: torch.Generator) -> Tensor:
    """Draft weights beside target weights; rows are by turns free, equal, disjoint, or one-hot."""
    free = random_weights(target.shape, generator)
    disjoint = (target == 0).double()
    disjoint = torch.where(disjoint.sum(-1, keepdim=True) > 0, disjoint, free)
    one_hot = torch.zeros_like(free).scatter(-1, free.argmax(-1, keepdim=True), 1.0)
    kind = torch.randint(0, 5, (*target.shape[:-1], 1), generator=generator)
    for number, rows in enumerate((target, disjoint, one_hot)):
        free = torch.where(kind == number, rows, free)
    return free
