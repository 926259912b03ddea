"""Prompts with pictures on a GPU: `python -m pytest -m gpu tests/pictures`."""

import copy

import pytest
import torch
from eagle_heads import head_for
from pictured_models import FAMILIES, OTHERS, ROWS, build, prompts

from specdec import EagleDrafter, ModelDrafter, SpeculativeGenerator

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


@pytest.mark.parametrize("sees_pictures", [True, False])
@pytest.mark.parametrize("options", [{"num_draft_tokens": 3}, {"tree": "6x3"}], ids=str)
def test_captured_drafts_of_heads_with_three_axes_are_those_of_a_cpu(sees_pictures, options):
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    flags = {"rope": rope, "head_dim": 8, "sees_pictures": sees_pictures}
    drafts = []
    for device in ("cpu", "cuda"):
        model = copy.deepcopy(build("qwen3_vl")).to(device)
        drafter = EagleDrafter(
            head_for(model.cpu(), **flags).to(device), model.to(device), **options
        )
        inputs = {name: value.to(device) for name, value in prompts("qwen3_vl").items()}
        generator = SpeculativeGenerator(model, drafter, graphs=True, prefill_chunk_size=5)
        result = generator.generate(**inputs, max_new_tokens=12, check=True)
        drafts.append((result.texts, result.stats.steps, result.stats.acceptance_rate))
    assert drafts[0] == drafts[1]
