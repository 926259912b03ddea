"""The records that flow between the parts.

Legend: B rows, K draft tokens (the nodes of a tree), D depth (tokens on the longest path, K for a
chain), N = K + 1 rows of a window: the root, which is the last committed token, and the draft that
goes on from it; V target vocabulary, F feature width.
Shapes, data types and devices are checked when a record is built (`TypeError`, `ValueError` with
the name of the field); values are not, so no check waits for a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.arguments import check_integer, check_tensor

PAD_TOKEN = -1
"""Fills the token slots of a record that hold no token."""


class Queries(NamedTuple):
    """A feature: the queries of a layer's attention, of all heads side by side, as they are
    multiplied by the keys of the cache: with their positions, and scaled.
    """

    layer: int


FeatureLayer = int | str | Queries
"""A feature of the target: a hidden state by HF's number, `"final"`, or `Queries`."""

_IDS = (torch.long,)
_PROBS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Context:
    """What a drafter may know: the newly committed tokens and the target's features beside them.

    `features[:, j]` is the target's state at the token of position `start + j`: the state that
    *produced* `tokens[:, j + 1]`. This is the only place where the alignment "state t beside token
    t + 1" is written.

    A prompt of T >= 2 tokens, at positions 0..T - 1, arrives as follows. The first chunk has its
    token 0 as the root (`start` is 0), so token 0 is never a new token. The chunks of `prefill`
    bring tokens 1..T - 2. The last token, T - 1, is left for the first `propose`, whose root is
    token T - 2. A prompt of one token is the root of its first `propose`, with `num_new` 0; in
    `prefill`, which reads it only beside longer prompts, its `num_new` is -1. There is no `prefill`
    where no prompt has two tokens.

    Args:
        tokens: `[B, N + 1]` int64, the root (the last token known before) and then the new
            tokens.
        features: `[B, N, F]`, or `None` when the drafter asks for no features.
        start: `[B]` int64, position of the root.
        num_new: `[B]` int64, how many of the N new tokens are valid in each row; what follows them
            is garbage or `PAD_TOKEN`. It is 0 where only the root is known: in the `propose`
            after a prompt of one token, and in a chunk whose root is token T - 2 of its prompt
            (the first one of a prompt of two tokens). During prefill it is -1 in a row that ended
            before the chunk: there not even the root belongs to the row. The last known token is
            at index `num_new.clamp(min=0)`.
        target: the target's keys and values of the text, a `specdec.targets.text.TargetText`, for a
            drafter with `reads_target`; else `None`.
        row_inputs: `[B, ...]` by name, what the call brought for each row (`Drafter.row_inputs`).
        prompt: in a prefill, what `Drafter.read_prompts` made of these tokens, a
            `specdec.targets.prompt_inputs.PromptChunk`; `None` where tokens are ids alone.

    Example:
        >>> tokens = torch.tensor([[5, 7, 8]])  # the one at position 3, and the two after it
        >>> context = Context(tokens, torch.zeros(1, 2, 16), torch.tensor([3]), torch.tensor([2]))
        >>> context.num_committed, context.features.shape
        (tensor([6]), torch.Size([1, 2, 16]))
    """

    tokens: Tensor
    features: Tensor | None
    start: Tensor
    num_new: Tensor
    _: KW_ONLY
    target: Any = None
    row_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt: Any = None

    def __post_init__(self):
        rows, width = check_tensor("context.tokens", self.tokens, (None, None), _IDS).shape
        where = self.tokens.device
        check_tensor("context.start", self.start, (rows,), _IDS, device=where)
        check_tensor("context.num_new", self.num_new, (rows,), _IDS, device=where)
        if self.features is not None:
            check_tensor("context.features", self.features, (rows, width - 1, None))

    @property
    def num_committed(self) -> Tensor:
        """`[B]` tokens committed so far; the last of them sits at position `num_committed - 1`."""
        return self.start + self.num_new + 1


@dataclass(frozen=True, eq=False)
class Draft:
    """What a drafter proposes: tokens, and the probabilities that each was drawn from. Tokens
    follow each other, a chain, or are the nodes of a tree: several candidates for one position.

    Args:
        tokens: `[B, K]` int64; entries at or beyond `num_valid` are ignored.
        probs: `[B, K, V]` float32 or float64 over the *target's* vocabulary: `probs[b, i]` is the
            distribution from which `tokens[b, i]` was actually drawn, given the tokens before it
            and the siblings before it: of children drawn without replacement, what its earlier
            siblings left. `None` means a deterministic proposal, a point mass.
        num_valid: `[B]` int64, how many tokens each row proposes, or `None` for K in every row.
        parents: `[B, K]` int64, the node that each node hangs on, -1 for the root; a parent comes
            before its children, and siblings are in the order in which they were drawn. `None` is
            -1, 0, 1, ..., a chain: the host knows its shape. `window_parents` has both.
        depth: D, tokens on the longest path, known to the host; K for a chain, and where it is left
            out.
        runs: sizes of consecutive runs of nodes, K in all, in which no node hangs on another one or
            on the same one as another: rules that look at probabilities take one run at a time.
            `None` for runs of one node.
        raw_probs: `[B, K]`, the drafter's probability of each token given its path, before
            temperature, truncation and what siblings left, for traces (`Drawing.wants_raw`); `None`
            where nobody asked.
        proposed: set by the loop: the draft as the drafter returned it, where ids and counts of
            this one were brought into their ranges.

    Example:
        >>> chain = Draft(torch.tensor([[5, 6, 7]]), torch.full((1, 3, 10), 0.1))
        >>> chain.token_probs
        tensor([[0.1000, 0.1000, 0.1000]])
        >>> tree = Draft(torch.tensor([[5, 6, 7]]), parents=torch.tensor([[-1, 0, -1]]), depth=2)
        >>> tree.depths
        tensor([[0, 1, 2, 1]])
    """

    tokens: Tensor
    probs: Tensor | None = None
    num_valid: Tensor | None = None
    parents: Tensor | None = None
    depth: int | None = None
    runs: tuple[int, ...] | None = None
    raw_probs: Tensor | None = None
    proposed: Draft | None = None

    def __post_init__(self):
        rows, width = check_tensor("draft.tokens", self.tokens, (None, None), _IDS).shape
        where = self.tokens.device
        if self.probs is not None:
            check_tensor("draft.probs", self.probs, (rows, width, None), _PROBS, device=where)
        if self.num_valid is not None:
            check_tensor("draft.num_valid", self.num_valid, (rows,), _IDS, device=where)
        is_chain = self.parents is None
        if self.depth is None or is_chain:
            object.__setattr__(self, "depth", width)
        if is_chain:
            return
        check_tensor("draft.parents", self.parents, (rows, width), _IDS, device=where)
        check_integer("draft.depth", self.depth, min(width, 1), width)
        if self.runs is None:
            object.__setattr__(self, "runs", (1,) * width)
        if sum(self.runs) != width:
            raise ValueError(f"draft.runs must sum to {width} nodes, got {self.runs}")

    @cached_property
    def is_chain(self) -> bool:
        """Each token follows the one before it, as the host knows without a look at `parents`."""
        return self.parents is None

    @cached_property
    def window_parents(self) -> Tensor:
        """`[B, K]`, the row of the window that each token follows: 0 for the root, i + 1 for
        token i.
        """
        return _counted(self.tokens) if self.parents is None else self.parents + 1

    @cached_property
    def token_probs(self) -> Tensor | float:
        """`[B, K]`, the probability of each token under the distribution that it was drawn from;
        the number 1 for point masses.
        """
        if self.probs is None:
            return 1.0
        return self.probs.gather(-1, self.tokens.clamp(min=0)[..., None])[..., 0]

    def probs_like(self, table: Tensor) -> Tensor:
        """`[B, K, V]`: `probs`, or one-hot rows for point masses, in the type of a table
        `[..., V]`.
        """
        if self.probs is not None:
            return self.probs
        ids = self.tokens.clamp(0, table.shape[-1] - 1)[..., None]
        return table.new_zeros(*self.tokens.shape, table.shape[-1]).scatter_(-1, ids, 1)

    @cached_property
    def ancestors(self) -> Tensor:
        """`[B, N, N]` bool: (i, j) is whether row j of the window is row i or comes before it on
        its path.
        """
        from specdec.tree_shape import ancestors

        return ancestors(self.window_parents, self.depth)

    @cached_property
    def depths(self) -> Tensor:
        """`[B, N]` int64, how many tokens after the root each row of the window is."""
        if self.is_chain:
            index = torch.arange(self.depth + 1, device=self.tokens.device)
            return index.expand(len(self.tokens), -1)
        return self.ancestors.sum(dim=-1) - 1

    @cached_property
    def earlier_siblings(self) -> Tensor:
        """`[B, K, K]` bool: (i, j) is whether node j is an earlier sibling of node i."""
        from specdec.tree_shape import earlier_siblings

        return earlier_siblings(self.window_parents)

    @cached_property
    def first_children(self) -> tuple[Tensor, Tensor]:
        """`[B, N]` the first token after each row of the window, and whether there is any."""
        from specdec.tree_shape import first_children

        return first_children(self.window_parents, self.is_valid)

    @cached_property
    def is_valid(self) -> Tensor:
        """`[B, K]` bool: slots that hold a draft token."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        limit = self.tokens.shape[1] if self.num_valid is None else self.num_valid[:, None]
        return (index < limit).expand_as(self.tokens)


@dataclass(frozen=True, eq=False)
class TargetOutput:
    """One forward of the target over the root and the draft.

    Args:
        logits: `[B, N, V]`; row i predicts what follows the first i draft tokens; of a tree, what
            follows node i - 1.
        features: `[B, N, F]` of the same tokens, or `None`.
    """

    logits: Tensor
    features: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the sampler decided.

    Args:
        tokens: `[B, D + 1]` int64: the accepted path, one recovered or bonus token, then
            `PAD_TOKEN`.
        num_accepted: `[B]` int64 in 0..D, without the extra token.
        num_drafted: `[B]` int64 in 0..K, how many tokens were up for decision; `None` for all that
            the row drafted.
        path: `[B, D + 1]` int64, the rows of the window that were accepted: 0, the root, and i +
            1 for node i; after the accepted ones anything in 0..K. `None` is 0, 1, 2, ..., the path
            of a chain. `rows` has both.

    Example:
        >>> tokens = torch.tensor([[5, 6, 9], [4, PAD_TOKEN, PAD_TOKEN]])
        >>> Verdict(tokens, num_accepted=torch.tensor([2, 0])).is_bonus
        tensor([ True, False])
    """

    tokens: Tensor
    num_accepted: Tensor
    num_drafted: Tensor | None = None
    path: Tensor | None = None

    def __post_init__(self):
        shape = check_tensor("verdict.tokens", self.tokens, (None, None), _IDS).shape
        where = self.tokens.device
        check_tensor("verdict.num_accepted", self.num_accepted, shape[:1], _IDS, device=where)
        if self.num_drafted is not None:
            check_tensor("verdict.num_drafted", self.num_drafted, shape[:1], _IDS, device=where)
        if self.path is not None:
            check_tensor("verdict.path", self.path, shape, _IDS, device=where)

    @property
    def rows(self) -> Tensor:
        """`[B, D + 1]`, the rows of the window on the accepted path."""
        return _counted(self.tokens) if self.path is None else self.path

    @property
    def is_bonus(self) -> Tensor:
        """`[B]` bool, of a chain: everything was accepted, so the extra token is a bonus token, not
        a recovered one.
        """
        if self.num_drafted is None:
            return self.num_accepted == self.tokens.shape[1] - 1
        return self.num_accepted == self.num_drafted


def _counted(tokens: Tensor) -> Tensor:
    """0, 1, 2, ... in each row of a table."""
    return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
