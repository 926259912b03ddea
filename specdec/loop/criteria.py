"""Stopping criteria: host code of users, shown the text token by token as plain decoding shows it.

Legend: R rows that are shown together, T tokens of each so far.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria

from specdec.arguments import shown


class ShownText:
    """What stopping criteria have been shown, natively of one row, through HF's hook of the batch;
    each column of new tokens is shown once, in order, since criteria may keep state.

    Args:
        rows: R numbers of the batch.
        prompts: `[R, T]`, as they are shown.
        criteria: all are called for every column, as in HF.
    """

    def __init__(self, rows: Sequence[int], prompts: Tensor, criteria: Iterable[StoppingCriteria]):
        self.rows, self._ids, self._criteria, self.num_shown = rows, prompts, criteria, 0

    def show(self, tokens: list[int]) -> list[bool]:
        """Shows the next token of every row; which of the rows end there.

        Raises:
            TypeError: a criterion answered something else; says which.
        """
        column = torch.tensor(tokens, device=self._ids.device)[:, None]
        self._ids = torch.cat([self._ids, column], dim=1)
        self.num_shown += 1
        is_met = torch.zeros(len(tokens), dtype=torch.bool)
        for criterion in self._criteria:
            is_met |= _read(criterion, criterion(self._ids, None), is_met.shape)
        return is_met.tolist()


def _read(criterion: StoppingCriteria, answer: object, shape: torch.Size) -> Tensor:
    """What a stopping criterion says of rows `[R]`, or of all of them at once."""
    if isinstance(answer, bool | np.bool_):
        return torch.tensor(bool(answer))
    is_flag = isinstance(answer, Tensor) and answer.dtype == torch.bool
    if is_flag and (answer.shape == shape or answer.numel() == 1):
        return answer.cpu().reshape(-1)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise TypeError(
        f"the stopping criterion {name} returned {shown(answer)} for ids [{shape[0]}, T]; expected "
        f"a bool tensor of shape {list(shape)}, or True or False"
    )
