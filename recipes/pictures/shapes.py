"""Pictures of coloured shapes with their captions, and a processor for them: all made here, so that
a small multimodal model can be trained and tried without a download.

A picture is 48 x 48 pixels. Each of its four quadrants holds one shape or none, at random places.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from recipes.pictures.answers import Answered

SIZE, PATCH = 48, 12
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 70),
    "blue": (50, 90, 230),
    "yellow": (230, 210, 50),
    "purple": (150, 60, 200),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = {"small": 5.0, "large": 9.0}
"""Half the width of a shape, in pixels."""
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
NUMBERS = ("no shape", "one shape", "two shapes", "three shapes", "four shapes")
END, IMAGE, USER, ASSISTANT = "<end>", "<image>", "<user>", "<assistant>"
QUESTION = "what is in the picture ?"
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> "
    "{% if message['content'] is string %}{{ message['content'] }} {% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def draw(seed: int) -> tuple[Image.Image, str]:
    """A picture and its caption, from a seed alone."""
    generator = np.random.default_rng([7, seed])
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float64)
    pixels = np.full((SIZE, SIZE, 3), 24.0) + generator.normal(0, 6, (SIZE, SIZE, 3))
    said = []
    for index, quadrant in enumerate(QUADRANTS):
        if generator.random() < 0.3:
            continue
        colour, shape, size = (
            str(generator.choice(list(choices))) for choices in (COLOURS, SHAPES, SIZES)
        )
        radius = SIZES[size]
        centre = np.array([index // 2, index % 2]) * SIZE / 2 + SIZE / 4
        centre += generator.uniform(-1, 1, 2) * (SIZE / 4 - radius - 1)
        inside = _is_inside(shape, (y - centre[0]) / radius, (x - centre[1]) / radius)
        pixels[inside] = np.array(COLOURS[colour]) + generator.normal(0, 6, (inside.sum(), 3))
        said.append(f"a {size} {colour} {shape} at the {quadrant}")
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    if not said:
        return picture, f"there is {NUMBERS[0]} ."
    verb = "is" if len(said) == 1 else "are"
    return picture, f"there {verb} {NUMBERS[len(said)]} : {' , '.join(said)} ."


def _is_inside(shape: str, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Of points in units of the shape's half width."""
    if shape == "circle":
        return y**2 + x**2 < 1
    box = np.maximum(abs(y), abs(x)) < 1
    if shape == "square":
        return box
    if shape == "cross":
        return box & (np.minimum(abs(y), abs(x)) < 0.35)
    return box & (abs(x) < (y + 1) / 2)


def make_processor() -> LlavaProcessor:
    """Words as tokens, pictures as patches, and a chat template."""
    text = f"{QUESTION} there is are . : , a at the {' '.join(NUMBERS)} {' '.join(QUADRANTS)} "
    text += f"{' '.join(COLOURS)} {' '.join(SHAPES)} {' '.join(SIZES)}"
    special = (END, IMAGE, USER, ASSISTANT)
    words = dict.fromkeys((*special, "<unknown>", *text.split()))
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        unk_token="<unknown>",
        additional_special_tokens=[IMAGE, USER, ASSISTANT],
        padding_side="left",
    )
    size = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(
        size=size, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        images,
        fast,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's first one, which is dropped
        chat_template=TEMPLATE,
    )


def ask(processor: LlavaProcessor) -> str:
    """The prompt, as the chat template writes it."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(messages, add_generation_prompt=True)


class Captions(Sequence[Answered]):
    """Pictures of so many seeds from `first` on, with the question and the caption; each is drawn
    when it is asked for.
    """

    def __init__(self, processor: LlavaProcessor, count: int, *, first: int = 0):
        self.processor, self.count, self.first = processor, count, first
        self.question = ask(processor)

    def __len__(self) -> int:
        return self.count

    def prompt(self, index: int) -> tuple[dict, str]:
        """What the processor returns for the question alone, and the caption."""
        picture, caption = draw(self.first + index)
        given = self.processor(images=picture, text=self.question, return_tensors="pt")
        return dict(given), caption

    def __getitem__(self, index: int) -> Answered:
        picture, caption = draw(self.first + index)
        text = f"{self.question}{caption} {END}"
        whole = self.processor(images=picture, text=text, return_tensors="pt")
        # A word is a token, so the answer is as long as its words.
        return Answered(dict(whole), whole["input_ids"].shape[1] - len(caption.split()) - 1)
