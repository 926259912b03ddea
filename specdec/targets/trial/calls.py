"""The self-test of the windows of a call, where code of users runs in a model: their edits, hooks
and forwards. Such code may look at the number of tokens or rows of a forward, and at what a call
brings for its rows. HF's own code is tried once per model, over windows of few sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.positions import position_limit
from specdec.slots.cache import SlotCache
from specdec.targets.edits.edit import Edit
from specdec.targets.families import asked
from specdec.targets.forward import forward, open_window
from specdec.targets.route import Route
from specdec.targets.trial.layer_trace import LayerTrace
from specdec.targets.trial.plain_run import PlainRun, take
from specdec.targets.trial.rounding import Differences
from specdec.targets.trial.witness import trial_texts
from specdec.targets.views import open_views


class Windows(NamedTuple):
    """Windows that are read one behind the other from the beginning of a text, all but the last as
    chunks of a prompt.

    Args:
        rows: of each.
        sizes: tokens of each.
    """

    rows: int
    sizes: tuple[int, ...]


def windows_of_call(
    rows: Collection[int], num_draft_tokens: int, chunks: Sequence[int], num_prompt: int | None
) -> tuple[set[Windows], set[Windows]]:
    """Windows of the steps of a call, and of its prompt.

    Args:
        rows: numbers of rows that forwards of the call may have, the call's own among them.
        num_draft_tokens: the most that a step drafts.
        chunks: sizes of the chunks that the prompts are read in, in order.
        num_prompt: tokens of the forward in which HF reads the prompts, `None` where HF's own text
            is not what is wanted.

    Example:
        >>> steps, prompts = windows_of_call([1, 2], 1, [4], 5)
        >>> sorted(map(tuple, steps))
        [(1, (1, 2)), (2, (1, 1)), (2, (1, 2))]
        >>> sorted(map(tuple, prompts))
        [(2, (4, 2)), (2, (5, 1))]
    """
    most, window = max(rows), num_draft_tokens + 1
    steps = {Windows(count, (1, window)) for count in rows}
    steps |= {Windows(most, (1, size)) for size in range(1, window)}
    prompts = {Windows(most, (size, window)) for size in chunks[:1]}
    prompts |= {Windows(most, (num_prompt, 1))} if num_prompt else set()
    prompts |= {Windows(most, (1, size, window)) for size in chunks[1:]}
    return steps, prompts


class CallTrial:
    """Windows of the sizes of a call, beside one window over the whole texts, with the same code of
    users in both.

    Args:
        model, route, edits: to be tried.
        windows: to be read.
        number: other texts for another number.
        row_inputs: `[B, ...]` by name, what a call brings for its rows.
        num_rows: R of the window over the whole texts, two texts in turn; 2 at least.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        route: Route,
        edits: Sequence[Edit],
        windows: Collection[Windows],
        number: int = 0,
        *,
        row_inputs: Mapping[str, Tensor] | None = None,
        num_rows: int = 2,
    ):
        length = max(sum(each.sizes) for each in windows) + 1
        length = min(length, position_limit(model.config.get_text_config()) or length)
        self._windows = [each for each in sorted(windows) if sum(each.sizes) <= length]
        texts = trial_texts(model, length, number)
        device = texts.device
        rows = torch.arange(num_rows, device=device)
        self._tokens, self._places = texts[rows % 2], torch.arange(length, device=device)
        views = open_views(model, route, edits=edits)
        self._views, self._trace = views._replace(chunk=views.step), LayerTrace(views.step, route)
        own = {
            name: value.to(device)[rows % len(value)] for name, value in (row_inputs or {}).items()
        }
        for of_texts in asked(model, "rows_of_trial", views.step, self._tokens):
            own |= of_texts
        ends = torch.where(rows % 2 == 0, 1, max(length - 2, 0))
        self._inputs = {**own, "prompt_end": ends + own.get("position_offset", 0)}
        read = partial(self._read, self._cache(rows), rows, self._places)
        parts = self._tokens, self._trace, read, "one window over the whole text"
        self.plain = PlainRun(model, route, *parts)

    def differences(self) -> Iterator[Differences]:
        """Of each window, with the texts at places where they do not stand in the window over the
        whole texts.
        """
        num_texts, device = self._tokens.shape[0], self._tokens.device
        for count, sizes in self._windows:
            rows = (torch.arange(count, device=device) + 1) % num_texts
            cache, start = self._cache(rows), 0
            for number, size in enumerate(sizes, 1):
                places = self._places[start : start + size]
                slots = places.expand(count, -1)
                pick = partial(take, slots=slots, texts=rows)
                given = {name: pick(state) for name, state in self.plain.inputs.items()}
                read = partial(self._read, cache, rows, places, is_chunk=number < len(sizes))
                found = self._trace.run(read, lambda name, arrived, own=given: own[name])
                where = f"in a window of {size} tokens in {count} rows"
                found = self.plain.difference(slots, found, rows)
                yield {f"{where} {name}": difference for name, difference in found.items()}
                start += size

    def _cache(self, rows: Tensor) -> SlotCache:
        length = len(self._places)
        cache = self._views.route.init_cache(len(rows), length, max_window=length)
        cache.row_inputs = {name: own[rows] for name, own in self._inputs.items()}
        return cache

    def _read(self, cache: SlotCache, rows: Tensor, places: Tensor, **options: bool) -> Tensor:
        """Logits of the tokens at some places of the rows' texts."""
        slots = places.expand(len(rows), -1)
        window = open_window(self._views, cache, slots, **options)
        return forward(self._views, self._tokens[rows][:, places], cache, window)[0]
