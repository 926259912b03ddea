"""The windowed run of the self-test: two texts in ragged windows over a cache of garbage, where
each layer is given what it was given in the plain run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.graphs.tree import fill
from specdec.hf.positions import position_limit
from specdec.slots.cache import SlotCache, narrowed
from specdec.slots.layout import KeyValueShape
from specdec.slots.room import memory_bytes
from specdec.slots.spans import Chunk
from specdec.targets.edits.edit import Edit
from specdec.targets.families import asked
from specdec.targets.forward import forward, open_window
from specdec.targets.route import Route
from specdec.targets.trial.layer_trace import LayerTrace
from specdec.targets.trial.plain_run import PlainRun, take
from specdec.targets.trial.rounding import Differences
from specdec.targets.trial.witness import trial_texts
from specdec.targets.views import open_view, open_views

LONGEST_WINDOW = 64
"""Texts of the self-test exceed sliding windows and chunks of up to so many tokens."""

WIDTH = 4096
"""Slots that the self-test attends over, unless the model has fewer positions or longer windows."""

NUM_EDITED = 64
"""Tokens of a text that edits are tried over; halves of it are windows."""


class Trial:
    """Ragged windows of two texts over a cache of garbage, beside the texts' plain forward; with
    edits of the user in the views, beside one window over the whole texts.

    Attributes:
        length: tokens of each text.
    """

    def __init__(
        self, model: PreTrainedModel, route: Route, number: int, edits: Sequence[Edit] = ()
    ):
        windows = route.layer_windows.values()
        sizes = [w.size if isinstance(w, Chunk) else w for w in windows if w is not None]
        self.length = length = _length(model, route, sizes, has_edits=bool(edits))
        self._tokens = trial_texts(model, length, number)
        if not edits:
            whole = LayerTrace(open_view(model, Route()), route)
            self.plain = PlainRun(model, route, self._tokens, whole)
        views = open_views(model, route, edits=edits)
        self._views, self._trace = views._replace(chunk=views.step), LayerTrace(views.step, route)
        device, self._narrow = self._tokens.device, 2 * length
        width = max(self._narrow, _width(model, sizes, route.shapes.values()))
        self._cache = route.init_cache(2, width, max_window=2 * length, extra_slots=0)
        for own in asked(model, "rows_of_trial", views.step, self._tokens):
            self._cache.row_inputs |= own
        # Row 0 keeps all of the first window, row 1 all but the last token of it.
        half = length // 2
        self._everything = torch.arange(length, device=device).expand(2, -1)
        self._first = self._everything[:, :half]
        self._kept = torch.tensor([[half], [half - 1]], device=device)
        self._later = self._kept + torch.arange(length - half, device=device)
        if edits:
            ends = torch.tensor([half - 2, length - 2], device=device)
            self._cache.row_inputs["prompt_end"] = ends
            read = partial(self._read, self._tokens, self._cache, self._everything)
            parts = self._tokens, self._trace, read, "one window over the whole text"
            self.plain = PlainRun(model, route, *parts)

    def chains(self) -> Iterator[Differences]:
        """A window over as few slots as can be, and one of several tokens and one of a single one
        behind what was kept of it, over many slots.
        """
        first, later, one = (partial(take, slots=s) for s in (self._first, self._later, self._kept))
        self._states(lambda state: state.flip(0, 1), self._everything)  # the garbage
        self._spread_garbage()
        with narrowed([self._cache], self._narrow):
            narrow = self._states(first, self._first)
        yield self.plain.difference(self._first, narrow)
        yield self.plain.difference(self._later, self._states(later, self._later))
        yield self.plain.difference(self._kept, self._states(one, self._kept))
        if self._views.route.mixers:  # the same behind a chunk of a prompt
            fill((self._cache.memory, self._cache.stores), 0)
            ragged = torch.where(self._first < self._kept, self._first, self._cache.padding_slot)
            self._states(first, ragged, is_chunk=True)
            yield self.plain.difference(self._later, self._states(later, self._later))
            fill((self._cache.memory, self._cache.stores), 0)  # and behind one of a single token
            self._states(first, ragged, is_chunk=True)
            self._states(one, self._kept, is_chunk=True)
            rest = self._later[:, 1:]
            yield self.plain.difference(rest, self._states(partial(take, slots=rest), rest))

    def tree(self) -> Differences:
        """The second window once more, with an earlier sibling from the other text before each
        token but the root.
        """
        positions = self._later.repeat_interleave(2, dim=1)[:, 1:]  # root, sibling, token, ...
        count = positions.shape[1]
        order = torch.arange(count, device=positions.device)
        is_other = order % 2 == 1
        visible = (order <= order[:, None]) & (~is_other | (order == order[:, None]))

        def among(state: Tensor) -> Tensor:
            own, other = take(state, positions), take(state.flip(0), positions)
            mask = is_other.to(own.device).view(1, -1, *[1] * (own.dim() - 2))
            return torch.where(mask, other, own)

        tree = {"positions": positions, "visible": visible[None]}
        states = self._states(among, self._kept + order, **tree)
        return self.plain.difference(self._later, {n: state[:, ::2] for n, state in states.items()})

    def _states(self, pick: Callable, slots: Tensor, **window: Any) -> dict[str, Tensor]:
        """Everything to compare, of a window of tokens that are picked from the texts."""
        given = {name: pick(state) for name, state in self.plain.inputs.items()}
        tokens = pick(self._tokens)
        return self._trace.run(
            lambda: self._read(tokens, self._cache, slots, **window),
            lambda name, arrived: given[name],
        )

    def _read(self, tokens: Tensor, cache: SlotCache, slots: Tensor, **window: Any) -> Tensor:
        """Logits of a window."""
        return forward(
            self._views, tokens, cache, open_window(self._views, cache, slots, **window)
        )[0]

    def _spread_garbage(self) -> None:
        """Copies what the first slots hold to all others."""
        length = self._tokens.shape[1]
        for store in self._cache.stores:
            for start in range(length, store.shape[2], length):
                count = min(length, store.shape[2] - start)
                store[:, :, start : start + count] = store[:, :, :count]


def _length(model: PreTrainedModel, route: Route, sizes: list[int], *, has_edits: bool) -> int:
    """Tokens of the texts of a self-test, of a model with windows of these sizes: more than its
    layers leave out, so far as it has positions for so many.
    """
    length = max([6, *(size + 4 for size in sizes if size <= LONGEST_WINDOW)])
    length = max([length, *asked(model, "least_tokens", route)])
    limit = position_limit(model.config.get_text_config()) or length
    num_tried = max(route.num_tried, min(NUM_EDITED, limit) if has_edits else 0)
    return max(min(length, limit), fitting(model, num_tried))


def fitting(model: PreTrainedModel, length: int, rows: int = 2) -> int:
    """So many tokens of each row, or as many as the states of all layers fit an eighth of the
    memory for, several times over.
    """
    config = model.config.get_text_config()
    size = rows * 8 * 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
    return min(length, (memory_bytes(model.device) or 2**33) // (8 * size))


_WINDOWED = re.compile("window|local|chunk|span")


def _width(model: PreTrainedModel, known: list[int], shapes: Iterable[KeyValueShape]) -> int:
    """Slots to attend over: more than any window that the model keeps where HF's masks do not show
    it, in a number or in a buffer by the positions of queries and keys, so far as the model has
    positions for so many and an eighth of the memory holds them.
    """
    hidden = [WIDTH]
    for module in model.modules():
        numbers = (v for name, v in vars(module).items() if _WINDOWED.search(name))
        hidden += [v + 1 for v in numbers if type(v) is int and v not in known]
        masks = (b.shape for b in module.buffers(recurse=False) if b is not None and b.dim() > 1)
        hidden += [shape[-1] for shape in masks if shape[-1] == shape[-2]]
    width = min(max(hidden), position_limit(model.config.get_text_config()) or max(hidden))
    for device in {shape.device for shape in shapes}:
        size = sum(
            heads * (keys + values) * dtype.itemsize
            for heads, keys, values, dtype, place in shapes
            if place == device
        )
        width = min(width, (memory_bytes(device) or 2**33) // (8 * 2 * size))
    return width
