"""The exact distribution of one round of a sampler, found by bisection of a black box.

A sampler's only randomness are uniforms: one to accept each draft token, one to draw the extra
token. For every drafted path (a batch row each) the points where its decisions flip are bisected.
First the threshold of each accepting uniform, with the uniforms before it on its path at 0 and all
others at their largest: this serves rules that decide token by token, and rules that look for the
longest acceptable prefix; on a tree, rules that go from the root to a leaf and from leaves to it.
Then, for every pattern of uniforms below or above their thresholds, the points at which the extra
token moves on to the next id. Intervals between such points are probabilities, exact to 2**-52. A
rule of another library may draw the extra token by an exponential race instead: then the weights
that it races with are found, see `race_law`.

Nothing of a rule is assumed but that its decisions are such step functions, and that is checked:
`mispredictions` compares what the flips predict with what the sampler does at random uniforms. Of a
rule with other decisions nothing is learnt here; `draws` tests it.

The distribution of the tokens that one round emits is completed to K + 1 tokens with the target's
own distribution. If the result is the target's distribution for every context, then by induction so
is that of any number of rounds, cut anywhere by a rule that looks at emitted tokens only (one-round
completion).

Legend: M patterns of positive probability, and see `paths`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.lab.certificates.sampler.paths import Decide, Paths
from specdec.lab.certificates.sampler.problems import Problems

_EARLY, _LATE = 2.0**-16, 1e9


def bisect(is_below: Callable[[Tensor], Tensor], *shape: int, bits: int = 52) -> Tensor:
    """How far up each of many decisions, True at small u, stays True.

    Args:
        is_below: from u of the given shape, multiples of 2**-bits in [0, 1), to decisions.
        shape: of the decisions.
        bits: of a uniform.

    Returns:
        float64 in [0, 1]: the probability of True for a uniform u; 0 only if it is False at u = 0.

    Example:
        >>> bisect(lambda u: u < torch.tensor([0.25, 0.0]), 2)
        tensor([0.2500, 0.0000], dtype=torch.float64)
    """
    low, high = (
        torch.zeros(shape, dtype=torch.float64, device="cpu"),
        torch.ones(shape, dtype=torch.float64, device="cpu"),
    )
    is_possible = is_below(low)
    for _ in range(bits):
        middle = (low + high) / 2
        below = is_below(middle)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(is_possible, high, 0.0)


def inversion_law(draw: Callable[[Tensor], Tensor], count: int, vocab: int, bits: int) -> Tensor:
    """`[count, V]`: the distributions of tokens that a uniform draws each; `draw` makes tokens of
    `[count * (V - 1)]` uniforms.
    """
    tokens = torch.arange(vocab - 1, device="cpu")
    shape = count, vocab - 1
    ends = bisect(lambda u: draw(u.flatten()).view(shape) <= tokens, *shape, bits=bits)
    return pad(ends, (1, 1)).index_fill(1, torch.tensor([vocab], device="cpu"), 1.0).diff(dim=-1)


def race_law(draw: Callable[[Tensor], Tensor], count: int, vocab: int, bits: int) -> Tensor:
    """`[count, V]`: the distributions of tokens that win races; `draw` makes tokens of
    `[count * P, V]` exponentials, P = V (V - 1) / 2.

    For every pair of tokens a, b, when all others come late, the ratio `t_ab = E_a / E_b` up to
    which a beats b is bisected. Because the least of exponentials wins in proportion to its rate,
    `P(a) = 1 / sum_b 1 / t_ab`, with `t_aa = 1`.
    """
    one, other = torch.triu_indices(vocab, vocab, offset=1, device="cpu")
    each = torch.arange(len(one), device="cpu")
    script = torch.full((count, len(one), vocab), _LATE, dtype=torch.float64, device="cpu")

    def is_won(u: Tensor) -> Tensor:
        script[:, each, one] = (_EARLY * u).clamp(min=2.0**-100)  # 0 has no reciprocal
        script[:, each, other] = _EARLY * (1 - u)
        return draw(script.flatten(0, 1)).view(count, -1) == one

    flip = bisect(is_won, count, len(one), bits=bits)  # E_a / E_b is u / (1 - u)
    inverse = torch.ones(count, vocab, vocab, dtype=torch.float64, device="cpu")
    inverse[:, one, other] = (1 - flip) / flip
    inverse[:, other, one] = flip / (1 - flip)
    return 1 / inverse.sum(dim=-1)


@dataclass(frozen=True)
class ExtraDraws:
    """What a rule draws its extra token by: a uniform, a multiple of 2**-bits, or the exponentials
    of a race.
    """

    bits: int = 52
    races: bool = False

    def idle(self, count: int, vocab: int) -> Tensor:
        """Draws of `count` tokens that nobody looks at."""
        shape = (count, vocab) if self.races else (count,)
        return torch.full(shape, float(self.races), dtype=torch.float64, device="cpu")

    def random(self, count: int, vocab: int, generator: torch.Generator) -> Tensor:
        """Exponentials `[count, V]`, or uniforms `[count]`."""
        draws = self.idle(count, vocab)
        return (
            draws.exponential_(generator=generator)
            if self.races
            else draws.uniform_(generator=generator)
        )

    def laws(self, decide: Decide, paths: Paths, row: Tensor, accept: Tensor) -> Tensor:
        """`[M, V]`: the distributions of the extra tokens that a sampler draws on rows `[M]` of
        paths, after accepting uniforms `[M, K]`.
        """
        vocab, law = paths.problems.vocab_size, race_law if self.races else inversion_law
        copies = vocab * (vocab - 1) // 2 if self.races else vocab - 1  # pairs, or points between
        run = paths.runner(decide, row.repeat_interleave(copies))
        accept = accept.repeat_interleave(copies, dim=0)

        def draw(extra: Tensor) -> Tensor:
            verdict = run(accept, extra)
            return verdict.tokens.gather(1, verdict.num_accepted[:, None])[:, 0]

        return law(draw, len(row), vocab, self.bits)


@dataclass(frozen=True, eq=False)
class Flips:
    """Where the decisions of a sampler flip."""

    paths: Paths
    accept: Tensor  # [R, K] thresholds of the accepting uniforms
    row: Tensor  # [M] of each pattern
    is_below: Tensor  # [M, K] bool, the pattern
    num_accepted: Tensor  # [M]
    path: Tensor  # [M, D + 1] rows of the window that were accepted, see `Verdict.path`
    extra: Tensor  # [M, V] distribution of the extra token
    draws: ExtraDraws

    @property
    def weight(self) -> Tensor:
        """`[M]` probability of the drafted path and the pattern."""
        threshold = self.accept[self.row]
        chance = torch.where(self.is_below, threshold, 1 - threshold).prod(dim=1)
        return self.paths.weight[self.row] * chance

    @property
    def mean_accepted(self) -> Tensor:
        """`[W]`, of the number of accepted tokens in each problem."""
        mean = torch.zeros(len(self.paths.problems), dtype=torch.float64, device="cpu")
        return mean.index_add(0, self.paths.problem[self.row], self.weight * self.num_accepted)

    def above_zero(self) -> "Flips":
        """The same decisions at uniforms above 0: what they do at 0 alone has probability 0."""
        smallest = 2.0**-self.draws.bits
        accept = torch.where(self.accept > smallest, self.accept, 0.0)
        is_drawn = (self.extra.cumsum(dim=-1) > smallest) | self.draws.races
        return replace(self, accept=accept, extra=torch.where(is_drawn, self.extra, 0.0))

    def completed_law(self) -> Tensor:
        """`[W, V**(K + 1)]`: the distribution of emitted tokens, completed with the target's."""
        paths, target, vocab = self.paths, self.paths.problems.target, self.extra.shape[-1]
        weight = self.weight[:, None]
        whole = torch.zeros(
            len(paths.problems), vocab ** len(target), dtype=torch.float64, device="cpu"
        )
        for length in range(len(target)):  # accepted tokens
            here = self.num_accepted == length
            row = self.row[here]
            place = paths.problem[row], paths.prefix[row, self.path[here, length]]
            law = torch.zeros(
                len(paths.problems), vocab**length, vocab, dtype=torch.float64, device="cpu"
            )
            law.index_put_(place, weight[here] * self.extra[here], accumulate=True)
            whole += continued(law.flatten(1), target[length + 1 :])
        return whole


def find_flips(
    decide: Decide,
    problems: Problems,
    *,
    device: torch.device | str = "cpu",
    draws: ExtraDraws | None = None,
) -> Flips:
    """Bisects every decision of a sampler over all drafted paths.

    Args:
        decide: the sampler.
        problems: what is drafted from.
        device: where the sampler runs.
        draws: what draws its extra token; `None` for uniforms of 52 bits.
    """
    draws, paths = draws or ExtraDraws(), Paths(problems, device=device)
    width, vocab = problems.num_draft_tokens, problems.vocab_size
    accept = _find_thresholds(decide, paths, draws)

    patterns = (
        torch.arange(2**width, device="cpu")[:, None] >> torch.arange(width, device="cpu") & 1 == 1
    )  # [2**K, K]
    chance = torch.where(patterns, accept[:, None], 1 - accept[:, None]).prod(dim=-1)
    row, pattern = (chance > 0).nonzero(as_tuple=True)
    is_below = patterns[pattern]  # [M, K]
    ends = (~is_below).double() * (1 - 2.0**-draws.bits)
    verdict = paths.runner(decide, row)(ends, draws.idle(len(row), vocab))
    extra = draws.laws(decide, paths, row, ends)
    return Flips(paths, accept, row, is_below, verdict.num_accepted, verdict.rows, extra, draws)


def _find_thresholds(decide: Decide, paths: Paths, draws: ExtraDraws) -> Tensor:
    """`[R, K]`; copy i of a row moves u_i, with what is before it on its path at 0."""
    count, width = len(paths), paths.problems.num_draft_tokens
    if width == 0:
        return torch.zeros(count, 0, dtype=torch.float64, device="cpu")
    run = paths.runner(decide, torch.arange(count, device="cpu").repeat_interleave(width))
    moves = torch.eye(width, dtype=torch.float64, device="cpu")
    draft, _, _ = paths.inputs(torch.zeros(1, dtype=torch.long, device="cpu"))
    behind = (~draft.ancestors[0, 1:, 1:].cpu()).double() * (1 - 2.0**-draws.bits)
    nodes = torch.arange(1, width + 1, device="cpu")
    extra = draws.idle(count * width, paths.problems.vocab_size)

    def is_accepted(u: Tensor) -> Tensor:
        accept = u[..., None] * moves + behind  # [R, K, K]
        verdict = run(accept.flatten(0, 1), extra)
        length, path = verdict.num_accepted.view(count, width, 1), verdict.rows
        path = path.view(count, width, -1)
        is_here = (path == nodes[:, None]) & (torch.arange(path.shape[2], device="cpu") <= length)
        return is_here.any(dim=2)

    return bisect(is_accepted, count, width, bits=draws.bits)


def mispredictions(
    decide: Decide, flips: Flips, generator: torch.Generator, *, copies: int = 4
) -> Tensor:
    """`[N]` rows of paths on which the sampler does not do what its flips predict, at `copies`
    random settings of the uniforms per path: the same as at the ends of its pattern's intervals,
    and the extra token of the distribution that was found.
    """
    paths, (count, width) = flips.paths, flips.accept.shape
    rows = torch.arange(count, device="cpu").repeat_interleave(copies)
    accept = torch.rand(len(rows), width, dtype=torch.float64, generator=generator, device="cpu")
    noise = flips.draws.random(len(rows), paths.problems.vocab_size, generator)
    accept, noise = (accept * 2**52).floor() * 2.0**-52, (noise * 2**52).floor() * 2.0**-52
    is_below, bits = accept < flips.accept[rows], 1 << torch.arange(width, device="cpu")
    number = torch.full((count, 2**width), -1, device="cpu")
    number[flips.row, (flips.is_below * bits).sum(dim=1)] = torch.arange(
        len(flips.row), device="cpu"
    )
    pattern = number[rows, (is_below * bits).sum(dim=1)]
    run, ends = paths.runner(decide, rows), (~is_below).double() * (1 - 2.0**-flips.draws.bits)
    found, expected = run(accept, noise), run(ends, noise)
    emitted = found.tokens.gather(1, found.num_accepted[:, None])
    is_wrong = (found.tokens != expected.tokens).any(dim=1)
    return rows[is_wrong | (emitted != _predicted(flips.extra[pattern], noise, emitted))[:, 0]]


def _predicted(law: Tensor, noise: Tensor, emitted: Tensor) -> Tensor:
    """`[N, 1]` tokens that noise draws from distributions `[N, V]`. Of a race, the one that was
    emitted if only rounding can tell it from the first.
    """
    if noise.dim() == 1:
        return (law.cumsum(dim=1)[:, :-1] <= noise[:, None]).sum(dim=1, keepdim=True)
    times = noise / law
    first, token = times.min(dim=1, keepdim=True)
    return torch.where(times.gather(1, emitted) <= 1.001 * first, emitted, token)


def continued(law: Tensor, levels: list[Tensor]) -> Tensor:
    """The distribution of longer sequences: `[W, V**n]` extended by one token per level."""
    for level in levels:
        law = (law[..., None] * level).flatten(1)
    return law


def joint_law(levels: list[Tensor]) -> Tensor:
    """`[W, V**n]`: the joint distribution of n tokens, from n levels."""
    return continued(torch.ones(len(levels[0]), 1, dtype=torch.float64, device="cpu"), levels)
