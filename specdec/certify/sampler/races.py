"""The exact law of samplers that draw by a race: the least `E_v / weight_v` wins, where `E_v` are
independent Exp(1) variables that drafter and target share (`StepNoise.race`).

The exponentials are scripted. At every place that a drafted path reaches, and for every pair of
tokens a, b, the ratio `t_ab = E_a / E_b` up to which a beats b is bisected. Because the least of
exponentials wins in proportion to its rate, `P(a) = 1 / sum_b 1 / t_ab`, with `t_aa = 1`. That the
winner is `argmin_v E_v / P(v)` at all, whatever is drafted, is then checked at random exponentials.

So each emitted token is a function of the noise at its own position, the same for every draft; its
law is P, and tokens at different positions are independent given their contexts.

Legend: see `paths`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.certify.sampler.enumeration import bisect
from specdec.certify.sampler.paths import Decide, Paths
from specdec.certify.sampler.worlds import Worlds
from specdec.samplers import ScriptedNoise
from specdec.types import PAD_TOKEN, Verdict

_EARLY, _LATE = 1e-9, 1e9


@dataclass(frozen=True, eq=False)
class Races:
    """What wins."""

    paths: Paths
    is_reached: Tensor  # [R, K + 1] bool, where a token can be emitted
    law: Tensor  # [R, K + 1, V] of that token

    def target(self) -> Tensor:
        """`[R, K + 1, V]`: the law that each token should have."""
        paths, levels = self.paths, self.paths.worlds.target
        rows = [level[paths.world, paths.prefix[:, i]] for i, level in enumerate(levels)]
        return torch.stack(rows, dim=1)


def find_races(decide: Decide, worlds: Worlds, *, device: torch.device | str = "cpu") -> Races:
    """Bisects every pair of tokens at every place of every path."""
    paths = Paths(worlds, device=device, with_impossible=True)
    count, places, vocab = len(paths), worlds.num_draft_tokens + 1, worlds.vocab_size
    drafted = torch.nn.functional.one_hot(paths.tokens.clamp(min=0), vocab).double()
    drafted = drafted * _EARLY + (1 - drafted)  # [R, K, V], the draft wins where it can
    drafted = torch.nn.functional.pad(drafted, (0, 0, 0, 1), value=1.0)
    run = _runner(decide, paths, torch.arange(count))
    is_reached = run(drafted).tokens != PAD_TOKEN

    row, place = is_reached.nonzero(as_tuple=True)
    one, other = torch.triu_indices(vocab, vocab, offset=1)
    pairs, total = len(one), len(row) * len(one)
    row, place = row.repeat_interleave(pairs), place.repeat_interleave(pairs)
    one, other, at = one.repeat(total // pairs), other.repeat(total // pairs), torch.arange(total)
    script = drafted[row]
    script[at, place] = _LATE
    run = _runner(decide, paths, row)

    def wins(u: Tensor) -> Tensor:
        script[at, place, one] = u
        script[at, place, other] = 1 - u
        return run(script).tokens[at, place] == one

    flip = bisect(wins, total)  # E_a / E_b is u / (1 - u)
    inverse = torch.ones(count, places, vocab, vocab, dtype=torch.float64)
    inverse[row, place, one, other] = (1 - flip) / flip
    inverse[row, place, other, one] = flip / (1 - flip)
    return Races(paths, is_reached, 1 / inverse.sum(dim=-1))


def wrong_winners(
    decide: Decide, races: Races, generator: torch.Generator, *, copies: int = 4
) -> Tensor:
    """`[N]` rows of paths on which the sampler emits another token than the winner, at `copies`
    random settings of the exponentials per path.
    """
    paths = races.paths
    rows = torch.arange(len(paths)).repeat_interleave(copies)
    exponentials = torch.empty(races.law[rows].shape, dtype=torch.float64)
    exponentials.exponential_(generator=generator)
    winners = (exponentials / races.law[rows]).argmin(dim=-1)
    tokens = _runner(decide, paths, rows)(exponentials).tokens
    is_wrong = (tokens != PAD_TOKEN) & ((tokens != winners) | ~races.is_reached[rows])
    return rows[is_wrong.any(dim=1)]


def _runner(decide: Decide, paths: Paths, rows: Tensor) -> Callable[[Tensor], Verdict]:
    draft, logits, warp = paths.inputs(rows)

    def run(exponentials: Tensor) -> Verdict:
        noise = ScriptedNoise(exponentials=exponentials.to(paths.device))
        verdict = decide(draft, logits, warp, noise)
        return Verdict(verdict.tokens.cpu(), verdict.num_accepted.cpu())

    return run
