"""The published wirings of mask-token heads, recomputed straight and without any cache.

Plain functions on tensors, one row of text at a time, written from the description of the formats
and sharing nothing with the package but the names of the weights.
"""

import math

import torch
from eagle_reference import linear, rms_norm, rotated
from torch import Tensor


def draft_logits(config, weights, tables, text, features, count, **faults) -> Tensor:
    """What the head predicts after a text, `[K, Vd]`.

    Args:
        config: the head's flags.
        weights: the head's tensors by name.
        tables: embeddings `[V, H]` and vocabulary head `[Vd, H]` for a head without its own.
        text: n + 1 committed token ids x_0..x_n.
        features: `[n, F]` of all but the last of them, or None.
        count: K.
        faults: see `draft_rows`.
    """
    vocabulary = weights["lm_head.weight"] if "lm_head.weight" in weights else tables[1]
    if config.ties_embeddings:
        vocabulary = weights["embed_tokens.weight"]
    rows = draft_rows(config, weights, tables, text, features, count, **faults)
    return rows @ vocabulary.to(rows.dtype).T * config.logit_scale


def draft_rows(config, weights, tables, text, features, count, *, late=0, first=0, sees=None):
    """What the vocabulary head reads for each draft token, `[K, H]`.

    Args:
        late: masks stand so many positions late.
        first: the rows that are sampled begin so many rows late.
        sees: (queries, keys) -> what is visible, instead of what the config says.
    """
    exact = next(iter(weights.values())).dtype
    embeddings = weights["embed_tokens.weight"] if "embed_tokens.weight" in weights else tables[0]
    embeddings = embeddings.to(exact)
    n = len(text) - 1
    if config.context == "keys":
        width = config.block_size or (count + 1 if config.alignment == "same-position" else count)
        embeds = [embeddings[text[n]]] + [mask_embedding(config, weights, embeddings)] * (width - 1)
        positions = [n] + [n + i + late for i in range(1, width)]
        context = rms_norm(config, linear(weights, "fc", features), weights["hidden_norm.weight"])
        start = (1 if config.alignment == "same-position" else 0) + first
    else:
        known = text[1:] if config.alignment == "shifted" else text
        embeds = [embeddings[token] for token in known]
        embeds += [mask_embedding(config, weights, embeddings)] * (count - 1 + first)
        positions = list(range(len(known)))
        positions += [len(known) + i + late for i in range(count - 1 + first)]
        start, context = len(known) - 1 + first, None
    x = torch.stack(embeds)
    hidden = None
    if config.context == "input":
        masks = weights["mask_hidden"].reshape(1, -1).expand(count - 1 + first, -1)
        hidden = fused(config, weights, torch.cat([features, masks]))
    out = stack(config, weights, x, hidden, context, positions, sees)
    if config.output_norm:
        out = rms_norm(config, out, weights["norm.weight"])
    return out[start : start + count]


def mask_embedding(config, weights, embeddings):
    if config.mask_token_id is None:
        return weights["mask_embedding"].reshape(-1)
    return embeddings[config.mask_token_id]


def fused(config, weights, features: Tensor) -> Tensor:
    """Features `[n, F]` as hidden states."""
    if config.norm_before_fc:
        features = rms_norm(config, features, weights["input_norm.weight"])
    if config.fc_norm:
        pieces = features.split(config.target_hidden_size, dim=1)
        normed = [rms_norm(config, p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(pieces)]
        features = torch.cat(normed, dim=1)
    return linear(weights, "fc", features)


def stack(config, weights, embeds, hidden, context, positions, sees) -> Tensor:
    """All layers over rows `[n, H]`."""
    x = embeds
    for i in range(config.num_layers):
        name = f"layers.{i}"
        norm = weights[f"{name}.input_layernorm.weight"]
        residual, read = x, rms_norm(config, x, norm)
        if i == 0 and config.context == "input":
            normed = rms_norm(config, hidden, weights[f"{name}.hidden_norm.weight"])
            read = torch.cat([read, normed], dim=1)
            residual = normed if config.norm_before_residual else hidden
        attended = attention(config, weights, f"{name}.self_attn", read, context, positions, sees)
        x = residual + attended
        read = rms_norm(config, x, weights[f"{name}.post_attention_layernorm.weight"])
        gate, up = (linear(weights, f"{name}.mlp.{part}_proj", read) for part in ("gate", "up"))
        x = x + linear(weights, f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)
    return x


def attention(config, weights, name, x, context, positions, sees) -> Tensor:
    """Rows `[n, H]` over the context's keys (at positions 0, 1, ...) and their own."""
    size, group = config.layer.head_dim, config.layer.num_heads // config.layer.num_kv_heads
    source = x if context is None else torch.cat([context, x])
    at = positions if context is None else [*range(len(context)), *positions]
    queries, keys = torch.tensor(positions)[:, None], torch.tensor(at)
    visible = keys <= queries
    if not config.is_causal:
        visible = torch.ones_like(visible)
    if sees is not None:
        visible = sees(queries, keys)
    query, key, value = (
        linear(weights, f"{name}.{part}_proj", rows)
        for part, rows in zip("qkv", (x, source, source), strict=True)
    )
    heads = []
    for h in range(config.layer.num_heads):
        own, shared = slice(h * size, (h + 1) * size), h // group * size
        q, k, v = query[:, own], key[:, shared : shared + size], value[:, shared : shared + size]
        if config.layer.has_qk_norm:
            q = rms_norm(config, q, weights[f"{name}.q_norm.weight"])
            k = rms_norm(config, k, weights[f"{name}.k_norm.weight"])
        scores = rotated(config, q, positions) @ rotated(config, k, at).T / math.sqrt(size)
        heads.append(scores.masked_fill(~visible, -math.inf).softmax(dim=1) @ v)
    return linear(weights, f"{name}.o_proj", torch.cat(heads, dim=1))
