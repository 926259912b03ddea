"""Positions of a longer text for short training rows, so that a head has met distances that its
rows do not have.

Legend: B rows of a batch, T tokens of a row, P pieces of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.arguments import check_integer


@dataclass(frozen=True)
class SkippedPositions:
    """Positions with skips: a row is cut into pieces at random, and each piece but the first begins
    any number of positions later, as if the text between had been left out.

    The target reads its rows at their own positions; only the head's keys and queries are turned to
    these. Within a piece distances are those of the text. Draws come from torch's global generator,
    as those of anchors do.

    Args:
        longest: positions are below it; at least the tokens of a row.
        pieces: P.

    Example:
        >>> positions = SkippedPositions(4096)(2, 512)
        >>> positions.shape, bool((positions.diff() > 0).all()), int(positions.max()) < 4096
        (torch.Size([2, 512]), True, True)

    Reference: Zhu et al., arXiv:2309.10400 (PoSE), section 3.2.
    """

    longest: int
    pieces: int = 2

    def __post_init__(self):
        check_integer("SkippedPositions.longest", self.longest, 1)
        check_integer("SkippedPositions.pieces", self.pieces, 1)

    def __call__(self, rows: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """`[B, T]` int64, ascending in each row."""
        advice = "longest has to be at least the tokens of a training row"
        check_integer("the tokens of a row", count, 1, self.longest, advice=advice)
        shape = rows, self.pieces - 1
        starts = torch.randint(1, max(count, 2), shape, device=device)
        skips = torch.randint(0, self.longest - count + 1, shape, device=device).sort(dim=1).values
        skips = torch.cat([skips.new_zeros(rows, 1), skips], dim=1)  # of each piece, in all
        index = torch.arange(count, device=device)
        piece = (index[:, None] >= starts[:, None]).sum(dim=2)  # [B, T]
        return index + skips.gather(1, piece)
