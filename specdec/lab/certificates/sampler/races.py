"""The exact distribution of samplers that draw by a race: the least `E_v / weight_v` wins, where
`E_v` are independent Exp(1) variables that drafter and target share (`StepNoise.race`).

The exponentials are scripted. At every row of the window that a drafted path reaches (the root,
and each node), the distribution P of the winner is found (`race_law`), while the tokens on the path
win the races before. That the winner is `argmin_v E_v / P(v)` at all, whatever is drafted, is then
checked at random exponentials.

So each emitted token is a function of the noise at its own position, the same for every draft; its
distribution is P, and tokens at different positions are independent given their contexts.

A rule may race several lists at each position (`StepNoise.arrivals(path=k)`): the least of all
`E^k_v / P(v)` over the lists k in use wins, which are other ones after other drafts. Then the lists
in use are found as well, row by row. That the winner has distribution P needs that they are
independent of the races that they run: they may depend on draft tokens of earlier positions only
(`late_lists`), and those on races of their own positions and earlier ones only
(`drafting.looks_ahead`).

Legend: N rows of the window, D depth, P lists, and see `paths`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.lab.certificates.sampler.enumeration import race_law
from specdec.lab.certificates.sampler.paths import Decide, Paths
from specdec.lab.certificates.sampler.problems import Problems
from specdec.types import PAD_TOKEN

_EARLY = 1e-9


@dataclass(frozen=True, eq=False)
class Races:
    """What wins."""

    paths: Paths
    is_reached: Tensor  # [R, N] bool, after which row of the window a token can be emitted
    law: Tensor  # [R, N, V] of that token
    lists: Tensor  # [R, N, P] bool, in use there

    def target(self) -> Tensor:
        """`[R, N, V]`: the distribution that each token should have."""
        return self.paths.of_rows(self.paths.problems.target)


def find_races(
    decide: Decide,
    problems: Problems,
    *,
    num_lists: int = 1,
    device: torch.device | str = "cpu",
) -> Races:
    """Bisects every pair of tokens after every row of every window.

    Args:
        decide: the sampler.
        problems: what is drafted from.
        num_lists: races at each position.
        device: where the sampler runs.
    """

    def alike(script: Tensor) -> Tensor:
        """All lists race with the same numbers."""
        return script if num_lists == 1 else script[:, None].expand(-1, num_lists, -1, -1)

    paths = Paths(problems, device=device, with_impossible=True)
    vocab, depths, scripts = problems.vocab_size, torch.tensor(paths.depths, device="cpu"), []
    for index in range(len(depths)):  # the tokens on the path to this row of the window win
        script = torch.ones(len(paths), len(depths), vocab, dtype=torch.float64, device="cpu")
        while index > 0:
            token = paths.tokens[:, index - 1 : index].clamp(min=0)
            index = problems.window_parents[index - 1]
            script[:, depths[index]].scatter_(1, token, _EARLY)
        scripts.append(script)
    script = torch.stack(scripts, dim=1)  # [R, N, N, V], raced for by depth
    every = torch.arange(len(paths), device="cpu").repeat_interleave(len(depths))
    verdict = paths.runner(decide, every)(None, alike(script.flatten(0, 1)))
    end = depths.repeat(len(paths))[:, None]
    is_emitted = (verdict.tokens.gather(1, end) != PAD_TOKEN)[:, 0]
    prefix = paths.prefix[every].gather(1, verdict.rows.gather(1, end))[:, 0]
    is_reached = is_emitted.view(len(paths), -1) & (prefix.view(len(paths), -1) == paths.prefix)

    row, index = is_reached.nonzero(as_tuple=True)
    pairs = vocab * (vocab - 1) // 2
    of_row, at = script[row, index], torch.arange(len(row) * pairs, device="cpu")
    script = of_row.repeat_interleave(pairs, 0)
    place = depths[index].repeat_interleave(pairs)
    run = paths.runner(decide, row.repeat_interleave(pairs))

    def draw(exponentials: Tensor) -> Tensor:
        script[at, place] = exponentials
        return run(None, alike(script)).tokens[at, place]

    law = torch.ones(len(paths), len(depths), vocab, dtype=torch.float64, device="cpu") / vocab
    law[row, index] = race_law(draw, len(row), vocab, bits=52)
    lists = torch.ones(len(paths), len(depths), num_lists, dtype=torch.bool, device="cpu")
    if num_lists > 1:
        run = paths.runner(decide, row)
        lists[row, index] = _lists_in_use(run, of_row, depths[index], law[row, index], num_lists)
    return Races(paths, is_reached, law, lists)


def _lists_in_use(
    run: Callable, script: Tensor, place: Tensor, law: Tensor, num_lists: int
) -> Tensor:
    """`[M, P]` bool, in which lists an early arrival of the least likely token makes it win.

    Args:
        run: the sampler on M rows of paths.
        script: `[M, N, V]` by which each row is reached.
        place: `[M]` depth of the race.
        law: `[M, V]` of its winner. Where one token is all that can win, any list will do.
        num_lists: P.
    """
    rare = law.masked_fill(law <= 0, torch.inf).argmin(dim=1)
    every, found = torch.arange(len(rare), device="cpu"), []
    for each in range(num_lists):
        lists = script[:, None].repeat(1, num_lists, 1, 1)
        lists[every, :, place] = 1.0
        lists[every, each, place, rare] = _EARLY
        found.append(run(None, lists).tokens[every, place] == rare)
    return torch.stack(found, dim=1)


def late_lists(races: Races) -> Tensor:
    """`[n]` rows of paths on which the lists in use after a row of the window are others than on a
    path with the same tokens up to its depth: they depend on tokens that the same races draw, or
    later ones.
    """
    paths, depths, found = races.paths, races.paths.depths, []
    nodes = torch.tensor(depths[1:], device="cpu")
    for index, depth in enumerate(depths):
        tokens = paths.tokens.masked_fill(nodes > depth, PAD_TOKEN)
        key = torch.cat([paths.problem[:, None], tokens], dim=1)[races.is_reached[:, index]]
        row, lists = races.is_reached[:, index].nonzero()[:, 0], races.lists[:, index]
        if not len(row):
            continue
        _, group = key.unique(dim=0, return_inverse=True)
        first = torch.full((int(group.max()) + 1,), len(row), device="cpu")
        first.scatter_reduce_(0, group, torch.arange(len(row), device="cpu"), "amin")
        found.append(row[(lists[row] != lists[row[first[group]]]).any(dim=1)])
    return torch.cat(found)


def wrong_winners(
    decide: Decide, races: Races, generator: torch.Generator, *, copies: int = 4
) -> Tensor:
    """`[N]` rows of paths on which the sampler emits another token than the winner, at `copies`
    random settings of the exponentials per path.
    """
    paths, num_lists = races.paths, races.lists.shape[2]
    rows = torch.arange(len(paths), device="cpu").repeat_interleave(copies)
    count, vocab = races.law.shape[1:]
    shape = (len(rows), num_lists, count, vocab)
    exponentials = torch.empty(shape, dtype=torch.float64, device="cpu")
    exponentials.exponential_(generator=generator)
    given = exponentials if num_lists > 1 else exponentials[:, 0]
    verdict = paths.runner(decide, rows)(None, given)
    at = rows[:, None], verdict.rows
    in_use = races.lists[at].transpose(1, 2)[..., None]  # [n, P, D + 1, 1]
    arrivals = exponentials[:, :, : verdict.rows.shape[1]].masked_fill(~in_use, torch.inf)
    winners = (arrivals.amin(dim=1) / races.law[at]).argmin(dim=-1)
    is_wrong = (verdict.tokens != winners) | ~races.is_reached[at]
    return rows[(is_wrong & (verdict.tokens != PAD_TOKEN)).any(dim=1)]
