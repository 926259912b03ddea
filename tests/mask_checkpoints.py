"""Synthetic mask-token checkpoints in the exact layout of each producer, written out by hand."""

from architectures import VOCAB
from checkpoint_parts import (
    DRAFT_VOCAB,
    HEAD_DIM,
    HIDDEN,
    NUM_LAYERS,
    Files,
    eagle3_shapes,
    layer,
    llama_keys,
    tensors,
    vocab_map,
)
from checkpoint_writer import speculators as speculators_eagle

MASK = 9


def more_layers(shapes, count, **options):
    """Plain layers after the first."""
    norms = ("input_layernorm",)
    for i in range(1, count):
        shapes = shapes | layer(f"layers.{i}", HIDDEN, norms=norms, **options)
    return shapes


def amazon(*, ids=(2, 4, 5), layers=2, **keys):
    """amazon/*-p-eagle: an EAGLE-3 head in vLLM's names, `ptd_token_id` and `mask_hidden`."""
    config = llama_keys(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=HEAD_DIM,
        eagle_aux_hidden_state_layer_ids=list(ids),
        num_hidden_layers=layers,
        ptd_token_id=MASK,
        parallel_drafting=True,
    )
    shapes = more_layers(eagle3_shapes("layers.0", num_features=len(ids)), layers)
    shapes |= {"mask_hidden": (1, len(ids) * HIDDEN)}
    return Files(config | keys, tensors(shapes) | vocab_map())


def speculators_peagle(*, layers=2, **keys):
    """nm-testing/*-peagle-speculators: embeddings, `mask_token_id` and `mask_hidden`."""
    files = speculators_eagle(layers={"num_hidden_layers": layers})
    config = files.config | {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "mask_token_id": MASK,
        "embed_requires_grad": True,
    }
    shapes = more_layers({}, layers) | {"mask_hidden": (1, 1, 3 * HIDDEN)}
    return Files(config | keys, files.tensors | tensors(shapes, seed=4))


def specforge_peagle(*, layers=2, **keys):
    """SpecForge's `PEagleDraftModel`: ids as outputs of layers, and no id of a mask."""
    config = llama_keys(
        architectures=["PEagleDraftModel"],
        draft_vocab_size=DRAFT_VOCAB,
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        rope_theta=1000000.0,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    )
    shapes = more_layers(eagle3_shapes("layers.0"), layers)
    shapes |= {"mask_hidden": (1, 1, 3 * HIDDEN)}
    return Files(config | keys, tensors(shapes) | vocab_map())


def lm_shapes(layers, *, vocab_size=VOCAB, qk_norm=False, bias="", tied=False):
    """Shapes of a causal language model, in its own names."""
    shapes = {"model.embed_tokens.weight": (vocab_size, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(layers):
        norms = ("input_layernorm",)
        shapes |= layer(f"model.layers.{i}", HIDDEN, norms=norms, qk_norm=qk_norm, bias=bias)
    return shapes if tied else shapes | {"lm_head.weight": (vocab_size, HIDDEN)}


def pard(kind="llama", *, layers=3, vocab_size=VOCAB, tied=False, **keys):
    """amd/PARD-*: a language model whose configuration names its mask."""
    config = llama_keys(
        architectures=["LlamaForCausalLM"],
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        rope_theta=500000.0,
        pard_token=MASK,
        spd_type="pard",
    )
    config |= {"model_type": kind, "vocab_size": vocab_size, "tie_word_embeddings": tied}
    flags = {"qwen2": {"bias": "qkv"}, "qwen3": {"qk_norm": True}}.get(kind, {})
    shapes = lm_shapes(layers, vocab_size=vocab_size, tied=tied, **flags)
    return Files(config | keys, tensors(shapes))


def dflash_shapes(layers, count):
    """Shapes of a DFlash head without tables."""
    shapes = {"fc.weight": (HIDDEN, count * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= layer(f"layers.{i}", HIDDEN, norms=("input_layernorm",), qk_norm=True)
    return shapes


def z_lab(*, ids=(1, 4), layers=2, block_size=6, nested=False, dflash=None, **keys):
    """z-lab/*-DFlash: Qwen3's keys, `block_size` at the top or, later, in `dflash_config`."""
    flash = {"mask_token_id": MASK, "target_layer_ids": None if ids is None else list(ids)}
    config = llama_keys(
        architectures=["DFlashDraftModel"],
        auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        num_target_layers=NUM_LAYERS,
        layer_types=["full_attention"] * layers,
        attention_bias=False,
        rope_theta=1000000,
        dflash_config=flash | (dflash or {}),
    )
    config["model_type"] = "qwen3"
    (config["dflash_config"] if nested else config)["block_size"] = block_size
    count = layers if ids is None else len(ids)
    return Files(config | keys, tensors(dflash_shapes(layers, count)))


def torchspec(*, layers=1, count=3, **keys):
    """TorchSpec's `DFlashConfig` and names (torchspec/models/draft/dflash.py): `num_target_layers`
    is the number of features; a copy of the target's embeddings is saved.
    """
    config = llama_keys(
        architectures=["DFlashDraftModel"],
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        num_target_layers=count,
        target_hidden_size=HIDDEN,
        target_num_hidden_layers=NUM_LAYERS,
        target_layer_ids=None,
        mask_token_id=MASK,
        rope_theta=1000000,
        block_size=6,
        _torchspec_version="0.1.0",
    )
    config["model_type"] = "dflash"
    files = tensors(dflash_shapes(layers, count) | {"embed_tokens.weight": (VOCAB, HIDDEN)})
    for ours, theirs in {"fc": "context_proj", "hidden_norm": "context_norm"}.items():
        files[f"{theirs}.weight"] = files.pop(f"{ours}.weight")
    files["final_norm.weight"] = files.pop("norm.weight")
    return Files(config | keys, files)


def hf_assistant(*, ids=(1, 4), layers=2, **keys):
    """What `MuseGlimmerAssistantModel.save_pretrained` writes, with layers of full attention."""
    config = llama_keys(
        architectures=["MuseGlimmerAssistantModel"],
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        sliding_window=2048,
        attention_dropout=0,
        rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"},
        target_layer_ids=list(ids),
        block_size=6,
        mask_token_id=MASK,
    )
    config["model_type"] = "muse_glimmer_assistant"
    del config["vocab_size"]
    files = tensors(dflash_shapes(layers, len(ids)))
    for ours, theirs in {"fc": "encoder.fc", "hidden_norm": "encoder.output_norm_enc"}.items():
        files[f"{theirs}.weight"] = files.pop(f"{ours}.weight")
    return Files(config | keys, files)


def speculators_dflash(*, ids=(2, 5), layers=2, full=False, layer_keys=None, **keys):
    """RedHatAI's DFlash: ids as boundaries; a head of fewer ids is stored, a whole one is not."""
    of_layers = {"num_hidden_layers": layers} | (layer_keys or {})
    files = speculators_eagle(kind="qwen3", layers=of_layers)
    config = files.config | {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "draft_vocab_size": VOCAB if full else DRAFT_VOCAB,
        "aux_hidden_state_layer_ids": list(ids),
        "block_size": 5,
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
    }
    for key in ("eagle_aux_hidden_state_layer_ids", "norm_before_residual", "embed_requires_grad"):
        del config[key]
    shapes = dflash_shapes(layers, len(ids))
    maps = {}
    if not full:
        shapes, maps = shapes | {"lm_head.weight": (DRAFT_VOCAB, HIDDEN)}, vocab_map()
    return Files(config | keys, tensors(shapes) | maps)


def deepspec(*, layers=2, **keys):
    """deepseek-ai/dflash_*_block7: DSpark's files without its Markov head, with both tables."""
    config = llama_keys(
        architectures=["Qwen3DSparkModel"],
        head_dim=HEAD_DIM,
        num_hidden_layers=layers,
        num_target_layers=NUM_LAYERS,
        layer_types=["full_attention"] * layers,
        mask_token_id=MASK,
        target_layer_ids=[-1, 1, 5],
        block_size=7,
        markov_rank=0,
        enable_confidence_head=False,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"},
    )
    config["model_type"] = "qwen3"
    shapes = dflash_shapes(layers, 3) | {"embed_tokens.weight": (VOCAB, HIDDEN)}
    return Files(config | keys, tensors(shapes | {"lm_head.weight": (VOCAB, HIDDEN)}))


# Corrections inside a block, and convolutions in its layers.


def markov_shapes(rank=4, kind="vanilla", *, ids=VOCAB, confidence=None):
    """DSpark's Markov head, and its confidence head of so many inputs."""
    shapes = {"markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (ids, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, HIDDEN + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, HIDDEN + 2 * rank)}
        shapes |= {"joint_proj.bias": (3 * rank,)}
    shapes = {f"markov_head.{name}": shape for name, shape in shapes.items()}
    if confidence is not None:
        shapes |= {"confidence_head.proj.weight": (1, confidence)}
        shapes |= {"confidence_head.proj.bias": (1,)}
    return shapes


def more(files, shapes, **keys):
    """The files with further tensors and keys."""
    return Files(files.config | keys, files.tensors | tensors(shapes, seed=7))


def domino(*, first=1, **keys):
    """SpecForge's `DominoDraftModel`: sizes in `dflash_config`, tensors at the top."""
    sizes = {"emb_dim": 5, "gru_hidden_dim": 6, "pure_draft_prefix_len": first}
    files = z_lab(dflash=sizes | {"projector_type": "domino"} | keys, emb_dim=5)
    files.config["architectures"] = ["DominoDraftModel"]
    shapes = {
        "prefix_gru.weight_ih_l0": (18, HIDDEN),
        "prefix_gru.weight_hh_l0": (18, 6),
        "embed_proj.0.weight": (5, HIDDEN + 6),
        "embed_proj.2.weight": (VOCAB, 5),
    }
    return more(files, shapes)


def dflash2_shapes(layers=2, *, taps=3, group=4, rank=4, suffix=""):
    """The selector and the convolutions of DFlash 2; z-lab's codebooks are parameters, others'
    embeddings.
    """
    shapes = {
        f"candidate_selector.predecessor_codebook{suffix}": (VOCAB, rank),
        f"candidate_selector.successor_codebook{suffix}": (VOCAB, rank),
        "candidate_selector.hidden_projection.weight": (rank, HIDDEN),
    }
    for i in range(layers):
        for part in ("attention_conv", "mlp_conv"):
            name, kernels = f"layers.{i}.{part}", 2 * taps * (HIDDEN // group)
            shapes[f"{name}.base_kernel"] = (2, taps, HIDDEN)
            shapes[f"{name}.kernel_projection.weight"] = (kernels, HIDDEN)
    return shapes


DFLASH2_KEYS = {
    "conv_kernel_size": 3,
    "conv_group_size": 4,
    "selector_rank": 4,
    "selector_top_k": 5,
}


def xpress_shapes(rank=3, *, ratio=2, block=5, ids=VOCAB):
    """XPress's refiner."""
    shapes = {
        "token_embed.weight": (VOCAB, rank),
        "down_h.weight": (rank, HIDDEN),
        "down_g.weight": (rank, HIDDEN),
        "in_proj.weight": (rank, 3 * rank),
        "mix_l": (rank, block, block),
        "mlp_gate.weight": (rank * ratio, rank),
        "mlp_up.weight": (rank * ratio, rank),
        "mlp_down.weight": (rank, rank * ratio),
        "readout.weight": (ids, rank),
    }
    return {f"refiner_head.{name}": shape for name, shape in shapes.items()}
