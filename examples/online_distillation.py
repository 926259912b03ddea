"""`OnlineDistillation`: a draft model learns from the windows that the target has verified anyway,
rejected tokens included.

Legend: B rows, K draft tokens, N = K + 1 rows of a window, M windows that are kept, C tokens of
their context, k tokens whose probabilities are kept, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec import Context, Draft, Drawing, ModelDrafter, Verified, WrappedDrafter
from specdec.arguments import check_integer
from specdec.torch_names import buffers_of


class _State(NamedTuple):
    """Of `KeepVerified`: the drafter's own, and the last tokens of each row, ids plus 1."""

    inner: Any
    tail: Tensor


class KeepVerified(WrappedDrafter):
    """Drafts as a `ModelDrafter` does, and keeps what the target said of each window: the k largest
    probabilities after each of its tokens, also after those that were rejected.

    The windows of all rows and calls share one ring, which takes M (C + K + 2 N k) numbers of eight
    bytes. Drafts do not depend on it.

    Args:
        inner: of chains, without a vocabulary of its own.
        windows: M; the oldest are forgotten first.
        context: C, the tokens before a draft that a window has with it.
        top_k: k.

    Raises:
        TypeError, ValueError: another drafter; a number that is too small.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.lab.training import FollowTarget
        >>> target = zoo.load_target()
        >>> drafter = KeepVerified(zoo.load_drafter("model", target))
        >>> generator = SpeculativeGenerator(target, drafter)
        >>> follow = FollowTarget(generator, OnlineDistillation)
        >>> result = generator.generate(torch.tensor([[5, 6]]), max_new_tokens=16)
        >>> follow(result) > 0, drafter.num_kept == result.stats.steps[0]
        (True, True)

    Reference: Liu et al., arXiv:2310.07177 (OSD).
    """

    reads_outcome = True

    def __init__(
        self, inner: ModelDrafter, *, windows: int = 1024, context: int = 64, top_k: int = 32
    ):
        name = type(inner).__name__
        if not isinstance(inner, ModelDrafter):
            raise TypeError(f"KeepVerified keeps windows of a ModelDrafter, got a {name}")
        if inner.tree_depth is not None or inner.vocabulary is not None or inner.has_memory:
            raise ValueError(
                "KeepVerified keeps windows of chains in the target's vocabulary; make the "
                "ModelDrafter without tree= and vocabulary="
            )
        super().__init__(inner)
        self.windows = check_integer("windows", windows, 1)
        self.context = check_integer("context", context, 2)
        self.top_k = check_integer("top_k", top_k, 1)
        width = inner.num_draft_tokens
        sizes = {"tokens": (context + width,), "ids": (width + 1, top_k), "count": ()}
        for kind, shape in sizes.items():  # the last one is for what is not kept
            table = torch.zeros(windows + 1, *shape, dtype=torch.long, device="cpu")
            self.register_buffer(f"_{kind}", table, persistent=False)
        probs = torch.zeros(windows + 1, width + 1, top_k, device="cpu")
        self.register_buffer("_probs", probs, persistent=False)
        pointer = torch.zeros(1, dtype=torch.long, device="cpu")
        self.register_buffer("_num_seen", pointer, persistent=False)

    @property
    def model(self) -> PreTrainedModel:
        """The draft model."""
        return self.inner.model

    @property
    def num_kept(self) -> int:
        """Windows that are kept; waits for the device."""
        return min(int(self._num_seen), self.windows)

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """As the drafter's own; a vocabulary of k ids or more, and no longer drafts than when this
        was made.
        """
        super().validate(vocab_size=vocab_size, device=device)
        most = self._ids.shape[1] - 1
        check_integer("num_draft_tokens of KeepVerified", self.num_draft_tokens, 0, most)
        check_integer("top_k", self.top_k, 1, vocab_size)
        for name, table in (tables := buffers_of(self)).items():
            tables[name] = table.to(device)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> _State:
        """The drafter's own, and room for the last tokens."""
        sizes = {"vocab_size": vocab_size, "device": device}
        inner = super().init_state(batch_size, max_length, **sizes).inner
        tail = torch.zeros(batch_size, self.context, dtype=torch.long, device=device)
        return _State(inner, tail)

    def prefill(self, context: Context, state: _State) -> None:
        """The drafter reads the tokens, and the last ones are noted."""
        self._note(context, state)
        super().prefill(context, state)

    def propose(self, context: Context, state: _State, drawing: Drawing) -> Draft:
        """The drafter's own draft."""
        self._note(context, state)
        return super().propose(context, state, drawing)

    def _note(self, context: Context, state: _State) -> None:
        tail = state.tail
        is_first = (tail[:, -1] == 0) & (context.num_new >= 0)  # nothing has noted the root
        last = torch.where(is_first, context.tokens[:, 0] + 1, tail[:, -1])
        known = torch.cat([tail[:, :-1], last[:, None], context.tokens[:, 1:] + 1], dim=1)
        first = context.num_new.clamp(min=0)[:, None]
        index = first + torch.arange(tail.shape[1], device=tail.device)
        tail.copy_(known.gather(1, index))

    def learn(self, verified: Verified, state: _State) -> None:
        """Keeps the windows of the rows that are going on."""
        super().learn(verified, state)
        draft, is_going = verified.draft, verified.num_new > 0
        place = (self._num_seen + is_going.cumsum(dim=0) - 1) % self.windows
        place = torch.where(is_going, place, self.windows)
        width = min(draft.tokens.shape[1], self._ids.shape[1] - 1)  # others may draft more
        probs = verified.output.logits[:, : width + 1].float().softmax(dim=-1)
        probs, ids = probs.topk(self.top_k, dim=-1)
        tokens = torch.cat([state.tail, draft.tokens[:, :width] + 1], dim=1)
        self._tokens[:, : tokens.shape[1]].index_copy_(0, place, tokens)
        self._ids[:, : width + 1].index_copy_(0, place, ids)
        self._probs[:, : width + 1].index_copy_(0, place, probs)
        self._count.index_copy_(0, place, draft.is_valid[:, :width].sum(dim=1) + 1)
        self._num_seen.add_(is_going.sum())

    def kept(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Windows by number: tokens `[n, C + K]`, ids plus 1 and 0 before a text's beginning; of
        the rows of their windows the likeliest ids and their probabilities, `[n, N, k]`; and how
        many rows each has, `[n]`.
        """
        return self._tokens[index], self._ids[index], self._probs[index], self._count[index]


class OnlineDistillation(nn.Module):
    """Cross-entropy to what the target said of windows that were verified, KL(target || draft) and
    a constant, over every row of the window. It costs no forward of the target: what is minimised
    was computed by the steps. A draft is so learned from where the draft model went wrong, and from
    what would have followed there.

    An objective of `FollowTarget`: `FollowTarget(generator, OnlineDistillation)`.

    Args:
        drafter: whose windows are learned.
        model: the target, which is not run.
        windows: of each step of the optimiser, drawn at random from those that are kept.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> target = zoo.load_target()
        >>> drafter = KeepVerified(zoo.load_drafter("model", target))
        >>> generator = SpeculativeGenerator(target, drafter)
        >>> result = generator.generate(torch.tensor([[5, 6]]), max_new_tokens=8)
        >>> OnlineDistillation(drafter)().shape
        torch.Size([])

    Reference: Liu et al., arXiv:2310.07177 (OSD), there with a buffer of wrong tokens only.
    """

    def __init__(
        self, drafter: KeepVerified, model: PreTrainedModel | None = None, windows: int = 64
    ):
        super().__init__()
        if not isinstance(drafter, KeepVerified):
            raise TypeError(
                "OnlineDistillation learns the windows of KeepVerified(drafter), got a "
                f"{type(drafter).__name__}"
            )
        self.drafter, self.windows = drafter, check_integer("windows", windows, 1)

    def forward(self, ids: Tensor | None = None) -> Tensor:
        """Mean nats per row of windows. The texts of the rollout are not looked at.

        Raises:
            ValueError: no window has been kept.
        """
        drafter, count = self.drafter, self.drafter.num_kept
        if not count:
            raise ValueError("no window has been kept yet; generate with the drafter first")
        device = drafter._tokens.device
        index = torch.randperm(count, device="cpu")[: self.windows].to(device)
        tokens, likely, probs, rows = (table.clone() for table in drafter.kept(index))
        is_there = tokens > 0
        positions = (is_there.cumsum(dim=1) - 1).clamp(min=0)
        logits = drafter.model(
            input_ids=(tokens - 1).clamp(min=0),
            attention_mask=is_there.long(),
            position_ids=positions,
            use_cache=False,
        ).logits[:, drafter.context - 1 :]
        log_q = logits.float().log_softmax(dim=-1).gather(2, likely)
        loss = -(probs / probs.sum(dim=-1, keepdim=True) * log_q).sum(dim=-1)  # [n, N]
        is_row = torch.arange(loss.shape[1], device=device) < rows[:, None]
        return loss.where(is_row, 0).sum() / is_row.sum()
