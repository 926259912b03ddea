"""Tiny random models of every architecture family that specdec is tested on."""

import torch
import transformers
from transformers import PreTrainedModel

VOCAB = 61

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied, a random model repeats its last token for ever
}
_NO_GQA = _COMMON | {"num_key_value_heads": 4}
_MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
}
_GPT = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
_MPT = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 128,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}

ARCHITECTURES: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", _COMMON),
    "qwen2": ("Qwen2", _COMMON),
    "qwen3": ("Qwen3", _COMMON | {"head_dim": 8}),
    "qwen3_moe": ("Qwen3Moe", _COMMON | _MOE | {"head_dim": 8}),
    "mistral_sliding": ("Mistral", _COMMON | {"sliding_window": 7}),
    "mixtral": ("Mixtral", _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": (
        "Gemma2",
        # Some versions of transformers run it by sdpa, which leaves out its cap of scores.
        _COMMON
        | {
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 8,
            "attn_implementation": "eager",
        },
    ),
    "gemma3": (
        "Gemma3",
        _COMMON
        | {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "num_hidden_layers": 6},
    ),
    "gpt_oss": (
        "GptOss",
        _COMMON
        | {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "phi": ("Phi", _NO_GQA),
    "phi3": ("Phi3", _COMMON | {"sliding_window": 9}),
    "gpt2": ("GPT2", _GPT),
    "gpt_neox": ("GPTNeoX", _NO_GQA),
    "opt": ("OPT", _NO_GQA | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "olmo2": ("Olmo2", _COMMON),
    "cohere2": ("Cohere2", _COMMON | {"sliding_window": 7, "num_hidden_layers": 4}),
    "starcoder2": ("Starcoder2", _COMMON | {"sliding_window": 9}),
    "glm4": ("Glm4", _COMMON | {"head_dim": 8}),
    "granite": ("Granite", _COMMON),
    "stablelm": ("StableLm", _COMMON),
    "smollm3": ("SmolLM3", _COMMON),
    "deepseek_v3": (
        "DeepseekV3",
        _NO_GQA
        | {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 4}),
    "falcon_rotary": ("Falcon", _NO_GQA | {"alibi": False, "new_decoder_architecture": False}),
    "falcon_gqa": (
        "Falcon",
        _COMMON | {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "mpt": ("Mpt", _MPT | {"tie_word_embeddings": False}),
    "llama4": (
        "Llama4",
        # Three layers of chunks and rotary positions, and one of neither.
        _COMMON
        | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4}
        | {"num_experts_per_tok": 2, "num_hidden_layers": 4, "interleave_moe_layer_step": 2}
        | {"attention_chunk_size": 8},
    ),
}


_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_CONV = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 4,
}
_PURE = {
    **{name: _COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")},
    **{name: _COMMON[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    "tie_word_embeddings": False,
    "state_size": 8,
}
_SHARED_EXPERT = _MOE | {"shared_expert_intermediate_size": 24}
_BLOCKS = ["mamba", "mlp", "attention", "mamba"]

RECURRENT: dict[str, tuple[str, dict]] = {
    "qwen3_next": ("Qwen3Next", _COMMON | _LINEAR | _SHARED_EXPERT | {"head_dim": 8}),
    "qwen3_5": ("Qwen3_5", _COMMON | _LINEAR | {"head_dim": 8}),
    "qwen3_5_moe": ("Qwen3_5Moe", _COMMON | _LINEAR | _SHARED_EXPERT | {"head_dim": 8}),
    "lfm2": ("Lfm2", _COMMON | _CONV | {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", _COMMON | _CONV | _MOE | {"num_dense_layers": 1}),
    "lfm3": ("Lfm3", _COMMON | {"num_hidden_layers": 4}),
    "olmo_hybrid": ("OlmoHybrid", _COMMON | _LINEAR),
    "bamba": ("Bamba", _COMMON | _MAMBA2 | {"attn_layer_indices": [2]}),
    "falcon_h1": ("FalconH1", _COMMON | _MAMBA2 | {"mamba_d_ssm": 64, "head_dim": 8}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        _COMMON
        | _MAMBA2
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24}
        | {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    ),
    "nemotron_h": (
        "NemotronH",
        _COMMON
        | {"layers_block_type": _BLOCKS, "num_hidden_layers": 4, "head_dim": 8, "n_groups": 1}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 16},
    ),
    "jamba": (
        "Jamba",
        _COMMON
        | {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_hidden_layers": 4},
    ),
    "zamba": (
        "Zamba",
        _NO_GQA | {"attn_layer_period": 2, "attn_layer_offset": 1, "attention_head_dim": 16},
    ),
    "zamba2": (
        "Zamba2",
        _NO_GQA
        | {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "num_hidden_layers": 4}
        | {"mamba_d_state": 8, "mamba_headdim": 16, "mamba_ngroups": 1, "n_mamba_heads": 4}
        | {"chunk_size": 16},
    ),
    "kimi_linear": (
        "KimiLinear",
        _NO_GQA
        | {name: _LINEAR[name] for name in ("num_hidden_layers", "layer_types")}
        | {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
        | {"v_head_dim": 12, "num_experts": 4, "num_experts_per_token": 2}
        | {"moe_intermediate_size": 24, "num_shared_experts": 1, "first_k_dense_replace": 1}
        | {
            "linear_attn_config": {
                "num_heads": 4,
                "head_dim": 16,
                "short_conv_kernel_size": 4,
                "kda_layers": [1, 2, 4],
                "full_attn_layers": [3],
            }
        },
    ),
    "mamba": ("Mamba", _PURE),
    "mamba2": ("Mamba2", _PURE | {"num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}),
    "falcon_mamba": ("FalconMamba", _PURE),
}
"""Models that keep a recurrent state, all of them or in some layers."""


def build(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changed
) -> PreTrainedModel:
    """A random model in eval mode whose logits vary enough that greedy text is not constant."""
    family, config = {**ARCHITECTURES, **RECURRENT}[name]
    config = config | changed
    is_text_of_more = family in ("Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe")
    config_class = f"{family}TextConfig" if is_text_of_more else f"{family}Config"
    model_class = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15, generator=generator)
    return model.to(dtype).eval()
