"""`Record`: all that the host needs of a step, in one table, so that one copy takes it there.

Legend: B rows, K draft tokens (nodes of a tree), D tokens of its longest path (K for a chain), C
columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_NUM_COUNTS = 6


@dataclass(eq=False, repr=False)
class Record:
    """Named views of a table, on the device or on the host: what is written to the one or read from
    the other has a name and no column.

    Args:
        table: `[B, C]` int64, a tensor, or an array of the host.
        num_draft_tokens: K.
        tree_depth: D of trees; `None` for chains.

    Attributes:
        num_new: `[B]` tokens that the row keeps.
        is_eos: `[B]` 1 where the row ended with an end-of-sequence token.
        num_accepted, num_drafted: `[B]` tokens accepted, and those that the sampler considered.
        faults: `[B]` sums of `Fault` values that the sampler found.
        num_sound: `[B]` tokens before one that no distribution stands for (`Outcome.note_empty`).
        emitted: `[B, D + 1]` tokens, as the sampler returned them.
        path: `[B, D + 1]` of the verdict on a tree; `None` for chains.
        num_valid, drafted: `[B]` and `[B, K]`, as the drafter returned them.
        parents: `[B, K]` of the nodes of a tree; `None` for chains.
        verdict, proposal: all columns of the verdict and of the proposal, in the order of above.

    Example:
        >>> record = Record.allocate(2, num_draft_tokens=3)
        >>> record.drafted[1] = 7
        >>> record.table[1].tolist(), record.emitted.shape
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 7, 7], torch.Size([2, 4]))
    """

    table: Any
    num_draft_tokens: int
    tree_depth: int | None = None

    @classmethod
    def allocate(
        cls,
        batch_size: int,
        num_draft_tokens: int,
        tree_depth: int | None = None,
        *,
        device: torch.device | str = "cpu",
    ) -> Record:
        """A table of zeros."""
        depth, per_node = (num_draft_tokens, 1) if tree_depth is None else (tree_depth, 2)
        width = _NUM_COUNTS + (depth + 1) * per_node + 1 + num_draft_tokens * per_node
        table = torch.zeros(batch_size, width, dtype=torch.long, device=device)
        return cls(table, num_draft_tokens, tree_depth)

    def __post_init__(self):
        table, depth = self.table, self.tree_depth
        is_chain, width = depth is None, (self.num_draft_tokens if depth is None else depth) + 1
        counts = (table[:, i] for i in range(_NUM_COUNTS))
        self.num_new, self.is_eos, self.num_accepted, self.num_drafted, *others = counts
        self.faults, self.num_sound = others
        end = _NUM_COUNTS + width
        self.emitted = table[:, _NUM_COUNTS:end]
        self.path = None if is_chain else table[:, end : end + width]
        end += 0 if is_chain else width
        self.verdict, self.proposal = table[:, :end], table[:, end:]
        nodes = self.proposal[:, 1:]
        self.num_valid, self.drafted = self.proposal[:, 0], nodes[:, : self.num_draft_tokens]
        self.parents = None if is_chain else nodes[:, self.num_draft_tokens :]
