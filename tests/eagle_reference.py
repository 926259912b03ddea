"""The published wirings of EAGLE heads, recomputed straight and without any cache; what heads of
other families have in common with them.

Plain functions on tensors, one row of text at a time, written from the description of the formats
and sharing nothing with the package but the names of the weights. Every draft step runs the head
over the whole text again, all rows with full causal attention.
"""

import math

import torch
from torch import Tensor


def draft_outputs(config, weights, tables, text, features, drafted, positions=None, sees=None):
    """What the head computes behind a text while it drafts.

    Args:
        config: the head's flags.
        weights: the head's tensors by name.
        tables: embeddings `[V, H]` and vocabulary head `[Vd, H]` for a head without its own.
        text: n + 1 committed token ids.
        features: `[n, F]` of all but the last of them.
        drafted: K token ids that were drafted behind the text.
        positions: of the n + K - 1 rows; None for 0, 1, ...
        sees: as of `attention`.

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
        out = stack(config, weights, embeddings[ids], hidden, rows[: len(ids)], sees=sees)[-1]
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
        pieces = features.split(config.target_hidden_size, dim=1)
        normed = [rms_norm(config, p, weights[f"fc_norm.{i}.weight"]) for i, p in enumerate(pieces)]
        features = torch.cat(normed, dim=1)
    is_joined = getattr(config, "fusion", None) != "input" and "fc.weight" in weights
    return linear(weights, "fc", features) if is_joined else features


def stack(config, weights, embeds, hidden, positions: list[int], context=None, sees=None) -> Tensor:
    """All layers over rows of embeddings and hidden states `[n, H]`; other Args as `attention`."""
    is_input = getattr(config, "fusion", None) == "input"
    fuses = hidden is not None and not is_input
    x = linear(weights, "fc", torch.cat([embeds, hidden], dim=1)) if is_input else embeds
    for i in range(config.num_layers):
        name, residual, read = f"layers.{i}", x, x
        if i > 0 or not is_input:
            read = rms_norm(config, x, weights[f"{name}.input_layernorm.weight"])
        if i == 0 and fuses:
            normed = rms_norm(config, hidden, weights[f"{name}.hidden_norm.weight"])
            read = torch.cat([read, normed], dim=1)
            residual = normed if config.norm_before_residual else hidden
        case = positions, context, sees
        if config.layer.convolution is None:
            x = residual + attention(config, weights, f"{name}.self_attn", read, *case)
            x = x + mlp(config, weights, name, x)
            continue
        before, after = convolutions(config, weights, f"{name}.attention_conv", read)
        out = attention(config, weights, f"{name}.self_attn", before(read), *case)
        x = residual + after(out)
        normed = rms_norm(config, x, weights[f"{name}.post_attention_layernorm.weight"])
        before, after = convolutions(config, weights, f"{name}.mlp_conv", normed)
        x = x + after(gated(weights, name, before(normed)))
    return x


def convolutions(config, weights, name: str, x: Tensor):
    """Two functions of rows `[n, H]`: their dynamic kernels are made of rows `x`."""
    taps, group = config.layer.convolution
    base, own = weights[f"{name}.base_kernel"], linear(weights, f"{name}.kernel_projection", x)
    own = own.view(len(x), 2, taps, -1)

    def convolve(side: int, rows: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        for row in range(len(rows)):
            for tap in range(min(taps, row + 1)):
                factor = base[side, tap] + own[row, side, tap].repeat_interleave(group)
                out[row] += factor * rows[row - tap]
        return out

    return (lambda rows: convolve(0, rows)), (lambda rows: convolve(1, rows))


def mlp(config, weights, name: str, x: Tensor) -> Tensor:
    """What the second half of a layer adds."""
    x = rms_norm(config, x, weights[f"{name}.post_attention_layernorm.weight"])
    return gated(weights, name, x)


def gated(weights, name: str, x: Tensor) -> Tensor:
    """The MLP itself."""
    gate, up = (linear(weights, f"{name}.mlp.{part}_proj", x) for part in ("gate", "up"))
    return linear(weights, f"{name}.mlp.down_proj", gate * gate.sigmoid() * up)


def attention(config, weights, name: str, x: Tensor, positions, context=None, sees=None) -> Tensor:
    """Attention of rows `[n, H]`, one head at a time, over the context's keys (at positions 0, 1,
    ...) and their own; `sees` (queries, keys) -> what is visible, instead of what the config says.
    """
    layer, count = config.layer, 0 if context is None else len(context)
    source, at = (x if context is None else torch.cat([context, x])), [*range(count), *positions]
    queries, keys = torch.tensor(positions)[:, None], torch.tensor(at)
    visible = keys <= queries if sees is None else sees(queries, keys)
    if sees is None and not getattr(config, "is_causal", True):
        visible = torch.ones_like(visible)
    window = layer.windows[int(name.split(".")[1])] if layer.windows else None
    if window is not None and sees is None:
        visible = visible & (keys > queries - window)
        if layer.is_window_causal:
            visible = visible & (keys <= queries)
    query, key, value = keys_and_values(config, weights, name, x, source, positions, at)
    heads = []
    for h in range(layer.num_heads):
        kv = h // (layer.num_heads // layer.num_kv_heads)
        scores = query[:, h] @ key[:, kv].T / math.sqrt(layer.head_dim)
        scores = scores.masked_fill(~visible, -math.inf)
        if layer.has_sinks:
            sink = weights[f"{name}.sinks"][h].expand(len(scores), 1)
            scores = torch.cat([scores, sink], dim=1)
        heads.append(scores.softmax(dim=1)[:, : len(key)] @ value[:, kv])
    return linear(weights, f"{name}.o_proj", torch.cat(heads, dim=1))


def keys_and_values(config, weights, name: str, x, source, positions, at) -> tuple[Tensor, ...]:
    """Queries of rows `x`, keys and values of rows `source`, `[n, heads, D]`, rotated."""
    layer = config.layer
    query, key, value = (
        linear(weights, f"{name}.{part}_proj", rows).unflatten(1, (-1, layer.head_dim))
        for part, rows in zip("qkv", (x, source, source), strict=True)
    )
    if layer.has_qk_norm:
        query = rms_norm(config, query, weights[f"{name}.q_norm.weight"])
        key = rms_norm(config, key, weights[f"{name}.k_norm.weight"])
    return rotated(config, query, positions), rotated(config, key, at), value


def rotated(config, x: Tensor, positions: list[int]) -> Tensor:
    """Rows `[n, heads, D]`, of which the first R channels are turned by their positions: i and
    i + R / 2 are a plane.
    """
    width = int(config.layer.head_dim * config.layer.rope.get("partial_rotary_factor", 1))
    speeds = frequencies(config.layer.rope, width)
    angles = torch.tensor(positions).float()[:, None, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :width].chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., width:]], dim=-1)


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
