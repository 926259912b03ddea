"""Device functions that draw a token, where the weights of stretches of a row are known.

Legend: B rows, V vocabulary.
"""

import triton
import triton.language as tl

from specdec.kernels.triton_laws import pass_gate, read_logits
from specdec.kernels.triton_residual import read_draft, take_off
from specdec.kernels.triton_rows import find_past, weigh

GROUP = tl.constexpr(8)  # tokens that are drawn from in the end: those side by side in a thread


@triton.jit
def weigh_tokens(chain, laws, spot, order, removed, ids, is_residual: tl.constexpr):
    """Weights of tokens `ids` in the residual, or in the target's law without the token `removed`;
    `order` is the gate and the law at the spot, a row and a place, and the residual's factor.
    """
    row, place = spot
    gate, law, factor = order
    x = read_logits(laws, row, place, ids)
    if is_residual:
        draft = read_draft(chain, laws, row, place, ids)
        weights = take_off(laws, gate, law, factor, ids, x, draft)
    else:
        weights = weigh(laws, gate[0], law, 1.0, ids, pass_gate(laws, gate, ids, x))
        weights = tl.where(ids == removed, 0.0, weights)
    return weights


@triton.jit
def draw(
    chain,
    laws,
    spot,
    order,
    removed,
    weights,
    total,
    u,
    is_residual: tl.constexpr,
    length: tl.constexpr,
    size: tl.constexpr,
):
    """A token of `length` stretches of `size` tokens, of given weights, float64: from the stretch,
    the group in it and the token in that, by `weigh_tokens`, on which the cumulative weight passes
    the threshold, which is `u` of the total.
    """
    group: tl.constexpr = GROUP if size > GROUP else size
    index, before = find_past(weights, u * total, length)
    threshold = u * total - before
    first = tl.minimum(index, (laws.vocab - 1) // size) * size  # past the end where all is NaN
    ids = first + tl.arange(0, size)
    weights = weigh_tokens(chain, laws, spot, order, removed, ids, is_residual)
    weights = tl.sum(tl.reshape(weights, (size // group, group)), axis=1)
    index, before = find_past(weights.to(tl.float64), threshold, size // group)
    first += tl.minimum(index, size // group - 1) * group
    ids = first + tl.arange(0, group)  # read again, from the cache
    weights = weigh_tokens(chain, laws, spot, order, removed, ids, is_residual)
    index, _ = find_past(weights.to(tl.float64), threshold - before, group)
    return tl.minimum(first + index, laws.vocab - 1).to(tl.int64)
