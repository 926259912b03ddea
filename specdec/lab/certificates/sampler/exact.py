"""`certify_sampler`: tries a sampler on all problems."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import (
    check_choice,
    check_device,
    check_function,
    check_integer,
    check_number,
    plain_numbers,
    shown,
)
from specdec.lab.certificates.bar import BAR
from specdec.lab.certificates.chisquare import detectable_variation
from specdec.lab.certificates.foreign import ForeignBatchSampler, ForeignSampler, is_declared_lossy
from specdec.lab.certificates.sampler.drafting import examine_draft_law, looks_ahead, num_lists_of
from specdec.lab.certificates.sampler.draws import draw_tests, own_noise_tests
from specdec.lab.certificates.sampler.enumeration import (
    ExtraDraws,
    Flips,
    find_flips,
    joint_law,
    mispredictions,
)
from specdec.lab.certificates.sampler.optimum import most_accepted
from specdec.lab.certificates.sampler.paths import Decide, Paths
from specdec.lab.certificates.sampler.problems import Problems, standard_problems
from specdec.lab.certificates.sampler.races import Races, find_races, late_lists, wrong_winners
from specdec.lab.certificates.sampler.report import DrawnEvidence, Failure, SamplerReport
from specdec.lab.certificates.sampler.rows import NUM_ROWS, NUM_SLOW_ROWS, Companions
from specdec.lab.certificates.sampler.state import changed_by_a_call
from specdec.lab.certificates.sampler.wider import PATHS as WIDER_PATHS
from specdec.lab.certificates.sampler.wider import TREE, OutsideError, wider_problems
from specdec.samplers import Noise, Sampler, draw_by_race
from specdec.samplers.check import check_sampler
from specdec.samplers.paths import PathSampler
from specdec.samplers.scripted import NotScriptedError
from specdec.settings import called

Sizes = tuple[tuple[int, int, int], ...]
SIZES: Sizes = ((4, 1, 36), (4, 2, 24), (2, 3, 18), (3, 3, 18))
FOREIGN_SIZES: Sizes = ((3, 1, 6), (2, 2, 6), (3, 2, 2))
"""(V, K, W) of the batches that are tried; fewer where a rule runs row by row."""

TREES = ((-1, -1, 1), (-1, 0, 0, -1), (-1, -1, 0, 1))
"""Shapes that rules for trees are tried on, besides."""

PATHS = ((3, 1), (2, 2))
"""Independent paths (how many, of how many tokens) that they are tried on, too."""

NUM_DRAWS, NUM_FOREIGN_DRAWS = 16384, 1024
"""Texts per problem, where a sampler has to be tested by draws."""

MOST_CELLS = 10**6
"""Problems x texts x patterns of uniforms; some minutes of work."""

MOST_COLUMNS = 40
"""Tokens of a table that is printed."""

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def certify_sampler(
    sampler: Sampler,
    *,
    sizes: Sizes | None = None,
    trees: tuple[tuple[int, ...], ...] | None = None,
    paths: tuple[tuple[int, int], ...] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    num_draws: int | None = None,
    false_alarm: float = 1e-6,
    progress: Callable[[list], Iterable] = BAR,
) -> SamplerReport:
    """Finds the exact distribution of a sampler on toy problems and compares it with the target's.

    Enumeration takes decisions to be thresholds: a draft token is accepted where its uniform is
    small, and the extra token is chosen by another uniform. What a sampler does at random noise
    shows whether they are. If not, enumeration is *inconclusive*, and the sampler is tested by
    draws instead: many texts in each problem, against the target's distribution.

    A rule that passes is enumerated in larger vocabularies, and with logits of other types, too.
    No call may change a rule, nor a row's place in a batch a verdict.

    Args:
        sampler: a `Sampler`; wrap a foreign rule as `ForeignSampler` or `ForeignBatchSampler`.
        sizes: (vocabulary, draft tokens, problems) of each batch; work grows with
            vocabulary ** draft tokens. `None` is `SIZES`, or `FOREIGN_SIZES`.
        trees: parents of the nodes of each shape, see `Draft.parents`, with vocabulary and problems
            of the last size. `None` is `TREES` without `sizes`, for a rule that takes trees.
        paths: numbers of independent paths and of their tokens, see `PathDraft`; likewise,
            `None` is `PATHS` without `sizes` and `trees`.
        device: where it runs.
        dtype: float64, or float32 with a tolerance for its rounding.
        num_draws: texts per problem of the tests by draws; `None` is `NUM_DRAWS`, or
            `NUM_FOREIGN_DRAWS`.
        false_alarm: chance that the tests by draws fail a lossless sampler.
        progress: wraps the list of batches; `BAR` shows long calls on terminals, `iter` nothing.

    Raises:
        TypeError: no sampler, or its class; sizes, trees or paths that are no lists of numbers.
        ValueError: another dtype, sizes or trees too large to enumerate, a number out of range, or
            trees or paths for a rule that does not take them.
    """
    check_choice("dtype", dtype, TOLERANCE)
    check_sampler(sampler)
    device = check_device("device", device)
    is_foreign, is_slow = (isinstance(sampler, c) for c in (ForeignBatchSampler, ForeignSampler))
    if num_draws is None:
        num_draws = NUM_FOREIGN_DRAWS if is_slow else NUM_DRAWS
    check_integer("num_draws", num_draws, 1)
    check_number("false_alarm", false_alarm, above=0, below=1)
    check_function("progress", progress, "one that wraps a list, such as tqdm")
    name = sampler.name if is_foreign else called(sampler.settings())
    is_usual = sizes is None and sampler.takes_trees
    if paths is None:
        paths = PATHS if is_usual and trees is None else ()
    if trees is None:
        trees = TREES if is_usual and not isinstance(sampler, PathSampler) else ()
    if sizes is None:
        sizes = FOREIGN_SIZES if is_slow else SIZES
    sizes, trees, paths = _shapes(sizes, trees, paths)
    _check_sizes(sizes, trees, paths)
    if (trees or paths) and not sampler.takes_trees:
        raise ValueError(f"{name} verifies chains (takes_trees is False); pass no trees")
    if trees and isinstance(sampler, PathSampler):
        raise ValueError(f"{name} verifies independent paths; pass paths=((2, 3),), and no trees")
    draws, rounding = ExtraDraws(), 0.0
    if is_foreign:
        draws, rounding = ExtraDraws(sampler.bits, sampler.races), sampler.tolerance
    tolerance, is_lossy = max(TOLERANCE[dtype], rounding), is_declared_lossy(sampler)
    report = SamplerReport(name, tolerance, is_declared_lossy=is_lossy)
    batches = list(standard_problems(sizes, trees, paths, dtype=dtype))
    by_draws = {"num_draws": num_draws, "device": device}
    by_draws["generator"] = _generator()

    def drawn(test: Callable, batches: list[Problems], reason: str) -> SamplerReport:
        tests = [
            (problems, problem, *found)
            for problems in progress(batches)
            for problem, found in enumerate(test(sampler, problems, **by_draws))
        ]
        return _report_of_draws(report, reason, tests, num_draws, false_alarm)

    chains = [each for each in batches if each.is_chain and each.name == "soft drafts"]
    if sampler.noise_type is not Noise:
        _examine_state(report, sampler, chains[0], device)
        return drawn(
            own_noise_tests,
            chains,
            f"its numbers are those of {sampler.noise_type.__name__}, a noise_type of its own, "
            "which enumeration cannot script",
        )
    options = {"tolerance": tolerance, "num_draws": num_draws, "false_alarm": false_alarm}
    found = examine_draft_law(sampler, sizes[-1][0], dtype=dtype, device=device, **options)
    report.draft_law = found.says
    if not found.is_honest:
        report.failures.append(Failure("draft", found.size, found.says))
    num_lists = int(sampler.draw_draft is draw_by_race)
    most = NUM_SLOW_ROWS if is_slow else NUM_ROWS
    options = {"draws": draws, "device": device}
    for number, problems in enumerate(progress(batches)):
        report.num_problems += len(problems)
        try:
            _examine_state(report, sampler, problems, device)
            num_lists = max(num_lists, num_lists_of(sampler, problems, device))
            reason, flips = _examine_law(report, sampler, problems, num_lists, **options)
            if reason is None and flips is not None and report.passed:
                accepted = flips.mean_accepted, most_accepted(flips.paths)
                report.accepted.append((problems, *accepted))
            if report.passed or problems is batches[0]:
                company = Companions(
                    sampler, problems, _generator(), num_lists=num_lists, num_rows=most, **options
                )
                is_thorough = problems.is_chain and problems.num_draft_tokens < 3
                if (stray := company.strays(number, is_thorough=is_thorough)) is not None:
                    report.failures.append(Failure(stray[0], 1.0, stray[1]))
        except NotScriptedError as error:
            reason = f"it decides by numbers of its own ({error.asked})"
            if found.names:
                reason += ", and has its drafts drawn by such; chains of soft drafts were tried"
                return drawn(own_noise_tests, chains, reason)
        except (RuntimeError, IndexError) as error:  # torch's own, which name no problem
            raise RuntimeError(
                f"{name} fails on {problems.describe(0)}: {error}; if it needs a larger "
                "vocabulary, pass sizes= with such only, for instance sizes=((4, 2, 18),)"
            ) from error
        if reason is not None:  # what enumeration said is dropped
            return drawn(partial(draw_tests, draws=draws), batches, reason)
    if report.passed:
        size = {"vocab": sizes[-1][0], "width": sizes[-1][1], "dtype": dtype}
        size["parents"] = TREE if trees else WIDER_PATHS if paths else None
        _examine_further(report, sampler, size, num_lists=num_lists, is_slow=is_slow, **options)
    if num_lists > 1:
        ahead = looks_ahead(sampler, sizes[-1][0], num_lists, dtype=dtype, device=device)
        if ahead is not None:
            report.failures.append(Failure("draft", 1.0, ahead))
    return report


def _shapes(*given: Any) -> list[tuple[tuple, ...]]:
    """`sizes`, `trees` and `paths` as tuples of tuples, each of so many values as it says."""
    meant = {
        "sizes": ("(vocabulary, draft tokens, problems)", ((4, 1, 36),), 3),
        "trees": ("the parents of a tree's nodes", ((-1, 0, 0),), None),
        "paths": ("(paths, tokens of each)", ((3, 2),), 2),
    }
    found = []
    for (name, (what, example, count)), value in zip(meant.items(), given, strict=True):
        value = plain_numbers(value)
        is_table = isinstance(value, list | tuple) and all(
            isinstance(row, list | tuple) and len(row) == (len(row) if count is None else count)
            for row in value
        )
        if not is_table:
            raise TypeError(
                f"{name} must be a tuple of {what}, for instance {example}; got {shown(value)}"
            )
        found.append(tuple(map(tuple, value)))
    return found


def _check_sizes(sizes: Sizes, trees: Sequence[tuple[int, ...]], paths: Sequence) -> None:
    """Raises ValueError for sizes that cannot be enumerated: each text of K + 1 tokens has a
    probability, and each pattern of accepting uniforms a row.
    """
    if not sizes:
        raise ValueError("sizes must be (vocabulary, draft tokens, problems) of a batch or more")
    for parents in trees:
        for node, parent in enumerate(parents):
            check_integer(f"the parent of node {node} in trees", parent, -1, node - 1)
    for number in (number for shape in paths for number in shape):
        check_integer("a number in paths", number, 1)
    nodes = [*map(len, trees), *(count * depth for count, depth in paths)]
    of_trees = [(sizes[-1][0], count, sizes[-1][2]) for count in nodes]
    for vocab, num_draft_tokens, num_problems in (*sizes, *of_trees):
        check_integer("a vocabulary in sizes", vocab, 2)
        check_integer("a number of draft tokens in sizes", num_draft_tokens, 0)
        check_integer("a number of problems in sizes", num_problems, 1)
        cells = vocab ** (num_draft_tokens + 1) * 2**num_draft_tokens * num_problems
        if cells > MOST_CELLS:
            raise ValueError(
                f"{num_problems} problems of {vocab} ids and {num_draft_tokens} draft tokens have "
                f"{cells:.3g} cells to enumerate; the most is {MOST_CELLS:.0e}"
            )


def _examine_further(
    report: SamplerReport,
    sampler: Sampler,
    size: dict[str, Any],
    *,
    num_lists: int,
    is_slow: bool,
    device: torch.device | str,
    draws: ExtraDraws,
) -> None:
    """A sampler that passed, in a large vocabulary and with logits of other types."""
    found, tried = [], []
    options = {"tolerance": report.tolerance, "is_race": num_lists > 0, "is_slow": is_slow}
    for each in wider_problems(sampler, **size, **options):
        problems, into = each.problems, SamplerReport(report.name, each.tolerance)
        into.num_problems, reason = len(problems), None
        try:
            reason, _ = _examine_law(
                into, each.decide, problems, num_lists, draws=draws, device=device
            )
        except OutsideError as error:
            into.failures.append(Failure("zero", 1.0, f"{error} ({problems.describe(0)})"))
        except NotScriptedError as error:
            reason = f"it decides by numbers of its own there ({error.asked})"
        except (RuntimeError, IndexError) as error:  # torch's own, which name no problem
            raise RuntimeError(f"{report.name} fails on {problems.describe(0)}: {error}") from error
        if reason is not None:
            into.failures.append(Failure("decision", 1.0, reason))
        tried.append(each.what)
        found.append(into)
        if not into.passed:
            break  # a rule that has failed needs no more to fail by
    report.add_further(found, tried)


def _examine_state(
    report: SamplerReport, sampler: Sampler, problems: Problems, device: torch.device
) -> None:
    """What a sampler changes in itself from call to call; said once."""
    if any(failure.kind == "state" for failure in report.failures):
        return
    if (says := changed_by_a_call(sampler, problems, device)) is not None:
        report.failures.append(Failure("state", 1.0, says))


def _examine_law(
    report: SamplerReport, decide: Decide, problems: Problems, num_lists: int, **options: Any
) -> tuple[str | None, Flips | None]:
    """Enumerates a sampler on problems; why that is inconclusive, and, without races, its flips."""
    if num_lists:
        device = options["device"]
        races = find_races(decide, problems, num_lists=num_lists, device=device)
        _examine_race(report, races, decide)
        return None, None
    flips = find_flips(decide, problems, **options)
    return _examine_chances(report, flips, decide), flips


def _examine_chances(report: SamplerReport, flips: Flips, sampler: Sampler) -> str | None:
    """A sampler that accepts and resamples by uniforms; returns why enumeration is inconclusive,
    or `None`.
    """
    problems, wrong = flips.paths.problems, mispredictions(sampler, flips, _generator())
    report.num_paths += len(flips.paths)
    if len(wrong):
        return (
            "decisions are no thresholds: a draft token is not accepted just where its own uniform "
            f"is small, or the extra token not drawn by its own ({_undecided(flips.paths, wrong)})"
        )
    law, target = flips.completed_law(), joint_law(problems.target)
    length, vocab = len(problems.target), problems.vocab_size
    report.losses.append(_losses(law, problems))
    if (worst := _worst(report, law, target)) is not None:
        says, text = _apart(law[worst], target[worst]), problems.text_of(worst[1], length)
        accept, cause = _one_decision(flips, worst[0], report.tolerance)
        report.failures.append(_failure("law", *says, problems, worst[0], text, accept, cause))
    for n in range(1, length + 1):  # tokens of the shortest beginning that is impossible
        begins = law.view(len(problems), vocab**n, -1).sum(dim=-1)
        wrong = ((joint_law(problems.target[:n]) == 0) & (begins > 0)).nonzero()
        if len(wrong):
            problem, code = wrong[0].tolist()
            above_zero = flips.above_zero().completed_law()[problem].view(vocab**n, -1)[code].sum()
            chance, text = begins[problem, code].item(), problems.text_of(code, n)
            when = f"with chance {chance:.2g}" if above_zero > 0 else "at u = 0"
            says = f"is impossible, emitted {when}"
            report.failures.append(_failure("zero", chance, says, problems, problem, text))
            break
    return None


def _examine_race(report: SamplerReport, races: Races, sampler: Sampler) -> None:
    """A sampler that races."""
    paths, is_reached = races.paths, races.is_reached
    problems, wrong = paths.problems, wrong_winners(sampler, races, _generator())
    report.num_paths += len(paths)
    if len(wrong):
        report.failures.append(Failure("decision", len(wrong), _undecided(paths, wrong)))
    if len(late := late_lists(races)):
        says = (
            "which lists race at a position depends on draft tokens that the same races draw, or "
            f"later ones: {paths.describe(late[0])}"
        )
        report.failures.append(Failure("decision", len(late), says))
    law, target = races.law[is_reached], races.target()[is_reached]
    row, index = is_reached.nonzero(as_tuple=True)

    def add(kind: str, at: int, token: int, size: float, says: str) -> None:
        code, depth = int(paths.prefix[row[at], index[at]]), paths.depths[index[at]]
        text, problem = (*problems.text_of(code, depth), token), int(paths.problem[row[at]])
        report.failures.append(_failure(kind, size, f"ends so: {says}", problems, problem, text))

    if (worst := _worst(report, law, target)) is not None:
        add("law", *worst, *_apart(law[worst], target[worst]))
    for at, token in ((target == 0) & (law > 0)).nonzero()[:1].tolist():
        add("zero", at, token, law[at, token].item(), "the last token is impossible and can win")


def _report_of_draws(
    begun: SamplerReport, reason: str, tests: list, num_draws: int, false_alarm: float
) -> SamplerReport:
    """Of any sampler, whatever it does with its noise."""
    threshold = false_alarm / len(tests)
    p_value, most = min(test[2] for test in tests), max(test[3] for test in tests)
    resolution = detectable_variation(num_draws, most, threshold)
    evidence = DrawnEvidence(reason, num_draws, p_value, threshold, false_alarm, resolution)
    report = SamplerReport(
        begun.name,
        begun.tolerance,
        math.nan,
        math.nan,
        len(tests),
        drawn=evidence,
        draft_law=begun.draft_law,
        is_declared_lossy=begun.is_declared_lossy,
    )
    report.failures += [f for f in begun.failures if f.kind in ("draft", "rows", "ids", "state")]
    for problems, problem, p_value, _, (code, share, law) in tests:
        if p_value < threshold:
            says = (
                f"has {share:.4f} of the draws, the target gives {law:.4f} (p-value {p_value:.1e})"
            )
            text = problems.text_of(code, len(problems.target))
            report.failures.append(
                _failure("draws", abs(share - law), says, problems, problem, text)
            )
    return report


def _losses(law: Tensor, problems: Problems) -> Tensor:
    """`[W, K + 1]`: for each token of a completed text the total variation between its distribution
    and the target's given the tokens before it, in the mean over these.
    """
    losses, before = [], torch.ones(len(problems), 1, dtype=torch.float64, device="cpu")
    for level in problems.target:
        here = law.view(len(problems), level.shape[1] * problems.vocab_size, -1).sum(dim=-1)
        losses.append((here - (before[..., None] * level).flatten(1)).abs().sum(dim=1) / 2)
        before = here
    return torch.stack(losses, dim=1)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _worst(report: SamplerReport, law: Tensor, target: Tensor) -> tuple[int, int] | None:
    """Where distributions `[N, cells]` are furthest from the target's, beyond the tolerance."""
    off = (law - target).abs().nan_to_num(nan=torch.inf)
    report.deviation = max(report.deviation, off.max().item())
    report.total_variation = max(report.total_variation, off.sum(dim=1).max().item() / 2)
    return divmod(off.argmax().item(), off.shape[1]) if off.max() > report.tolerance else None


def _apart(found: Tensor, expected: Tensor) -> tuple[float, str]:
    """How far apart two probabilities are, and that in words."""
    size = (found - expected).abs().item()
    says = f"has probability {found:.6g}, the target gives {expected:.6g}: {size:.1e} apart"
    if size <= TOLERANCE[torch.float32]:
        says += ", as much as rounding to float32; dtype=torch.float32 allows for it"
    return size, says


def _failure(
    kind: str,
    size: float,
    says: str,
    problems: Problems,
    problem: int,
    text: tuple[int, ...],
    accept: Tensor | None = None,
    cause: str | None = None,
) -> Failure:
    where = f"text {text} of {problems.describe(problem)} {says}"
    is_small = problems.vocab_size <= MOST_COLUMNS
    table = problems.table(problem, text, accept) if is_small else ()
    return Failure(kind, size, where, problems.num_draft_tokens, table, cause)


def _one_decision(flips: Flips, problem: int, tolerance: float) -> tuple[Tensor | None, str | None]:
    """Of a problem with one draft token the chances `[V]` to accept each, and which decision is
    wrong: only so much can be made good afterwards.
    """
    paths, problems = flips.paths, flips.paths.problems
    if problems.num_draft_tokens != 1:
        return None, None
    if problems.num_valid and not problems.num_valid[problem]:
        return None, "nothing is drafted here: the one token must be drawn from the target"
    here, target = paths.problem == problem, problems.target[0][problem, 0]
    accept = torch.full_like(target, torch.nan)
    accept[paths.tokens[here, 0]] = flips.accept[here, 0]
    most = (target / problems.draft[0][problem, 0].double()).clamp(max=1)
    over, token = (accept - most).nan_to_num(nan=-1).max(dim=0)
    first = flips.completed_law()[problem].view(len(target), -1).sum(dim=1)
    if over > tolerance:
        return accept, (
            f"draft token {token} is accepted with chance {accept[token]:.4g}; a lossless rule "
            f"accepts it with target / draft = {most[token]:.4g} at most"
        )
    if (first - target).abs().max() > tolerance and not accept.nan_to_num().any():
        return accept, (
            "no token is accepted, whatever the uniform of Stream.ACCEPT is: a rule that reads "
            "another stream, or one number for two purposes, is no lossless one"
        )
    if (first - target).abs().max() > tolerance:
        return accept, (
            "no token is accepted too often, so the recovered token is wrong: after a rejection it "
            "must be drawn from target - draft * chance to accept, normalised, which is "
            "max(0, target - draft) where the chance is min(1, target / draft)"
        )
    return accept, (
        "the first token is right, so the bonus token is wrong: after an accepted token it must be "
        "drawn from the target's next row"
    )


def _undecided(paths: Paths, rows: Tensor) -> str:
    return (
        f"{len(rows)} rows at random noise are not what bisection predicts, the first is "
        f"{paths.describe(rows[0])}"
    )
