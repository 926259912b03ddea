"""`difference`: how much more one run accepts than another, paired over the prompts of both."""

from __future__ import annotations

import numpy as np

from specdec.arguments import check_choice
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.intervals import Estimate, bootstrap, ratio

Totals = dict[str | int, tuple[float, float]]
"""Of each prompt or batch, what is divided and by what."""


def difference(first: Evaluation, second: Evaluation, of: str = "acceptance_length") -> Estimate:
    """The estimate `of` the second run minus that of the first, with an interval.

    Prompts differ more than drafters do. Both runs are resampled with the same prompts at a time
    (the same batches, for speed), so what the prompts have in common leaves the interval.

    Args:
        first, second: evaluations of the same prompts.
        of: `"acceptance_length"`, `"acceptance_rate"`, `"block_efficiency"`,
            `"tokens_per_second"` or `"ms_per_token"`.

    Raises:
        ValueError: runs over other prompts, or over batches of other prompts for speed.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.evaluation import evaluate
        >>> target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
        >>> ids = [tokenizer(text).input_ids[:24] for text in zoo.heldout_prompts(6)]
        >>> runs = [
        ...     evaluate(SpeculativeGenerator(target, name), ids, max_new_tokens=4)
        ...     for name in (None, "lookup")
        ... ]
        >>> bool(difference(*runs).value >= 0)
        True
    """
    return _paired(first, second, of, np.subtract)


def quotient(first: Evaluation, second: Evaluation, of: str = "tokens_per_second") -> Estimate:
    """The estimate `of` the second run divided by that of the first, with an interval, paired as
    `difference` is.
    """
    return _paired(first, second, of, np.divide)


def _paired(first: Evaluation, second: Evaluation, of: str, contrast: np.ufunc) -> Estimate:
    check_choice("of", of, [*_PARTS, "tokens_per_second", "ms_per_token"])
    totals = [_totals(run, of) for run in (first, second)]
    unit, units = ("prompt", "prompts") if of in _PARTS else ("batch", "batches")
    if alone := sorted(map(str, totals[0].keys() ^ totals[1].keys())):
        raise ValueError(
            f"the runs are over other {units}: {len(alone)} are in one of them only, "
            f"{alone[0][:60]!r} for instance"
        )
    table = np.array([[*totals[0][key], *totals[1][key]] for key in totals[0]], dtype=float)

    def contrasted(sums: np.ndarray) -> np.ndarray:
        return contrast(ratio(sums[..., 2:]), ratio(sums[..., :2]))

    return bootstrap(table, contrasted, level=first.level, unit=unit)[0]


_PARTS = {
    "acceptance_length": lambda s: (sum(s.steps) + sum(s.accepted), sum(s.steps)),
    "acceptance_rate": lambda s: (sum(s.accepted), sum(s.drafted)),
    "block_efficiency": lambda s: (sum(s.emitted), sum(s.steps)),
}


def _totals(run: Evaluation, of: str) -> Totals:
    if of in _PARTS:
        return {prompt: _PARTS[of](stats) for prompt, stats in run.stats_of_prompts.items()}
    totals = {}
    for batch in run.batches:
        tokens, seconds = batch.num_new_tokens, sum(batch.seconds)
        speed = (tokens, seconds) if of == "tokens_per_second" else (1e3 * seconds, tokens)
        totals[tuple(row.prompt for row in batch.rows)] = speed
    return totals
