"""`certify_sampler`: tries a sampler on all worlds."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.arguments import check_choice, check_device, check_integer, check_number
from specdec.certify.chisquare import detectable_variation
from specdec.certify.foreign import ForeignBatchSampler, ForeignSampler
from specdec.certify.sampler.draws import draw_tests
from specdec.certify.sampler.enumeration import find_flips, joint_law, mispredictions
from specdec.certify.sampler.paths import Paths
from specdec.certify.sampler.races import find_races, wrong_winners
from specdec.certify.sampler.worlds import Worlds, standard_worlds
from specdec.samplers import Sampler, draw_by_race
from specdec.samplers.base import check_sampler

Sizes = tuple[tuple[int, int, int], ...]
SIZES: Sizes = ((4, 1, 36), (4, 2, 24), (2, 3, 18), (3, 3, 18))
FOREIGN_SIZES: Sizes = ((3, 1, 6), (2, 2, 6), (3, 2, 2))
"""(V, K, W) of the batches that are tried; fewer where a rule runs row by row."""

TREES = ((-1, -1, 1), (-1, 0, 0, -1), (-1, -1, 0, 1))
"""Shapes that rules for trees are tried on, besides."""

NUM_DRAWS, NUM_FOREIGN_DRAWS = 16384, 1024
"""Texts per world, where a sampler has to be tested by draws."""

MOST_CELLS = 10**6
"""Worlds x texts x patterns of uniforms; some minutes of work."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


@dataclass(frozen=True)
class Failure:
    """Something that a lossless sampler does not do.

    Args:
        kind: `"law"`: a text does not have its probability. `"zero"`: a text of probability 0 is
            emitted, if only at a single value of a uniform. `"decision"`: a race whose winner is
            not the one that its own law predicts. `"draws"`: many texts that were drawn have
            another law.
        size: how far off; the largest is reported.
        text: what, and where.
    """

    kind: str
    size: float
    text: str


@dataclass(frozen=True)
class DrawnEvidence:
    """Why a sampler was tested by draws, and what these could see.

    Args:
        reason: why its law could not be enumerated.
        num_draws: texts per world.
        p_value: the smallest.
        threshold: what no p-value must fall below.
        false_alarm: chance that a lossless sampler fails one of the tests.
        detectable: total variation in a world that is detected with 99 % power.
    """

    reason: str
    num_draws: int
    p_value: float
    threshold: float
    false_alarm: float
    detectable: float


@dataclass
class SamplerReport:
    """What exact enumeration found, or what tests by draws found where that is inconclusive.

    Attributes:
        name: of the sampler.
        tolerance: for `deviation`.
        deviation: largest difference between the probability of a text of K + 1 tokens and the
            target's (for a race: of a token given its context).
        total_variation: largest between the laws of such texts and the target's.
        num_worlds: contexts tried.
        num_paths: drafted paths tried.
        failures: empty for a lossless sampler.
        drawn: `None` if the law was enumerated; else the verdict is that of tests by draws, and
            `deviation` and `total_variation` are NaN.
    """

    name: str
    tolerance: float
    deviation: float = 0.0
    total_variation: float = 0.0
    num_worlds: int = 0
    num_paths: int = 0
    failures: list[Failure] = field(default_factory=list)
    drawn: DrawnEvidence | None = None

    @property
    def passed(self) -> bool:
        """Nothing was found."""
        return not self.failures

    @property
    def is_exact(self) -> bool:
        """The verdict is about the law itself, not about draws from it."""
        return self.drawn is None

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        verdict = "PASS" if self.passed else "FAIL"
        if self.drawn is None:
            lines = [
                f"{verdict}  {self.name}: exact law over {self.num_worlds} worlds, "
                f"{self.num_paths} drafted paths",
                f"      deviation {self.deviation:.1e} (tolerance {self.tolerance:.0e}), "
                f"total variation {self.total_variation:.1e}",
            ]
        else:
            drawn = self.drawn
            lines = [
                f"{verdict}  {self.name}: by draws, {drawn.num_draws} texts in each of "
                f"{self.num_worlds} worlds",
                f"      enumeration is inconclusive: {drawn.reason}",
                f"      smallest p-value {drawn.p_value:.1e} (threshold {drawn.threshold:.0e}, "
                f"false alarm {drawn.false_alarm:.0e} over all tests), detectable TV "
                f"{drawn.detectable:.3f} (99 % power)",
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
    trees: tuple[tuple[int, ...], ...] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    num_draws: int | None = None,
    false_alarm: float = 1e-6,
    progress: Callable[[list], Iterable] = iter,
) -> SamplerReport:
    """Finds the exact law of a sampler on small worlds and compares it with the target's.

    Enumeration takes decisions to be thresholds: a draft token is accepted where its uniform is
    small, and the extra token is chosen by another uniform. What a sampler does at random noise
    shows whether they are. If not, enumeration is *inconclusive*, and the sampler is tested by
    draws instead: many texts in each world, against the target's law.

    Args:
        sampler: a `Sampler`; wrap a foreign rule as `ForeignSampler` or `ForeignBatchSampler`.
        sizes: (vocabulary, draft tokens, worlds) of each batch; work grows with
            vocabulary ** draft tokens. `None` is `SIZES`, or `FOREIGN_SIZES`.
        trees: parents of the nodes of each shape, see `Draft.parents`, with vocabulary and worlds
            of the last size. `None` is `TREES` without `sizes`, for a rule that takes trees.
        device: where it runs.
        dtype: float64, or float32 with a tolerance for its rounding.
        num_draws: texts per world of the tests by draws; `None` is `NUM_DRAWS`, or
            `NUM_FOREIGN_DRAWS`.
        false_alarm: chance that the tests by draws fail a lossless sampler.
        progress: wraps the list of batches, `tqdm` for instance.

    Raises:
        ValueError: another dtype, sizes or trees too large to enumerate, a number out of range, or
            trees for a rule that does not take them.
    """
    check_choice("dtype", dtype, TOLERANCE)
    check_sampler(sampler)
    device = check_device("device", device)
    is_foreign = isinstance(sampler, ForeignBatchSampler)
    is_slow = isinstance(sampler, ForeignSampler)
    if num_draws is None:
        num_draws = NUM_FOREIGN_DRAWS if is_slow else NUM_DRAWS
    check_integer("num_draws", num_draws, 1)
    check_number("false_alarm", false_alarm, above=0, below=1)
    name = sampler.name if is_foreign else type(sampler).__name__
    rounding = sampler.tolerance if is_foreign else 0.0
    report = SamplerReport(name, max(TOLERANCE[dtype], rounding))
    is_race = sampler.draw_draft is draw_by_race
    if trees is None:
        trees = TREES if sizes is None and sampler.takes_trees else ()
    if sizes is None:
        sizes = FOREIGN_SIZES if is_slow else SIZES
    _check_sizes(sizes, trees)
    if trees and not sampler.takes_trees:
        raise ValueError(f"{name} verifies chains (takes_trees is False); pass no trees")
    batches = list(standard_worlds(sizes, trees, dtype=dtype))
    for worlds in progress(batches):
        report.num_worlds += len(worlds)
        try:
            examine = _examine_race if is_race else _examine_chances
            reason = examine(sampler, worlds, report, device)
        except (RuntimeError, IndexError) as error:  # torch's own, which name no world
            raise RuntimeError(
                f"{name} fails on {worlds.describe(0)}: {error}; if it needs a larger vocabulary, "
                "pass sizes= with such only, for instance sizes=((4, 2, 18),)"
            ) from error
        if reason is not None:
            tests = progress(batches)
            return _examine_draws(sampler, tests, report, reason, num_draws, false_alarm, device)
    return report


def _examine_draws(
    sampler: Sampler,
    batches: Iterable[Worlds],
    report: SamplerReport,
    reason: str,
    num_draws: int,
    false_alarm: float,
    device: torch.device,
) -> SamplerReport:
    """Any sampler, whatever it does with its noise; what enumeration said of it is dropped."""
    generator = torch.Generator().manual_seed(0)
    options = {"num_draws": num_draws, "device": device, **_noise_of(sampler, ("races",))}
    tests = [
        (worlds, world, *test)
        for worlds in batches
        for world, test in enumerate(draw_tests(sampler, worlds, generator, **options))
    ]
    threshold, failures = false_alarm / len(tests), []
    for worlds, world, p_value, _, (code, share, law) in tests:
        if p_value < threshold:
            text = (
                f"{_text(worlds, code, len(worlds.target))} of {worlds.describe(world)} has "
                f"share {share:.4f}, the target gives {law:.4f} (p-value {p_value:.1e})"
            )
            failures.append(Failure("draws", abs(share - law), text))
    p_value, most = min(test[2] for test in tests), max(test[3] for test in tests)
    resolution = detectable_variation(num_draws, most, threshold)
    evidence = DrawnEvidence(reason, num_draws, p_value, threshold, false_alarm, resolution)
    report.deviation = report.total_variation = math.nan
    report.num_worlds, report.failures, report.drawn = len(tests), failures, evidence
    return report


def _check_sizes(sizes: Sizes, trees: Sequence[tuple[int, ...]]) -> None:
    """Refuses what cannot be enumerated: each text of K + 1 tokens has a probability, and each
    pattern of accepting uniforms a row.
    """
    if not sizes:
        raise ValueError("sizes must be (vocabulary, draft tokens, worlds) of a batch or more")
    for parents in trees:
        for node, parent in enumerate(parents):
            check_integer(f"the parent of node {node} in trees", parent, -1, node - 1)
    of_trees = [(sizes[-1][0], len(parents), sizes[-1][2]) for parents in trees]
    for vocab, num_draft_tokens, num_worlds in (*sizes, *of_trees):
        check_integer("a vocabulary in sizes", vocab, 2)
        check_integer("a number of draft tokens in sizes", num_draft_tokens, 0)
        check_integer("a number of worlds in sizes", num_worlds, 1)
        cells = vocab ** (num_draft_tokens + 1) * 2**num_draft_tokens * num_worlds
        if cells > MOST_CELLS:
            raise ValueError(
                f"{num_worlds} worlds of {vocab} ids and {num_draft_tokens} draft tokens have "
                f"{cells:.3g} cells to enumerate; the most is {MOST_CELLS:.0e}"
            )


def _examine_chances(
    sampler: Sampler, worlds: Worlds, report: SamplerReport, device: torch.device | str
) -> str | None:
    """A sampler that accepts and resamples by uniforms; returns why enumeration is inconclusive,
    or `None`.
    """
    flips = find_flips(sampler, worlds, device=device, **_noise_of(sampler))
    wrong = mispredictions(sampler, flips, torch.Generator().manual_seed(0))
    law, target = flips.completed_law(), joint_law(worlds.target)
    report.num_paths += len(flips.paths)
    if len(wrong):
        return f"decisions are no thresholds of uniforms ({_undecided(flips.paths, wrong)})"

    def describe(world: int, code: int, length: int = len(worlds.target), of: str = "") -> str:
        return f"{_text(worlds, code, length)}{of} of {worlds.describe(world)}"

    _compare(report, law, target, describe)
    above_zero = flips.above_zero()
    for n in range(1, len(worlds.target) + 1):
        emitted = flips.emitted(n).flatten(1)
        is_impossible = joint_law(worlds.target[:n]) == 0
        for world, code in (is_impossible & (emitted > 0)).nonzero()[:1].tolist():
            chance = emitted[world, code].item()
            at_zero = not above_zero.emitted(n).flatten(1)[world, code] > 0
            when = "at u = 0" if at_zero else f"with chance {chance:.2g}"
            text = describe(world, code, n, f", impossible, emitted {when},")
            report.failures.append(Failure("zero", chance, text))
    return None


def _noise_of(sampler: Sampler, names: tuple[str, ...] = ("races", "bits")) -> dict[str, int]:
    """What a foreign rule says of the noise that it takes."""
    is_foreign = isinstance(sampler, ForeignBatchSampler)
    return {name: getattr(sampler, name) for name in names} if is_foreign else {}


def _examine_race(
    sampler: Sampler, worlds: Worlds, report: SamplerReport, device: torch.device | str
) -> None:
    """A sampler that races."""
    races = find_races(sampler, worlds, device=device)
    wrong = wrong_winners(sampler, races, torch.Generator().manual_seed(0))
    paths, is_reached = races.paths, races.is_reached
    report.num_paths += len(paths)
    row, index = is_reached.nonzero(as_tuple=True)

    def describe(at: int, token: int) -> str:
        context = _text(worlds, int(paths.prefix[row[at], index[at]]), paths.depths[index[at]])
        return f"token {token} behind {context} of {worlds.describe(int(paths.world[row[at]]))}"

    if len(wrong):
        report.failures.append(Failure("decision", len(wrong), _undecided(paths, wrong)))
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
        size = off.max().item()
        text = (
            f"{describe(at, code)} has probability {law[at, code]:.6g}, "
            f"the target gives {target[at, code]:.6g}: {size:.1e} apart"
        )
        if size <= TOLERANCE[torch.float32]:
            text += ", as much as rounding to float32; dtype=torch.float32 allows for it"
        report.failures.append(Failure("law", size, text))


def _undecided(paths: Paths, rows: Tensor) -> str:
    return (
        f"{len(rows)} rows at random noise are not what bisection predicts, the first is "
        f"{paths.describe(rows[0])}"
    )


def _text(worlds: Worlds, code: int, length: int) -> str:
    digits = [code // worlds.vocab_size**i % worlds.vocab_size for i in range(length)]
    return f"text {tuple(reversed(digits))}"
