"""`difference`: how much more one run accepts than another, paired over the prompts of both; and
which of several runs differ.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from specdec.arguments import check_choice
from specdec.lab.evaluation.evaluation import SPEED_UNIT, Evaluation, tokens_and_seconds
from specdec.lab.evaluation.intervals import Estimate, bootstrap, paired_p_values, ratio

Totals = dict[Hashable, tuple[float, float]]
"""Of each prompt, or of separate batches by their rows, what is divided and by what."""


def difference(first: Evaluation, second: Evaluation, of: str = "acceptance_length") -> Estimate:
    """Second minus first: positive where the second run has more `of` it, with an interval.

    Prompts differ more than drafters do. Both runs are resampled with the same prompts at a time
    (the same batches, for speed), so what the prompts have in common leaves the interval. All
    samples of a prompt are one of these.

    Args:
        first, second: evaluations of the same prompts.
        of: `"acceptance_length"`, `"acceptance_rate"`, `"block_efficiency"`,
            `"tokens_per_second"` or `"ms_per_token"`.

    Returns:
        NaN where a run does not know its number, as HF's assisted decoding its acceptance, and for
        times on unlike devices.

    Raises:
        ValueError: runs over other prompts, or over batches of other rows for speed.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.lab.evaluation import evaluate
        >>> target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
        >>> ids = [tokenizer(text).input_ids[:24] for text in zoo.heldout_prompts(6)]
        >>> runs = [
        ...     evaluate(SpeculativeGenerator(target, name), ids, max_new_tokens=4)
        ...     for name in (None, "lookup")
        ... ]
        >>> bool(difference(*runs).value >= 0)
        True
    """
    return _paired(first, second, of, np.subtract, "second minus first")


def quotient(first: Evaluation, second: Evaluation, of: str = "tokens_per_second") -> Estimate:
    """Second over first: above 1 where the second run has more `of` it; paired likewise."""
    return _paired(first, second, of, np.divide, "second over first")


def p_values(runs: Sequence[Evaluation], of: str) -> np.ndarray:
    """`[c, c]`, see `paired_p_values`: whether each two of c runs are shown to differ.

    Args:
        runs: of the same prompts.
        of: as in `difference`.
    """
    values = paired_p_values(totals_of(runs, of))
    is_known = [[_are_known(one, other, of) for one in runs] for other in runs]
    return np.where(is_known, values, 1.0)


def value_of(run: Evaluation, of: str) -> float:
    """The value of an estimate, without its interval; NaN where it is not known."""
    sums = np.sum(list(_totals(run, of).values()), axis=0)
    return float(ratio(sums)[0]) if _is_known(run, of) else math.nan


def _is_known(run: Evaluation, of: str) -> bool:
    """Nothing is known of the drafts of some other programs."""
    return of not in _PARTS or run.num_draft_tokens is not None


def _are_known(first: Evaluation, second: Evaluation, of: str) -> bool:
    """Times compare on one kind of device."""
    devices = [run.about.get("run", {}).get("device") for run in (first, second)]
    is_alike = of in _PARTS or devices[0] == devices[1]
    return is_alike and _is_known(first, of) and _is_known(second, of)


def _paired(
    first: Evaluation, second: Evaluation, of: str, contrast: np.ufunc, name: str
) -> Estimate:
    table = totals_of([first, second], of)
    if not _are_known(first, second, of):
        return Estimate(math.nan, level=first.level, note=name)

    def contrasted(sums: np.ndarray) -> np.ndarray:
        return contrast(ratio(sums[..., 2:]), ratio(sums[..., :2]))

    unit = "prompt" if of in _PARTS else SPEED_UNIT
    (found,) = bootstrap(table.reshape(-1, 4), contrasted, level=first.level, unit=unit)
    return replace(found, note="; ".join(filter(None, (name, found.note))))


_PARTS = {
    "acceptance_length": lambda s: (sum(s.steps) + sum(s.accepted), sum(s.steps)),
    "acceptance_rate": lambda s: (sum(s.accepted), sum(s.drafted)),
    "block_efficiency": lambda s: (sum(s.emitted), sum(s.steps)),
}


def totals_of(runs: Sequence[Evaluation], of: str) -> np.ndarray:
    """`[n, c, 2]`: the totals of every prompt, or of every group of batches, in c runs.

    Raises:
        ValueError: runs over other prompts, or over batches of other rows for speed.
    """
    check_choice("of", of, [*_PARTS, "tokens_per_second", "ms_per_token"])
    first, *others = found = [_totals(run, of) for run in runs]
    for other in others:
        if alone := sorted(map(str, first.keys() ^ other.keys())):
            raise ValueError(
                f"the runs are over other {'prompts' if of in _PARTS else 'batches'}: {len(alone)} "
                f"are in one of them only, {alone[0][:60]!r} for instance"
            )
    return np.array([[totals[key] for totals in found] for key in first], dtype=float)


def _totals(run: Evaluation, of: str) -> Totals:
    if of in _PARTS:
        return {prompt: _PARTS[of](stats) for prompt, stats in run.stats_of_prompts.items()}
    totals = {}
    for group in run.separate_batches:
        tokens, seconds = tokens_and_seconds(group)
        speed = (tokens, seconds) if of == "tokens_per_second" else (1e3 * seconds, tokens)
        totals[tuple(tuple(row.key for row in batch.rows) for batch in group)] = speed
    return totals
