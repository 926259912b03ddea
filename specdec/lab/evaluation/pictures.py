"""Pictures of files, and what a target's processor makes of them and of the text beside them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_utils import load_image

from specdec.hf.prompts import TEXT_ONLY, auto_class
from specdec.lab.show.text import one_line
from specdec.loading import find_pretrained, load_pretrained

_FILES = "processor_config.json", "preprocessor_config.json"


def load_processor(name: str) -> ProcessorMixin:
    """Loads the processor of a model that reads pictures. No weights are loaded.

    Args:
        name: a folder, or a Hugging Face id.

    Raises:
        ImportError: a library is missing that pictures need.
        ValueError: there is no such model, or it reads no pictures; says why.
    """
    if name == "zoo":
        raise ValueError("the zoo's target reads text alone: --target names a model with pictures")
    is_local = find_pretrained(name)
    check_reads_pictures(name)
    need_pillow()
    missing = (
        f"{name} has no processor among its files ({' or '.join(_FILES)}); put it there with "
        "processor.save_pretrained"
    )
    try:
        processor = load_pretrained("AutoProcessor", name, local_files_only=is_local)
    except ValueError as error:
        cause = error.__cause__ or error
        is_there = any(Path(name, file).is_file() for file in _FILES)
        if isinstance(cause, OSError) and not is_there:
            raise ValueError(f"{missing}: {one_line(cause)[:120]}") from error
        if importlib.util.find_spec("torchvision"):
            raise
        raise ImportError(  # HF's own words do not always name the library
            f"the processor of {name} cannot be loaded without torchvision: pip install "
            f"torchvision ({type(cause).__name__}: {one_line(cause)[:120]})"
        ) from error
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(missing)
    return processor


def check_reads_pictures(name: str) -> None:
    """Raises `ValueError` for a model whose prompts must be text, by its configuration."""
    config = load_pretrained("AutoConfig", name, local_files_only=find_pretrained(name))
    kind = config.model_type
    if kind in TEXT_ONLY:
        raise ValueError(f"{name} ({kind}) can be given no pictures: {TEXT_ONLY[kind]}")
    if auto_class(config) != "AutoModelForImageTextToText":
        raise ValueError(
            f"{name} ({kind}) is a model of text and reads no pictures; name one that does "
            "(Qwen-VL, Gemma 3, Llava, ...), or leave the pictures out"
        )


def need_pillow() -> None:
    """Raises `ImportError` where pictures cannot be opened."""
    if not importlib.util.find_spec("PIL"):
        raise ImportError("pictures need Pillow: pip install pillow")


def open_pictures(paths: Iterable[str | Path]) -> list[Any]:
    """The pictures of files, as `PIL.Image` in RGB, turned as their camera says.

    Raises:
        ImportError: Pillow is missing.
        ValueError: a file is missing or no picture; says which.
    """
    need_pillow()
    pictures = []
    for path in paths:
        if not Path(path).is_file():
            is_address = str(path).startswith(("http:", "https:"))
            advice = "; download it first, pictures are files" if is_address else ""
            raise ValueError(f"there is no picture {path}{advice}")
        try:
            pictures.append(load_image(str(path)))
        except Exception as error:  # damaged files end in errors of many kinds
            raise ValueError(f"{path} is no picture that can be read: {one_line(error)}") from error
    return pictures


def message(role: str, text: str, pictures: Sequence[Any] = ()) -> dict[str, Any]:
    """What somebody says, as processors' chat templates take it: pictures first.

    Args:
        role: `"user"`, `"assistant"` or `"system"`.
        text: that is said.
        pictures: shown before it.

    Example:
        >>> message("user", "Hello")
        {'role': 'user', 'content': [{'type': 'text', 'text': 'Hello'}]}
    """
    content = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": role, "content": [*content, {"type": "text", "text": text}]}


def inputs_of(
    processor: ProcessorMixin,
    messages: Sequence[Mapping[str, Any]],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **template: Any,
) -> dict[str, Any]:
    """What a target's `generate` takes of a conversation that it goes on with.

    Args:
        processor: of the target. Its chat template writes the conversation; where it has none, the
            conversation is one text, with a placeholder in the place of each picture.
        messages: of `message`.
        dtype: of pixels; `None` leaves them as the processor makes them.
        device: of all tensors.
        template: variables of the chat template.

    Returns:
        Ids, mask, and tensors of the pictures, by name.

    Raises:
        ValueError: the processor or its template raises an error, which the message quotes.
    """
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    messages = [_without_placeholders(each, processor.tokenizer) for each in messages]
    try:
        if _template_of(processor):
            inputs = processor.apply_chat_template(
                messages, return_tensors="pt", **form, **template
            )
        else:
            parts = [part for each in messages for part in each["content"]]
            pictures = [part["image"] for part in parts if part["type"] == "image"]
            text = "".join(part.get("text") or _placeholder(processor) for part in parts)
            inputs = processor(text=[text], images=pictures or None, return_tensors="pt")
    except Exception as error:  # templates and processors raise errors of their own
        raise ValueError(f"the target's processor raises an error: {one_line(error)}") from error
    own = {name: value for name, value in inputs.items() if value is not None}
    return {name: _moved(value, dtype, device) for name, value in own.items()}


def _without_placeholders(
    message: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Mapping[str, Any]:
    """A message; an answer without its special tokens. A processor would take those that stand for
    pictures in an answer for pictures of the conversation.
    """
    if message["role"] != "assistant":
        return message
    (part,) = message["content"]
    text = part["text"]
    for token in tokenizer.all_special_tokens:
        text = text.replace(token, "")
    return {**message, "content": [{**part, "text": text}]}


def is_processor(given: Any) -> bool:
    """Whether it is a processor, and no tokenizer alone."""
    return isinstance(given, ProcessorMixin)


def tokenizer_of(given: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer in a processor; any other tokenizer, or `None`, as it is."""
    return given.tokenizer if is_processor(given) else given


def _template_of(processor: ProcessorMixin) -> Any:
    return processor.chat_template or getattr(processor.tokenizer, "chat_template", None)


def _placeholder(processor: ProcessorMixin) -> str:
    """What stands for a picture in the text of a processor without a chat template."""
    found = getattr(processor, "boi_token", None) or getattr(processor, "image_token", None)
    if found is None:
        raise ValueError(f"{type(processor).__name__} has no chat template and no image_token")
    return str(found)


def _moved(value: Any, dtype: torch.dtype | None, device: torch.device | str) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)
