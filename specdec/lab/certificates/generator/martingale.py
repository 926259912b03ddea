r"""Bets against the claim that a text was drawn from given distributions, valid at any time.

Let p_t be the target's distribution after the text before token t. If a generator is lossless, then
for every function f_t with values in -1..1 that is fixed before token x_t is drawn,

    gain_t = f_t(x_t) - sum_v p_t(v) f_t(v)

has the mean 0 given the text before, whatever was drafted and wherever steps began. So the wealth
of somebody who stakes a share s (|s| <= 0.4) of it on every gain, the product of 1 + s gain_t, is a
martingale that begins with 1, and exceeds 1 / alpha at *any* time with probability at most alpha
(Ville). A mean of several such wealths is one as well: over functions f ("directions"), stakes of
both signs, and shares w of rows. The last is for faults in few rows: with w < 1 the wealth is the
product over rows of 1 - w + w (wealth of the row). Rows that are drawn side by side
are bet on column by column, row by row: the functions may depend on all that was drawn before in
this order, and the wealth counts when all rows are finished.

Where p_t is known up to rounding only, a tolerance widens the claim: |mean of gain_t| <= tolerance.
Each factor is then divided by 1 + |s| tolerance, which leaves a supermartingale.

Reference: Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference",
arXiv:2210.01948.

Legend: T tokens of a text, D directions, S stakes, W shares of rows.
"""

import math

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import check_integer, check_number, check_tensor
from specdec.lab.certificates.generator.alternatives import AlternativeBets, Ratios

STAKES = tuple(sign * 0.4 * 2.0**-k for k in range(7) for sign in (1, -1))
"""Shares of the wealth that are bet, in steps of 2: the best one for a fault that moves the mean of
a direction by mu is mu / variance, and one that is sqrt(2) off grows 17 % more slowly.
"""
SHARES = (1.0, 1 / 8, 1 / 50)
"""Of rows that are thought to be at fault. Most of the wealth is bet on all of them."""
_PRIOR = (0.75, 0.125, 0.125)
ON_ALTERNATIVES = 0.2
"""Share of the wealth that is bet on other distributions, where their ratios are known."""


class Wealth:
    """What somebody owns who bets on the texts of a generator: an e-value.

    Args:
        num_directions: D.
        tolerance: how far the mean of a gain may be from 0 in a sound generator.
        last: share of the wealth that is bet on the last direction; `None` for as on the others.
        alternatives: whether a fifth of the wealth is bet on other distributions.

    Attributes:
        alternatives: the bets on other distributions; `None` without.
        log_e: logarithm of the wealth.
        log_peak: of the largest wealth so far.

    Example:
        >>> wealth = Wealth(1)
        >>> lengths = torch.full((8,), 5)
        >>> for _ in range(8):
        ...     wealth.add(torch.full((8, 5, 1), 0.5, dtype=torch.float64), lengths)
        >>> wealth.p_value < 1e-6  # all gains are above their mean
        True
    """

    def __init__(
        self,
        num_directions: int,
        *,
        tolerance: float = 0.0,
        last: float | None = None,
        alternatives: bool = False,
    ):
        count = check_integer("num_directions", num_directions, 1)
        self._tolerance = check_number("tolerance", tolerance, 0)
        self._logs = torch.zeros(len(SHARES), count, len(STAKES), dtype=torch.float64, device="cpu")
        prior = torch.tensor(_PRIOR, dtype=torch.float64, device="cpu") / len(STAKES)
        on = torch.full((count,), 1 / count, dtype=torch.float64, device="cpu")
        if last is not None:
            on[:-1], on[-1] = (1 - last) / (count - 1), last
        self._log_prior = (prior[:, None, None] * on[:, None]).log()
        self.alternatives = AlternativeBets() if alternatives else None
        self.log_e = self.log_peak = 0.0

    def add(
        self,
        gains: Tensor,
        lengths: Tensor,
        last_bets: Tensor | None = None,
        ratios: Ratios | None = None,
    ) -> None:
        """Bets along more texts, which are drawn side by side.

        Args:
            gains: `[B, T, D]` float64, each in -2..2, 0 where a row has ended.
            lengths: `[B]` tokens of each row.
            last_bets: `[B, T]` logarithms of factors with a mean of at most 1, which take the place
                of stakes on the last direction; without a tolerance only.
            ratios: `[B, T, A]` of each token; needed where alternatives are bet on.

        Raises:
            ValueError: gains of another shape, or no ratios where they are needed.
        """
        check_tensor("gains", gains, (len(lengths), None, self._logs.shape[1]), (torch.float64,))
        stakes = torch.tensor(STAKES, dtype=torch.float64, device="cpu")
        price = (stakes.abs() * self._tolerance).log1p()
        rows = [(row[..., None] * stakes).log1p().sum(dim=0) for row in gains.cpu()]  # [D, S]
        wealths = torch.stack(rows) - lengths.cpu()[:, None, None] * price  # [B, D, S]
        if last_bets is not None and not self._tolerance:
            wealths[:, -1] = last_bets.cpu().sum(dim=1, keepdim=True)
        for logs, share in zip(self._logs, SHARES, strict=True):
            beside = math.log1p(-share) if share < 1 else -math.inf
            kept = torch.full_like(wealths, beside)
            logs += torch.logaddexp(wealths + math.log(share), kept).sum(dim=0)
        self.log_e = (self._logs + self._log_prior).logsumexp(dim=(0, 1, 2)).item()
        if self.alternatives is not None:
            if ratios is None:
                raise ValueError("alternatives are bet on; pass the ratios of each token")
            # A function with values in -1..1 is off by the tolerance at most, so a ratio that is
            # within a spread of 1 has a mean of at most 1 + spread * tolerance.
            logs = ratios.logs - (ratios.spreads * self._tolerance).log1p()
            self.alternatives.add(logs.cpu())
            on = math.log1p(-ON_ALTERNATIVES), math.log(ON_ALTERNATIVES)
            self.log_e = float(np.logaddexp(self.log_e + on[0], self.alternatives.log_e + on[1]))
        self.log_peak = max(self.log_peak, self.log_e)

    @property
    def e_value(self) -> float:
        """The wealth now, which has a mean of at most 1 for a sound generator."""
        return math.exp(min(self.log_e, 700.0))

    @property
    def p_value(self) -> float:
        """1 / the largest wealth so far: the chance that a sound generator ever comes so far."""
        return math.exp(-self.log_peak)


def needed_score(num_directions: float, false_alarm: float, power: float = 0.95) -> float:
    """How many standard deviations a sum of gains has to lie from 0 in the mean, so that the wealth
    reaches 1 / `false_alarm` with probability `power`, where 1 / `num_directions` of it is bet on
    this direction.

    At the best stake the logarithm of the wealth in one direction is near s^2 / 2 with a standard
    deviation of s, and 1 / (number of bets) of it counts.

    Example:
        >>> round(needed_score(15, 1e-6), 1)
        8.1
    """
    from scipy.special import ndtri

    most = math.log(num_directions * len(STAKES) / _PRIOR[0] / false_alarm)
    margin = float(ndtri(power))
    return margin + math.sqrt(margin**2 + 2 * most)
