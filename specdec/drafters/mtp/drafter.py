"""`MTPDrafter`: prediction modules that a target ships, one per depth, draft a chain.

Legend: B rows, N new tokens, K draft tokens, D depths, H width of the head, W window, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters import files
from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.state import HeadState
from specdec.drafters.head.window import Pass, WindowPlan
from specdec.drafters.mtp.head import MTPHead
from specdec.drafters.mtp.window import PastRows, ShiftedWindow, shift_window
from specdec.drafters.proposal import Drafting
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft


@dataclass(frozen=True, eq=False)
class MTPState(HeadState):
    """Keys and values of every depth, index t of a text in slot t, and the rows that repair them.

    Args:
        cache, angles: as `HeadState`; depth d is layer d.
        past: the last rows of each text, committed tokens beside the target's features; see
            `drafters/mtp/window.py`.
        before: those that the last window began with.
        start: `[B]` int64, where that window's context began. A step whose capture fails is run
            again: it finds the same start, and begins with the same rows. Before the first window
            it is 0, and both tables are zeros.
    """

    past: PastRows
    before: PastRows
    start: Tensor

    @property
    def num_depths(self) -> int:
        """Depths that it was made for."""
        return len(self.cache.keys)


class MTPDrafter(HeadDrafter):
    """Drafts K tokens with D prediction modules, the depths, each with its own keys and values.

    A step costs max(K, D) passes. Each of the first D passes runs one depth over a window of K + 1
    rows, which holds the newly committed tokens and, before them, as many remembered ones as there
    is room for: it re-computes what that depth had computed from draft tokens, so every key and
    value below a text's root depends on committed tokens alone (`drafters/mtp/window.py`
    proves that the window suffices). Depth d predicts draft token d. If K > D, the last depth goes
    on alone, one row per pass, reading its own output; if K < D, the head's first K depths serve.

    What differs between models is in the head's configuration: which feature enters, whether depths
    are chained, which state is passed on. A row of which the target has read nothing yet (the first
    step of a one-token prompt) proposes nothing.

    `from_pretrained` reads the modules from the target's own checkpoint folder, where HF leaves
    them unread; see `specdec.checkpoints.mtp`.

    Args and Raises: as `HeadDrafter`; the head is an `MTPHead`.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.drafters.head.layer_config import LayerConfig
        >>> from specdec.drafters.mtp.head import MTPConfig, MTPHead
        >>> target = zoo.load_target()
        >>> layer = LayerConfig(128, 256, 4, 4, 32)
        >>> head = MTPHead(MTPConfig(layer, target.config.vocab_size, num_layers=3))
        >>> drafter = MTPDrafter(head, target, num_draft_tokens=3)
        >>> SpeculativeGenerator(target, drafter).target.feature_layers
        ('final',)

    Reference: DeepSeek-AI, arXiv:2412.19437, section 2.2; Gloeckle et al., arXiv:2404.19737.
    """

    head_type = MTPHead
    drafts_trees = False

    @property
    def num_depths(self) -> int:
        """Depths that the states of new calls have: no more than K are."""
        return min(self.config.num_layers, self.num_draft_tokens)

    num_layers = num_depths

    def save_pretrained(
        self,
        folder: str | Path,
        layout: Any = None,
        target: PreTrainedModel | None = None,
    ) -> None:
        """Writes the head in the library's own layout, or the target with the head in one that
        engines read. Args and Raises: as `save_modules`.
        """
        files.checkpoints("mtp").save_modules(self.head, folder, layout, target)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> MTPState:
        """Key/value storage for `max_length` tokens per row and depth, and the rows to remember."""
        of_head = super().init_state(batch_size, max_length, vocab_size=vocab_size, device=device)
        rows = batch_size, max(self.num_depths - 1, 0)
        where = {"dtype": self.head.dtype, "device": device}
        past, before = (
            PastRows(
                torch.zeros(rows, dtype=torch.long, device=device),
                torch.zeros(*rows, self.config.hidden_size, **where),
            )
            for _ in range(2)
        )
        start = torch.zeros(batch_size, dtype=torch.long, device=device)
        return MTPState(of_head.cache, of_head.angles, past, before, start)

    def prefill(self, context: Context, state: MTPState) -> None:
        """Reads the new tokens beside their features, at every depth.

        The newest d entries of depth d need tokens that are not known yet. They are computed from
        token 0, and the next call computes them again.
        """
        # None of the newest entries can be kept, as they can after a draft that was accepted.
        width = context.tokens.shape[1] - 1 + state.num_depths - 1
        window, step = self._open(context, state, width)[:2]
        self._run_depths(window, step, state.num_depths)

    def propose(self, context: Context, state: MTPState, drawing: Drawing) -> Draft:
        """One pass per depth or draft token; a row without any new token proposes nothing."""
        num_draft_tokens, depths = drawing.num_draft_tokens, state.num_depths
        num_later = max(num_draft_tokens - depths, 0)
        width = max(context.tokens.shape[1] - 1, depths)
        window, step, plan = self._open(context, state, width, num_later)
        drafting = self.proposal.begin(drawing)
        out = self._run_depths(window, step, depths, drafting, num_draft_tokens)
        head, last = self.head, depths - 1
        for m in range(num_later):
            embeds, hidden = self.embed(drafting.tokens[-1]), head.feedback(last, out)
            out = head(last, embeds, hidden, plan.open(1 + m))
            drafting.draw(self.logits(out, last))
        return drafting.end(context.num_new.clamp(0, 1) * num_draft_tokens)

    def logits(self, out: Tensor, depth: int = 0) -> Tensor:
        """Logits `[B, N, V]` of a depth's outputs `[B, N, H]`."""
        return self.head.logits(depth, out, self.borrowed.lm_head)

    def shift(
        self, context: Context, state: MTPState, width: int, num_later: int = 0
    ) -> ShiftedWindow:
        """The last `width` rows of every text, and `num_later` slots after the newest. The state
        remembers the newest rows, and those that were there before.
        """
        self.check_features(context)
        context = replace(context, features=self.head.fuse(context.features))
        is_again = (context.start == state.start)[:, None]
        state.before.tokens.copy_(torch.where(is_again, state.before.tokens, state.past.tokens))
        wide = is_again[..., None]
        state.before.features.copy_(torch.where(wide, state.before.features, state.past.features))
        state.start.copy_(context.start)
        padding_slot = state.cache.padding_slot
        window = shift_window(
            context, state.before, width, padding_slot=padding_slot, num_later=num_later
        )
        for table, newest in zip(state.past, window.past(state.num_depths - 1), strict=True):
            table.copy_(newest)
        return window

    def _open(
        self, context: Context, state: MTPState, width: int, num_later: int = 0
    ) -> tuple[ShiftedWindow, Pass, WindowPlan]:
        """The rows of all depths' first passes, that pass, and the plan of all passes."""
        window = self.shift(context, state, width, num_later)
        plan = WindowPlan(state.cache, window.slots, num_later, table=state.angles)
        return window, plan.open(0), plan

    def _run_depths(
        self,
        window: ShiftedWindow,
        step: Pass,
        num_depths: int,
        drafting: Drafting | None = None,
        num_draft_tokens: int = 0,
    ) -> Tensor:
        """One pass of every depth over a window; each draws a draft token, while one is wanted.
        Returns the last depth's output at each text's newest row, `[B, 1, H]`.
        """
        head, tokens, hidden = self.head, window.tokens, window.features
        unknown = torch.zeros_like(tokens[:, :1])
        for depth in range(num_depths):
            out = head(depth, self.embed(tokens), hidden, step)
            drafted = unknown
            if depth < num_draft_tokens:
                drafted = drafting.draw(self.logits(out[:, -1:], depth))
            tokens = torch.cat([tokens[:, 1:], drafted], dim=1)
            if self.config.semantics == "chain":
                hidden = head.feedback(depth, out)
        return out[:, -1:]
