"""The published wiring of EAGLE heads, recomputed straight and without any cache.

Plain functions on tensors, one row of text at a time, written from the description of the formats
and sharing nothing with the package but the names of the weights. Every draft step runs the head
over the whole text again, all rows with full causal attention.
"""

import math

import torch
from torch import Tensor


def draft_outputs(config, weights, tables, text, features, drafted, positions=None):
    """What the head computes behind a text while it drafts.

    Args:
        config: the head's flags.
        weights: the head's tensors by name.
        tables: embeddings `[V, H]` and vocabulary head `[Vd, H]` for a head without its own.
        text: n + 1 committed token ids.
        features: `[n, F]` of all but the last of them.
        drafted: K token ids that were drafted behind the text.
        positions: of the n + K - 1 rows; None for 0, 1, ...

    Returns:
        Logits `[K, Vd]` and feedback `[K, H]` of the draft steps.
    """
    embeddings = weights.get("embed_tokens.weight", tables[0]).to(features.dtype)
    vocabulary = weights.get("lm_head.weight", tables[1]).to(features.dtype)
    ids = list(text[1:])  # row t: token t + 1 beside feature t
    hidden = fused(config, weights, features)
    logits, feedback = [], []
    for token in drafted:
        rows = positions or list(range(len(ids)))
        out = stack(config, weights, embeddings[ids], hidden, rows[: len(ids)])[-1]
        normed = rms_norm(config, out, weights["norm.weight"]) if "norm.weight" in weights else out
        logits.append(vocabulary @ (normed if config.output_norm else out) * config.logit_scale)
        feedback.append(normed if config.feedback_norm else out)
        ids.append(token)
        hidden = torch.cat([hidden, feedback[-1][None]])
    return torch.stack(logits), torch.stack(feedback)


def fused(config, weights, features: Tensor) -> Tensor:
    """Features `[n, F]` as the hidden states that the first layer gets."""
    if config.norm_before_fc:
        features = rms_norm(config, features, weights["input_norm.weight"])
    if config.fc_norm:
        width = config.target_hidden_size
        pieces = [
            rms_norm(
                config, features[:, i * width : (i + 1) * width], weights[f"fc_norm.{i}.weight"]
            )
            for i in range(len(config.feature_layers))
        ]
        features = torch.cat(pieces, dim=1)
    if config.fusion == "attention" and config.has_fc:
        return linear(weights, "fc", features)
    return features


def stack(config, weights, embeds: Tensor, hidden: Tensor, positions: list[int]) -> Tensor:
    """All layers over rows of embeddings and hidden states `[n, H]`."""
    if config.fusion == "input":
        hidden = linear(weights, "fc", torch.cat([embeds, hidden], dim=1))
    for i in range(config.num_layers):
        name = f"layers.{i}"
        norms = {
            key: weights.get(f"{name}.{key}.weight") for key in ("input_layernorm", "hidden_norm")
        }
        residual, x = hidden, hidden
        if i == 0 and config.fusion == "attention":
            normed = rms_norm(config, hidden, norms["hidden_norm"])
            x = torch.cat([rms_norm(config, embeds, norms["input_layernorm"]), normed], dim=1)
            residual = normed if config.norm_before_residual else hidden
        elif i > 0:
            x = rms_norm(config, hidden, norms["input_layernorm"])
        hidden = residual + attention(config, weights, f"{name}.self_attn", x, positions)
        x = rms_norm(config, hidden, weights[f"{name}.post_attention_layernorm.weight"])
        gate, up = (linear(weights, f"{name}.mlp.{part}_proj", x) for part in ("gate", "up"))
        hidden = hidden + linear(weights, f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)
    return hidden


def attention(config, weights, name: str, x: Tensor, positions: list[int]) -> Tensor:
    """Causal attention of n rows, one head at a time."""
    size, group = config.layer.head_dim, config.layer.num_heads // config.layer.num_kv_heads
    query, key, value = (linear(weights, f"{name}.{part}_proj", x) for part in "qkv")
    heads = []
    for h in range(config.layer.num_heads):
        q = query[:, h * size : (h + 1) * size]
        k = key[:, h // group * size : (h // group + 1) * size]
        v = value[:, h // group * size : (h // group + 1) * size]
        if config.layer.has_qk_norm:
            q = rms_norm(config, q, weights[f"{name}.q_norm.weight"])
            k = rms_norm(config, k, weights[f"{name}.k_norm.weight"])
        scores = rotated(config, q, positions) @ rotated(config, k, positions).T / math.sqrt(size)
        future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(dim=1) @ v)
    return linear(weights, f"{name}.o_proj", torch.cat(heads, dim=1))


def rotated(config, x: Tensor, positions: list[int]) -> Tensor:
    """Rows `[n, D]` turned by their positions: channels i and i + D / 2 are a plane."""
    size = config.layer.head_dim
    half, speeds = size // 2, frequencies(config.layer.rope, size)
    angles = torch.tensor(positions).float()[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)


def frequencies(rope: dict, size: int) -> Tensor:
    """Of the planes of a head, in radians per position; float32, as everybody makes them."""
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    if rope["rope_type"] == "linear":
        return plain / rope["factor"]
    if rope["rope_type"] == "llama3":
        length = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = length * plain / (2 * math.pi)  # within the original length
        share = ((turns - low) / (high - low)).clamp(0, 1)
        return share * plain + (1 - share) * plain / rope["factor"]
    assert rope["rope_type"] == "default"
    return plain


def rms_norm(config, x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm of the last dimension."""
    return x / (x.square().mean(-1, keepdim=True) + config.layer.rms_norm_eps).sqrt() * weight


def linear(weights, name: str, x: Tensor) -> Tensor:
    """With a bias where there is one."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
