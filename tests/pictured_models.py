"""Tiny random models that read pictures or sound, and prompts for them as their processors make
them: padded on the left, with a picture in some rows, several or none in others.
"""

from __future__ import annotations

from functools import cache

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

VOCAB = 99
IMAGE, START, END, VIDEO = 90, 91, 92, 93

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
_MROPE = TEXT | {"rope_parameters": _SECTIONS}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
_QWEN3_TOWER = _TOWER | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}
_LLAMA = TEXT | {"model_type": "llama"}
_GEMMA3 = TEXT | {
    **{"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 7},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA4 = TEXT | {
    **{"head_dim": 8, "global_head_dim": 8, "sliding_window": 7},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB},
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA4_IDS = {
    **{"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": 94},
    **{"boi_token_id": START, "eoi_token_id": END, "boa_token_id": 95, "eoa_token_index": 96},
}
_GEMMA4_TOWER = _VIT | {
    **{"num_key_value_heads": 4, "head_dim": 8, "pooling_kernel_size": 2},
    "position_embedding_size": 32,
}
_ERNIE_TOWER = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4},
    **{"spatial_merge_size": 2, "temporal_merge_size": 2},
}

FAMILIES: dict[str, tuple[str, dict]] = {
    "qwen2_vl": (
        "Qwen2VL",
        {
            "text_config": _MROPE,
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            **_QWEN_IDS,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {
            "text_config": _MROPE,
            "vision_config": _TOWER | {"window_size": 16, "fullatt_block_indexes": [1]},
            **_QWEN_IDS,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"text_config": _MROPE | {"head_dim": 8}, "vision_config": _QWEN3_TOWER, **_QWEN_IDS},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": _MROPE | _MOE | {"head_dim": 8},
            "vision_config": _QWEN3_TOWER,
            **_QWEN_IDS,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "text_config": TEXT
            | {
                "head_dim": 16,
                "rope_parameters": _SECTIONS
                | {
                    "mrope_section": [1, 1, 2],
                    "mrope_interleaved": True,
                    "partial_rotary_factor": 0.5,
                },
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            "vision_config": _TOWER | {"num_position_embeddings": 64},
            **_QWEN_IDS,
        },
    ),
    "glm4v": (
        "Glm4v",
        {
            "text_config": _MROPE,
            "vision_config": _TOWER | {"image_size": 16},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "video_start_token_id": 95,
            "video_end_token_id": 96,
        },
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoe",
        {
            "text_config": _MROPE
            | {
                "moe_intermediate_size": [24, 16],
                "moe_k": 2,
                "moe_num_experts": 4,
                "moe_num_shared_experts": 1,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            },
            "vision_config": _ERNIE_TOWER,
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "image_start_token_id": START,
            "image_end_token_id": END,
            "video_start_token_id": 95,
            "video_end_token_id": 96,
        },
    ),
    "llava": (
        "Llava",
        {
            "text_config": _LLAMA,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "vision_config": _VIT
            | {"model_type": "clip_vision_model", "image_size": 8, "projection_dim": 32},
        },
    ),
    "internvl": (
        "InternVL",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "vision_config": _VIT | {"image_size": [16, 16], "patch_size": [4, 4]},
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": TEXT | {"model_type": "mistral", "head_dim": 8},
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "vision_config": _VIT | {"model_type": "pixtral", "image_size": 32, "head_dim": 8},
        },
    ),
    "idefics3": (
        "Idefics3",
        {
            "text_config": _LLAMA,
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "vision_config": _VIT | {"image_size": 16},
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "text_config": _LLAMA,
            "image_token_id": IMAGE,
            "scale_factor": 2,
            "vision_config": _VIT | {"image_size": 16},
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "text_config": _GEMMA3,
            "mm_tokens_per_image": 4,
            "image_token_id": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "vision_config": _VIT | {"image_size": 16},
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "text_config": _GEMMA4,
            "vision_config": _GEMMA4_TOWER,
            "audio_config": None,
            **_GEMMA4_IDS,
        },
    ),
    "gemma4_vision": (
        "Gemma4",
        {
            "text_config": _GEMMA4 | {"use_bidirectional_attention": "vision"},
            "vision_config": _GEMMA4_TOWER,
            "audio_config": None,
            **_GEMMA4_IDS,
        },
    ),
    "paligemma": (
        "PaliGemma",
        {
            "text_config": TEXT | {"model_type": "gemma", "head_dim": 8},
            "image_token_id": IMAGE,
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "vision_config": _VIT | {"image_size": 8, "projection_dim": 32},
        },
    ),
    "qwen2_audio": (
        "Qwen2Audio",
        {
            "text_config": TEXT | {"model_type": "qwen2"},
            "audio_token_index": IMAGE,
            "audio_config": {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 8,
                "max_source_positions": 20,
            },
        },
    ),
}
"""Prefix of the class's name, and fields of its configuration."""

GRIDS = "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "glm4v", "ernie4_5_vl_moe"
"""Families whose pictures have positions of several axes."""
BOTH_WAYS = "gemma3", "gemma4_vision", "paligemma"
"""Families whose prompts see themselves both ways, or the pictures in them."""
SMALL, LARGE = (4, 4), (4, 6)
"""Sizes of pictures in patches; families whose pictures are of one size have one."""

ROWS = ([5, 6, 7, SMALL, 8, 9, 10, 11], [12, 13, 14, 15, 16], [21, SMALL, 22, LARGE, 23, 24])
"""One picture, none, and two of different sizes."""
OTHERS = ([30, LARGE, 31, 5, 6, 30], [17, 18, 19, 30, 31, 17, 18, 19, 17, 18], [SMALL, 25, 26, 25])


@cache
def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A model of the family in float32, in eval mode, whose greedy text is not constant."""
    prefix, fields = FAMILIES[name]
    config_class = getattr(transformers, f"{prefix}Config")
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(
        config_class(**fields, tie_word_embeddings=False)
    )
    model = model.float().eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15 if name == "qwen3_5" else 0.25, generator=generator)
    return model


class _Row:
    """Ids of one row, and what its pictures bring."""

    def __init__(self, name: str, parts: list):
        self.ids, self.pictures = [], []
        for part in parts:
            if isinstance(part, int):
                self.ids.append(part)
                continue
            generator = torch.Generator().manual_seed(1 + 31 * len(self.ids) + sum(self.ids[:3]))
            count, picture = _picture(name, part, generator)
            own = [] if name == "paligemma" else [START], [] if name == "paligemma" else [END]
            self.ids += [*own[0], *[IMAGE] * count, *own[1]]
            self.pictures.append(picture)


def _picture(name: str, size: tuple[int, int], generator) -> tuple[int, dict]:
    """Slots that a picture takes, and its tensors."""

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    height, width = size
    if name in GRIDS:
        wide = 3 * 4 * 4 * (1 if name == "ernie4_5_vl_moe" else 2)
        grid = torch.tensor([[1, height, width]])
        return height * width // 4, {
            "pixel_values": noise(height * width, wide),
            "image_grid_thw": grid,
        }
    if name in ("llava", "paligemma"):
        return 4, {"pixel_values": noise(1, 3, 8, 8)}
    if name in ("internvl", "gemma3", "idefics3", "smolvlm"):
        return 4, {"pixel_values": noise(1, 3, 16, 16)}
    if name == "mistral3":
        pixels = torch.zeros(1, 3, 16, 24)
        pixels[..., : 4 * height, : 4 * width] = noise(1, 3, 4 * height, 4 * width)
        sizes = torch.tensor([[4 * height, 4 * width]])
        return height * width // 4, {"pixel_values": pixels, "image_sizes": sizes}
    if name.startswith("gemma4"):
        pixels, places = torch.zeros(1, 24, 48), torch.full((1, 24, 2), -1)
        count = height * width
        pixels[:, :count] = noise(1, count, 48).sigmoid()
        index = torch.arange(count)
        places[:, :count] = torch.stack([index % width, index // width], dim=-1)
        return count // 4, {"pixel_values": pixels, "image_position_ids": places}
    mask = torch.zeros(1, 40, dtype=torch.long)
    length = 5 * width  # of sound: after two strides of 2
    mask[:, :length] = 1
    slots = ((length - 1) // 2 + 1 - 2) // 2 + 1
    return slots, {"input_features": noise(1, 8, 40), "feature_attention_mask": mask}


def prompts(name: str, rows=ROWS) -> dict[str, torch.Tensor]:
    """What `generate` takes of a batch."""
    made = [_Row(name, parts) for parts in rows]
    width = max(len(row.ids) for row in made)
    ids = torch.tensor([[0] * (width - len(row.ids)) + row.ids for row in made])
    mask = torch.tensor([[0] * (width - len(row.ids)) + [1] * len(row.ids) for row in made])
    inputs = {"input_ids": ids, "attention_mask": mask}
    pictures = [picture for row in made for picture in row.pictures]
    types = (ids == IMAGE).int()
    if name in GRIDS or name.startswith("gemma4"):
        inputs["mm_token_type_ids"] = types
    if name == "ernie4_5_vl_moe":
        marks = (ids == IMAGE) | (ids == START) | (ids == END)
        inputs["moe_mm_token_type_ids"] = marks.int()
    if name == "gemma3":
        inputs["token_type_ids"] = types
    if name == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)
    if name in ("idefics3", "smolvlm"):
        most = max(len(row.pictures) for row in made)
        if most:
            pixels = torch.zeros(len(made), most, 3, 16, 16)
            for i, row in enumerate(made):
                for j, picture in enumerate(row.pictures):
                    pixels[i, j] = picture["pixel_values"][0]
            inputs["pixel_values"] = pixels
    elif pictures:
        for key in pictures[0]:
            inputs[key] = torch.cat([picture[key] for picture in pictures])
    return inputs


def of_row(name: str, rows, index: int) -> dict[str, torch.Tensor]:
    """The same of one row alone."""
    return prompts(name, [rows[index]])


def text_of_hf(model: PreTrainedModel, inputs: dict, count: int) -> list[list[int]]:
    """HF's greedy text."""
    copied = {key: value.clone() for key, value in inputs.items()}
    out = model.generate(**copied, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[:, inputs["input_ids"].shape[1] :].tolist()
