"""What a loss is: how far a head's distribution at one position is from the target's.

A `Loss` maps log-probabilities of the head and of the target, both `[..., Vd]`, to a loss per
position `[...]`. The head's are normalised over the Vd ids that it can propose, the target's over
its whole vocabulary: what they lack of 1 is mass of ids that the head cannot propose. A draft has
probability 0 there, so this mass counts as lost in `tv`, `nla`, `js` and `reverse_kl`. In `kl` and
`soft_ce` those ids would make every loss infinite; their terms, which no weight of the head could
change, are left out, and the position has a smaller gradient.

The names are those of vLLM's speculators, whose definitions these are where all ids can be
proposed.

Legend: p the target's probabilities, q the head's, Vd ids of the head.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specdec.arguments import check_number

Loss = Callable[[Tensor, Tensor], Tensor]
"""`(log_q, log_p)`, both `[..., Vd]`, to `[...]`."""


def bounded(log_probs: Tensor) -> Tensor:
    """Log-probabilities; of ids below float32's smallest number, and of ids of exactly 0, that of
    the smallest, so that no loss and no gradient is infinite.
    """
    return log_probs.clamp(min=math.log(torch.finfo(torch.float32).tiny))


def soft_ce(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Cross-entropy to the target's distribution, `-sum p log q`: `kl`, and the target's entropy,
    which makes no gradient. The loss of all objectives by default.

    Example:
        >>> log_p = torch.tensor([0.5, 0.5]).log()
        >>> soft_ce(torch.tensor([0.25, 0.75]).log(), log_p)
        tensor(0.8370)

    Reference: Hinton et al., arXiv:1503.02531.
    """
    return -(log_p.exp() * bounded(log_q)).sum(dim=-1)


def ce(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Cross-entropy to the target's likeliest token, of those that the head can propose."""
    return -bounded(log_q).gather(-1, log_p.argmax(dim=-1, keepdim=True)).squeeze(-1)


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """`KL(p || q) = sum p log(p / q)`, over the ids that the head can propose. Below 0 where they
    lack much of the mass.
    """
    return (log_p.exp() * (bounded(log_p) - bounded(log_q))).sum(dim=-1)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """`KL(q || p) = sum q log(q / p)`, which punishes tokens that the target would not take."""
    return (log_q.exp() * (bounded(log_q) - bounded(log_p))).sum(dim=-1)


def js(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Jensen-Shannon divergence, `(KL(p || m) + KL(q || m)) / 2` with `m = (p + q) / 2`; at most
    log 2.

    Reference: Lin, *Divergence measures based on the Shannon entropy*, 1991.
    """
    log_q, log_p = bounded(log_q), bounded(log_p)
    log_m = torch.logaddexp(log_q, log_p) - math.log(2)
    p, q = log_p.exp(), log_q.exp()
    lost = (1 - p.sum(dim=-1)).clamp(min=0) * math.log(2)  # m = p / 2 there
    return 0.5 * ((p * (log_p - log_m) + q * (log_q - log_m)).sum(dim=-1) + lost)


def tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Total variation distance, `1 - sum min(p, q)`: the probability that rejection sampling
    rejects a draft token.

    Example:
        >>> tv(torch.tensor([0.25, 0.75]).log(), torch.tensor([0.5, 0.5]).log())
        tensor(0.2500)

    Reference: Leviathan et al., arXiv:2211.17192, theorem 3.5.
    """
    return 1 - torch.minimum(log_q, log_p).exp().sum(dim=-1)


def nla(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Negative logarithm of the acceptance probability, `-log sum min(p, q)`. Its gradient is that
    of `tv`, larger the less is accepted.

    Reference: Samarin et al., arXiv:2602.23881 (LK losses).
    """
    return -torch.minimum(bounded(log_q), bounded(log_p)).logsumexp(dim=-1)


def lk_hybrid(log_q: Tensor, log_p: Tensor, *, eta: float = 3.0) -> Tensor:
    """`w kl + (1 - w) tv`, where `w = exp(-eta a)` falls with the acceptance probability a of the
    position and makes no gradient. `functools.partial(lk_hybrid, eta=5)` is a loss too.

    Reference: Samarin et al., arXiv:2602.23881, the hybrid objective.
    """
    rejected = tv(log_q, log_p)
    weight = (-eta * (1 - rejected.detach())).exp()
    return weight * kl(log_q, log_p) + (1 - weight) * rejected


LOSSES = {f.__name__: f for f in (ce, soft_ce, kl, reverse_kl, js, tv, nla, lk_hybrid)}
"""Those that a command names."""


def weighted(terms: Mapping[Loss, float]) -> Loss:
    """The sum of losses by their weights.

    Example:
        >>> loss = weighted({ce: 0.7, tv: 0.3})
        >>> loss(torch.tensor([0.25, 0.75]).log(), torch.tensor([0.5, 0.5]).log())
        tensor(1.0454)
    """
    if not terms:
        raise ValueError("expected at least one loss with its weight, got none")
    for weight in terms.values():
        check_number("the weight of a loss", weight, 0)
    if max(terms.values()) < torch.finfo(torch.float32).tiny:
        raise ValueError(
            "the sum of losses is 0 in float32, so nothing is learned: expected a weight above 0, "
            f"got {[*terms.values()]}"
        )

    def loss(log_q: Tensor, log_p: Tensor) -> Tensor:
        found = [weight * each(log_q, log_p) for each, weight in terms.items()]
        return torch.stack(found).sum(dim=0)

    return loss


def find_loss(text: str) -> Loss:
    """The loss of a text: a name, or names with weights.

    Raises:
        ValueError: a name that is none, twice the same, or a weight that is no number from 0 on.

    Example:
        >>> find_loss("tv") is tv
        True
        >>> find_loss("ce:0.7,tv:0.3")(*torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log())
        tensor(1.0454)
    """
    terms: dict[Loss, float] = {}
    for part in text.split(","):
        name, colon, number = part.strip().partition(":")
        loss = LOSSES.get(name)
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            loss = None
        if loss is None or loss in terms or not 0 <= weight < math.inf:
            raise ValueError(
                f"a loss must be of {', '.join(LOSSES)}, each once and with a weight where there "
                f"are several, like ce:0.7,tv:0.3; got {text!r}"
            )
        terms[loss] = weight
    return loss if len(terms) == 1 and weight == 1 else weighted(terms)
