"""Mask-token heads of every wiring, with random weights or fitted to a target, for the tests."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from eagle_heads import (
    features_and_logits,
    fitted,
    flagged,
    random_weights,
    stand_in,
)
from mask_reference import draft_rows
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters import MaskTokenConfig, MaskTokenDrafter, MaskTokenHead
from specdec.drafters.head.layer_config import Convolution, LayerConfig
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.lattice import LiLiCorrConfig

VOCAB, WIDTH = 23, 16
LAYER = LayerConfig(WIDTH, 24, num_heads=4, num_kv_heads=2, head_dim=6)
SIZES = {
    "layer": LAYER,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "target_hidden_size": WIDTH,
    "mask_token_id": 7,
}
P_EAGLE = MaskTokenConfig("shifted", "input", feature_layers=(1, 2, 3), num_layers=2, **SIZES)
PARD = MaskTokenConfig(
    *("unshifted", "none"), feature_layers=(), num_layers=2, has_embed_tokens=True, **SIZES
)
DFLASH = flagged(
    MaskTokenConfig(
        *("same-position", "keys"),
        feature_layers=(1, 3),
        num_layers=2,
        block_size=6,
        is_causal=False,
        has_lm_head=False,
        **SIZES,
    ),
    has_qk_norm=True,
)
DSPARK = replace(DFLASH, alignment="next-token", has_lm_head=True)
WIRINGS = {
    "p-eagle": P_EAGLE,
    "p-eagle, one layer": replace(P_EAGLE, num_layers=1),
    "p-eagle, norm before fc": replace(P_EAGLE, norm_before_fc=True),
    "p-eagle, norm per feature": replace(P_EAGLE, fc_norm=True, fc_bias=True),
    "p-eagle, norm before residual": replace(P_EAGLE, norm_before_residual=True),
    "p-eagle, wider target": replace(P_EAGLE, target_hidden_size=20, has_embed_tokens=True),
    "p-eagle, fewer ids": replace(P_EAGLE, draft_vocab_size=9),
    "p-eagle, learned embedding": replace(P_EAGLE, mask_token_id=None, has_lm_head=False),
    "p-eagle, no output norm": replace(P_EAGLE, output_norm=False, logit_scale=0.3),
    "pard": PARD,
    "pard, tied": replace(PARD, ties_embeddings=True),
    "pard, qk norm": flagged(PARD, has_qk_norm=True, attention_bias=True),
    "dflash": DFLASH,
    "dflash, own tables": replace(DFLASH, has_embed_tokens=True, has_lm_head=True),
    "dflash, learned embedding": replace(DFLASH, mask_token_id=None),
    "dflash, causal": replace(DFLASH, block_size=None, is_causal=True),
    "dspark": DSPARK,
    "dspark, causal": replace(DSPARK, block_size=None, is_causal=True),
}
CORRECTED = {
    "p-eagle, markov": replace(P_EAGLE, correction=MarkovConfig(3)),
    "p-eagle, markov, fewer ids": replace(
        P_EAGLE, draft_vocab_size=9, correction=MarkovConfig(3), confidence="markov"
    ),
    "pard, markov": replace(PARD, correction=MarkovConfig(2, "gated")),
    "dspark, markov": replace(DSPARK, correction=MarkovConfig(3), confidence="markov"),
    "dspark, gated": replace(DSPARK, correction=MarkovConfig(3, "gated"), confidence="hidden"),
    "dspark, rnn": replace(DSPARK, correction=MarkovConfig(3, "rnn")),
    "dflash, rnn": replace(DFLASH, correction=MarkovConfig(2, "rnn")),
    "dflash, markov": replace(DFLASH, correction=MarkovConfig(3)),
    "domino": replace(DFLASH, correction=DominoConfig(5, 7, first=1)),
    "domino, next token": replace(DSPARK, correction=DominoConfig(5, 7), has_lm_head=False),
    "dflash2": flagged(
        DFLASH, correction=SelectorConfig(3, top_k=6), convolution=Convolution(3, 4)
    ),
    "dflash2, next token": replace(DSPARK, correction=SelectorConfig(3, top_k=4)),
    "xpress": replace(DFLASH, correction=XPressConfig(4)),
    "xpress, next token": replace(DSPARK, correction=XPressConfig(3, mlp_ratio=1)),
    "lilicorr": replace(DFLASH, correction=LiLiCorrConfig(4, 6, 2, 3, 1.5, factor_dim=4)),
    "lilicorr, convolutions": flagged(
        DFLASH,
        correction=LiLiCorrConfig(3, 0, 1, 2, factor_dim=3, scale=3.0),
        confidence="hidden",
        convolution=Convolution(2, 8),
    ),
}
WINDOWED = {
    "p-eagle, windows": flagged(P_EAGLE, windows=(3, None), has_sinks=True),
    "pard, windows": flagged(PARD, windows=(4, 2)),
    "dflash, windows": flagged(DFLASH, windows=(4, None)),
    "dflash, windows both ways": flagged(
        DFLASH, windows=(7, 8), is_window_causal=False, has_sinks=True
    ),
}
WIRINGS |= CORRECTED | WINDOWED
ALIGNMENTS = {"p-eagle": P_EAGLE, "pard": PARD, "dflash": DFLASH, "dspark": DSPARK}


def random_head(config: MaskTokenConfig, *, seed: int = 0, dtype=torch.float64) -> MaskTokenHead:
    """Weights large enough for every part to show; ids of a small vocabulary in no order."""
    return random_weights(MaskTokenHead, config, seed=seed, dtype=dtype)


def random_drafter(name: str, num_draft_tokens: int = 3, **options) -> MaskTokenDrafter:
    """A random head of a wiring for a stand-in."""
    config = WIRINGS[name]
    return MaskTokenDrafter(random_head(config), stand_in(config), num_draft_tokens, **options)


def config_for(model: PreTrainedModel, name: str, **flags) -> MaskTokenConfig:
    """A wiring with the sizes of a model."""
    text, base = model.config.get_text_config(), WIRINGS[name]
    layers = {"shifted": (0, 1, 2), "unshifted": ()}.get(base.alignment, (1, 2))
    sizes = {
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
        "feature_layers": layers,
    }
    return flagged(base, **(sizes | flags))


def head_for(model: PreTrainedModel, name: str, *, seed: int = 0, **flags) -> MaskTokenHead:
    """A random head for a model, in float32."""
    return random_head(config_for(model, name, **flags), seed=seed, dtype=torch.float32)


@torch.no_grad()
def informed(model: PreTrainedModel, head: MaskTokenHead, num_draft_tokens: int) -> MaskTokenHead:
    """The same random head with a vocabulary head fitted (ridge regression) to the target's logits
    in its own greedy texts, for all draft tokens alike: right often enough, and wrong often enough.
    """
    config, text = head.config, model.config.get_text_config()
    assert config.has_lm_head
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(1, text.vocab_size, (240, 5), generator=generator)
    texts = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), **texts)
    exact = {name: tensor.double() for name, tensor in head.state_dict().items()}
    tables = [model.get_input_embeddings().weight.double()] * 2
    features, logits = None, model(input_ids=ids).logits
    if config.feature_layers:
        features = features_and_logits(model, ids, config.feature_layers)[0].double()
    xs, ys = [], []
    for b in range(len(ids)):
        known = 6 + b % 11  # tokens, the last of them not read by the target
        row = None if features is None else features[b, : known - 1]
        rows = draft_rows(config, exact, tables, ids[b, :known].tolist(), row, num_draft_tokens)
        xs.append(rows)
        ys.append(logits[b, known - 1 : known - 1 + num_draft_tokens].double())
    x, y = torch.cat(xs), torch.cat(ys)
    if head.target_ids is not None:
        y = y[:, head.target_ids]
    head.lm_head.weight.copy_(fitted(x, y))
    return head


@torch.no_grad()
def learned(
    model: PreTrainedModel, name: str, num_draft_tokens: int, text: Sequence[Tensor], **flags
) -> MaskTokenHead:
    """A random wide head whose vocabulary head is solved for: at every place of a text it predicts
    the tokens that follow.
    """
    sizes = {"hidden_size": 224, "intermediate_size": 256, "num_layers": 2}
    tables = {"has_embed_tokens": True, "has_lm_head": True}
    head = head_for(model, name, **(sizes | tables | flags))
    config, xs, labels = head.config, [], []
    exact = {key: tensor.double() for key, tensor in head.state_dict().items()}
    for row in text:
        features = None
        if config.feature_layers:
            features = features_and_logits(model, row[None], config.feature_layers)[0][0].double()
        for known in range(5, len(row) - num_draft_tokens + 1):
            seen = None if features is None else features[: known - 1]
            case = row[:known].tolist(), seen, num_draft_tokens
            xs.append(draft_rows(config, exact, [None, None], *case))
            labels.append(row[known : known + num_draft_tokens])
    x, y = torch.cat(xs), F.one_hot(torch.cat(labels), config.vocab_size).double()
    head.lm_head.weight.copy_(fitted(x, y, 1e-7))
    return head
