"""The self-test: an HF model is accepted only if windows over a cache of garbage reproduce its own
plain forward.

An architecture may apply masks, biases and positions anywhere, and so may a user's hooks. So a
model is run by HF's own code over whole texts (plain_run.py), and in ragged windows (windows.py),
and compared layer by layer and token by token: what goes into each decoder layer, what its
attention returns, and what it returns. In the windowed run each layer is given what it was given in
the plain run. A difference is then of that layer, and rounding does not accumulate over layers
until it hides a wrong mask in one of them. HF's own steps over the same texts are compared first
(witness.py).

A difference may be as large as rounding makes it (rounding.py). No other implementation of the
model is compared with, since that one need not be the same function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from transformers import PreTrainedModel

from specdec.targets.edits.edit import Edit, name_of
from specdec.targets.families import choosing_few
from specdec.targets.route import Route
from specdec.targets.trial.rounding import Judge
from specdec.targets.trial.windows import Trial
from specdec.targets.trial.witness import PlainForwardError
from specdec.targets.views import open_view
from specdec.targets.wrappers import remark_on_hooks

NUM_TEXTS = 8
"""Texts that are tried where rounding may choose other experts for a token."""


def compare(model: PreTrainedModel, route: Route) -> tuple[str | None, Route]:
    """What is wrong if ragged windows over a cache of garbage differ from a plain forward, `None`
    if nothing is.

    Args:
        model: without wrappers.
        route: to be tried.

    Returns:
        The complaint about windows of chains, and the route with what was seen on the way: what is
        wrong with the window of a tree, and what decoder layers return.

    Raises:
        PlainForwardError: HF's own forward depends on how a text is cut into calls.
    """
    complaint, route = _compared(model, route)
    few = choosing_few(model) if complaint is None else None
    if few is not None:  # a short text has no more keys than its indexers choose
        fault = route.fault_of_trees
        complaint, route = _compared(few, route)
        route = replace(route, fault_of_trees=fault or route.fault_of_trees)
    return complaint, route


def _compared(model: PreTrainedModel, route: Route) -> tuple[str | None, Route]:
    """`compare` of a model as it is."""
    of_plain, of_chains, of_trees = Judge(), Judge(), Judge()
    for number in range(NUM_TEXTS if _may_flip(model) else 1):
        trial = Trial(model, route, number)
        cut, complaint = of_plain(trial.plain.against_hf()), of_chains(trial.chains())
        is_serial = route.mixers or route.compressors
        fault = None if is_serial else of_trees.of_anything(trial.tree)
        if not (cut or complaint or fault):
            break
    if cut:
        raise PlainForwardError(
            f"{type(model).__name__} cannot be decoded in windows ({cut}): its own forward depends "
            "on how a text is cut into calls, or on something beside the text"
            f"{remark_on_hooks(model)}. Use HF generate for this model"
        )
    fault = "recurrent layers read it as a chain" if route.mixers else fault
    fault = "compressed layers read it as a chain" if route.compressors else fault
    trace, inputs = trial.plain.trace, trial.plain.inputs.values()
    seen = {"returns_tuples": trace.has_tuples, "has_streams": any(x.dim() > 3 for x in inputs)}
    return complaint, replace(route, fault_of_trees=fault, **seen)


def _may_flip(model: PreTrainedModel) -> bool:
    """Whether rounding may choose other experts, or keys, for a token: where scores are coarse."""
    is_coarse = torch.finfo(model.dtype).eps > 1e-5
    names = (name for name, _ in model.named_modules())
    return is_coarse and any("expert" in name or "indexer" in name for name in names)


def try_edits(model: PreTrainedModel, route: Route, edits: Sequence[Edit]) -> None:
    """Raises `ValueError` if what edits of the user do depends on how a text is cut into windows,
    on the rows of a batch, or fails: windows of several sizes are held against one window over the
    whole text, with the same edits in both. What the model is without them was tried before.
    """
    of_windows, of_trees, complaint = Judge(), Judge(), None
    names, what = ", ".join(map(name_of, edits)), type(model).__name__
    open_view(model, route, edits=edits)  # so that their own errors come as they are
    with torch.inference_mode(route.is_compiled), torch.no_grad():
        for number in range(NUM_TEXTS if _may_flip(model) else 1):
            try:
                trial = Trial(model, route, number, edits)
                complaint = of_windows(chain(trial.chains(), trial.batches()))
                if route.fault_of_trees is None:
                    complaint = complaint or of_trees(iter([trial.tree()]))
            except Exception as error:
                raise ValueError(
                    f"edits of {what} ({names}) fail in a window of their trial "
                    f"({type(error).__name__}: {error}); a window has any number of tokens and "
                    "rows, and row_inputs of a call's own may be missing"
                ) from error
            if complaint is None:
                return
    raise ValueError(
        f"edits of {what} ({names}) depend on how a text is cut into windows ({complaint}). Let "
        "them act by the positions of tokens, window_of(view).since_prompt or .text_positions, not "
        "by their places in a window, the number of a window's tokens or rows, or what was "
        "computed before: see 'Interventions' in docs/models.md"
    )
