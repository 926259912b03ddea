"""The law of one round of a sampler, tested by drawing: for rules whose decisions are no thresholds
of their uniforms, so that `enumeration` does not apply.

Drafts are drawn from the worlds' draft laws, uniforms from a seeded generator. What a round emits
is completed to K + 1 tokens with draws from the target's own law, as in `enumeration`, and the
counts of the completed texts are compared with the target's law by a chi-square test per world.

A rule that is wrong at single values of a uniform only, or by less than the total variation that
the tests detect, passes.

Legend: N texts of a world, and see `paths`.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.certify.chisquare import goodness_of_fit
from specdec.certify.sampler.enumeration import joint_law, random_extra
from specdec.certify.sampler.paths import Decide, Paths
from specdec.certify.sampler.worlds import Worlds


def draw_tests(
    decide: Decide,
    worlds: Worlds,
    generator: torch.Generator,
    *,
    num_draws: int,
    device: torch.device | str = "cpu",
    races: bool = False,
) -> Iterator[tuple[float, int, tuple[int, float, float]]]:
    """Draws N texts in every world and compares their counts with the target's law.

    Yields:
        For each world the p-value and the degrees of freedom, and of the text whose share is
        furthest from its probability the number, the share and the probability.
    """
    paths, laws = Paths(worlds, device=device), joint_law(worlds.target)
    for world, law in enumerate(laws):
        here = (paths.world == world).nonzero()[:, 0]
        picked = torch.multinomial(
            paths.weight[here], num_draws, replacement=True, generator=generator
        )
        codes = _texts(decide, paths, here[picked], generator, races)
        p_value, df = goodness_of_fit(Counter(codes.tolist()), dict(enumerate(law.tolist())))
        share = torch.bincount(codes, minlength=len(law)) / num_draws
        worst = (share - law).abs().argmax().item()
        yield p_value, df, (worst, share[worst].item(), law[worst].item())


def _texts(
    decide: Decide, paths: Paths, rows: Tensor, generator: torch.Generator, races: bool
) -> Tensor:
    """`[N]` numbers, in base V, of the texts that rounds over these rows of paths lead to."""
    worlds = paths.worlds
    count, width, vocab = len(rows), worlds.num_draft_tokens, worlds.vocab_size
    accept = torch.rand(count, width, dtype=torch.float64, generator=generator)
    extra = random_extra(count, vocab, races, generator)
    verdict = paths.runner(decide, rows)(accept, extra)
    code, world = torch.zeros(count, dtype=torch.long), paths.world[rows]
    for place, level in enumerate(worlds.target):
        own = torch.multinomial(level[world, code], 1, generator=generator)[:, 0]
        emitted = verdict.tokens[:, place]
        token = torch.where(place <= verdict.num_accepted, emitted, own)
        code = code * vocab + token
    return code
