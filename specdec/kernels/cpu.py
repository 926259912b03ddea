"""Wide rows on a CPU: what `gate` defines, without sorting V logits and without boolean masks.

With 150 000 logits a sort takes 200 times as long as a softmax, a comparison that gives booleans 3
times as long as one that gives floats, and memory that is fresh from the system several times as
long as memory in a cache. So rows are taken one by one, and comparisons write floats.

Legend: B rows, V vocabulary, n tokens of a row that are still in question.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from specdec.kernels import gate as gates
from specdec.kernels.gate import Floor, Gate, Truncation

WIDE = 8192
"""Logits per row from which on this is faster than `gate`."""
UNITS = 2.0**52
"""Mass is counted in units of 2**-52: whole numbers below 2**53, which float64 adds exactly."""
FEW, SAMPLES, ROUNDS = 2048, 512, 6
"""Narrow until FEW tokens are left to sort, guided by about SAMPLES of them, in at most ROUNDS."""
LARGEST = torch.finfo(torch.float32).max


def is_wide(logits: Tensor) -> bool:
    """Whether logits `[..., V]` belong here: not float64, the precision of oracles, nor gradients.

    They keep to `gate`.
    """
    fits = logits.shape[-1] >= WIDE and logits.device.type == "cpu"
    return fits and logits.dtype != torch.float64 and not logits.requires_grad


def law(logits: Tensor, gate: Gate, into: Tensor | None = None) -> Tensor:
    """`gate.law`, to the last bit; `into` a table for it, float32, if there is one."""
    probs = torch.empty(logits.shape, dtype=torch.float32) if into is None else into
    table = probs[:, None] if logits.dim() == 2 else probs
    for place, row, b in _rows(logits):
        row = gates.scale(row, _part(gate.temperature, b))
        if gate.floor is not None:
            row = lowered(row, *(column.view(-1)[place] for column in gate.floor))
        torch.softmax(row, dim=-1, out=table[b, place.start % table.shape[1]])
    if gate.is_greedy is None:
        return probs
    return probs.copy_(gates.with_greedy_rows(probs, logits, gate.is_greedy))


def find_floor(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Floor:
    """`gate.find_floor`; the masses that top-p compares are free of rounding: see `top_p_floor`."""
    top_k, tail, min_p, largest_k = truncation
    limit = None if tail is None else _largest_gone(tail)
    floors = []
    for _, row, b in _rows(logits):
        row = left = gates.scale(row, _part(temperature, b))
        floor = None
        if top_k is not None:
            floor = gates.find_floor(row, None, Truncation(top_k=top_k[b], largest_k=largest_k))
            left = lowered(row, *floor)
        if limit is not None:
            floor = gates.higher(floor, Floor(*top_p_floor(left, limit[b], FEW, SAMPLES)))
        if min_p is not None:
            left = row if floor is None else lowered(row, *floor)
            floor = gates.higher(floor, gates.find_floor(left, None, Truncation(min_p=min_p[b])))
        floors.append(floor)
    columns = (torch.cat(column).view(logits.shape[:-1]) for column in zip(*floors, strict=True))
    return Floor(*columns)


def _rows(logits: Tensor) -> Iterator[tuple[slice, Tensor, slice]]:
    """Of each row of logits `[B, V]` or `[B, N, V]`: its place among all, itself as `[1, V]`, and
    its place among the B.
    """
    flat = logits.flatten(0, -2)
    for i in range(len(flat)):
        b = i * len(logits) // len(flat)
        yield slice(i, i + 1), flat[i : i + 1], slice(b, b + 1)


def _part(column: Tensor | None, b: slice) -> Tensor | None:
    return None if column is None else column[b]


def _largest_gone(tail: Tensor) -> Tensor:
    """`[B]` float64: the largest masses, in units, that are <= the tails once both are float32."""
    tail = tail.float()
    middle = tail.double() / 2 + torch.nextafter(tail, tail + 1).double() / 2
    is_up = middle.float() > tail  # a tie goes to the even one
    return torch.where(is_up, torch.nextafter(middle, middle - 1), middle) * UNITS


# Two operations look at data: where a floor's id is, and how many tokens are left to sort. That is
# free on a CPU; a step on a GPU runs kernels that never look. To the dispatcher each is one
# operation, so that `no_host_sync` on a CPU sees the step that a GPU would run.


@torch.library.custom_op("specdec::lowered", mutates_args=(), device_types="cpu")
def lowered(scaled: Tensor, at: Tensor, ids: Tensor) -> Tensor:
    """Scaled logits `[1, V]`, those under the floor `(at [1], ids [1])` so low that they have
    probability 0.
    """
    is_out, first = torch.empty_like(scaled), int(ids)
    torch.le(scaled[:, :first], at, out=is_out[:, :first])  # 1.0 or 0.0
    torch.lt(scaled[:, first:], at, out=is_out[:, first:])
    return torch.sub(scaled, is_out, alpha=LARGEST, out=is_out)


@torch.library.custom_op("specdec::top_p_floor", mutates_args=(), device_types="cpu")
def top_p_floor(scaled: Tensor, limit: Tensor, few: int, samples: int) -> tuple[Tensor, Tensor]:
    """The floor of top-p: a token goes while the mass up to and including it, from the least likely
    (of equal logits the lowest id), is at most 1 - top_p.

    A token's mass is its float32 probability, rounded down to a whole number of units, so sums are
    exact in any order and the floor does not depend on how it is found. A sum is rounded to float32
    once, and compared with the tail in float32 as HF does; `gate.find_floor` adds up in another
    way, and may decide otherwise where a sum is within float32 rounding of the tail.

    Args:
        scaled: `[1, V]` float32.
        limit: `[1]` float64, the largest mass in units that may go; negative keeps all.
        few: how many tokens may be left to sort.
        samples: how many tokens guide the narrowing.

    Returns:
        logits `[1]` and ids `[1]` of a `Floor`.
    """
    if limit < 0:
        return torch.full_like(scaled[:, 0], -torch.inf), torch.zeros(1, dtype=torch.long)
    logits, ids = _edge(scaled[0], float(limit), few, samples)
    return logits.view(1), ids.view(1)


def _edge(logits: Tensor, limit: float, few: int, samples: int) -> tuple[Tensor, Tensor]:
    """Logit and id of the last token of a row `[V]` that is kept: quickselect by mass.

    A pivot splits the tokens in question; the exact mass on one side says which side has the edge.
    So pivots decide on time only, and may be guessed from a sample.
    """
    masses = logits.softmax(dim=-1).mul_(UNITS).floor_()  # [n]
    ids, below, total, misses = None, 0.0, _sum(masses), 0
    for _ in range(ROUNDS if total > 0 else 0):  # a row with NaN has no edge: any will do
        if len(logits) <= few:
            break
        pivot, is_upper = _aim(logits, masses, limit - below, samples, misses)
        side = _above(logits, pivot) if is_upper else _where(logits < pivot)
        mass = _sum(masses.index_select(0, side))
        lower = total - mass if is_upper else mass  # the mass of the lower side
        is_above = below + lower <= limit and lower < total  # the most likely token always stays
        if is_above != is_upper:
            side = _where(logits <= pivot if is_upper else logits >= pivot)
            misses += 1
        below, total = (below + lower, total - lower) if is_above else (below, lower)
        logits, masses = logits.index_select(0, side), masses.index_select(0, side)
        ids = side if ids is None else ids.index_select(0, side)
    ascending, order = logits.sort(stable=True)
    reached = masses.index_select(0, order).cumsum(0, dtype=torch.float64) + below
    last = (reached[:-1] <= limit).sum()
    return ascending[last], order[last] if ids is None else ids[order[last]]


def _aim(
    logits: Tensor, masses: Tensor, left: float, samples: int, misses: int
) -> tuple[Tensor, bool]:
    """A pivot `[]` near the edge, and whether the edge is rather above it than under it.

    A sample tells about where the edge is. The pivot is set beside it, on the side where it cuts
    off more, by two standard deviations of the rank of a sampled token; further after a miss.

    Args:
        left: the mass that may still go.
    """
    step = max(len(logits) // samples, 1)
    sample, order = logits[::step].sort()
    count = len(sample)
    reached = masses[::step].index_select(0, order).cumsum(0).mul_(step)
    edge = int((reached <= left).sum())
    beside = 1 + int(2 * 4**misses * (edge * (count - edge) / count) ** 0.5)
    is_upper = 2 * edge >= count
    at = edge - beside if is_upper else edge + beside
    return sample[min(max(at, 0), count - 1)], is_upper


def _above(logits: Tensor, pivot: Tensor) -> Tensor:
    """`[m]` ids, ascending, of the logits `[n]` that are > pivot, where these are few.

    They are looked for in those columns of a table of 16 rows whose largest is > pivot.
    """
    width = len(logits) // 16
    table = logits[: 16 * width].view(16, width)
    columns = _where(table.amax(dim=0) > pivot)
    row, column = (table.index_select(1, columns) > pivot).nonzero().unbind(dim=1)
    rest = _where(logits[16 * width :] > pivot)
    return torch.cat([row * width + columns.index_select(0, column), rest + 16 * width])


def _where(is_in: Tensor) -> Tensor:
    """`[m]` ids of what is true of `[n]`."""
    return is_in.nonzero()[:, 0]


def _sum(masses: Tensor) -> float:
    """Exact, because masses are whole numbers."""
    return float(masses.sum(dtype=torch.float64))
