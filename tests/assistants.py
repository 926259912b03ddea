"""Small assistants of Gemma 4 and their targets, of every published shape of configuration."""

from functools import cache

import torch
from eagle_heads import fitted
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specdec import Target
from specdec.drafters.assistant import AssistantDrafter, AssistantHead
from specdec.targets.text import TargetText

VOCAB = 60

_TEXT = {
    "vocab_size": VOCAB,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 64,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
_BACKBONE = _TEXT | {
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token for ever
}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_KEYS_ARE_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
_CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 4}

SHAPES = {
    # As E2B and E4B: layers that share keys and values, per-layer inputs, centroids.
    "E2B": (
        "gemma4",
        _PER_LAYER | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        _CENTROIDS,
    ),
    # As 31B, and 26B-A4B.
    "31B": ("gemma4", _KEYS_ARE_VALUES | {"final_logit_softcapping": 30.0}, {}),
    "26B-A4B": ("gemma4", _KEYS_ARE_VALUES | {"enable_moe_block": True} | _EXPERTS, {}),
    "shared, whole table": ("gemma4", _PER_LAYER | {"num_kv_shared_layers": 4}, {}),
    "unified": ("gemma4_unified", {"num_global_key_value_heads": 1}, {}),
    "short window": ("gemma4", {"sliding_window": 5}, _CENTROIDS),
}
"""Family, what the target's configuration has, and what the assistant's has."""


def target_of(shape: str, *, seed: int = 0, **own) -> PreTrainedModel:
    """A random target whose logits vary enough that greedy text is not constant."""
    family, changed, _ = SHAPES[shape]
    return _random(f"{family}_text", _BACKBONE | changed | own, 0.15, seed)


def assistant_of(
    shape: str, model: PreTrainedModel, *, seed: int = 1, flags: dict | None = None, **own
) -> PreTrainedModel:
    """HF's assistant for a target: random, but for its table (`inform`)."""
    family, changed, usual = SHAPES[shape]
    flags = usual if flags is None else flags
    kept = {"sliding_window", "num_global_key_value_heads", "attention_k_eq_v"}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "layer_types": kinds}
    text = _TEXT | {name: value for name, value in changed.items() if name in kept} | sizes | own
    text = AutoConfig.for_model(f"{family}_text", **_known(family, text))
    wide = {"backbone_hidden_size": model.config.get_text_config().hidden_size}
    wide |= {"text_config": text, **flags}
    assistant = _random(f"{family}_assistant", wide, 0.3, seed)
    if flags:
        order = torch.randperm(text.vocab_size, generator=torch.Generator().manual_seed(seed))
        assistant.masked_embedding.token_ordering.copy_(order)
    return inform(assistant, model)


def assistant_of_plain(model: PreTrainedModel, flags: dict, **own) -> PreTrainedModel:
    """For a target that is no Gemma, all of whose layers see everything."""
    text = model.config.get_text_config()
    sizes = {"vocab_size": text.vocab_size, "num_hidden_layers": 2}
    sizes |= {"global_head_dim": text.head_dim, "layer_types": ["full_attention"] * 2}
    return assistant_of("31B", model, flags=flags, **sizes | own)


def _random(kind: str, sizes: dict, scale: float, seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(kind, **_known(kind, sizes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale, generator=generator)
            else:  # norms
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def _known(kind: str, sizes: dict) -> dict:
    """Unified models have no per-layer inputs, and no keys for them."""
    if "unified" not in kind:
        return sizes
    return {name: value for name, value in sizes.items() if "per_layer_input" not in name}


@torch.no_grad()
def outputs(
    assistant: PreTrainedModel, model: PreTrainedModel, ids: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """What an assistant's vocabulary head reads after each prefix of texts `[R, T]`, along paths of
    `depth` tokens, and the target's logits there.
    """
    target, (rows, length) = Target(model, feature_layers=("final",)), ids.shape
    drafter = AssistantDrafter(AssistantHead.of(assistant), model, 1)
    slots, lengths = target.init_cache(rows, length), torch.full((rows,), length)
    features = target.prefill(slots, ids, lengths, offset=0)
    logits, xs, ys = model(ids).logits, [], []
    for known in range(1, length - depth):
        read = drafter._reader(TargetText(target, slots, lengths * 0 + known))
        hidden = features[:, known - 1 : known]
        for at in range(known, known + depth):
            xs.append(read(ids[:, at : at + 1], hidden)[:, 0])
            ys.append(logits[:, at])
            hidden = drafter.head.feedback(xs[-1][:, None])
    return torch.cat(xs).double(), torch.cat(ys).double()


@torch.no_grad()
def inform(
    assistant: PreTrainedModel, model: PreTrainedModel, ids: Tensor | None = None
) -> PreTrainedModel:
    """Fits its table (ridge regression) to the target's logits after texts, by default random ones;
    centroids are the middle of their ids' rows. Right often enough, and wrong often enough.
    """
    if ids is None:
        vocab = model.config.get_text_config().vocab_size
        ids = torch.randint(1, vocab, (64, 24), generator=torch.Generator().manual_seed(5))
    table = assistant.lm_head.weight.copy_(fitted(*outputs(assistant, model, ids, 3)))
    if assistant.masked_embedding is not None:
        centroids = assistant.masked_embedding.centroids.weight
        groups = table[assistant.masked_embedding.token_ordering].unflatten(0, (len(centroids), -1))
        centroids.copy_(groups.mean(dim=1))
    return assistant


@torch.no_grad()
def learn(
    assistant: PreTrainedModel, model: PreTrainedModel, texts: list[Tensor], depth: int
) -> PreTrainedModel:
    """Solves for a table that predicts the target's greedy texts, all of their paths, exactly."""
    seen = [outputs(assistant, model, text[None], depth) for text in texts]
    xs, ys = (torch.cat(part) for part in zip(*seen, strict=True))
    labels = F.one_hot(ys.argmax(dim=-1), ys.shape[-1]).double()
    assistant.lm_head.weight.copy_(fitted(xs, labels, 1e-7))
    return assistant


@cache
def pair(shape: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target and its assistant."""
    model = target_of(shape)
    return model, assistant_of(shape, model)


def drafter_of(shape: str, num_draft_tokens: int = 4, **options) -> AssistantDrafter:
    """Of the pair of a shape."""
    model, assistant = pair(shape)
    return AssistantDrafter(AssistantHead.of(assistant), model, num_draft_tokens, **options)
