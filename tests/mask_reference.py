"""The published wirings of mask-token heads, recomputed straight and without any cache.

Plain functions on tensors, one row of text at a time, written from the description of the formats
and sharing nothing with the package but the names of the weights.
"""

import torch
import torch.nn.functional as F
from eagle_reference import fused, linear, rms_norm, stack
from torch import Tensor


def corrected(config, weights, logits: Tensor, block: Tensor, start: int, before, embeddings):
    """Corrected logits of a path, `[K, Vd]`.

    Args:
        config: the head's flags.
        weights: the correction's tensors by name.
        logits: `[K, Vd]` of the parallel pass.
        block: `[N, H]`, what the rows of the pass put out after the final norm.
        start: which of them predicts the first draft token.
        before: ids: the last two committed tokens, then the path.
        embeddings: `[V, H]` of the head.
    """
    count = len(logits)
    hidden, previous = block[start : start + count], torch.tensor(before[1 : 1 + count])
    kind = type(config.correction).__name__
    if kind == "MarkovConfig" and config.correction.kind == "rnn":
        rows = torch.tensor([before[1]] * start + before[1 : 1 + count])
        return logits + markov("rnn", weights, block[: start + count], rows)[start:]
    if kind == "MarkovConfig":
        return logits + markov(config.correction.kind, weights, hidden, previous)
    if kind == "DominoConfig":
        return logits + domino(config.correction, weights, hidden, embeddings[previous])
    if kind == "SelectorConfig":
        return selected(config.correction.top_k, weights, logits, hidden, previous)
    rows = torch.tensor(before[1 - start :][: count + start])
    return logits + refined(weights, block, rows)[start:]


def markov(kind: str, weights, hidden: Tensor, previous: Tensor) -> Tensor:
    z = weights["markov_w1.weight"][previous]
    if kind == "gated":
        gate = torch.cat([hidden, z], 1) @ weights["gate_proj.weight"].T + weights["gate_proj.bias"]
        z = z / (1 + torch.exp(-gate))
    if kind == "rnn":
        state, outs, rank = torch.zeros_like(z[0]), [], z.shape[1]
        for before, own in zip(z, hidden, strict=True):
            joint = weights["joint_proj.weight"] @ torch.cat([state, before, own])
            joint = joint + weights["joint_proj.bias"]
            keep = torch.sigmoid(joint[:rank])
            state = keep * state + (1 - keep) * torch.tanh(joint[rank : 2 * rank])
            outs.append(torch.tanh(joint[2 * rank :]))
        z = torch.stack(outs)
    return z @ weights["markov_w2.weight"].T


def domino(sizes, weights, hidden: Tensor, embeds: Tensor) -> Tensor:
    gru = torch.nn.GRU(embeds.shape[1], sizes.gru_width, bias=False, batch_first=True)
    gru = gru.to(embeds.dtype)
    own = {name.removeprefix("prefix_gru."): x for name, x in weights.items() if "gru" in name}
    gru.load_state_dict(own)
    states = gru(embeds[None])[0][0]
    inner = F.silu(torch.cat([hidden, states], 1) @ weights["embed_proj.0.weight"].T)
    added = inner @ weights["embed_proj.2.weight"].T
    added[: sizes.first] = 0
    return added


def selected(top_k: int, weights, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
    left = weights["predecessor_codebook"][previous]
    scores = (left * (hidden @ weights["hidden_projection.weight"].T)) @ weights[
        "successor_codebook"
    ].T
    worst = logits.sort(dim=1, descending=True).values[:, top_k - 1 : top_k]
    return torch.where(logits >= worst, logits + scores, -torch.inf)


def refined(weights, block: Tensor, previous: Tensor) -> Tensor:
    count = len(previous)
    own = block[:count] @ weights["down_h.weight"].T
    mean = (block.mean(0) @ weights["down_g.weight"].T).expand(count, -1)
    tokens = weights["token_embed.weight"][previous]
    x = torch.cat([own, mean, tokens], 1) @ weights["in_proj.weight"].T
    mix = weights["mix_l"][:, :count, :count] * torch.ones(count, count).tril()
    x = x + torch.einsum("rkj,jr->kr", mix, x)
    gate, up = (x @ weights[f"mlp_{part}.weight"].T for part in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ weights["mlp_down.weight"].T
    return x @ weights["readout.weight"].T


def latticed(config, weights, logits: Tensor, rows: Tensor, feature: Tensor, path, embeddings):
    """LiLiCorr's scores of a path, `[K, V]`, candidate by candidate: `logits` `[S, V]` and `rows`
    `[S, H]` of all positions, the target's last feature `[H]`. A token that is no candidate counts
    as the best one.
    """
    sizes, eps, nodes = config.correction, config.layer.rms_norm_eps, []
    ids = [row.argsort(descending=True)[: sizes.top_k].tolist() for row in logits]
    for s, (row, own) in enumerate(zip(logits, ids, strict=True)):
        log_probs = row.log_softmax(0)[own]
        for rank, p in enumerate(log_probs):
            said = [p, p.exp(), p - log_probs[0], rank / max(sizes.top_k - 1, 1), rank == 0]
            said = torch.tensor(said, dtype=row.dtype)
            said = (said - said.mean()) / torch.sqrt(said.var(correction=0) + 1e-5)
            said = said * weights["feature_norm.weight"] + weights["feature_norm.bias"]
            x = embeddings[own[rank]]
            x = linear(weights, "token_proj", x) if "token_proj.weight" in weights else x
            x = x + linear(weights, "pass_hidden_proj", rows[s])
            x = x + silu_mlp(weights, "feature_mlp.", said)
            x = x + weights["slot_embedding"][0, 0, s, 0] + weights["rank_embedding"][0, 0, 0, rank]
            nodes.append(x)
    x, slots = torch.stack(nodes), [s for s in range(len(ids)) for _ in ids[s]]
    for i in range(sizes.num_layers):
        layer = {n.removeprefix(f"layers.{i}."): t for n, t in weights.items()}
        x = x + lattice_attention(
            sizes, layer, weights, normed(x, layer["attn_norm.weight"], eps), slots
        )
        x = x + silu_mlp(layer, "mlp.", normed(x, layer["mlp_norm.weight"], eps))
    x = normed(x, weights["output_norm.weight"], eps)
    last = normed(linear(weights, "context_proj", feature), weights["anchor_norm.weight"], eps)
    after, scores = linear(weights, "anchor_out_head", last), []
    for s, own in enumerate(ids[: len(path)]):
        found = torch.full_like(logits[s], -torch.inf)
        for rank, token in enumerate(own):
            factors = node_factors(weights, x[s * sizes.top_k + rank], last)
            into = linear(weights, "in_head", factors)
            lengths = (
                after.norm().clamp(min=sizes.vector_eps),
                into.norm().clamp(min=sizes.vector_eps),
            )
            found[token] = sizes.scale * (after @ into) / (lengths[0] * lengths[1])
        scores.append(found)
        chosen = own.index(path[s]) if path[s] in own else 0
        factors = node_factors(weights, x[s * sizes.top_k + chosen], last)
        after = linear(weights, "out_head", factors)
    return torch.stack(scores)


def node_factors(weights, node: Tensor, last: Tensor) -> Tensor:
    return F.silu(linear(weights, "factor_input_proj", torch.cat([node, last, node * last])))


def silu_mlp(weights, name: str, x: Tensor) -> Tensor:
    return linear(weights, f"{name}down_proj", F.silu(linear(weights, f"{name}up_proj", x)))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def lattice_attention(sizes, layer, weights, x: Tensor, slots: list[int]) -> Tensor:
    joined, heads = x @ layer["attn.in_proj_weight"].T + layer["attn.in_proj_bias"], []
    middle = weights["relative_slot_bias"].shape[1] // 2
    distances = torch.tensor([[a - b for b in slots] for a in slots])
    split = [part.chunk(sizes.num_heads, 1) for part in joined.chunk(3, 1)]
    for h, (queries, keys, values) in enumerate(zip(*split, strict=True)):
        scores = queries @ keys.T / queries.shape[1] ** 0.5
        scores = scores + weights["relative_slot_bias"][h][middle + distances]
        scores = scores + torch.where(distances == 0, weights["same_slot_bias"][h], 0)
        heads.append(scores.softmax(1) @ values)
    return linear(layer, "attn.out_proj", torch.cat(heads, 1))


def draft_logits(config, weights, tables, text, features, count, path=None, **faults) -> Tensor:
    """What the head predicts after a text, `[K, Vd]`.

    Args:
        config: the head's flags.
        weights: the head's tensors by name.
        tables: embeddings `[V, H]` and vocabulary head `[Vd, H]` for a head without its own.
        text: n + 1 committed token ids x_0..x_n.
        features: `[n, F]` of all but the last of them, or None.
        count: K.
        path: the tokens drafted, which the logits of later ones depend on where the head has a
            correction.
        faults: see `draft_rows`.
    """
    vocabulary = weights["lm_head.weight"] if "lm_head.weight" in weights else tables[1]
    if config.ties_embeddings:
        vocabulary = weights["embed_tokens.weight"]
    block, start = block_rows(config, weights, tables, text, features, count, **faults)
    rows = block[start : start + count]
    logits = rows @ vocabulary.to(rows.dtype).T * config.logit_scale
    if config.correction is None:
        return logits
    own = {name.removeprefix("correction."): tensor for name, tensor in weights.items()}
    embeddings = weights["embed_tokens.weight"] if "embed_tokens.weight" in weights else tables[0]
    embeddings = embeddings.to(rows.dtype)
    if type(config.correction).__name__ == "LiLiCorrConfig":
        logits = block[start:] @ vocabulary.to(rows.dtype).T * config.logit_scale
        feature = linear(weights, "fc", features[-1:])
        feature = rms_norm(config, feature, weights["hidden_norm.weight"])[0]
        return latticed(config, own, logits, block[start:], feature, path, embeddings)
    before = [text[max(len(text) - 2, 0)], text[-1], *path]
    return corrected(config, own, logits, block, start, before, embeddings)


def draft_rows(config, weights, tables, text, features, count, **faults) -> Tensor:
    """What the vocabulary head reads for each draft token, `[K, H]`; Args as `block_rows`."""
    block, start = block_rows(config, weights, tables, text, features, count, **faults)
    return block[start : start + count]


def block_rows(config, weights, tables, text, features, count, *, late=0, first=0, sees=None):
    """What the vocabulary head reads for all rows of the pass, and the index of the first one that
    predicts a draft token.

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
    out = stack(config, weights, x, hidden, positions, context, sees)
    if config.output_norm:
        out = rms_norm(config, out, weights["norm.weight"])
    return out, start


def mask_embedding(config, weights, embeddings):
    if config.mask_token_id is None:
        return weights["mask_embedding"].reshape(-1)
    return embeddings[config.mask_token_id]
