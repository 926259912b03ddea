"""The exact law of samplers that draw by a race: the least `E_v / weight_v` wins, where `E_v` are
independent Exp(1) variables that drafter and target share (`StepNoise.race`).

The exponentials are scripted. At every row of the window that a drafted path reaches (the root,
and each node), the distribution P of the winner is found (`race_law`), while the tokens on the path
win the races before. That the winner is `argmin_v E_v / P(v)` at all, whatever is drafted, is then
checked at random exponentials.

So each emitted token is a function of the noise at its own position, the same for every draft; its
law is P, and tokens at different positions are independent given their contexts.

Legend: N rows of the window, D depth, and see `paths`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.certificates.sampler.enumeration import race_law
from specdec.certificates.sampler.paths import Decide, Paths
from specdec.certificates.sampler.problems import Problems
from specdec.types import PAD_TOKEN

_EARLY = 1e-9


@dataclass(frozen=True, eq=False)
class Races:
    """What wins."""

    paths: Paths
    is_reached: Tensor  # [R, N] bool, after which row of the window a token can be emitted
    law: Tensor  # [R, N, V] of that token

    def target(self) -> Tensor:
        """`[R, N, V]`: the law that each token should have."""
        return self.paths.of_rows(self.paths.problems.target)


def find_races(decide: Decide, problems: Problems, *, device: torch.device | str = "cpu") -> Races:
    """Bisects every pair of tokens after every row of every window."""
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
    verdict = paths.runner(decide, every)(None, script.flatten(0, 1))
    end = depths.repeat(len(paths))[:, None]
    is_emitted = (verdict.tokens.gather(1, end) != PAD_TOKEN)[:, 0]
    prefix = paths.prefix[every].gather(1, verdict.rows.gather(1, end))[:, 0]
    is_reached = is_emitted.view(len(paths), -1) & (prefix.view(len(paths), -1) == paths.prefix)

    row, index = is_reached.nonzero(as_tuple=True)
    pairs = vocab * (vocab - 1) // 2
    script, at = (
        script[row, index].repeat_interleave(pairs, 0),
        torch.arange(len(row) * pairs, device="cpu"),
    )
    place = depths[index].repeat_interleave(pairs)
    run = paths.runner(decide, row.repeat_interleave(pairs))

    def draw(exponentials: Tensor) -> Tensor:
        script[at, place] = exponentials
        return run(None, script).tokens[at, place]

    law = torch.ones(len(paths), len(depths), vocab, dtype=torch.float64, device="cpu") / vocab
    law[row, index] = race_law(draw, len(row), vocab, bits=52)
    return Races(paths, is_reached, law)


def wrong_winners(
    decide: Decide, races: Races, generator: torch.Generator, *, copies: int = 4
) -> Tensor:
    """`[N]` rows of paths on which the sampler emits another token than the winner, at `copies`
    random settings of the exponentials per path.
    """
    paths = races.paths
    rows = torch.arange(len(paths), device="cpu").repeat_interleave(copies)
    exponentials = torch.empty(races.law[rows].shape, dtype=torch.float64, device="cpu")
    exponentials.exponential_(generator=generator)
    verdict = paths.runner(decide, rows)(None, exponentials)
    at = rows[:, None], verdict.rows
    winners = (exponentials[:, : verdict.rows.shape[1]] / races.law[at]).argmin(dim=-1)
    is_wrong = (verdict.tokens != winners) | ~races.is_reached[at]
    return rows[(is_wrong & (verdict.tokens != PAD_TOKEN)).any(dim=1)]
