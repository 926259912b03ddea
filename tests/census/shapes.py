"""A tiny random model of every type that HF registers as a causal or a multimodal LM.

A type's own default configuration is shrunk by the names of its fields. What the names do not tell
stands in `CORRECTIONS`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipVisionConfig,
)
from transformers.models.auto import modeling_auto

VOCAB = 99
POSITIONS = 2048
"""Above every prompt of the census."""
NUM_LAYERS = 4

_SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size audio_vocab_size "
    "encoder_hash_byte_group_vocab ngram_vocab_size_base shape_vocab_size "
    "pronunciation_vocab_size",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len context_length "
    "model_max_length max_target_positions max_source_positions position_bias_max_distance",
    1: "num_nextn_predict_layers topk_group n_shared_experts num_shared_experts n_group "
    "moe_num_shared_experts mamba_n_groups n_groups mamba_ngroups first_k_dense_replace "
    "num_dense_layers pretraining_tp num_expert_group num_mem_blocks moe_layer_start_index "
    "zero_expert_num",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "swa_num_key_value_heads depth num_query_groups interleave_moe_layer_step n_mamba_heads "
    "moe_top_k kv_n_heads heads_per_ngram",
    4: "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
    "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts "
    "linear_num_key_heads linear_num_value_heads linear_num_heads index_topk_blocks",
    8: "mamba_n_heads mamba_num_heads mamba_d_state state_size ssm_state_size time_step_rank "
    "mamba_dt_rank d_rel hidden_size_per_layer_input loop_gate_rank gated_norm_rank hc_lowrank "
    "query_pre_attn_scalar router_hidden_size laurel_rank rotary_dim",
    16: "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank d_head "
    "swa_head_dim dim_head kv_channels attention_head_size linear_key_head_dim index_head_dim "
    "linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim mamba_chunk_size "
    "chunk_size global_head_dim ple_embed_dim adapter_rank o_lora_rank",
    24: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "shared_experts_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size",
    32: "index_n_heads index_topk qk_head_dim attention_head_dim",
    48: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size dim_ff dff "
    "intermediate_size_mlp emb_dim d_inner feed_forward_size dense_intermediate_size",
    64: "hidden_size d_model n_embd embedding_dim embedding_size word_embed_proj_dim lru_width "
    "attention_hidden_size input_embedding_size output_embedding_size adapter_in_dim "
    "hidden_size_global out_hidden_size text_hidden_size "
    "adapter_input_size adapter_out_dim shape_embed_dim pronunciation_embed_dim",
    128: "mamba_d_ssm",
}
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
"""By field, what it is in a tiny model; only where the default configuration has a number."""

FILLED_IN = {
    *("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "sliding_window"),
}
"""Fields that get a number even where the default is `None`."""

LAYERS = {
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    *("num_decoder_layers", "num_blocks", "encoder_layers", "num_encoder_layers"),
}
WINDOWS = {
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    *("attention_chunk_size", "local_attention_window_len", "keep_window_size", "local_attention"),
    *("rel_extent", "log_scaling_n_floor", "floor_scale"),
}
"""Fields with a number of tokens from which on a layer computes something else."""
IDS = {"bos_token_id", "sep_token_id", "cls_token_id", "mask_token_id"}
ALWAYS = {
    **{"is_decoder": True, "use_cache": True, "tie_word_embeddings": False},
}
SLIDING = {"use_sliding_window": True, "max_window_layers": 2}
"""Fields that have one value in all types that have them, and those that turn windows on."""

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
CORRECTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"q_lora_rank": None},
    "bamba": {"attn_layer_indices": [2]},
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
            for kind in set(_ALTERNATING)
        },
    },
    "DbrxAttentionConfig": {"rope_theta": 10_000.0, "clip_qkv": 8.0},
    "blt": {"num_hidden_layers": 4},
    "doge": {"sliding_window": None, "keep_window_size": 2048},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots3_note_text": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 32},
        **{"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_v_head_dim": 16},
        "swa_qk_nope_head_dim": 16,
    },
    "gemma3n_text": {
        "layer_types": _ALTERNATING,
        "num_kv_shared_layers": 2,
        "intermediate_size": 48,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "glm5_next_text": {"index_kpool": 4},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    "hrm_text": {"num_layers_per_stack": None, "num_hidden_layers": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _ALTERNATING, "num_attention_heads_per_layer": [4, 4, 2, 4]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": _ALTERNATING},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        **{"index_block_size": 8, "index_n_heads": 2, "index_topk_blocks": 3},
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 32, "indexer_compress_ratio": 4},
    },
    "mistral4": {"head_dim": 32},
    "mistral_large4_text": {
        **{"indexer_types": ["full", "full", "shared", "full"], "kv_source_layers": [0, 0, 0, 3]},
    },
    "paddleocr_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]},
    },
    "reformer": {"axial_pos_shape": (32, 64), "axial_pos_embds_dim": (32, 32)},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "num_key_value_heads": 4},
    "zamba2": {
        **{"num_key_value_heads": 4, "attention_hidden_size": 128, "attention_head_dim": 32},
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
"""What the names of fields do not tell, by type or class of the configuration."""


DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
"""Of types whose default configuration is not a valid one."""


def _towers(model_type: str) -> dict[str, PreTrainedConfig]:
    """In the place of towers that need a package of their own; no text enters them."""
    if model_type != "gemma3n":
        return {}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    tower = SiglipVisionConfig(**sizes, num_attention_heads=4, image_size=28, patch_size=14)
    for name, value in {"vocab_offset": 128, "vocab_size": 8, "rms_norm_eps": 1e-6}.items():
        setattr(tower, name, value)
    return {"vision_config": tower}


def model_classes() -> dict[str, dict[str, str]]:
    """By group, the model class of every type that the installed transformers registers. Multimodal
    ones are those that are no causal LM as well.
    """
    causal = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    others = {name: of for name, of in multimodal.items() if of not in causal.values()}
    return {"causal": causal, "multimodal": others}


def _layers_of_every_kind(config: PreTrainedConfig, count: int) -> tuple[list[int], list[str]]:
    """Layers of the default configuration to keep, at least one of every kind, and the fields that
    have a value for each layer.
    """
    fields = [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and not any(isinstance(entry, list | dict) for entry in value)
        and len(value) == count > len(set(value))
    ]
    kinds: dict[tuple, int] = {}
    for index in range(count):
        kinds.setdefault(tuple(vars(config)[name][index] for name in fields), index)
    others = [index for index in range(count) if index not in kinds.values()]
    missing = max(0, NUM_LAYERS - len(kinds))
    return sorted([*kinds.values(), *others[:missing]]), fields


def _with_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters whose sections for time, height and width fill a tiny head."""
    if not all(isinstance(value, dict) for value in rope.values()):
        third, rest = divmod(
            int(rope.get("partial_rotary_factor", 1.0) * SMALL["head_dim"]) // 2, 3
        )
        return {**rope, "mrope_section": [third, third, third + rest]}
    return {kind: _with_sections(value) for kind, value in rope.items()}


def shrunk(config: PreTrainedConfig, window: int | None) -> dict[str, Any]:
    """The fields of a tiny configuration of the same type; without a window, windows are those of
    the default configuration.
    """
    values, fields = vars(config), {}
    count = next((values[name] for name in LAYERS if type(values.get(name)) is int), 0)
    layers, per_layer = _layers_of_every_kind(config, count)
    for name, value in values.items():
        is_number = type(value) is int or (value is None and name in FILLED_IN)
        if isinstance(value, PreTrainedConfig):
            fields[name] = shrunk(value, window)
            if value.model_type:
                fields[name]["model_type"] = value.model_type
        elif name in per_layer:
            fields[name] = [value[index] for index in layers]
        elif name in ALWAYS:
            fields[name] = ALWAYS[name]
        elif name in SLIDING and window is not None:
            fields[name] = SLIDING[name]
        elif name in LAYERS and is_number:
            fields[name] = len(layers)
        elif name in IDS and is_number:
            fields[name] = 1
        elif name in ("eos_token_id", "pad_token_id"):
            fields[name] = None if name == "eos_token_id" else 0
        elif name in WINDOWS and is_number:
            fields[name] = value if window is None else window
        elif name in SMALL and is_number:
            fields[name] = 0 if value == 0 else SMALL[name]  # 0: the model has no such part
    sections = getattr(config, "ignore_keys_at_rope_validation", None) or ()
    if "mrope_section" in sections and "mrope_interleaved" not in sections:
        fields["rope_parameters"] = _with_sections(config.rope_parameters)
    if "kv_lora_rank" in values:
        fields["num_key_value_heads"] = SMALL["num_attention_heads"]
    if window is not None and not SLIDING.keys().isdisjoint(fields):
        fields.pop("layer_types", None)
    return fields | CORRECTIONS.get(config.model_type or type(config).__name__, {})


def _classes(model_type: str, group: str) -> tuple[type[PreTrainedModel], type[PreTrainedConfig]]:
    """Of the model, and of the configuration that it is made from."""
    model_class = getattr(transformers, model_classes()[group][model_type])
    config_class = CONFIG_MAPPING[model_type]
    if model_class.config_class in getattr(config_class, "sub_configs", {}).values():
        config_class = model_class.config_class  # of a picture model's text decoder
    return model_class, config_class


def has_window(model_type: str, group: str = "causal") -> bool:
    """Whether a window changes anything in the configuration."""
    try:
        default = _classes(model_type, group)[1](**DEFAULTS.get(model_type, {}))
    except Exception:  # whatever a foreign configuration raises: `build` says it
        return False
    return shrunk(default, 5) != shrunk(default, 6)


def remembers(model_type: str, group: str = "causal") -> bool:
    """Whether some of its layers have a recurrent state."""
    try:
        config = _classes(model_type, group)[1](**DEFAULTS.get(model_type, {})).get_text_config()
    except Exception:  # whatever a foreign configuration raises: `build` says it
        return False
    kinds = getattr(config, "layer_types", None) or ()
    return not {"linear_attention", "conv", "hybrid"}.isdisjoint(kinds)


def build(
    model_type: str, *, group: str = "causal", window: int | None = 70, seed: int = 0
) -> PreTrainedModel:
    """A tiny random model in float32, in eval mode, whose greedy text is not constant.

    Args:
        model_type: as HF calls it.
        group: of `model_classes`.
        window: of every sliding window, chunk and buffer, in tokens; `None` leaves them as they are
            in the default configuration.
        seed: of the weights.
    """
    model_class, config_class = _classes(model_type, group)
    default = config_class(**DEFAULTS.get(model_type, {}))
    torch.manual_seed(seed)
    config = config_class(**shrunk(default, window))
    vars(config).update(_towers(model_type))  # the configuration takes its own classes only
    model = model_class(config).float().eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # no forced ids, no penalties
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model
