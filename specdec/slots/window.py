"""`Window`: the tokens of one forward.

Legend: B rows, N tokens of a window, n queries (the last of the N), m slots in use with it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAST = "last_embedding"
"""Name of the row input that holds the embedding of a prompt's last token, where it is not that of
its id."""


class Chunk(NamedTuple):
    """In place of a layer's sliding window: a query sees keys of its own chunk of `size` positions,
    which begin at multiples of it (Llama 4).
    """

    size: int


class Window:
    """The tokens of one forward: where each is stored, where it stands, and what it sees.

    A slot is an index in the storage, a position one in the text. Committed tokens have
    slot = position, and so has a chain of draft tokens. Nodes of a tree are stored one after the
    other, and nodes of one depth share a position. What a model is told is `text_positions`: a row
    may carry an offset. What sees what is a matter of slots, and of positions without it.

    Args:
        slots: `[B, N]` int64; the cache's padding slot for a token to forget.
        num_attended: W, how many slots the forward attends over, a multiple of `SLOT_MULTIPLE`.
        positions: `[B, N]` int64; `None` for those of a chain, `slots`. Positions of their own are
            those of tokens in consecutive slots.
        visible: bool that broadcasts to `[B, n, m]`, over the n tokens of the window that have
            queries, its last, and the last m >= n slots that are in use with it. Entry (i, j) is
            whether token i sees slot `first + j`, where `first` is m - n before the smallest slot
            of a row's queries: the ancestors of a node and itself, or a block that sees itself in
            both directions. Slots before `first` are seen by all. `None` is causal.
        layer_windows: sliding window of each attention layer by its index, in positions, or its
            `Chunk`; `None` for full attention, also of layers that are left out.
        query_layers: layers whose queries are wanted as features.
        row_inputs: `[B, ...]` by name, those of the cache; see `SlotCache`.
        logits_to_keep: logits of the last so many tokens are computed; 0 for all of them; `None`
            where nobody reads them: as few as the model can.
        is_chunk: of a prompt: many tokens, all of which are kept.
        memory: what recurrent layers remember of the rows; `None` where there are none.
        has_kernels: attention over the window may be `ragged_attention`.
        prompt: what the text decoder reads in place of token ids, a chunk of `PromptInputs`.

    Attributes:
        masks: additive masks of this forward, made on first use (attention.py).
        features: hidden states of this forward by feature layer, where they are wanted.
    """

    def __init__(
        self,
        slots: Tensor,
        num_attended: int,
        *,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        layer_windows: Mapping[int, int | Chunk | None] | None = None,
        query_layers: Collection[int] = (),
        row_inputs: Mapping[str, Tensor] | None = None,
        logits_to_keep: int | None = 0,
        is_chunk: bool = False,
        memory: Any = None,
        has_kernels: bool = False,
        prompt: Any = None,
    ):
        self.prompt = prompt
        self.slots, self.num_attended = slots, num_attended
        self.positions, self.visible, self.row_inputs = positions, visible, row_inputs or {}
        self.layer_windows, self.has_kernels = layer_windows or {}, has_kernels
        self.query_layers = query_layers
        self.logits_to_keep, self.is_chunk, self.memory = logits_to_keep, is_chunk, memory
        self.masks: dict[tuple, Tensor] = {}
        self.features: dict[Any, Tensor] = {}
        self.flat_slots: Tensor | None = None  # in a list of the slots of all rows
        self._elsewhere: dict[torch.device, Window] = {}

    @property
    def text_positions(self) -> Tensor:
        """`[B, N]`, where each token stands in its text, for a model."""
        positions = self.slots if self.positions is None else self.positions
        offset = self.row_inputs.get("position_offset")
        return positions if offset is None else positions + offset[:, None]

    def positions_below(self, limit: int | None, padding_slot: int) -> Tensor:
        """The same for a model of so many positions. Tokens at or beyond the last one will be
        forgotten: those in the padding slot, and what a row drafts beyond its last token.
        """
        positions = self.text_positions
        has_offset = "position_offset" in self.row_inputs
        fits = limit is None or (padding_slot < limit and not has_offset)
        return positions if fits else positions.clamp(max=limit - 1)

    @property
    def has_own_masks(self) -> bool:
        """Its prompt says what each token sees, and not the slots."""
        return self.prompt is not None and not self.prompt.is_causal

    @property
    def since_prompt(self) -> Tensor:
        """`[B, N]`, how many positions after the last token of its row's prompt each token stands:
        0 for that token, from which the first new one is predicted, and below 0 before it.

        Raises:
            ValueError: nobody said where prompts end.
        """
        if "prompt_end" not in self.row_inputs:
            raise ValueError(
                "a window has no row_inputs['prompt_end'], the position of the last token of each "
                "row's prompt; in a loop of your own, set cache.row_inputs['prompt_end']"
            )
        return self.text_positions - self.row_inputs["prompt_end"][:, None]

    def on(self, device: torch.device) -> Window:
        """The window with its tensors on a device, that of some layers, copied there once."""
        if device == self.slots.device:
            return self
        if device not in self._elsewhere:
            other = self._elsewhere[device] = copy.copy(self)
            for name in ("slots", "positions", "visible"):
                tensor = getattr(self, name)
                setattr(other, name, None if tensor is None else tensor.to(device))
            other.row_inputs = {name: own.to(device) for name, own in self.row_inputs.items()}
            other.masks, other.flat_slots = {}, None
        return self._elsewhere[device]
