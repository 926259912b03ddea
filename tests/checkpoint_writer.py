"""Synthetic EAGLE checkpoints in the exact layout of each producer."""

import torch
from architectures import VOCAB
from checkpoint_parts import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    NUM_LAYERS,
    WIDE,
    Files,
    eagle3_shapes,
    layer,
    llama_keys,
    tensors,
    vocab_map,
)


def safeailab_eagle1(*, bias=True, **keys):
    """yuhuili/EAGLE-*: fc and a layer without its first norm."""
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer("layers.0", HIDDEN)}
    shapes |= {"fc.bias": (HIDDEN,)} if bias else {}
    return Files(llama_keys(architectures=["LlamaForCausalLM"], **keys), tensors(shapes))


def safeailab_eagle3(**keys):
    """yuhuili/EAGLE3-*: `midlayer`, and neither layer ids nor a rope base in the configuration."""
    config = llama_keys(architectures=["LlamaForCausalLM"], draft_vocab_size=DRAFT_VOCAB, **keys)
    return Files(config, tensors(eagle3_shapes()) | vocab_map())


def specforge(*, ids=None, **keys):
    """lmsys/*-SpecForge: `midlayer`, embeddings, ids as outputs of layers in `eagle_config`."""
    config = llama_keys(
        architectures=["LlamaForCausalLMEagle3"],
        attention_bias=False,
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=HEAD_DIM,
        rope_scaling=None,
        rope_theta=1000000.0,
        **keys,
    )
    if ids is not None:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    shapes = eagle3_shapes() | {"embed_tokens.weight": (VOCAB, HIDDEN)}
    return Files(config, tensors(shapes) | vocab_map())


def speculators(*, kind="llama", ids=(2, 4, 5), layers=None, **keys):
    """RedHatAI/*-speculator.eagle3: the layers' configuration as a difference to HF's defaults.

    `layers` sets keys of that configuration, or removes those whose value is `...`.
    """
    difference = {
        "model_type": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        **(layers or {}),
    }
    difference = {key: value for key, value in difference.items() if value is not ...}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "transformer_layer_config": difference,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "somebody/target", "architectures": ["LlamaForCausalLM"]},
        },
        **keys,
    }
    shapes = eagle3_shapes("layers.0", qk_norm=kind == "qwen3")
    shapes |= {"embed_tokens.weight": (VOCAB, HIDDEN)}
    return Files(config, tensors(shapes) | vocab_map())


def nvidia(*, ids=(2, 4, 5), eagle=None, **keys):
    """nvidia/*-Eagle3: `eagle_config`, draft ids by frequency, no `t2d` and no embeddings."""
    eagle_config = {
        "eagle_aux_hidden_state_layer_ids": None if ids is None else list(ids),
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
        **(eagle or {}),
    }
    config = llama_keys(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=HEAD_DIM,
        rope_theta=10000,
        rope_scaling={"rope_type": "default", "rope_theta": 10000},
        mlp_bias=False,
        attention_bias=False,
        eagle_config=eagle_config,
        **keys,
    )
    by_frequency = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB]
    d2t = vocab_map(by_frequency)["d2t"]
    return Files(config, tensors(eagle3_shapes("layers.0")) | {"d2t": d2t})


def deepspec(*, ids=(0, 1, 3, 5, 7), **keys):
    """deepseek-ai/eagle3_qwen3_*: five outputs of layers, norms of queries and keys, all ids."""
    config = llama_keys(
        architectures=["Qwen3Eagle3Model"],
        attention_bias=False,
        head_dim=HEAD_DIM,
        layer_types=["full_attention"],
        num_target_layers=NUM_LAYERS,
        target_layer_ids=list(ids),
        ttt_length=7,
        step_loss_decay=0.8,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
        **keys,
    )
    config["model_type"] = "qwen3"
    shapes = eagle3_shapes("layers.0", num_features=len(ids), qk_norm=True)
    shapes |= {"lm_head.weight": (VOCAB, HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)}
    return Files(config, tensors(shapes))


def vllm(*, ids=(2, 4, 5), **keys):
    """A head with vLLM's names and top-level keys, and no mark of who trained it."""
    config = llama_keys(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=HEAD_DIM,
        eagle_aux_hidden_state_layer_ids=list(ids),
        **keys,
    )
    return Files(config, tensors(eagle3_shapes("layers.0")) | vocab_map())


def speculators_eagle1(*, bias=False, layers=None, **keys):
    """A head of speculators 0.1, `type: eagle`: EAGLE-1 under names of its own. Its layers'
    configuration is the target's, of which it builds one layer; embedding and vocabulary head are
    never in the file.
    """
    difference = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        **(layers or {}),
    }
    config = {
        "architectures": ["EagleSpeculator", "LlamaDecoderLayer"],
        "speculators_model_type": "eagle",
        "speculators_version": "0.1.0",
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "transformer_layer_config": difference,
        "layernorms": False,
        "fusion_bias": bias,
        "speculators_config": {"algorithm": "eagle", "default_proposal_method": "greedy"},
        **keys,
    }
    shapes = {"fusion_fc.weight": (HIDDEN, 2 * HIDDEN), **layer("transformer", HIDDEN)}
    shapes |= {"fusion_fc.bias": (HIDDEN,)} if bias else {}
    return Files(config, tensors(shapes))


def angelslim(*, ids=(1, 3, 4), **keys):
    """A head of AngelSlim's: one midlayer, the number of layers of its target in the configuration,
    ids as outputs of layers under a name of its own.
    """
    config = llama_keys(
        architectures=["Eagle3LlamaForCausalLM"],
        target_model_type="qwen2",
        draft_vocab_size=DRAFT_VOCAB,
        **keys,
    )
    config |= {"num_hidden_layers": 24, "aux_hidden_states_layer_ids": list(ids)}
    return Files(config, tensors(eagle3_shapes()) | vocab_map())


LAYOUTS = {
    "speculators 0.1": speculators_eagle1,
    "AngelSlim": angelslim,
    "SafeAILab EAGLE-1": safeailab_eagle1,
    "SafeAILab EAGLE-3": safeailab_eagle3,
    "SpecForge": specforge,
    "speculators": speculators,
    "NVIDIA": nvidia,
    "DeepSpec": deepspec,
    "vLLM": vllm,
}
