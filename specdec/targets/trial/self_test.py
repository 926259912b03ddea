"""The self-test: an HF model is accepted only if windows over a cache of garbage reproduce its own
plain forward.

An architecture may apply masks, biases and positions anywhere, and so may a user's hooks. So a
model is run by HF's own code over whole texts (plain_run.py), and in ragged windows (windows.py),
and compared layer by layer and token by token: what goes into each decoder layer, what its
attention returns, and what it returns. In the windowed run each layer is given what it was given in
the plain run. A difference is then of that layer, and rounding does not accumulate over layers
until it hides a wrong mask in one of them. HF's own steps over the same texts are compared first
(`witness.py`).

A difference may be as large as rounding makes it (rounding.py). No other implementation of the
model is compared with, since that one need not be the same function.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from specdec.hf.refusals import cause_of_difference
from specdec.targets.families import choosing_few
from specdec.targets.route import Route
from specdec.targets.trial.rounding import Judge
from specdec.targets.trial.windows import Trial
from specdec.targets.trial.witness import PlainForwardError
from specdec.targets.wrappers import remark_on_hooks

NUM_TEXTS = 8
"""See `num_texts`."""


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
    for number in range(num_texts(model)):
        trial = Trial(model, route, number)
        cut, complaint = of_plain(trial.plain.against_hf()), of_chains(trial.chains())
        is_serial = route.mixers or route.compressors
        fault = None if is_serial else of_trees.of_anything(trial.tree)
        if not (cut or complaint or fault):
            break
    if cut:
        raise depends_on_cuts(model, cut)
    fault = "recurrent layers read it as a chain" if route.mixers else fault
    fault = "compressed layers read it as a chain" if route.compressors else fault
    trace, inputs = trial.plain.trace, trial.plain.inputs.values()
    seen = {"returns_tuples": trace.has_tuples, "has_streams": any(x.dim() > 3 for x in inputs)}
    return complaint, replace(route, fault_of_trees=fault, **seen)


def depends_on_cuts(model: PreTrainedModel, complaint: str) -> PlainForwardError:
    """What is said of a model whose forward depends on how a text is cut into calls."""
    return PlainForwardError(
        f"{type(model).__name__} cannot be decoded in windows ({complaint}): its own forward "
        f"depends on how a text is cut into calls, or on something beside the text"
        f"{cause_of_difference(model)}{remark_on_hooks(model)}. Use HF generate for this model"
    )


def num_texts(model: PreTrainedModel) -> int:
    """Texts that are tried: several where rounding may choose other experts, or keys, for a token,
    since scores are coarse.
    """
    is_coarse = torch.finfo(model.dtype).eps > 1e-5
    names = (name for name, _ in model.named_modules())
    may_flip = is_coarse and any("expert" in name or "indexer" in name for name in names)
    return NUM_TEXTS if may_flip else 1
