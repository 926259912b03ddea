"""Trees of what followed several matches.

Legend: B rows, m matches, c continuations, D tokens of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.types import Draft


def tree_of(tokens: Tensor, found: Tensor, most: int, num_draft_tokens: int) -> Draft:
    """The continuations of the best matches. Where a row has fewer matches the first is there
    several times, and one with fewer tokens ends in zeros: guesses as good as any.

    Args:
        tokens: `[B, m, D]` that follow the matches, the best first.
        found: `[B, m]` scores of the matches, -1 for none.
        most: c.
        num_draft_tokens: K.
    """
    depth = tokens.shape[2]
    tokens = torch.where(found[..., None] >= 0, tokens, tokens[:, :1])
    is_whole = are_alike(tokens)[..., -1]
    is_late = is_whole.tril(-1).any(dim=2) | (found < 0)
    order = is_late.long().sort(dim=1, stable=True).indices[:, :most, None]
    tokens = tokens.gather(1, order.expand(-1, -1, depth))  # [B, c, D]
    # A node hangs on the first of the nodes that stand for the same text.
    first = are_alike(tokens).long().argmax(dim=2)  # [B, c, D]
    parents = first * depth + torch.arange(depth, device=tokens.device)
    parents = F.pad(parents[..., :-1], (1, 0), value=-1)
    nodes, parents = (x.flatten(1)[:, :num_draft_tokens] for x in (tokens, parents))
    num_valid = torch.where(found[:, 0] >= 0, num_draft_tokens, 0)
    return Draft(nodes, None, num_valid, parents, min(depth, num_draft_tokens))


def are_alike(tokens: Tensor) -> Tensor:
    """`[B, m, m, D]` bool: whether continuations `[B, m, D]` have their first tokens in common."""
    return (tokens[:, :, None] == tokens[:, None]).long().cumprod(dim=3) > 0
