"""Operations on a wide row on a CPU, without sorting V logits and without boolean masks.

At V = 150 000 a sort takes 200 times as long as a softmax, a comparison that gives booleans 3 times
as long as one that gives floats, and a pass over freshly allocated memory several times as long as
one over cached memory. So rows are processed one by one, comparisons write floats, and top-p is a
quickselect.

Legend: B rows, N window indices, V vocabulary, n tokens of a row that the quickselect still holds.
"""

import torch
from torch import Tensor

UNITS = 2.0**52
"""Masses are whole numbers of 2**-52: their sums are below 2**53, so float64 adds them exactly."""
FEW, SAMPLES, ROUNDS = 2048, 512, 6
"""The quickselect stops when FEW tokens are left and sorts these. About SAMPLES of the tokens guide
a round; there are at most ROUNDS."""
LARGEST = torch.finfo(torch.float32).max


def largest_droppable(mass: Tensor) -> Tensor:
    """`[B]` float64: the largest sums, in units, that are <= the masses once both are float32."""
    mass = mass.float()
    middle = mass.double() / 2 + torch.nextafter(mass, mass + 1).double() / 2
    rounds_up = middle.float() > mass  # a tie is rounded to the even neighbour
    return torch.where(rounds_up, torch.nextafter(middle, middle - 1), middle) * UNITS


# Two operations read values on the host: which id a cutoff has, and how many tokens are left. A CPU
# does so without waiting; a GPU runs kernels that do not. Each is one operation to the dispatcher,
# so that `no_host_sync` on a CPU checks the step that a GPU would run.


@torch.library.custom_op("specdec::drop_below", mutates_args=(), device_types="cpu")
def drop_below(scaled: Tensor, at: Tensor, ids: Tensor) -> Tensor:
    """Scaled logits `[1, V]`; those below the cutoff `(at [1], ids [1])` are lowered so far that
    their probability is 0.
    """
    is_dropped, first = torch.empty_like(scaled), int(ids)
    torch.le(scaled[:, :first], at, out=is_dropped[:, :first])  # 1.0 or 0.0
    torch.lt(scaled[:, first:], at, out=is_dropped[:, first:])
    return torch.sub(scaled, is_dropped, alpha=LARGEST, out=is_dropped)


@torch.library.custom_op("specdec::top_p_cutoff", mutates_args=(), device_types="cpu")
def top_p_cutoff(scaled: Tensor, limit: Tensor, few: int, samples: int) -> tuple[Tensor, Tensor]:
    """The cutoff of top-p: tokens are dropped, least likely first and of equal logits the lowest id
    first, while their cumulative mass is at most 1 - top_p.

    The mass of a token is its float32 probability, rounded down to a whole number of units, so sums
    are exact in any order and the cutoff does not depend on how it is found. A sum is rounded to
    float32 once, and compared with 1 - top_p in float32, as Hugging Face does. The definition adds
    in another order, and may differ where a sum is within float32 rounding of 1 - top_p.

    Args:
        scaled: `[1, V]` float32.
        limit: `[1]` float64, the largest mass in units that may be dropped; negative keeps all.
        few: the number of tokens that may be sorted.
        samples: the number of tokens that guide a round.

    Returns:
        logits `[1]` and ids `[1]` of a `Cutoff`.
    """
    if limit < 0:
        none = torch.zeros(1, dtype=torch.long, device="cpu")
        return torch.full_like(scaled[:, 0], -torch.inf), none
    logit, token = _smallest_kept(scaled[0], float(limit), few, samples)
    return logit.view(1), token.view(1)


def _smallest_kept(logits: Tensor, limit: float, few: int, samples: int) -> tuple[Tensor, Tensor]:
    """Logit and id of the first token of a row `[V]`, in ascending order, that is not dropped.

    Quickselect by mass: a pivot splits the tokens, and the exact mass of one side decides which
    side holds the cutoff. Pivots change the running time, never the result, so they are guessed.
    """
    masses = logits.softmax(dim=-1).mul_(UNITS).floor_()  # [n]
    ids, below, total, misses = None, 0.0, _sum(masses), 0
    for _ in range(ROUNDS if total > 0 else 0):  # in a row with NaN any token will do
        if len(logits) <= few:
            break
        pivot, cuts_upper = _choose_pivot(logits, masses, limit - below, samples, misses)
        side = _above(logits, pivot) if cuts_upper else _where(logits < pivot)
        mass = _sum(masses.index_select(0, side))
        lower = total - mass if cuts_upper else mass  # the mass of the lower side
        is_above = below + lower <= limit and lower < total  # the most likely token always stays
        if is_above != cuts_upper:  # the cutoff is on the other, larger side
            side = _where(logits <= pivot if cuts_upper else logits >= pivot)
            misses += 1
        below, total = (below + lower, total - lower) if is_above else (below, lower)
        logits, masses = logits.index_select(0, side), masses.index_select(0, side)
        ids = side if ids is None else ids.index_select(0, side)
    ascending, order = logits.sort(stable=True)
    cumulative = masses.index_select(0, order).cumsum(0, dtype=torch.float64) + below
    first = (cumulative[:-1] <= limit).sum()
    return ascending[first], order[first] if ids is None else ids[order[first]]


def _choose_pivot(
    logits: Tensor, masses: Tensor, limit: float, samples: int, misses: int
) -> tuple[Tensor, bool]:
    """A pivot `[]` near the cutoff, and whether it is meant to lie below it, so that the upper side
    is kept.

    The cutoff of a sample is near that of the row. The pivot lies beside it, towards the larger
    part, by two standard deviations of the rank of a sampled token, and further after a miss.

    Args:
        limit: the mass that may still be dropped.
    """
    step = max(len(logits) // samples, 1)
    sample, order = logits[::step].sort()
    count = len(sample)
    cumulative = masses[::step].index_select(0, order).cumsum(0).mul_(step)
    rank = int((cumulative <= limit).sum())
    margin = 1 + int(2 * 4**misses * (rank * (count - rank) / count) ** 0.5)
    cuts_upper = 2 * rank >= count
    at = rank - margin if cuts_upper else rank + margin
    return sample[min(max(at, 0), count - 1)], cuts_upper


def _above(logits: Tensor, pivot: Tensor) -> Tensor:
    """`[m]` ids, ascending, of the logits `[n]` that are > pivot, fast where these are few.

    Seen as a table of 16 rows, only columns whose largest logit is > pivot are searched.
    """
    width = len(logits) // 16
    table = logits[: 16 * width].view(16, width)
    columns = _where(table.amax(dim=0) > pivot)
    row, column = (table.index_select(1, columns) > pivot).nonzero().unbind(dim=1)
    rest = _where(logits[16 * width :] > pivot)
    return torch.cat([row * width + columns.index_select(0, column), rest + 16 * width])


def _where(condition: Tensor) -> Tensor:
    """`[m]` indices at which a condition `[n]` holds."""
    return condition.nonzero()[:, 0]


def _sum(masses: Tensor) -> float:
    """Exact, because masses are whole numbers."""
    return float(masses.sum(dtype=torch.float64))
