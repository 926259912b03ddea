"""EAGLE-3 heads that know one text by heart, and hardly any of it when they are wired otherwise."""

import torch
import torch.nn.functional as F
from eagle_heads import features_and_logits
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters import EagleHead
from specdec.heads.layers import attend_causally

IGNORED = -100
"""Label of a token that the head has no id for."""


def learn_by_heart(
    model: PreTrainedModel, head: EagleHead, ids: Tensor, *, steps: int = 150, is_blind: bool = True
) -> EagleHead:
    """Fits a head to the two tokens that a model's greedy text has behind each place.

    Args:
        model: the target.
        head: fitted in place.
        ids: `[B, T]`.
        steps: of Adam, over the whole text each.
        is_blind: silence embedding and attention, so that all depends on the features.
    """
    config, length = head.config, ids.shape[1]
    features, logits = features_and_logits(model, ids, config.feature_layers)
    features, labels = features[:, :-1].detach(), logits.argmax(dim=-1)
    if head.target_ids is not None:
        draft_ids = torch.full((config.vocab_size,), IGNORED)
        draft_ids[head.target_ids] = torch.arange(config.draft_vocab_size)
        labels = draft_ids[labels]
    embeds = F.embedding(ids, model.get_input_embeddings().weight.detach())
    angles = config.layer.rotary_table(length, dtype=head.dtype)[None, None]
    if is_blind:
        first = head.layers[0]
        for weight in (first.input_layernorm.weight, first.self_attn.o_proj.weight):
            weight.data.zero_()
            weight.requires_grad_(False)
    free = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(free, lr=1e-2)
    for _ in range(steps):
        keys = {}
        out = head(
            embeds[:, 1:], head.fuse(features), angles[:, :, : length - 1], _first_pass(keys)
        )
        hidden = head.feedback(out)[:, :-1]
        later = head(embeds[:, 2:], hidden, angles[:, :, 1 : length - 1], _second_pass(keys))
        loss = sum(
            F.cross_entropy(
                head.logits(x).flatten(0, 1), labels[:, i:].flatten(), ignore_index=IGNORED
            )
            for i, x in ((1, out), (2, later))
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


def _first_pass(keys: dict):
    """Causal attention that remembers its keys and values."""

    def attend(layer, query, key, value):
        keys["key"], keys["value"] = key, value
        return attend_causally(layer, query, key, value)

    return attend


def _second_pass(keys: dict):
    """Row t sees rows 0..t of the first pass, and itself."""

    def attend(layer, query, key, value):
        count, group = query.shape[2], query.shape[1] // key.shape[1]
        earlier, old = (keys[n][:, :, :count].repeat_interleave(group, 1) for n in ("key", "value"))
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        seen = (query @ earlier.mT * scale).masked_fill(future, -torch.inf)
        own = (query * key).sum(-1, keepdim=True) * scale
        weights = torch.cat([seen, own], dim=-1).softmax(dim=-1)
        return weights[..., :-1] @ old + weights[..., -1:] * value

    return attend
