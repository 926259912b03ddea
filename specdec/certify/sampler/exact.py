"""`certify_sampler`: tries a sampler on all worlds, and says what it found."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.certify.foreign import ForeignSampler
from specdec.certify.sampler.enumeration import find_flips, joint_law, mispredictions
from specdec.certify.sampler.races import find_races, wrong_winners
from specdec.certify.sampler.worlds import Worlds, standard_worlds
from specdec.samplers import Sampler, draw_by_race

Sizes = tuple[tuple[int, int, int], ...]
SIZES: Sizes = ((4, 1, 24), (4, 2, 18), (2, 3, 12), (3, 3, 18))
FOREIGN_SIZES: Sizes = ((3, 1, 6), (2, 2, 6), (3, 2, 2))
"""(V, K, W) of the batches that are tried; fewer where a sampler runs row by row."""

MOST_CELLS = 10**6
"""Worlds x texts x patterns of uniforms; some minutes of work."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Failure:
    """Something that a lossless sampler does not do.

    Args:
        kind: `"law"`: a text does not have its probability. `"zero"`: a text of probability 0 is
            emitted, if only at a single value of a uniform. `"decision"`: at random noise the
            sampler does something else than its own flips predict, so that it uses its noise in a
            way that cannot be enumerated, or draws that are not its own.
        size: how far off, to tell the worst.
        text: what, and where.
    """

    kind: str
    size: float
    text: str


@dataclass
class SamplerReport:
    """What exact enumeration found.

    Attributes:
        name: of the sampler.
        tolerance: for `deviation`.
        deviation: largest difference between the probability of a text of K + 1 tokens and the
            target's (for a race: of a token given its context).
        total_variation: largest between the laws of such texts and the target's.
        num_worlds: contexts tried.
        num_paths: drafted paths tried.
        failures: empty for a lossless sampler.
    """

    name: str
    tolerance: float
    deviation: float = 0.0
    total_variation: float = 0.0
    num_worlds: int = 0
    num_paths: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Nothing was found."""
        return not self.failures

    def __str__(self) -> str:
        lines = [
            f"{'PASS' if self.passed else 'FAIL'}  {self.name}: exact law over {self.num_worlds} "
            f"worlds, {self.num_paths} drafted paths",
            f"      deviation {self.deviation:.1e} (tolerance {self.tolerance:.0e}), "
            f"total variation {self.total_variation:.1e}",
        ]
        for kind in dict.fromkeys(failure.kind for failure in self.failures):
            found = [failure for failure in self.failures if failure.kind == kind]
            worst = max(found, key=lambda failure: failure.size)
            lines.append(f"      {kind}, {len(found)} times, worst: {worst.text}")
        return "\n".join(lines)


def certify_sampler(
    sampler: Sampler,
    *,
    sizes: Sizes | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    progress: Callable[[list], Iterable] = iter,
) -> SamplerReport:
    """Finds the exact law of a sampler on small worlds and compares it with the target's.

    Args:
        sampler: a `Sampler`; wrap a foreign rule as `ForeignSampler`.
        sizes: (vocabulary, draft tokens, worlds) of each batch; work grows with
            vocabulary ** draft tokens. `None` is `SIZES`, or `FOREIGN_SIZES`.
        device: where it runs.
        dtype: float64, or float32 with a tolerance for its rounding.
        progress: wraps the list of batches, `tqdm` for instance.

    Raises:
        ValueError: another dtype, or sizes too large to enumerate.
    """
    if dtype not in TOLERANCE:
        raise ValueError(f"dtype must be torch.float64 or torch.float32, got {dtype}")
    name = sampler.name if isinstance(sampler, ForeignSampler) else type(sampler).__name__
    report = SamplerReport(name, TOLERANCE[dtype])
    sizes = sizes or (FOREIGN_SIZES if isinstance(sampler, ForeignSampler) else SIZES)
    for vocab, num_draft_tokens, num_worlds in sizes:
        _check_size(vocab, num_draft_tokens, num_worlds)
    is_race = sampler.draw_draft is draw_by_race
    examine = _examine_race if is_race else _examine_chances
    for worlds in progress(list(standard_worlds(sizes, dtype=dtype))):
        report.num_worlds += len(worlds)
        examine(sampler, worlds, report, device)
    return report


def _check_size(vocab: int, num_draft_tokens: int, num_worlds: int) -> None:
    """Refuses what cannot be enumerated: each text of K + 1 tokens has a probability, and each
    pattern of accepting uniforms a row.
    """
    if vocab < 2 or num_draft_tokens < 0 or num_worlds < 1:
        raise ValueError(
            "sizes are (vocabulary >= 2, draft tokens >= 0, worlds >= 1), got "
            f"{(vocab, num_draft_tokens, num_worlds)}"
        )
    cells = vocab ** (num_draft_tokens + 1) * 2**num_draft_tokens * num_worlds
    if cells > MOST_CELLS:
        raise ValueError(
            f"{num_worlds} worlds of {vocab} ids and {num_draft_tokens} draft tokens have "
            f"{cells:.3g} cells to enumerate; the most is {MOST_CELLS:.0e}"
        )


def _examine_chances(
    sampler: Sampler, worlds: Worlds, report: SamplerReport, device: torch.device | str
) -> None:
    """A sampler that accepts and resamples by uniforms."""
    flips = find_flips(sampler, worlds, device=device)
    wrong = mispredictions(sampler, flips, torch.Generator().manual_seed(0))
    law, target = flips.completed_law(), joint_law(worlds.target)
    report.num_paths += len(flips.paths)
    if len(wrong):
        row = wrong[0]
        tokens = _ids(flips.paths.tokens[row])
        where = f"draft {tokens} of {worlds.describe(int(flips.paths.world[row]))}"
        report.failures.append(_undecided(len(wrong), where))

    def describe(world: int, code: int, length: int, of: str) -> str:
        digits = [code // worlds.vocab_size**i % worlds.vocab_size for i in range(length)]
        return f"text {tuple(reversed(digits))}{of} of {worlds.describe(world)}"

    _compare(report, law, target, lambda w, code: describe(w, code, len(worlds.target), ""))
    for n in range(1, len(worlds.target) + 1):
        emitted = flips.emitted(n).flatten(1)
        is_impossible = joint_law(worlds.target[:n]) == 0
        for world, code in (is_impossible & (emitted > 0)).nonzero()[:1].tolist():
            chance = emitted[world, code].item()
            text = describe(world, code, n, f", impossible, emitted with chance {chance:.2g},")
            report.failures.append(Failure("zero", chance, text))


def _examine_race(
    sampler: Sampler, worlds: Worlds, report: SamplerReport, device: torch.device | str
) -> None:
    """A sampler that races."""
    races = find_races(sampler, worlds, device=device)
    wrong = wrong_winners(sampler, races, torch.Generator().manual_seed(0))
    paths, is_reached = races.paths, races.is_reached
    report.num_paths += len(paths)
    row, place = is_reached.nonzero(as_tuple=True)

    def describe(at: int, token: int) -> str:
        context = _ids(paths.tokens[row[at], : place[at]])
        return f"token {token} behind {context} of {worlds.describe(int(paths.world[row[at]]))}"

    if len(wrong):
        tokens = _ids(paths.tokens[wrong[0]])
        where = f"draft {tokens} of {worlds.describe(int(paths.world[wrong[0]]))}"
        report.failures.append(_undecided(len(wrong), where))
    law, target = races.law[is_reached], races.target()[is_reached]
    _compare(report, law, target, describe)
    for at, token in ((target == 0) & (law > 0)).nonzero()[:1].tolist():
        text = f"{describe(at, token)} is impossible and can win"
        report.failures.append(Failure("zero", law[at, token].item(), text))


def _compare(
    report: SamplerReport, law: Tensor, target: Tensor, describe: Callable[[int, int], str]
) -> None:
    """Laws `[N, cells]` against the target's."""
    off = (law - target).abs().nan_to_num(nan=torch.inf)
    report.deviation = max(report.deviation, off.max().item())
    report.total_variation = max(report.total_variation, off.sum(dim=1).max().item() / 2)
    if off.max() > report.tolerance:
        at, code = divmod(off.argmax().item(), off.shape[1])
        text = (
            f"{describe(at, code)} has probability {law[at, code]:.6g}, "
            f"the target gives {target[at, code]:.6g}"
        )
        report.failures.append(Failure("law", off.max().item(), text))


def _undecided(count: int, where: str) -> Failure:
    text = f"{count} rows at random noise are not what bisection predicts, the first is {where}"
    return Failure("decision", count, text)


def _ids(tokens: Tensor) -> tuple[int, ...]:
    return tuple(token for token in tokens.tolist() if token >= 0)
