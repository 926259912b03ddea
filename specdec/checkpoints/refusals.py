"""What no head of the library has: (reading) -> pairs (condition, message)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.layout import Reading

Pairs = Iterator[tuple[bool, str]]
PARD_MODELS = ("llama", "qwen2", "qwen3")
"""Architectures of language models that are read, by their `model_type`."""


def of_other_designs(reading: Reading) -> Pairs:
    """Heads that are not EAGLE's."""
    return other_designs(reading.fields, reading.tensors)


def of_speculators_eagle1(reading: Reading) -> Pairs:
    """Options of speculators' EAGLE-1 that this library does not run."""
    fields = reading.fields
    yield fields.flag("layernorms"), "layernorms: norms of the embedding and before the head"
    layer = fields.text("transformer_layer_architecture", "auto")
    is_other = layer not in ("auto", "LlamaDecoderLayer", "Qwen3DecoderLayer")
    yield is_other, f"transformer_layer_architecture {layer!r}"


def other_designs(fields: ConfigFields, names: Collection[str]) -> Pairs:
    """Marks of heads that are not EAGLE's."""
    kind = fields.get("speculators_model_type", "eagle3")
    is_other = kind not in ("eagle", "eagle3")
    yield is_other, f"speculators_model_type {kind!r} (expected 'eagle' or 'eagle3')"
    for key in ("ptd_token_id", "mask_token_id", "pard_token"):
        yield fields.get(key) is not None, f"{key}: a parallel (mask-token) head"
    for key in ("dflash_config", "block_size", "markov_rank", "medusa_num_heads"):
        yield fields.get(key) is not None, f"{key}: a block or Medusa drafter"
    has_hidden = any(name.endswith("mask_hidden") for name in names)
    yield has_hidden, "tensor mask_hidden: a parallel (mask-token) head"


def of_wiring(reading: Reading) -> Pairs:
    """Layers and weights that no head of EAGLE's wiring can have."""
    fields, names = reading.fields, reading.tensors
    eagle = fields.section("eagle_config")
    steps = eagle.integer("parallel_draft_step", 1)
    yield steps > 1, "eagle_config.parallel_draft_step > 1: parallel draft heads"
    has_parallel = any(name.startswith("parallel_draft_heads.") for name in names)
    yield has_parallel and steps == 1, "tensors parallel_draft_heads.*: parallel draft heads"
    yield from of_weights(reading)
    is_mtp = eagle.flag("use_mtp_layernorm")
    yield is_mtp, "eagle_config.use_mtp_layernorm: norms of an MTP module"
    for key in ("use_input_layernorm_in_first_layer", "next_layer_regular"):
        yield not eagle.flag(key, default=True), f"eagle_config.{key}: false"


def of_deepspec(reading: Reading) -> Pairs:
    """DeepSpec's other heads."""
    architectures, count = reading.fields.strings("architectures"), "num_hidden_layers"
    unknown = [name for name in architectures if name != "Qwen3Eagle3Model"]
    yield bool(unknown), f"architectures {unknown} (of DeepSpec, Qwen3Eagle3Model is read)"
    is_deep = reading.fields.integer(count, 1) > 1
    yield is_deep, f"{count} > 1 (DeepSpec's layers all read the embedding)"


def of_weights(reading: Reading) -> Pairs:
    """Layers that no head has."""
    fields, names = reading.fields, reading.tensors
    is_latent = fields.get("kv_lora_rank") is not None or any("kv_a_proj" in n for n in names)
    yield is_latent, "kv_lora_rank: a drafter with multi-head latent attention (MLA)"
    has_experts = any(".experts." in name for name in names)
    yield has_experts, "tensors *.experts.*: a mixture-of-experts drafter"
    yield fields.flag("mlp_bias"), "mlp_bias: biases in the MLP"
    is_quantised = fields.get("quantization_config") is not None
    yield is_quantised, "quantization_config: quantised weights"


def of_pard2(reading: Reading) -> Pairs:
    """What a mask-token head cannot have beside it."""
    is_pard2 = any(key.startswith("pard2_") for key in reading.fields.raw)
    is_pard2 = is_pard2 or bool({"warp_model.bin", "pard_warp_model"} & reading.beside)
    yield is_pard2, "PARD-2: a language model that reads the target's features through warp_model"
    is_pickled = "mask_embedding.pt" in reading.beside
    yield is_pickled, "mask_embedding.pt: a pickled embedding of the masks"


def of_language_model(reading: Reading) -> Pairs:
    """Language models of other layers."""
    model_type = reading.fields.text("model_type", "llama")
    yield model_type not in PARD_MODELS, f"model_type {model_type!r} of {list(PARD_MODELS)}"


def of_windows(reading: Reading) -> Pairs:
    """Windows of a P-EAGLE head whose producer has none."""
    is_windowed = reading.fields.flag("use_sliding_window")
    yield is_windowed, "use_sliding_window of a P-EAGLE head"


def of_mask_token(reading: Reading) -> Pairs:
    """What a mask-token head cannot have."""
    fields, flash = reading.fields, reading.flash
    is_all = flash.flag("use_aux_hidden_state", default=True)
    yield not is_all, "dflash_config.use_aux_hidden_state: false"
    for key in ("attention_value_scale", "input_embedding_scale"):
        factor = flash.get(key, 1)
        yield factor != 1, f"dflash_config.{key} {factor}: scaled values or embeddings"
    softcap = flash.get("final_logit_softcapping", 0)
    yield softcap != 0, f"dflash_config.final_logit_softcapping {softcap}: capped logits"
    is_dflare = any("DFlare" in name for name in fields.strings("architectures"))
    yield is_dflare, "architecture DFlare, of which no wiring is known here"
    is_turned = not fields.flag("is_neox_style", default=True)
    yield is_turned, "is_neox_style false: rotary channels in pairs of neighbours"
