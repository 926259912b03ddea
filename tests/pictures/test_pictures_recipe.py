"""The recipe of the small target that captions pictures, and of its heads."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoProcessor, LlavaForConditionalGeneration

from recipes.pictures import recipe, shapes
from specdec import EagleDrafter


@pytest.mark.parametrize("seed", range(8))
def test_captions_say_what_pictures_show(seed):
    """The reddest, greenest, ... pixels of a quadrant are where the caption says."""
    picture, caption = shapes.draw(seed)
    pixels, half = np.asarray(picture, dtype=float), shapes.SIZE // 2
    said = re.findall(r"a (\w+) (\w+) (\w+) at the (\w+) (\w+)", caption)
    assert shapes.NUMBERS[len(said)] in caption
    for row, vertical in enumerate(("top", "bottom")):
        for column, side in enumerate(("left", "right")):
            part = pixels[row * half : (row + 1) * half, column * half : (column + 1) * half]
            here = [each for each in said if each[3:] == (vertical, side)]
            is_bright = part.max(axis=2) > 100
            assert is_bright.any() == bool(here)
            if not here:
                continue
            (size, colour, shape, *_), found = here[0], part[is_bright].mean(axis=0)
            near = min(shapes.COLOURS, key=lambda n: abs(found - shapes.COLOURS[n]).sum())
            assert near == colour
            extent = max(np.ptp(np.nonzero(is_bright)[axis]) + 1 for axis in (0, 1))
            assert abs(extent - 2 * shapes.SIZES[size]) <= 2
            share = is_bright.sum() / extent**2
            shares = {"circle": np.pi / 4, "square": 1.0, "triangle": 0.5, "cross": 0.58}
            assert abs(share - shares[shape]) < 0.17


def test_a_prompt_is_the_beginning_of_its_answered_text():
    captions = shapes.Captions(shapes.make_processor(), 3, first=5)
    for index in range(3):
        prompt, caption = captions.prompt(index)
        example = captions[index]
        assert example.ids[: example.num_prompt].equal(prompt["input_ids"][0])
        answer = captions.processor.tokenizer.decode(example.ids[example.num_prompt :])
        assert answer == f"{caption} {shapes.END}"
        assert len(example.ids) <= recipe.ROW
        assert example.inputs["pixel_values"].equal(prompt["pixel_values"])


@pytest.mark.slow
def test_the_recipe_runs_and_what_it_writes_is_read(tmp_path, capsys):
    recipe.main(["--steps", "2", "--pictures", "2", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "measured.json").read_text())
    assert found["equal"]
    assert found["pictures"] == 2
    target = LlavaForConditionalGeneration.from_pretrained(tmp_path / "target").eval()
    processor = AutoProcessor.from_pretrained(tmp_path / "target")
    given = processor(images=shapes.draw(0)[0], text=shapes.ask(processor), return_tensors="pt")
    assert int((given["input_ids"] == target.config.image_token_id).sum()) == 16
    for name in ("visible", "hidden"):
        drafter = EagleDrafter.from_pretrained(tmp_path / name, target)
        assert drafter.config.sees_pictures == (name == "visible")
    assert torch.isfinite(target(**given).logits).all()
    assert "trained visible, drafts visible" in capsys.readouterr().out
