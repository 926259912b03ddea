"""The exact layout of each producer of EAGLE and mask-token heads.

A layout is a table of keys and a table of shapes, written out here from the description of the
formats and not taken from the package: what the package reads is compared with them.
"""

import torch
from architectures import VOCAB
from checkpoint_files import (
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
    plain_layers,
    tensors,
    vocab_map,
)

MASK = 9
IDS = "eagle_aux_hidden_state_layer_ids"
EMBEDDINGS = {"embed_tokens.weight": (VOCAB, HIDDEN)}
FEW = {"draft_vocab_size": DRAFT_VOCAB, "head_dim": HEAD_DIM}
SIZES = {
    **{"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": WIDE},
    **{"num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS},
    "vocab_size": VOCAB,
}
ROPE = {"rope_theta": 1000000, "rope_type": "default"}


def head(architecture, shapes, keys, *, maps=None) -> Files:
    """With the keys of a Llama configuration, as all producers but speculators write them."""
    usual = {
        **{"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-05},
        **{"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        **{"torch_dtype": "float32", "use_cache": True, "architectures": [architecture]},
    }
    return Files(SIZES | usual, tensors(shapes) | (maps or {})).but(**keys)


def safeailab_eagle1(*, bias=True, **keys):
    """yuhuili/EAGLE-*: fc and a layer without its first norm."""
    shapes = {"fc.weight": (HIDDEN, 2 * HIDDEN), **layer("layers.0")}
    return head("LlamaForCausalLM", shapes | ({"fc.bias": (HIDDEN,)} if bias else {}), keys)


def safeailab_eagle3(*, hidden=HIDDEN, **keys):
    """yuhuili/EAGLE3-*: `midlayer`, and neither layer ids nor a rope base in the configuration.
    A head of another width than its target says so, and brings embeddings.
    """
    keys, shapes = {"draft_vocab_size": DRAFT_VOCAB} | keys, eagle3_shapes(hidden=hidden)
    if hidden != HIDDEN:
        keys |= {"hidden_size": hidden, "target_hidden_size": HIDDEN, "head_dim": HEAD_DIM}
        shapes["embed_tokens.weight"] = (VOCAB, hidden)
    return head("LlamaForCausalLM", shapes, keys, maps=vocab_map())


def specforge(*, ids=None, **keys):
    """lmsys/*-SpecForge: `midlayer`, embeddings, ids as outputs of layers in `eagle_config`."""
    own = {"attention_bias": False, "rope_scaling": None, "rope_theta": 1000000.0}
    own |= {} if ids is None else {"eagle_config": {IDS: ids}}
    shapes = eagle3_shapes() | EMBEDDINGS
    return head("LlamaForCausalLMEagle3", shapes, FEW | own | keys, maps=vocab_map())


def vllm(*, ids=(2, 4, 5), **keys):
    """A head with vLLM's names and top-level keys, and no mark of who trained it."""
    own = FEW | {IDS: list(ids)} | keys
    return head("LlamaForCausalLMEagle3", eagle3_shapes("layers.0"), own, maps=vocab_map())


def angelslim(*, ids=(1, 3, 4), **keys):
    """AngelSlim's: one midlayer, the number of layers of its target in the configuration, ids as
    outputs of layers under a name of its own.
    """
    own = {"target_model_type": "qwen2", "draft_vocab_size": DRAFT_VOCAB, "num_hidden_layers": 24}
    own |= {"aux_hidden_states_layer_ids": list(ids)} | keys
    return head("Eagle3LlamaForCausalLM", eagle3_shapes(), own, maps=vocab_map())


def nvidia(*, ids=(2, 4, 5), eagle=None, **keys):
    """nvidia/*-Eagle3: `eagle_config`, draft ids by frequency, no `t2d` and no embeddings."""
    eagle_config = {
        **{IDS: None if ids is None else list(ids), "use_aux_hidden_state": True},
        **{"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True},
        **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1},
        **{"parallel_draft_heads_num_layers": 1, **(eagle or {})},
    }
    own = {"rope_theta": 10000, "rope_scaling": ROPE | {"rope_theta": 10000}, "mlp_bias": False}
    own |= {"attention_bias": False, "eagle_config": eagle_config}
    by_frequency = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:DRAFT_VOCAB]
    maps = {"d2t": vocab_map(by_frequency)["d2t"]}
    shapes = eagle3_shapes("layers.0")
    return head("LlamaForCausalLMEagle3", shapes, FEW | own | keys, maps=maps)


def deepspec(*, ids=(0, 1, 3, 5, 7), **keys):
    """deepseek-ai/eagle3_qwen3_*: five outputs of layers, norms of queries and keys, all ids."""
    own = {
        **{"model_type": "qwen3", "attention_bias": False, "head_dim": HEAD_DIM, "ttt_length": 7},
        **{"layer_types": ["full_attention"], "num_target_layers": NUM_LAYERS},
        **{"target_layer_ids": list(ids), "step_loss_decay": 0.8, "rope_parameters": ROPE},
    }
    shapes = eagle3_shapes("layers.0", num_features=len(ids), qk_norm=True) | EMBEDDINGS
    return head("Qwen3Eagle3Model", shapes | {"lm_head.weight": (VOCAB, HIDDEN)}, own | keys)


def of_speculators(kind, shapes, keys, *, like="llama", layers=None, maps=None) -> Files:
    """The layers' configuration as a difference to HF's defaults; `layers` sets its keys, or
    removes those whose value is `...`.
    """
    rope = {"rope_parameters": ROPE | {"rope_theta": 500000.0}}
    difference = SIZES | {"model_type": like, "head_dim": HEAD_DIM} | rope | (layers or {})
    verifier = {"name_or_path": "somebody/target", "architectures": ["LlamaForCausalLM"]}
    config = {
        **{"speculators_model_type": kind, "speculators_version": "0.5.0"},
        **{"draft_vocab_size": DRAFT_VOCAB, "target_hidden_size": None},
        "transformer_layer_config": {k: v for k, v in difference.items() if v is not ...},
        "speculators_config": {
            **{"algorithm": kind, "default_proposal_method": "greedy", "verifier": verifier},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
    }
    maps = vocab_map() if maps is None else maps
    return Files(config, tensors(shapes) | maps).but(**keys)


def speculators(*, kind="llama", ids=(2, 4, 5), layers=None, **keys):
    """RedHatAI/*-speculator.eagle3."""
    own = {"architectures": ["Eagle3DraftModel"], IDS: None if ids is None else list(ids)}
    own |= {"norm_before_residual": False, "embed_requires_grad": False} | keys
    shapes = eagle3_shapes("layers.0", qk_norm=kind == "qwen3") | EMBEDDINGS
    return of_speculators("eagle3", shapes, own, like=kind, layers=layers)


def speculators_eagle1(*, bias=False, **keys):
    """A head of speculators 0.1, `type: eagle`: EAGLE-1 under names of its own. Its layers'
    configuration is the target's, of which it builds one layer; embedding and vocabulary head are
    never in the file.
    """
    own = {"architectures": ["EagleSpeculator", "LlamaDecoderLayer"], "fusion_bias": bias}
    own |= {"transformer_layer_architecture": "LlamaDecoderLayer", "layernorms": False}
    own |= {"speculators_version": "0.1.0", "draft_vocab_size": ...} | keys
    layers = {"num_hidden_layers": NUM_LAYERS, "rms_norm_eps": 1e-5, "rope_parameters": ...}
    shapes = {"fusion_fc.weight": (HIDDEN, 2 * HIDDEN), **layer("transformer")}
    shapes |= {"fusion_fc.bias": (HIDDEN,)} if bias else {}
    return of_speculators("eagle", shapes, own, layers=layers, maps={})


EAGLE_LAYOUTS = {
    **{"speculators 0.1": speculators_eagle1, "AngelSlim": angelslim, "SpecForge": specforge},
    **{"SafeAILab EAGLE-1": safeailab_eagle1, "SafeAILab EAGLE-3": safeailab_eagle3},
    **{"speculators": speculators, "NVIDIA": nvidia, "DeepSpec": deepspec, "vLLM": vllm},
}


# Mask-token heads.


def mask_hidden(*shape):
    """Shapes of the second layer of a P-EAGLE head, and of what stands for a mask's features."""
    return plain_layers([1]) | {"mask_hidden": shape}


def amazon(*, ids=(2, 4, 5), layers=2, **keys):
    """amazon/*-p-eagle: an EAGLE-3 head in vLLM's names, `ptd_token_id` and `mask_hidden`."""
    own = {IDS: list(ids), "num_hidden_layers": layers, "ptd_token_id": MASK}
    shapes = eagle3_shapes("layers.0", num_features=len(ids)) | plain_layers(range(1, layers))
    shapes |= {"mask_hidden": (1, len(ids) * HIDDEN)}
    own |= {"parallel_drafting": True} | keys
    return head("LlamaForCausalLMEagle3", shapes, FEW | own, maps=vocab_map())


def speculators_peagle(**keys):
    """nm-testing/*-peagle-speculators: embeddings, `mask_token_id` and `mask_hidden`."""
    files = speculators(layers={"num_hidden_layers": 2}).plus(mask_hidden(1, 1, 3 * HIDDEN))
    own = {"speculators_model_type": "peagle", "mask_token_id": MASK, "embed_requires_grad": True}
    return files.but(architectures=["PEagleDraftModel"], **own | keys)


def specforge_peagle(**keys):
    """SpecForge's `PEagleDraftModel`: ids as outputs of layers, and no id of a mask."""
    own = {"num_hidden_layers": 2, "rope_theta": 1000000.0, "eagle_config": {IDS: [1, 3, 4]}}
    shapes = eagle3_shapes("layers.0") | mask_hidden(1, 1, 3 * HIDDEN)
    return head("PEagleDraftModel", shapes, FEW | own | keys, maps=vocab_map())


def pard(kind="llama", *, layers=3, vocab_size=VOCAB, tied=False, **keys):
    """amd/PARD-*: a language model whose configuration names its mask."""
    own = {"model_type": kind, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    own |= {"head_dim": HEAD_DIM, "num_hidden_layers": layers, "rope_theta": 500000.0}
    flags = {"qwen2": {"bias": "qkv"}, "qwen3": {"qk_norm": True}}.get(kind, {})
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= plain_layers(range(layers), prefix="model.layers", **flags)
    shapes |= {} if tied else {"lm_head.weight": (vocab_size, HIDDEN)}
    return head("LlamaForCausalLM", shapes, own | {"pard_token": MASK, "spd_type": "pard"} | keys)


def dflash_shapes(layers, count, *, fc="fc", hidden_norm="hidden_norm", norm="norm"):
    """Shapes of a DFlash head without tables, some of which producers name otherwise."""
    shapes = {f"{fc}.weight": (HIDDEN, count * HIDDEN), f"{hidden_norm}.weight": (HIDDEN,)}
    return shapes | {f"{norm}.weight": (HIDDEN,)} | plain_layers(range(layers), qk_norm=True)


def z_lab(*, ids=(1, 4), layers=2, dflash=None, **keys):
    """z-lab/*-DFlash: Qwen3's keys, `block_size` at the top."""
    flash = {"mask_token_id": MASK, "target_layer_ids": None if ids is None else list(ids)}
    own = {
        **{"model_type": "qwen3", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}},
        **{"head_dim": HEAD_DIM, "num_hidden_layers": layers, "num_target_layers": NUM_LAYERS},
        **{"layer_types": ["full_attention"] * layers, "attention_bias": False, "block_size": 6},
        **{"rope_theta": 1000000, "dflash_config": flash | (dflash or {})},
    }
    shapes = dflash_shapes(layers, layers if ids is None else len(ids))
    return head("DFlashDraftModel", shapes, own | keys)


def torchspec(**keys):
    """TorchSpec's `DFlashConfig` and names (torchspec/models/draft/dflash.py): `num_target_layers`
    is the number of features; a copy of the target's embeddings is saved.
    """
    own = {
        **{"model_type": "dflash", "head_dim": HEAD_DIM, "num_target_layers": 3, "block_size": 6},
        **{"target_hidden_size": HIDDEN, "target_num_hidden_layers": NUM_LAYERS},
        **{"target_layer_ids": None, "mask_token_id": MASK, "rope_theta": 1000000},
        "_torchspec_version": "0.1.0",
    }
    names = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
    return head("DFlashDraftModel", dflash_shapes(1, 3, **names) | EMBEDDINGS, own | keys)


def hf_assistant(**keys):
    """What `MuseGlimmerAssistantModel.save_pretrained` writes, with layers of full attention."""
    own = {
        **{"model_type": "muse_glimmer_assistant", "head_dim": HEAD_DIM, "num_hidden_layers": 2},
        **{"layer_types": ["full_attention"] * 2, "sliding_window": 2048, "attention_dropout": 0},
        **{"rope_parameters": ROPE, "target_layer_ids": [1, 4], "block_size": 6},
        "mask_token_id": MASK,
    }
    names = {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}
    shapes = dflash_shapes(2, 2, **names)
    return head("MuseGlimmerAssistantModel", shapes, own | {"vocab_size": ...} | keys)


def speculators_dflash(*, full=False, layers=None, **keys):
    """RedHatAI's DFlash: ids of hidden states; a head of fewer ids is stored, a whole one not."""
    own = {
        **{"architectures": ["DFlashDraftModel"], "aux_hidden_state_layer_ids": [2, 5]},
        **{"block_size": 5, "mask_token_id": MASK, "sliding_window_non_causal": False},
        **{"sample_from_anchor": False, "draft_vocab_size": VOCAB if full else DRAFT_VOCAB},
    }
    shapes = dflash_shapes(2, 2) | ({} if full else {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)})
    options = {"like": "qwen3", "layers": {"num_hidden_layers": 2} | (layers or {})}
    return of_speculators("dflash", shapes, own | keys, maps={} if full else None, **options)


def dspark(**keys):
    """deepseek-ai/dflash_*_block7: DSpark's files without its Markov head, with both tables."""
    own = {
        **{"model_type": "qwen3", "head_dim": HEAD_DIM, "num_hidden_layers": 2, "block_size": 7},
        **{"num_target_layers": NUM_LAYERS, "layer_types": ["full_attention"] * 2},
        **{"mask_token_id": MASK, "target_layer_ids": [-1, 1, 5], "markov_rank": 0},
        **{"enable_confidence_head": False, "rope_parameters": ROPE},
    }
    shapes = dflash_shapes(2, 3) | EMBEDDINGS | {"lm_head.weight": (VOCAB, HIDDEN)}
    return head("Qwen3DSparkModel", shapes, own | keys)


MASK_LAYOUTS = [amazon, dspark, hf_assistant, pard, speculators_dflash, speculators_peagle]
MASK_LAYOUTS += [specforge_peagle, torchspec, z_lab]


# Corrections inside a block, and convolutions in its layers.


def markov_shapes(rank=4, kind="vanilla", *, ids=VOCAB, confidence=None):
    """DSpark's Markov head, and its confidence head of so many inputs."""
    shapes = {"markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (ids, rank)}
    inputs = {"gated": ("gate", rank, HIDDEN + rank), "rnn": ("joint", 3 * rank, HIDDEN + 2 * rank)}
    if kind in inputs:
        name, *shape = inputs[kind]
        shapes |= {f"{name}_proj.weight": tuple(shape), f"{name}_proj.bias": (shape[0],)}
    shapes = {f"markov_head.{name}": shape for name, shape in shapes.items()}
    if confidence is not None:
        shapes |= {
            "confidence_head.proj.weight": (1, confidence),
            "confidence_head.proj.bias": (1,),
        }
    return shapes


def domino(*, first=1, **keys):
    """SpecForge's `DominoDraftModel`: sizes in `dflash_config`, tensors at the top."""
    sizes = {"emb_dim": 5, "gru_hidden_dim": 6, "pure_draft_prefix_len": first}
    files = z_lab(dflash=sizes | {"projector_type": "domino"} | keys, emb_dim=5)
    shapes = {"prefix_gru.weight_ih_l0": (18, HIDDEN), "prefix_gru.weight_hh_l0": (18, 6)}
    shapes |= {"embed_proj.0.weight": (5, HIDDEN + 6), "embed_proj.2.weight": (VOCAB, 5)}
    return files.plus(shapes).but(architectures=["DominoDraftModel"])


DFLASH2_KEYS = {"conv_kernel_size": 3, "conv_group_size": 4}
DFLASH2_KEYS |= {"selector_rank": 4, "selector_top_k": 5}


def dflash2_shapes(*, suffix=""):
    """The selector and the convolutions of DFlash 2; z-lab's codebooks are parameters, others'
    embeddings.
    """
    names = ("predecessor_codebook", "successor_codebook")
    shapes = {f"candidate_selector.{name}{suffix}": (VOCAB, 4) for name in names}
    shapes["candidate_selector.hidden_projection.weight"] = (4, HIDDEN)
    for name in (f"layers.{i}.{part}_conv" for i in range(2) for part in ("attention", "mlp")):
        shapes[f"{name}.base_kernel"] = (2, 3, HIDDEN)
        shapes[f"{name}.kernel_projection.weight"] = (2 * 3 * (HIDDEN // 4), HIDDEN)
    return shapes


LILICORR_KEYS = {
    **{"lilicorr_enabled": True, "projector_type": "lilicorr", "lilicorr_candidate_topk": 4},
    **{"lilicorr_hidden_size": 6, "lilicorr_num_layers": 2, "lilicorr_num_heads": 3},
    **{"lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 5},
    **{"lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 7.5, "causal": False},
}


def lilicorr(*, width=6, named=False, layers=(2, 3), dflash=None, **keys):
    """Model-Optimizer's `LiLiCorrDraftModel`; SGLang names the parts of MLPs, and a head as wide as
    its drafter has no `token_proj`.

    Args:
        width: of the lattice's transformer.
        named: as SGLang's.
        layers: of the transformer, and its heads.
        dflash, keys: of the configuration.
    """
    wide, linears = width or HIDDEN, {} if width in (0, HIDDEN) else {"token_proj": (width, HIDDEN)}
    count, heads = layers
    linears |= dict.fromkeys(("pass_hidden_proj", "context_proj"), (wide, HIDDEN))
    linears |= {"feature_mlp.1": (wide, 5), "feature_mlp.3": (wide, wide)}
    linears |= {"feature_mlp.0": (5,), "factor_input_proj": (wide, 3 * wide)}
    linears |= dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (5, wide))
    shapes = {
        **{"slot_embedding": (1, 1, 5, 1, wide), "rank_embedding": (1, 1, 1, 4, wide)},
        **{"relative_slot_bias": (heads, 11), "same_slot_bias": (heads,)},
        **{"output_norm.weight": (wide,), "anchor_norm.weight": (wide,)},
    }
    for i in range(count):
        inner, name = int(1.5 * wide), f"layers.{i}"
        linears |= {f"{name}.mlp.0": (inner, wide), f"{name}.mlp.2": (wide, inner)}
        linears[f"{name}.attn.out_proj"] = (wide, wide)
        shapes |= {f"{name}.attn.in_proj_weight": (3 * wide, wide)}
        shapes |= {f"{name}.attn.in_proj_bias": (3 * wide,)}
        shapes |= {f"{name}.attn_norm.weight": (wide,), f"{name}.mlp_norm.weight": (wide,)}
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    if named:
        shapes = {_named(name): shape for name, shape in shapes.items()}
    sizes = LILICORR_KEYS | {"lilicorr_hidden_size": width}
    sizes |= {"lilicorr_num_layers": count, "lilicorr_num_heads": heads}
    files = z_lab(dflash=sizes | (dflash or {}), architectures=["LiLiCorrDraftModel"])
    return files.plus({f"lilicorr.{name}": shape for name, shape in shapes.items()}).but(**keys)


def _named(name):
    name = name.replace("feature_mlp.0.", "feature_norm.")
    name = name.replace("mlp.0.", "mlp.up_proj.").replace("mlp.2.", "mlp.down_proj.")
    return name.replace("mlp.1.", "mlp.up_proj.").replace("mlp.3.", "mlp.down_proj.")


def xpress_shapes(rank=3, *, ratio=2, block=5):
    """XPress's refiner."""
    shapes = {
        **{"token_embed": (VOCAB, rank), "down_h": (rank, HIDDEN), "down_g": (rank, HIDDEN)},
        **{"in_proj": (rank, 3 * rank), "mlp_gate": (rank * ratio, rank)},
        **{"mlp_up": (rank * ratio, rank), "mlp_down": (rank, rank * ratio)},
        "readout": (VOCAB, rank),
    }
    named = {f"refiner_head.{name}.weight": shape for name, shape in shapes.items()}
    return named | {"refiner_head.mix_l": (rank, block, block)}
