"""Targets whose own checkpoint holds prediction modules, under the names of each producer."""

import json
from pathlib import Path

import torch
import transformers
from architectures import ARCHITECTURES, RECURRENT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

GLM4_MOE = ARCHITECTURES["deepseek_v3"][1] | {"head_dim": 8, "num_key_value_heads": 2}
for _name in ("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"):
    del GLM4_MOE[_name]
SHAPES = {
    "DeepseekV3": ARCHITECTURES["deepseek_v3"][1],
    "Glm4Moe": GLM4_MOE | {"use_qk_norm": True, "partial_rotary_factor": 0.5},
    "Llama": ARCHITECTURES["llama"][1],
    "Mellum": ARCHITECTURES["qwen3_moe"][1]
    | {"sliding_window": 4, "num_nextn_predict_layers": 1}
    | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "Qwen3Next": RECURRENT["qwen3_next"][1],
    "Qwen2": ARCHITECTURES["qwen2"][1],
    "Mistral": ARCHITECTURES["mistral_sliding"][1] | {"sliding_window": 4},
}


def random_model(family: str, *, seed: int = 0, **changes) -> PreTrainedModel:
    """A tiny random model with weights large enough for every part to show."""
    config = getattr(transformers, f"{family}Config")(**(SHAPES[family] | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.dim() > 1:
                tensor.copy_(0.15 * noise)
            elif "e_score" in name:
                tensor.copy_(0.3 * noise)
            else:
                tensor.add_(0.3 * noise)
    return model


def write_numbered(
    folder: Path, family: str, *, num_depths: int, seed: int = 0, **changes
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """A target of three layers with prediction modules as `model.layers.3` and so on.

    Returns:
        The target, loaded from the folder, and all tensors of its file.
    """
    num_layers = SHAPES[family]["num_hidden_layers"]
    whole = random_model(family, seed=seed, num_hidden_layers=num_layers + num_depths, **changes)
    whole.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    width = whole.config.hidden_size
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for depth in range(num_depths):
        prefix = f"model.layers.{num_layers + depth}"
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}.{name}.weight"] = 1 + 0.3 * normal(width)
        tensors[f"{prefix}.eh_proj.weight"] = normal(width, 2 * width) * (2 * width) ** -0.5
        for name, other in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        ):
            tensors[f"{prefix}.{name}.weight"] = tensors[f"{other}.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, num_hidden_layers=num_layers, num_nextn_predict_layers=num_depths)
    model_class = getattr(transformers, f"{family}ForCausalLM")
    return model_class.from_pretrained(folder, dtype=torch.float32).eval(), tensors


@torch.no_grad()
def write_mtp_names(
    folder: Path, model: PreTrainedModel, layer: nn.Module, *, seed: int = 0
) -> dict[str, Tensor]:
    """Saves a target as HF does, with its norms drawn anew, and a module under `mtp.*`, as Qwen
    does; the module's decoder layer is drawn anew too.

    Returns:
        All tensors of the file.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    for module in (model, layer):
        for name, tensor in module.named_parameters():
            if "norm" in name:
                tensor.add_(0.3 * normal(*tensor.shape))
            elif module is layer:
                tensor.copy_(0.2 * normal(*tensor.shape))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    width = layer.input_layernorm.weight.shape[0]
    tensors["mtp.fc.weight"] = normal(width, 2 * width) * (2 * width) ** -0.5
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.6 * normal(width)
    for name, tensor in unfused(layer.state_dict()).items():
        tensors[f"mtp.layers.0.{name}"] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def eager(config):
    """A copy of a configuration, with attention that any mask can be given to."""
    config = type(config).from_dict(config.to_dict())
    config._attn_implementation = "eager"
    return config


@torch.no_grad()
def run_layer(
    model: PreTrainedModel, layer: nn.Module, like: int, x: Tensor, config=None
) -> Tensor:
    """HF's own decoder layer over whole texts `[B, T, H]`, as layer `like` of a model."""
    config, positions = (
        config or eager(model.config.get_text_config()),
        torch.arange(x.shape[1])[None],
    )
    decoder = getattr(model.base_model, "language_model", model.base_model)
    rotary, types = type(decoder.rotary_emb)(config), getattr(config, "layer_types", None)
    kind = types[like % len(types)] if types else "full_attention"
    turned = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions
    is_nested = kind in config.rope_parameters
    angles = rotary(x, turned, **({"layer_type": kind} if is_nested else {}))
    distance = positions.T - positions
    is_near = distance < config.sliding_window if kind == "sliding_attention" else True
    mask = torch.zeros(distance.shape).masked_fill(~((distance >= 0) & is_near), -torch.inf)
    options = {"attention_mask": mask[None, None], "position_ids": positions}
    out = layer(x, position_embeddings=angles, **options)
    return out[0] if isinstance(out, tuple) else out


def unfused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as checkpoints store them."""
    result = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                for part, half in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    result[name.replace("gate_up_proj", f"{expert}.{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                result[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        else:
            result[name] = tensor
    return result


def edit_config(folder: Path, **changes) -> None:
    """Sets keys of config.json; `None` removes one."""
    path = folder / "config.json"
    keys = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))


def shard(folder: Path) -> None:
    """Spreads the tensors of `model.safetensors` over two files with an index, module tensors in
    the second.
    """
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {
        name: f"model-0000{1 + ('layers.3' in name or 'mtp' in name)}-of-00002.safetensors"
        for name in tensors
    }
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
