"""Race: a draw by an exponential race, with noise of the position in the text. See README.md.

Legend: B rows, N window indices, V vocabulary.
"""

import torch
from einops import rearrange
from torch import Tensor

from specdec.kernels.philox.reference import philox, to_uniforms
from specdec.kernels.truncate.reference import filtered_probs
from specdec.kernels.types import FilterParams, suits_kernels


def race(
    logits: Tensor, params: FilterParams, key: Tensor, position: Tensor, stream: int
) -> Tensor:
    """Draws tokens `[B, N]` from logits by an exponential race.

    Args:
        logits: `[B, N, V]`.
        params: how they become probabilities.
        key, position, stream: of the noise, see `race_weights`.

    Example:
        >>> key, position = torch.tensor([[7, 0]]), torch.tensor([[3, 4]])  # of seed 7
        >>> race(torch.zeros(1, 2, 10), FilterParams(), key, position, stream=3)
        tensor([[4, 5]])
    """
    if logits.is_cuda and suits_kernels(logits):
        from specdec.kernels.race import triton

        return triton.race(logits, params, key, position, stream)
    return race_weights(filtered_probs(logits, params), key, position, stream)


def race_weights(weights: Tensor, key: Tensor, position: Tensor, stream: int) -> Tensor:
    """Draws an index in proportion to weights by an exponential race: the least `E_v / weight_v`
    wins. It is the Gumbel-max trick, written without logarithms of weights.

    The noise is a function of (seed, position, stream, token), so two races at one position over
    similar weights mostly have the same winner.

    Args:
        weights: `[B, N, V]` >= 0, not all zero.
        key: `[B, 2]` int64, the two 32-bit words of each row's seed.
        position: `[B, N]` int64, positions in the text.
        stream: different streams have independent noise.

    Returns:
        `[B, N]` int64. An index of weight 0 never wins.

    Reference: Daliri et al., arXiv:2408.07978 (Gumbel sampling).
    """
    return first_arrival(weights, exponentials(key, position, stream, weights.shape[-1]))


def exponentials(key: Tensor, position: Tensor, stream: int | Tensor, vocab: int) -> Tensor:
    """Independent Exp(1) draws `[B, N, V]` float64; Args as `race_weights`, and a stream of each of
    the N is int64 `[N]`.
    """
    num_pairs = (vocab + 1) // 2  # the four words of one counter serve two tokens
    counter = torch.zeros(*position.shape, num_pairs, 4, dtype=torch.long, device=position.device)
    counter[..., 0] = position[..., None]
    counter[..., 1] = torch.arange(num_pairs, device=position.device)
    counter[..., 2] = stream[..., None] if isinstance(stream, Tensor) else stream
    words = philox(counter, rearrange(key, "b word -> b 1 1 word"))
    high, low = rearrange(words, "b n pair (token word) -> word b n (pair token)", word=2)
    return -torch.log1p(-to_uniforms(high, low)[..., :vocab])  # E = -log(1 - u), u in [0, 1)


def first_arrival(weights: Tensor, draws: Tensor) -> Tensor:
    """`[...]` int64: the index of the least `draws / weights`, both `[..., V]`, among the positive
    weights.
    """
    times = draws / weights
    return times.masked_fill(weights <= 0, torch.inf).argmin(dim=-1)
