"""The published wirings of mask-token heads, recomputed straight and without any cache.

Plain functions on tensors, one row of text at a time, written from the description of the formats
and sharing nothing with the package but the names of the weights.
"""

import torch
from correction_reference import corrected
from eagle_reference import fused, linear, rms_norm, stack
from torch import Tensor


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
    before = [text[max(len(text) - 2, 0)], text[-1], *path]
    return corrected(config, own, logits, block, start, before, embeddings.to(rows.dtype))


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
