"""Medusa heads for the tests, and what they predict, written from the definition."""

import torch
from eagle_heads import features_and_logits, fitted
from torch import Tensor

from specdec.drafters import MedusaConfig, MedusaHead


def head_for(model, *, num_heads=4, num_blocks=1, has_bias=True, seed=3) -> MedusaHead:
    """A random head whose every part shows."""
    config = model.config.get_text_config()
    sizes = num_heads, num_blocks, config.hidden_size, config.vocab_size
    head = MedusaHead(MedusaConfig(*sizes, has_bias)).to(model.dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.2, generator=generator)
    return head


@torch.no_grad()
def informed(model, *, seed=5, **sizes) -> MedusaHead:
    """A random head with vocabulary matrices that are fitted (ridge regression) to the target's
    logits: right often enough, and wrong often enough.
    """
    head = head_for(model, **sizes)
    ids = torch.randint(
        1, model.config.vocab_size, (256, 24), generator=torch.Generator().manual_seed(seed)
    )
    features, logits = features_and_logits(model, ids, ("final",))
    count = ids.shape[1] - head.config.num_heads
    for i, matrix in enumerate(head.lm_heads):
        x = head.hidden(features[:, :count], i).flatten(0, 1).double()
        y = logits[:, 1 + i : 1 + i + count].flatten(0, 1).double()
        matrix.weight.copy_(fitted(x, y))
    return head


def predicted(weights: dict[str, Tensor], states: Tensor, head: int, num_blocks: int = 1) -> Tensor:
    """Logits of a head after states `[..., H]`, by FasterDecoding's names of its tensors."""
    x = states
    for block in range(num_blocks):
        y = x @ weights[f"{head}.{block}.linear.weight"].T
        bias = weights.get(f"{head}.{block}.linear.bias")
        y = y if bias is None else y + bias
        x = x + y * torch.sigmoid(y)
    return x @ weights[f"{head}.{num_blocks}.weight"].T


def public_names(head: MedusaHead) -> dict[str, Tensor]:
    """The weights by FasterDecoding's names."""
    found = {}
    for name, weight in head.state_dict().items():
        kind, index, *rest = name.split(".")
        if kind == "blocks":
            found[f"{index}.{rest[0]}.linear.{rest[1]}"] = weight
        else:
            found[f"{index}.{head.config.num_blocks}.weight"] = weight
    return found
