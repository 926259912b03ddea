"""What cannot be read in chunks says what memory it takes."""

import re

import pytest
import torch
from pictured_models import build, prompts

from specdec import SpeculativeGenerator, Target
from specdec.targets.prompt_inputs import WHOLE

NOTE = re.compile(r"(\d+) tokens were read in one chunk.*masks took ([\d.]+) MiB for 3 x (\d+) tok")


def read(name):
    inputs = prompts(name)
    given = {n: v for n, v in inputs.items() if n not in ("input_ids", "attention_mask")}
    target = Target(build(name))
    return target, target.read_prompts(inputs["input_ids"], inputs["attention_mask"], given)


@pytest.mark.parametrize("name", ["gemma3", "gemma4_vision", "paligemma"])
def test_bytes_are_those_of_the_masks(name):
    """Of the masks themselves, in chunks that are as short as they can be."""
    _, own = read(name)
    size, num_bytes = own.uncut
    width = max(own.lengths)
    chunks = own.chunks(1)
    assert size == max(chunk.size for chunk in chunks) > 1
    longest = max(chunks, key=lambda chunk: chunk.size)
    masks = longest.arguments(width, torch.float32)["attention_mask"]
    masks = masks if isinstance(masks, dict) else {WHOLE: masks}
    tables = [mask for mask in (*masks.values(), *own.visible.values()) if mask is not None]
    assert num_bytes == sum(table.numel() * table.element_size() for table in tables)


def test_prompts_that_can_be_cut_take_nothing_more():
    target, own = read("qwen3_vl")
    assert (own.uncut, own.uncut_note, target.notes) == ((0, 0), "", ())


def test_explain_says_it_after_the_largest_prompts():
    generator = SpeculativeGenerator(build("paligemma"), "lookup", prefill_chunk_size=2)
    assert "one chunk" not in generator.explain()
    generator.generate(**prompts("paligemma"), max_new_tokens=2)
    generator.generate(**prompts("paligemma", [[5, 6, 7]]), max_new_tokens=2)
    ((size, _, width),) = NOTE.findall(generator.explain())
    longest = prompts("paligemma")["input_ids"].shape[1]
    assert int(size) == int(width) == longest


def test_an_error_of_memory_says_it(monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("no memory left")

    for name, words in (("gemma3", r"no memory left; prompts whose tokens .* MiB"), ("llava", "")):
        generator = SpeculativeGenerator(build(name), None)
        generator.generate(**prompts(name), max_new_tokens=2)
        with monkeypatch.context() as patch:
            patch.setattr("specdec.loop.prefill_inputs.prefill_chunk", fail)
            with pytest.raises(torch.OutOfMemoryError, match=words or "no memory left$"):
                generator.generate(**prompts(name), max_new_tokens=2)
