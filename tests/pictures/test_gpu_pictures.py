"""Prompts with pictures on a GPU: `python -m pytest -m gpu tests/pictures`."""

import copy

import pytest
import torch
from pictured_models import FAMILIES, OTHERS, ROWS, build, prompts

from specdec import ModelDrafter, SpeculativeGenerator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]


def on_gpu(inputs, dtype=torch.float32):
    return {n: v.to("cuda", dtype if v.is_floating_point() else None) for n, v in inputs.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_captured_steps_are_the_eager_ones_and_hfs(name):
    model = copy.deepcopy(build(name)).cuda()
    generator = SpeculativeGenerator(model, "lookup", prefill_chunk_size=5)
    for rows in (ROWS, OTHERS, ROWS[:2]):
        inputs = on_gpu(prompts(name, rows))
        result = generator.generate(**inputs, max_new_tokens=20, check=True)
        plain = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(result.sequences, model.generate(**inputs, **plain))


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_passes_the_trial(name):
    model = copy.deepcopy(build(name)).to("cuda", torch.bfloat16)
    drafter = None if name in ("qwen3_5",) else ModelDrafter(model, 3)
    generator = SpeculativeGenerator(model, drafter)
    inputs = on_gpu(prompts(name), torch.bfloat16)
    result = generator.generate(**inputs, max_new_tokens=20, check=True)
    assert result.lengths == [20, 20, 20]
