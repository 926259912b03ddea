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
from specdec.certify.sampler.enumeration import ExtraDraws, joint_law
from specdec.certify.sampler.paths import Decide, Paths
from specdec.certify.sampler.worlds import Worlds


def draw_tests(
    decide: Decide,
    worlds: Worlds,
    generator: torch.Generator,
    *,
    num_draws: int,
    device: torch.device | str = "cpu",
    draws: ExtraDraws,
) -> Iterator[tuple[float, int, tuple[int, float, float]]]:
    """Draws N texts in every world and compares their counts with the target's law.

    Yields:
        For each world the p-value and the degrees of freedom, and of the text whose share is
        furthest from its probability the number, the share and the probability.
    """
    paths, laws = Paths(worlds, device=device), joint_law(worlds.target)
    for world, law in enumerate(laws):
        here = (paths.world == world).nonzero()[:, 0]
        picked = paths.weight[here].multinomial(num_draws, replacement=True, generator=generator)
        codes = _texts(decide, paths, here[picked], generator, draws)
        p_value, df = goodness_of_fit(Counter(codes.tolist()), dict(enumerate(law.tolist())))
        share = torch.bincount(codes, minlength=len(law)) / num_draws
        worst = (share - law).abs().argmax().item()
        yield p_value, df, (worst, share[worst].item(), law[worst].item())


def _texts(
    decide: Decide, paths: Paths, rows: Tensor, generator: torch.Generator, draws: ExtraDraws
) -> Tensor:
    """`[N]` numbers, in base V, of the texts that rounds over these rows of paths lead to."""
    worlds, vocab = paths.worlds, paths.worlds.vocab_size
    shape = len(rows), worlds.num_draft_tokens
    accept = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
    extra = draws.random(len(rows), vocab, generator)
    verdict = paths.runner(decide, rows)(accept, extra)
    code, world = torch.zeros_like(rows), paths.world[rows]
    for place, level in enumerate(worlds.target):
        own = torch.multinomial(level[world, code], 1, generator=generator)[:, 0]
        is_emitted = place <= verdict.num_accepted
        code = code * vocab + torch.where(is_emitted, verdict.tokens[:, place], own)
    return code
