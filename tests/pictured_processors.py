"""Folders of tiny random models with processors of their families, made without a download; and
pictures for them.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from pictured_models import END, IMAGE, START, VIDEO, build
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoProcessor, PreTrainedTokenizerFast, ProcessorMixin

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% for part in m.content %}{% if part.type == 'image' "
    "%}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}a:"
)


class PicturesOfQwen(transformers.Qwen2_5_VLProcessor):
    """Qwen2.5-VL's own, without videos, for which transformers wants torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = IMAGE, VIDEO
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class _NoModel(transformers.PreTrainedConfig):
    """AutoProcessor finds processors by configurations."""


AutoProcessor.register(_NoModel, PicturesOfQwen, exist_ok=True)


def _tokenizer(special: dict[str, int], **named: str) -> PreTrainedTokenizerFast:
    """A token for each letter, and these special ones."""
    letters = "abcdefghijklmnopqrstuvwxyz .,?!:0123456789\n"
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2}
    vocabulary |= {letter: 3 + i for i, letter in enumerate(letters)}
    vocabulary |= {f"({i})": i for i in range(len(vocabulary), 99) if i not in special.values()}
    core = Tokenizer(models.WordLevel(vocabulary | special, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=[*special],
        **({"extra_special_tokens": named} if named else {}),
    )


def _processor(name: str) -> ProcessorMixin:
    if name == "qwen2_5_vl":
        marks = {"<|image_pad|>": IMAGE, "<|vision_start|>": START, "<|vision_end|>": END}
        sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        pixels = transformers.Qwen2VLImageProcessor(**sizes, min_pixels=64, max_pixels=1024)
        tokenizer = _tokenizer(marks | {"<|video_pad|>": VIDEO})
        template = TEMPLATE.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
        return PicturesOfQwen(pixels, tokenizer, chat_template=template)
    if name == "gemma3":
        named = {"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"}
        tokenizer = _tokenizer({"<image>": IMAGE, "<begin>": START, "<end>": END}, **named)
        pixels = transformers.Gemma3ImageProcessor(size={"height": 16, "width": 16})
        template = TEMPLATE.replace("PICTURE", "<begin>")
        own = {"chat_template": template, "image_seq_length": 4}
        return transformers.Gemma3Processor(pixels, tokenizer, **own)
    size = {"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(**size),
        _tokenizer({"<image>": IMAGE}),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )


NAMES = "llava", "qwen2_5_vl", "gemma3"
"""Families whose processors differ: one size of pictures; sizes and grids; types of tokens."""


def save(name: str, folder: Path) -> Path:
    """A folder with the family's model, tokenizer and processor."""
    build(name).save_pretrained(folder)
    _processor(name).save_pretrained(folder)
    return folder


def paint(folder: Path) -> list[Path]:
    """Two pictures of different sizes."""
    paths = [folder / "red.png", folder / "blue.png"]
    Image.linear_gradient("L").resize((17, 25)).convert("RGB").save(paths[0])
    Image.new("RGB", (40, 20), (20, 30, 230)).save(paths[1])
    return paths


def asked_of_hf(
    folder: Path, messages: list[dict], count: int, *, skip_special_tokens: bool = False
) -> str:
    """The greedy text of HF's own `generate` after a conversation with paths of pictures, all by
    HF's classes.
    """
    processor = AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    inputs = processor.apply_chat_template(messages, return_tensors="pt", **form)
    options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    new = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
    return processor.decode(new, skip_special_tokens=skip_special_tokens)


def shown(text: str, pictures: list[Path], role: str = "user") -> dict:
    """A message with pictures by their paths."""
    content = [{"type": "image", "path": str(path)} for path in pictures]
    return {"role": role, "content": [*content, {"type": "text", "text": text}]}
