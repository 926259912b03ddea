"""`read_step`: a step of a row that a file holds."""

from __future__ import annotations

from specdec.arguments import check_integer
from specdec.row_step import RowStep


def read_step(saved: list) -> RowStep:
    """The step whose fields `RowStep.saved` wrote.

    Raises:
        TypeError, ValueError: no ids, or new tokens that do not follow from the draft.

    Example:
        >>> read_step([[5, 6], 1, [5, 9]]).kinds
        ['accepted', 'recovered']
    """
    drafted, accepted, new, *tree = saved
    parents, path = tree or (None, None)
    step = RowStep(drafted, accepted, new, parents, path)
    for token in [*drafted, *new]:
        check_integer("a token", token, 0)
    check_integer("num_accepted", accepted, 0, len(drafted))
    is_cut = 1 <= len(new) <= accepted + 1
    along = [drafted[node] for node in step.path]
    if not is_cut or new[:accepted] != along[: min(accepted, len(new))]:
        raise ValueError(
            f"new_tokens must be the {accepted} accepted tokens and one more, or a beginning of "
            f"these, got {new} after the draft {drafted}"
        )
    return step
