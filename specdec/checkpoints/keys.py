"""Keys of config.json that no reader looks up: which of them change nothing in any head. All others
raise ValueError, since a key of an unknown name may change the wiring, even with the value `false`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from specdec.arguments import shown
from specdec.checkpoints.config_fields import ConfigFields

_MANY = "bos|eos|pad|sep|cls|unk|eod|boi|eoi|image|video|audio|vision"
_FILES = (
    *("architectures", "auto_map", "model_type", "torch_dtype", "tie_word_embeddings", "producer"),
    *("name_or_path", "_attn_implementation", "attention_backend", "tokenizer_class", "prefix"),
    *("finetuning_task", "task_specific_params", "torchscript", "use_bfloat16", "is_decoder"),
    *("pruned_heads", "output_past", "gradient_checkpointing", "parallel_drafting"),
    *("speculators_version", "speculators_config", "_torchspec_version"),
    *("target_model_name_or_path", "target_model_type", "draft_num_hidden_layers", "modal_type"),
    *("num_target_layers", f"({_MANY})(_(start|end|newline|pad))?_token_(id|index)"),
)
"""Of files, of how HF runs any model, and of the target."""
_TRAINING = (
    *("initializer_range", "attention_dropout", "hidden_dropout", "(resid|embd|attn)_pdrop"),
    *("classifier_dropout", "embed_requires_grad", "max_sequence_length", "num_anchors"),
    *(
        "ttt_length",
        "step_loss_decay",
        "loss_decay_gamma",
        r"(dflash_config\.)?confidence_head_alpha",
    ),
    # Copied from a target with experts; the tensors of a head with experts raise ValueError.
    *("router_aux_loss_coef", "output_router_logits", "decoder_sparse_step"),
    "pretraining_tp",  # splits the same products
)
_USUAL = {
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "norm_type": "rms",
    "use_rotary_pos_emb": True,
    "use_mrope": False,
    "use_cla": False,
    "embedding_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
}
"""What every head of the library does anyway."""
_HF = PreTrainedConfig().to_dict().keys() | GenerationConfig().to_dict().keys()
_INERT = re.compile("|".join((*_FILES, *_TRAINING, *map(re.escape, _HF - _USUAL.keys()))))


def unknown_keys(fields: ConfigFields, ignored: Collection[str] = ()) -> dict[str, Any]:
    """Keys that may change how a head is wired and that its reading has not looked up, with their
    values.

    Args:
        fields: that were read.
        ignored: further keys that change nothing, or sections.
    """
    return {
        key: value
        for key, value in fields.unread.items()
        if not _INERT.fullmatch(key)
        and not _INERT.fullmatch(key.partition(".")[0])
        and not {key, key.partition(".")[0]} & set(ignored)
        and (key not in _USUAL or _USUAL[key] != value)
    }


def refusal_of(keys: dict[str, Any]) -> str:
    """What is said of them."""
    said = ", ".join(f"{key} = {shown(value)}" for key, value in sorted(keys.items()))
    return (
        f"not supported: keys of config.json that nothing reads: {said}. They may change what the "
        f"head computes; if they do not, pass ignore_keys={sorted(keys)} (specdec inspect: "
        "--ignore-keys)"
    )
