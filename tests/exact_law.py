"""What tests of exact laws need on top of `specdec.lab.certificates`, which has the method."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from warpers import by_row, huggingface_law

from specdec.lab.certificates.sampler.enumeration import (
    Flips,
    find_flips,
    joint_law,
    mispredictions,
)
from specdec.lab.certificates.sampler.problems import Problems
from specdec.lab.certificates.sampler.problems import random_problems as draw_problems
from specdec.lab.certificates.sampler.races import find_races, wrong_winners
from specdec.samplers import draw_by_race
from specdec.types import Verdict


def random_problems(size: tuple[int, int, int], seed: int, kind: str = "soft") -> Problems:
    """Toy problems of a size (V, K, W), without a filter; see `certificates.sampler.problems`."""
    return draw_problems(*size, torch.Generator().manual_seed(seed), kind=kind)


def filtered(problems: Problems, filters: list[dict]) -> Problems:
    """The same problems with one filter each; the laws that they should have are HF's."""
    levels = [
        [huggingface_law(x, options) for x, options in zip(level, filters, strict=True)]
        for level in problems.logits
    ]
    return replace(
        problems, logits_filter=by_row(filters), target=[torch.stack(level) for level in levels]
    )


def emitted(flips: Flips, length: int) -> Tensor:
    """`[W, V**(length - 1), V]`: probability that a round emits at least so many tokens, and begins
    with these.
    """
    paths, vocab = flips.paths, flips.extra.shape[-1]
    law = torch.zeros(len(paths.problems), vocab ** (length - 1), vocab, dtype=torch.float64)
    ends, goes_on = flips.num_accepted == length - 1, flips.num_accepted >= length
    row = flips.row[ends]
    place = paths.problem[row], paths.prefix[row, flips.path[ends, length - 1]]
    law.index_put_(place, flips.weight[ends, None] * flips.extra[ends], accumulate=True)
    if goes_on.any():
        row = flips.row[goes_on]
        place = paths.problem[row], paths.prefix[row, flips.path[goes_on, length]]
        law.flatten(1).index_put_(place, flips.weight[goes_on], accumulate=True)
    return law


def law_error(sampler: Callable[..., Verdict], problems: Problems, target: list[Tensor]) -> float:
    """Largest deviation of the sampler's completed one-round law from the target's joint law."""
    law = find_flips(sampler, replace(problems, target=target)).completed_law()
    return (law - joint_law(target)).abs().max().item()


def assert_lossless(
    sampler: Callable[..., Verdict],
    problems: Problems,
    seed: int,
    *,
    is_race: bool | None = None,
    tolerance: float = 1e-12,
) -> None:
    """The sampler's law is the target's, and it does what its law was read from."""
    generator = torch.Generator().manual_seed(seed)
    if is_race is None:
        is_race = sampler.draw_draft is draw_by_race
    if is_race:
        races = find_races(sampler, problems)
        assert not len(wrong_winners(sampler, races, generator))
        law, expected = races.law[races.is_reached], races.target()[races.is_reached]
    else:
        flips = find_flips(sampler, problems)
        assert not len(mispredictions(sampler, flips, generator))
        law, expected = flips.completed_law(), joint_law(problems.target)
    torch.testing.assert_close(law, expected, rtol=0, atol=tolerance)
