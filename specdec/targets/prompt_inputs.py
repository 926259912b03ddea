"""`PromptInputs`: prompts that are more than token ids, as they reach the text decoder of a model.

A model's own `generate` makes embeddings, positions and masks of pictures, sound or given
embeddings before its text decoder runs (`reading.py` asks it to). Here these become rows that begin
at slot 0, and chunks of them.

Legend: B rows, T columns of the longest prompt, C tokens of a chunk, W slots attended over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.slots.cache import LAST

WHOLE = ""
"""The kind of layer of a mask that is handed to all layers."""


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """What the text decoder reads of a batch of prompts. Rows begin in column 0, as slots do; what
    follows a row's last token is garbage.

    Args:
        lengths: tokens of each row.
        arguments: `[B, T, ...]` by the names of the decoder's arguments, the embeddings
            `inputs_embeds` among them.
        position_ids: `[B, T]`, or `[A, B, T]` of several axes; `None` where the decoder counts
            slots.
        marked: name of the argument that marks tokens to which others of its arguments belong, and
            these: of each layer `[n, H]`, of the n marked tokens of all rows one after the other.
        visible: bool `[B, T, T]` by kind of layer, whether a token sees another. `WHOLE` stands for
            all kinds, and `None` for those whose layers see what they see in text.
        in_text: by kind, of columns `[T]`, whether each token sees another `[T, T]` in text.
        is_given: `[B, T]` bool: the embedding is not that of the token's id.
        position_offset: `[B]` int64: positions of what follows the prompt, less the slots.
        last_ids: `[B]` ids of the rows' last tokens, 0 where nobody knows.
        last: `[B, H]` embeddings of the rows' last tokens, where one of them is not that of its id.
    """

    lengths: Sequence[int]
    arguments: Mapping[str, Tensor]
    position_ids: Tensor | None
    marked: Mapping[str, tuple[str, Sequence[Tensor]]] = field(default_factory=dict)
    visible: Mapping[str, Tensor | None] = field(default_factory=dict)
    in_text: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    is_given: Tensor | None = None
    position_offset: Tensor | None = None
    last_ids: Tensor | None = None
    last: Tensor | None = None

    @property
    def is_causal(self) -> bool:
        """No token sees a later one, but as in text."""
        return not self._seen

    @property
    def kind(self) -> frozenset[str]:
        """Names of what the text decoder is given."""
        masks = {f"{kind} mask" for kind in self._seen}
        positions = set() if self.position_ids is None else {f"{self.position_ids.dim()} axes"}
        return frozenset(masks | positions | self.arguments.keys() | self.marked.keys())

    @property
    def placeholders(self) -> list[list[tuple[int, int]]]:
        """Of each row the runs of tokens, first and end, whose embeddings are not those of their
        ids: pictures, sound, or embeddings that the call brought. Waits for the device.
        """
        if self.is_given is None:
            return [[] for _ in self.lengths]
        given = self._real(self.is_given).cpu().long()
        steps = F.pad(given, (1, 1)).diff(dim=1)  # [B, T + 1]
        edges = [[(row == sign).nonzero()[:, 0].tolist() for sign in (1, -1)] for row in steps]
        return [[*zip(firsts, ends, strict=True)] for firsts, ends in edges]

    @property
    def _seen(self) -> dict[str, Tensor]:
        return {kind: seen for kind, seen in self.visible.items() if seen is not None}

    @property
    def num_read(self) -> int:
        """Columns that are read before the first step: all but the last token, which the first step
        reads; where earlier tokens see that one, too, it is read twice.
        """
        return max(self.lengths) - self.is_causal

    @property
    def row_inputs(self) -> dict[str, Tensor]:
        """What every step reads of each row, see `SlotCache.row_inputs`."""
        own = {"position_offset": self.position_offset, LAST: self.last}
        return {name: value for name, value in own.items() if value is not None}

    @cached_property
    def _borders(self) -> Tensor:
        """`[T]` bool of the host: a chunk may end behind a column, since none before it sees
        further.
        """
        width = max(self.lengths)
        columns = torch.arange(width, device="cpu")
        furthest = columns.clone()
        for seen in self._seen.values():
            device = seen.device
            order, ends = torch.arange(width, device=device), self._lengths_on(device)
            is_real = order < ends[:, None]
            both = seen & is_real[:, :, None] & is_real[:, None]
            reach = torch.where(both, order, -1).amax(dim=(0, 2))  # [T]
            furthest = furthest.maximum(reach.cpu())
        return furthest.cummax(0).values <= columns

    @property
    def trial_size(self) -> int:
        """A size of chunks for a self-test: two of them, or the first that would cut what sees
        itself both ways.
        """
        if self.is_causal:
            return max(1, self.num_read // 2)
        return int((~self._borders).long().argmax()) + 1

    @cached_property
    def uncut(self) -> tuple[int, int]:
        """Tokens of the longest chunk that cannot be cut, since some of it see later ones of it,
        and bytes that its masks take: an additive one of its tokens by all slots of the prompts,
        and what the prompts keep, a bool for every two tokens; of all rows and kinds of layers.
        (0, 0) where no token sees a later one.
        """
        if self.is_causal:
            return 0, 0
        ends = self._borders.nonzero()[:, 0]
        size = int(ends.diff(prepend=ends.new_tensor([-1])).max())
        kept = sum(seen.numel() for seen in self._seen.values())
        width, dtype = max(self.lengths), self.arguments["inputs_embeds"].dtype
        added = len(self._seen) * len(self.lengths) * size * width * dtype.itemsize
        return size, added + kept

    @property
    def uncut_note(self) -> str:
        """The same in a sentence; empty where every chunk can be cut."""
        size, num_bytes = self.uncut
        if not size:
            return ""
        return (
            f"prompts whose tokens see later ones: {size} tokens were read in one chunk, whatever "
            f"prefill_chunk_size is, and their masks took {num_bytes / 2**20:.1f} MiB for "
            f"{len(self.lengths)} x {max(self.lengths)} tokens; fewer rows, or smaller pictures, "
            "take less"
        )

    def chunk_sizes(self, chunk_size: int) -> list[int]:
        """Sizes of the chunks that the prompts are read in: at most so many tokens where no token
        sees a later one; where one does, chunks end where none does, and may be longer.
        """
        sizes, start, end = [], 0, self.num_read
        while start < end:
            stop = min(start + chunk_size, end)
            if stop < end and not self.is_causal:
                legal = self._borders.nonzero()[:, 0] + 1  # ends
                before = legal[(legal > start) & (legal <= stop)]
                after = legal[legal > stop]
                stop = int(before[-1]) if len(before) else int(after[0]) if len(after) else end
            sizes.append(min(stop, end) - start)
            start += sizes[-1]
        return sizes

    def chunks(self, chunk_size: int) -> list[PromptChunk]:
        """All of them."""
        sizes = self.chunk_sizes(chunk_size)
        starts = torch.tensor([0, *sizes], device="cpu").cumsum(0).tolist()
        return [PromptChunk(self, start, size) for start, size in zip(starts, sizes, strict=False)]

    def repeated(self, copies: int) -> PromptInputs:
        """Each row so many times."""
        rows = torch.arange(len(self.lengths), device="cpu").repeat_interleave(copies)
        return self.take(rows.tolist())

    def filled_to(self, rows: int) -> PromptInputs:
        """With inert rows after its own, up to so many."""
        own = len(self.lengths)
        filled = self.take([*range(own), *[own - 1] * (rows - own)])
        return replace(filled, lengths=[*self.lengths, *[1] * (rows - own)])

    @classmethod
    def joined(cls, each: Sequence[PromptInputs]) -> PromptInputs:
        """The rows of several, one after the other. Marks that some lack mark nothing there.

        Raises:
            ValueError: some lack numbers that others have.
        """
        width = max(max(one.lengths) for one in each)
        names = dict.fromkeys(name for one in each for name in one.arguments)
        arguments = {}
        for name in names:
            like = next(one.arguments[name] for one in each if name in one.arguments)
            if like.is_floating_point() and not all(name in one.arguments for one in each):
                raise ValueError(f"some prompts have {name} and others do not; read them apart")
            tables = [one._argument(name, like) for one in each]
            arguments[name] = torch.cat([_padded(table, width) for table in tables])
        marked: dict[str, tuple[str, Sequence[Tensor]]] = {}
        for name in dict.fromkeys(name for one in each for name in one.marked):
            found = [one.marked[name] for one in each if name in one.marked]
            layers = zip(*(tables for _, tables in found), strict=True)
            marked[name] = found[0][0], [torch.cat(tables) for tables in layers]
        kinds = dict.fromkeys(kind for one in each for kind in one.visible)
        visible = {}
        for kind in kinds:
            if all(one.visible.get(kind) is None for one in each):
                visible[kind] = None
                continue
            tables = [one._visible_or_text(kind) for one in each]
            visible[kind] = torch.cat([_padded(_padded(t, width), width, 2) for t in tables])
        positions, last = None, None
        if all(one.position_ids is not None for one in each):
            tables = [one.position_ids for one in each]
            tables = [_padded(_with_axes(table, tables), width, -1) for table in tables]
            positions = torch.cat(tables, dim=-2)
        if any(one.last is not None for one in each):
            last = torch.cat([one._last_embedding() for one in each])
        return cls(
            lengths=[length for one in each for length in one.lengths],
            arguments=arguments,
            position_ids=positions,
            marked=marked,
            visible=visible,
            in_text={kind: f for one in each for kind, f in one.in_text.items()},
            is_given=torch.cat([_padded(one.is_given, width) for one in each]),
            position_offset=torch.cat([one.position_offset for one in each]),
            last_ids=torch.cat([one.last_ids for one in each]),
            last=last,
        )

    def _argument(self, name: str, like: Tensor) -> Tensor:
        if name in self.arguments:
            return self.arguments[name]
        shape = len(self.lengths), max(self.lengths), *like.shape[2:]
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _visible_or_text(self, kind: str) -> Tensor:
        if (own := self.visible.get(kind)) is not None:
            return own
        device = next(iter(self.arguments.values())).device
        order = torch.arange(max(self.lengths), device=device)
        return self.in_text[kind](order).expand(len(self.lengths), -1, -1)

    def _last_embedding(self) -> Tensor:
        embeds = self.arguments["inputs_embeds"]
        ends = self._lengths_on(embeds.device) - 1
        return embeds[torch.arange(len(embeds), device=embeds.device), ends]

    def take(self, rows: Sequence[int]) -> PromptInputs:
        """These rows, in this order."""

        def of(table: Tensor, dim: int = 0) -> Tensor:
            return table.index_select(dim, torch.tensor(rows, device=table.device))

        marked = {}
        for name, (mark, layers) in self.marked.items():
            counts = self._real(self.arguments[mark]).sum(dim=1).tolist()
            pieces = [layer.split(counts) for layer in layers]
            marked[name] = mark, [torch.cat([layer[row] for row in rows]) for layer in pieces]
        positions, width = self.position_ids, max(self.lengths[row] for row in rows)
        arguments = {name: of(table)[:, :width] for name, table in self.arguments.items()}
        given, offset, last = self.is_given, self.position_offset, self.last
        ids = self.last_ids
        return replace(
            self,
            lengths=[self.lengths[row] for row in rows],
            arguments=arguments,
            position_ids=None if positions is None else of(positions, -2)[..., :width],
            marked=marked,
            visible=dict.fromkeys(self.visible)
            | {kind: of(seen)[:, :width, :width] for kind, seen in self._seen.items()},
            is_given=None if given is None else of(given)[:, :width],
            position_offset=None if offset is None else of(offset),
            last_ids=None if ids is None else of(ids),
            last=None if last is None else of(last),
        )

    def rounded(self, unit: float, generator: torch.Generator) -> PromptInputs:
        """With embeddings that are rounded once more, by parts of `unit`: how far states move by
        rounding.
        """
        embeds = self.arguments["inputs_embeds"]
        noise = torch.randn(embeds.shape, generator=generator, dtype=torch.float64, device="cpu")
        moved = (embeds * (1 + unit * noise.to(embeds.device))).to(embeds.dtype)
        return replace(self, arguments={**self.arguments, "inputs_embeds": moved})

    def _lengths_on(self, device: torch.device) -> Tensor:
        return torch.tensor(self.lengths, device=device)

    def _real(self, table: Tensor) -> Tensor:
        """A mark `[B, T]` without what follows the rows' last tokens."""
        order = torch.arange(table.shape[1], device=table.device)
        return table.bool() & (order < self._lengths_on(table.device)[:, None])


@dataclass(frozen=True, eq=False)
class PromptChunk:
    """Some columns of `PromptInputs`.

    Args:
        inputs: all of them.
        start: its first column.
        size: C.
    """

    inputs: PromptInputs
    start: int
    size: int

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that are read before the first step."""
        return [length - self.inputs.is_causal for length in self.inputs.lengths]

    @property
    def is_causal(self) -> bool:
        """Its layers see what they see in text."""
        return self.inputs.is_causal

    def arguments(self, num_attended: int, dtype: torch.dtype) -> dict:
        """The decoder's arguments in this chunk.

        Args:
            num_attended: W.
            dtype: of additive masks.
        """
        whole, columns = self.inputs, slice(self.start, self.start + self.size)
        found = {name: table[:, columns] for name, table in whole.arguments.items()}
        for name, (mark, layers) in whole.marked.items():
            marks = whole._real(whole.arguments[mark])
            number = (marks.flatten().long().cumsum(0) - 1).view_as(marks)[:, columns]
            found[mark] = marks[:, columns]
            found[name] = [layer[number[found[mark]].to(layer.device)] for layer in layers]
            if not len(found[name][0]):
                found[name] = found[mark] = None
        if whole.position_ids is not None:
            found["position_ids"] = whole.position_ids[..., columns]
        if not self.is_causal:
            masks = dict.fromkeys(whole.visible)
            masks |= {k: self._mask(seen, num_attended, dtype) for k, seen in whole._seen.items()}
            found["attention_mask"] = masks.get(WHOLE, masks)
        return found

    def _mask(self, visible: Tensor, num_attended: int, dtype: torch.dtype) -> Tensor:
        """Additive `[B, 1, C, W]`. What is no token of its row sees slot 0: a row without any key
        would be NaN.
        """
        seen = visible[:, self.start : self.start + self.size]
        ends = self.inputs._lengths_on(seen.device)
        order = torch.arange(seen.shape[2], device=seen.device)
        is_real = order < ends[:, None]
        seen = seen & is_real[:, None]
        seen = F.pad(seen, (0, max(0, num_attended - seen.shape[2])))[..., :num_attended].clone()
        seen[..., 0] |= ~is_real[:, self.start : self.start + self.size]
        hidden = torch.full(seen.shape, -torch.inf, dtype=dtype, device=seen.device)
        return hidden.masked_fill_(seen, 0)[:, None]


def _padded(table: Tensor, width: int, dim: int = 1) -> Tensor:
    """With zeros after its own columns."""
    missing = width - table.shape[dim]
    if missing == 0:
        return table
    shape = list(table.shape)
    shape[dim] = missing
    return torch.cat([table, table.new_zeros(shape)], dim=dim)


def _with_axes(positions: Tensor, every: Sequence[Tensor]) -> Tensor:
    """Of as many axes as any of them has."""
    most = max(every, key=lambda table: table.dim())
    return positions if positions.dim() == most.dim() else positions.expand(len(most), -1, -1)
