"""The self-test of models that differ in the values of their weights alone, which decide nothing:
it runs for the first of them, and the others have its result.
"""

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedModel

from specdec.graphs.tree import modules_of
from specdec.hf.foreign import has_own_code
from specdec.targets.route import Route
from specdec.torch_names import HOOKS_OF_ALL_MODULES, hooks_of

SEEN = "fault_of_trees", "returns_tuples", "has_streams"
"""Fields of a route that the self-test finds."""


def _alike(model: PreTrainedModel, route: Route) -> tuple | None:
    """Equal for models that the self-test cannot tell apart; `None` where it may."""
    modules = modules_of(model)
    hooks = [table.values() for m in modules for table in hooks_of(m)]
    is_changed = any(HOOKS_OF_ALL_MODULES) or any("forward" in vars(m) for m in modules)
    if is_changed or route.mixers or route.edits or has_own_code(model):
        return None
    plain = bool | int | float | str | None
    settings = [
        (type(m), [(n, v) for n, v in vars(m).items() if isinstance(v, plain)]) for m in modules
    ]
    tensors = [(t.dtype, t.device, t.shape) for t in (*model.parameters(), *model.buffers())]
    way = route.attention, route.layer_windows, route.attention_modules, route.num_tried
    code = [[getattr(hook, "__qualname__", type(hook)) for hook in table] for table in hooks]
    words = model.config.to_json_string(), *map(str, (settings, tensors, way, code))
    return type(model), model.config._attn_implementation, *words


def tried_once(compare: Callable, tried: dict[tuple, dict]) -> Callable:
    """`specdec.targets.trial.self_test.compare`, with results of models that are alike."""

    def compared(model: PreTrainedModel, route: Route) -> tuple[str | None, Route]:
        if (kind := _alike(model, route)) is None:
            return compare(model, route)
        if kind not in tried:
            complaint, found = compare(model, route)
            if complaint is not None:
                return complaint, found
            tried[kind] = {name: getattr(found, name) for name in SEEN}
        return None, replace(route, **tried[kind])

    return compared
