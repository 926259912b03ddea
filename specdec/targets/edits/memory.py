"""What the recurrent layers of a model remember, and how it is taken back.

A mixer (a gated delta net, Mamba, a short convolution) turns hidden states into hidden states and
leaves a state behind, which cannot be shortened. So the state that is kept is that of the committed
text. A window of draft tokens is read from it and leaves nothing but what its products were. When
the next window opens, it is known how many tokens of the last one were kept, and each mixer reads
these once more before its own: in one call with every row twice, once with all gates closed behind
what was kept, whose state is the new one, and once open, for the output. Products of the last
window are those of before, so no weight is read again, and one fixed shape serves rows of any
counts. Where a mixer has no gate that is known, it reads token by token. (Replays of inputs in
place of a state per draft token are known from engines, vllm#49232.)

Legend: B rows, N tokens of a window, W tokens of the longest one, F width of a product.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.graphs.tree import shared
from specdec.slots.cache import SlotCache, Window
from specdec.slots.layout import KeyValueShape, Stored
from specdec.targets.view import wrap_forward


class Place(NamedTuple):
    """Names a state; a layer may have several of a kind."""

    kind: str  # "conv" or "recurrent"
    layer: int
    index: int


class MixerPlan(NamedTuple):
    """What a mixer keeps, and how it is replayed.

    Args:
        states: `[1, ...]` of each state, zeros.
        input: `[1, 1, H]` of its input.
        products: `[1, 1, F]` of its linear layers before the recurrence, by name.
        outputs: names of those after it; the last puts out what the mixer does.
        gates: columns of products that leave the state as it is when they are -inf; `None` if not
            known.
        floors: lowest values of such columns, where the mixer bounds its time step from below.
    """

    states: dict[Place, Tensor]
    input: Tensor
    products: dict[str, Tensor]
    outputs: tuple[str, ...]
    gates: dict[str, slice] | None = None
    floors: Tensor | None = None


def row_bytes(
    mixers: Mapping[str, MixerPlan], max_window: int
) -> Iterator[tuple[torch.device, int]]:
    """Pairs (device, bytes) of what `Memory` keeps of each row."""
    for plan in mixers.values():
        for state in plan.states.values():
            yield state.device, state.nbytes
        for of_token in (plan.input, *plan.products.values()):
            yield of_token.device, max_window * of_token.nbytes


@dataclass(init=False, eq=False, repr=False)
class Memory:
    """The recurrent state of B rows, and the last window that they read.

    Args:
        batch_size: rows B.
        max_window: W.
        mixers: by their names in the model.

    Attributes:
        states: `[B, ...]` by place, after the committed tokens.
        records: by mixer and product `[B, W, F]`, of the last window; the mixer's input is `""`.
        start, count, kept: `[B]` of the last window: its first slot, the number of its tokens, and
            how many of them were kept.
        valid: `[B]` of this window: how many of its tokens are no padding.
        is_chunk: this window is text, of which everything is kept.
        run: of the mixer that is at work.
        lines: how this window lines up with the last one, by device.
    """

    states: dict[Place, Tensor]
    records: dict[str, dict[str, Tensor]]
    start: Tensor
    count: Tensor
    kept: Tensor
    valid: Tensor
    is_chunk: bool = shared()
    mixers: Mapping[str, MixerPlan] = shared()
    max_window: int = shared()

    def __init__(self, batch_size: int, max_window: int, mixers: Mapping[str, MixerPlan]):
        self.mixers, self.max_window = mixers, max_window
        self.states, self.records, self.is_chunk = {}, {}, False
        for name, plan in mixers.items():
            for place, one in plan.states.items():
                self.states[place] = one.new_zeros(batch_size, *one.shape[1:])
            self.records[name] = {
                product: one.new_zeros(batch_size, max_window, one.shape[-1])
                for product, one in {"": plan.input, **plan.products}.items()
            }
        device = next(iter(self.states.values())).device
        self.start, self.count, self.kept, self.valid = (
            torch.zeros(batch_size, dtype=torch.long, device=device) for _ in range(4)
        )
        self.__post_init__()

    def __post_init__(self):
        self.run: _MixerCall | None = None
        self.lines: dict[torch.device, TwoWindows] = {}

    def open(self, slots: Tensor, padding_slot: int, *, is_chunk: bool) -> None:
        """A window begins, and what comes before its first slot was kept of the last one.

        Args:
            slots: `[B, N]`, see `Window`.
            padding_slot: the slot of tokens to forget.
            is_chunk: the window is text, of which everything is kept.

        Raises:
            ValueError: a window of a step that is longer than W.
        """
        if not is_chunk and slots.shape[1] > self.max_window:
            raise ValueError(
                f"a window of {slots.shape[1]} tokens, and this cache was made for at most "
                f"{self.max_window}; pass max_window to init_cache"
            )
        first, valid = slots[:, 0].to(self.start.device), (slots != padding_slot).sum(dim=1)
        self.kept.copy_((first - self.start).clamp(min=0).minimum(self.count))
        self.valid.copy_(valid)
        self.start.copy_(first)
        self.count.copy_(valid)
        if is_chunk:
            self.count.zero_()
        self.is_chunk = is_chunk
        self.lines = {}

    def mix(self, name: str, current: threading.local, call: Callable, hidden: Tensor) -> Tensor:
        """Runs a mixer on a window, from the state behind the text before it.

        Args:
            name: of the mixer.
            current: where its products find the run that they belong to.
            call: the mixer's forward, of hidden states.
            hidden: `[B, N, H]` of the window.

        Returns:
            Its output `[B, N, H]`.
        """
        record = self.records[name]
        mixer = _Mixer(self, self.mixers[name], current, call)
        count, device = hidden.shape[1], hidden.device
        if self.is_chunk:
            mixer.commit(record[""], self.kept, record)
            is_text = torch.arange(count, device=device) < self.valid.to(device)[:, None]
            return mixer.commit(hidden.masked_fill(~is_text[..., None], 0), self.valid, {})
        if mixer.plan.gates is not None:
            if device not in self.lines:
                self.lines[device] = TwoWindows(self.kept.to(device), self.max_window, count)
            return mixer.read_both(hidden, record, self.lines[device])
        mixer.commit(record[""], self.kept, record)
        record[""][:, :count] = hidden
        return mixer.read(hidden, {n: table[:, :count] for n, table in record.items() if n})


class TwoWindows:
    """Where the kept tokens of the last window and then those of this one stand in one line of
    L = W + N tokens per row.

    Args:
        kept: `[B]` tokens of the last window.
        max_window: W.
        count: N.

    Attributes:
        kept: as given.
        sources: `[2 B L]`, rows of a list of all `[B, W + N]` tokens, every line twice.
        places: `[B N]`, rows of a list of all `[2 B, L]` tokens: this window's in the second lines.
        is_closed: `[2 B, L]`: what the first lines leave out.
    """

    def __init__(self, kept: Tensor, max_window: int, count: int):
        rows, length = len(kept), max_window + count
        order, behind = torch.arange(length, device=kept.device), kept[:, None]
        index = torch.where(order < behind, order, max_window + order - behind)
        index = index.clamp(max=length - 1)  # behind both windows, where nothing is looked at
        first = torch.arange(rows, device=kept.device)[:, None] * length
        self.kept, self.count = kept, count
        self.sources = (first + index).flatten().repeat(2)
        places = first + behind + order[:count]
        self.places = (rows * length + places).flatten()
        is_behind = order >= behind
        self.is_closed = torch.cat([is_behind, torch.zeros_like(is_behind)])

    def join(self, last: Tensor, new: Tensor) -> Tensor:
        """`[2 B, L, F]` of what the two windows have, `[B, W, F]` and `[B, N, F]`."""
        lines = torch.cat([last, new], dim=1).flatten(0, 1).index_select(0, self.sources)
        return lines.unflatten(0, self.is_closed.shape)

    def take(self, lines: Tensor) -> Tensor:
        """`[B, N, F]` of this window."""
        taken = lines.flatten(0, 1).index_select(0, self.places)
        return taken.unflatten(0, (-1, self.count))


class LayerStates:
    """The states of one layer, under the names by which models of transformers 5.17 read them.

    Args:
        memory: whose mixer is at work.
        layer: its index.
    """

    record_past, is_sliding, is_compileable, is_initialized = True, False, True, True

    def __init__(self, memory: Memory, layer: int):
        self._memory, self._layer = memory, layer

    @property
    def conv_states(self) -> dict[int, Tensor]:
        """The last inputs of convolutions, by index."""
        return self._of_kind("conv")

    @property
    def recurrent_states(self) -> dict[int, Tensor]:
        """The others, by index."""
        return self._of_kind("recurrent")

    def _of_kind(self, kind: str) -> dict[int, Tensor]:
        states = self._memory.run.states.items()
        return {p.index: state for p, state in states if p[:2] == (kind, self._layer)}


class _Mixer(NamedTuple):
    """A mixer at work in one forward."""

    memory: Memory
    plan: MixerPlan
    current: threading.local
    call: Callable

    def run(
        self, inputs: Tensor, states: Mapping[Place, Tensor], **options
    ) -> tuple[_MixerCall, Tensor]:
        run = _MixerCall(self.plan, states, **options)
        self.memory.run = self.current.run = run
        try:
            return run, self.call(inputs)
        finally:
            self.memory.run = self.current.run = None

    def _copies(self) -> dict[Place, Tensor]:
        return {place: self.memory.states[place].clone() for place in self.plan.states}

    def read(self, inputs: Tensor, record: dict[str, Tensor]) -> Tensor:
        """Output for tokens that may be rejected, one by one: their products are recorded."""
        states, out = self._copies(), []
        for i in range(inputs.shape[1]):
            column = {name: table[:, i : i + 1] for name, table in record.items()}
            run, of_token = self.run(inputs[:, i : i + 1], states, record=column)
            states = run.left()
            out.append(of_token)
        return torch.cat(out, dim=1)

    def read_both(self, inputs: Tensor, record: dict[str, Tensor], line: TwoWindows) -> Tensor:
        """The same for all at once, and what was kept of the last window becomes part of the
        state.
        """
        states, rows = self.memory.states, len(inputs)
        twice = {place: torch.cat([states[place]] * 2) for place in self.plan.states}
        both = line.join(record[""], inputs)
        record[""][:, : line.count] = inputs
        run, out = self.run(both, twice, is_closed=line.is_closed, record=record, line=line)
        for place, left in run.left(line.kept, rows).items():
            states[place].copy_(left)
        return out if len(out) == rows else line.take(out)

    def commit(self, inputs: Tensor, counts: Tensor, source: Mapping[str, Tensor]) -> Tensor:
        """Makes the first `counts` `[B]` tokens of each row a part of the state; returns the output
        for all.
        """
        states, counts = self.memory.states, counts.to(inputs.device)
        if self.plan.gates is not None:
            order = torch.arange(inputs.shape[1], device=inputs.device)
            is_closed = order >= counts[:, None]
            run, out = self.run(inputs, self._copies(), source=source, is_closed=is_closed)
            for place, left in run.left(counts).items():
                states[place].copy_(left)
            return out
        out = []
        for i in range(inputs.shape[1]):
            column = {name: table[:, i : i + 1] for name, table in source.items()}
            run, of_token = self.run(inputs[:, i : i + 1], self._copies(), source=column)
            for place, left in run.left().items():
                is_kept = (counts > i).view(-1, *[1] * (left.dim() - 1))
                states[place].copy_(torch.where(is_kept, left, states[place]))
            out.append(of_token)
        return torch.cat(out, dim=1)


class _MixerCall:
    """One call of a mixer: working copies of its states, and what its products are.

    Args:
        plan: the mixer's.
        states: before it, by place: copies, since some mixers change them in place.
        source: products that are known, `[B, N, F]`; then the last output is not wanted.
        is_closed: `[B, N]`, tokens that are to leave the state as it is.
        record: where products are written.
        line: of a call over two windows; products of the last one are those of the record.
    """

    def __init__(
        self,
        plan: MixerPlan,
        states: Mapping[Place, Tensor],
        *,
        source: Mapping[str, Tensor] | None = None,
        is_closed: Tensor | None = None,
        record: dict[str, Tensor] | None = None,
        line: TwoWindows | None = None,
    ):
        self.plan, self.source, self.is_closed = plan, source or {}, is_closed
        self.record, self.line = record or {}, line
        self.states = dict(states)

    def product(self, name: str, forward: Callable, x: Tensor) -> Tensor:
        """What a linear layer of the mixer puts out."""
        if (name,) == self.plan.outputs[-1:]:
            if self.source:
                return x.new_zeros(()).expand(*x.shape[:-1], self.plan.input.shape[-1])
            return forward(x if self.line is None else self.line.take(x))
        if self.line is not None and name in self.record:
            table, new = self.record[name], forward(self.line.take(x))
            out = self.line.join(table, new)
            table[:, : self.line.count] = new
        else:
            out = self.source[name] if name in self.source else forward(x)
            if name in self.record:
                self.record[name].copy_(out)
        columns, floors = (self.plan.gates or {}).get(name), self.plan.floors
        if columns is None or (self.is_closed is None and floors is None):
            return out
        out = out.clone()
        if floors is not None:
            out[..., columns] = out[..., columns].maximum(floors)
        if self.is_closed is not None:
            out[..., columns].masked_fill_(self.is_closed[..., None], -torch.inf)
        return out

    def convolve(self, place: Place, inputs: Tensor) -> Tensor:
        """`[B, C, k + N]`: the inputs that a convolution still sees, and those of the window."""
        self.states[place] = torch.cat([self.states[place], inputs], dim=-1)
        return self.states[place]

    def left(self, counts: Tensor | None = None, rows: int | None = None) -> dict[Place, Tensor]:
        """The states that the run leaves, of its first rows; of convolutions those after the first
        `counts` `[B]` tokens, `None` for all.
        """
        states = {place: state[:rows] for place, state in self.states.items()}
        for place, inputs in states.items():
            if place.kind == "conv":
                width = self.plan.states[place].shape[-1]
                if counts is None:
                    states[place] = inputs[..., -width:]
                else:
                    index = counts[:, None] + torch.arange(width, device=inputs.device)
                    states[place] = inputs.gather(
                        -1, index[:, None].expand(-1, inputs.shape[1], -1)
                    )
        return states


@dataclass(init=False, eq=False, repr=False)
class RecurrentCache(SlotCache):
    """A `SlotCache` of a model with recurrent layers, which read once more what was kept of their
    last window when the next one opens.

    Args:
        batch_size, num_slots, shapes: as of `SlotCache`.
        mixers: recurrent ones, by name.
        max_window: tokens of the longest window of a step.
        extra_slots: as of `SlotCache`.

    Attributes:
        memory: of the recurrent layers.
    """

    memory: Memory

    def __init__(
        self,
        batch_size: int,
        num_slots: int,
        shapes: Mapping[Stored, KeyValueShape],
        *,
        mixers: Mapping[str, MixerPlan],
        max_window: int = 1,
        extra_slots: int | None = None,
    ):
        self.memory = Memory(batch_size, max_window, mixers)
        super().__init__(batch_size, num_slots, shapes, extra_slots=extra_slots)

    def __post_init__(self):
        super().__post_init__()
        count = 1 + max(place.layer for place in self.memory.states)
        self.layers = [LayerStates(self.memory, i) for i in range(count)]

    def open_window(self, slots: Tensor, *, is_chunk: bool = False, **options: Any) -> Window:
        """As `SlotCache.open_window`."""
        self.memory.open(slots, self.padding_slot, is_chunk=is_chunk)
        return super().open_window(slots, is_chunk=is_chunk, memory=self.memory, **options)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """HF's entry: the last inputs of a convolution, zeros before the text."""
        return self.memory.run.states[Place("conv", layer_idx, state_idx)]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """HF's entry: inputs of a convolution behind those that it still sees."""
        return self.memory.run.convolve(Place("conv", layer_idx, state_idx), conv_states)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """HF's entry: the state behind the text so far."""
        return self.memory.run.states[Place("recurrent", layer_idx, state_idx)]

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """HF's entry: the state behind the window."""
        self.memory.run.states[Place("recurrent", layer_idx, state_idx)] = recurrent_states
        return recurrent_states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """HF's entry: a row without text has the state of zeros."""
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        """HF's entry: convolutions are handed all of their inputs, also for one token."""
        return True


def edit_memory(view: PreTrainedModel, mixers: Mapping[str, MixerPlan]) -> None:
    """Makes the mixers of a private view read and write the memory of the window that it runs.

    Args:
        view: of `private_view`.
        mixers: by name.
    """

    def around(name: str, current: threading.local, forward: Callable, *args, **kwargs):
        memory = None if view.running.window is None else view.running.window.memory
        if memory is None:
            return forward(*args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = None  # a window has no padding
        if args:
            hidden, call = args[0], lambda x: forward(x, *args[1:], **kwargs)
        else:
            rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            hidden, call = kwargs["hidden_states"], lambda x: forward(hidden_states=x, **rest)
        return memory.mix(name, current, call, hidden)

    def product(name: str, current: threading.local, forward: Callable, x: Tensor) -> Tensor:
        run = getattr(current, "run", None)
        return forward(x) if run is None else run.product(name, forward, x)

    for name, plan in mixers.items():
        mixer, current = view.get_submodule(name), threading.local()
        if plan.floors is not None:
            mixer.time_step_limit = (0.0, mixer.time_step_limit[1])
        wrap_forward(mixer, partial(around, name, current))
        for child in (*plan.products, *plan.outputs):
            wrap_forward(mixer.get_submodule(child), partial(product, child, current))
