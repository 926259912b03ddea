"""The self-test of users' code in a model: edits of a target when it is made, and edits and hooks
over the windows of each call. Ordinary models run none of this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.targets.edits.edit import Edit, name_of
from specdec.targets.reading import decoder_of_text
from specdec.targets.route import Route
from specdec.targets.trial.calls import CallTrial, Windows, windows_of_call
from specdec.targets.trial.rounding import Judge
from specdec.targets.trial.self_test import depends_on_cuts, num_texts
from specdec.targets.trial.windows import Trial, fitting
from specdec.targets.trial.witness import NUM_ROWS
from specdec.targets.views import open_view

NUM_IN_BATCHES = 63
"""Tokens of a window in which batches of several sizes are tried."""


def try_edits(model: PreTrainedModel, route: Route, edits: Sequence[Edit]) -> None:
    """Raises `ValueError` if what edits of the user do depends on how a text is cut into windows,
    on the rows of a batch, or fails: windows of several sizes are held against one window over the
    whole text, with the same edits in both. What the model is without them was tried before.
    """
    of_windows, of_trees = Judge(), Judge()
    open_view(model, route, edits=edits)  # so that their own errors come as they are

    def complaint(number: int) -> str | None:
        trial = Trial(model, route, number, edits)
        size = max(1, min(NUM_IN_BATCHES, trial.length - 1))
        sizes = {Windows(count, (size,)) for count in NUM_ROWS}
        batches = CallTrial(model, route, edits, sizes, number)
        found = of_windows(chain(trial.chains(), batches.differences()))
        if found is None and route.fault_of_trees is None:
            found = of_trees(iter([trial.tree()]))
        return found

    _refuse(model, route, edits, complaint)


def try_call(
    target: Any, request: Any, filled_to: int, num_draft_tokens: int, chunks: Sequence[int]
) -> None:
    """Raises `ValueError` if what users' code does depends on the number of tokens or rows of the
    forwards of a call, or on what the call brings for its rows, otherwise than by positions. Each
    size is tried once, and each table of row inputs that edits read.

    Args:
        target: `SlotModel` of the call.
        request: of the call. Rows that end leave its batch.
        filled_to: rows of the forwards, where a batch is filled up.
        num_draft_tokens: the most that a step drafts.
        chunks: sizes of the chunks that the prompts are read in, in order.
    """
    num_rows, num_prompt = request.padded.shape
    read = {name for edit in target.edits for name in getattr(edit, "row_inputs", ())}
    own = {name: value.cpu() for name, value in request.row_inputs.items() if name in read}
    names, values = tuple(sorted(own)), hashlib.sha256()
    for name in names:
        values.update(own[name].contiguous().numpy().tobytes())
    rows = {*range(1, num_rows + 1), filled_to}
    of_hf = num_prompt if target.route.num_tried else None
    steps, prompts = windows_of_call(rows, num_draft_tokens, chunks, of_hf)
    most, table = max(rows), (names, values.hexdigest() if own else "")
    keys = {each: (each, table if each.rows == most else names) for each in steps}
    keys |= {each: (each, names) for each in prompts}
    for each in (steps, prompts):
        windows = {one for one in each if keys[one] not in target.tried_windows}
        _try_windows(
            decoder_of_text(target.model), target.route, target.edits, windows, own, num_rows
        )
        target.tried_windows.update(keys[one] for one in windows)


def _try_windows(
    model: PreTrainedModel,
    route: Route,
    edits: Sequence[Edit],
    windows: Collection[Windows],
    row_inputs: Mapping[str, Tensor],
    num_rows: int,
) -> None:
    """Tries the windows that fit into the self-test's memory, of two rows if no more fit."""
    longest = max((sum(each.sizes) + 1 for each in windows), default=0)
    num_rows = max(2, num_rows)
    if fitting(model, longest, num_rows) < longest:
        num_rows, most = 2, fitting(model, longest)
        windows = {Windows(min(2, rows), s) for rows, s in windows if sum(s) < most}
    if not windows:
        return
    judge = Judge()

    def complaint(number: int) -> str | None:
        of_call = {"row_inputs": row_inputs, "num_rows": num_rows}
        return judge(CallTrial(model, route, edits, windows, number, **of_call).differences())

    _refuse(model, route, edits, complaint)


def _refuse(
    model: PreTrainedModel,
    route: Route,
    edits: Sequence[Edit],
    complaint: Callable[[int], str | None],
) -> None:
    """Raises `ValueError` if there is a complaint with each of the texts, by their numbers."""
    names, what = ", ".join(map(name_of, edits)), type(model).__name__
    with torch.inference_mode(route.is_compiled), torch.no_grad():
        for number in range(num_texts(model)):
            try:
                found = complaint(number)
            except Exception as error:
                if not edits:
                    raise depends_on_cuts(model, f"{type(error).__name__}: {error}") from error
                raise ValueError(
                    f"edits of {what} ({names}) fail in a window of their self-test "
                    f"({type(error).__name__}: {error}); a window has any number of tokens and "
                    "rows, and row_inputs of a call's own may be missing"
                ) from error
            if found is None:
                return
    if not edits:
        raise depends_on_cuts(model, found)
    raise ValueError(
        f"edits of {what} ({names}) depend on how a text is cut into windows ({found}). Let them "
        "act by the positions of tokens, window_of(view).since_prompt or .text_positions, not by "
        "their places in a window, the number of a window's tokens or rows, or what was computed "
        "before: see docs/interventions.md"
    )
