"""What only a GPU can show: `python -m pytest -m gpu`. In float32 with TF32 off, as law 3 asks.

A step must not wait for the device (CUDA's own check, where `no_host_sync` is a model of it), the
host reads one step late, and noise is the same bits as on a CPU.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import EagleDrafter, ModelDrafter, PromptLookupDrafter, SpeculativeGenerator
from specdec.drafters import EagleHead
from specdec.samplers import Noise, Stream
from specdec.training.eagle import eagle_config

pytestmark = pytest.mark.gpu
NAMES = ["llama", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "gpt2", "deepseek_v3", "gptj"]
DRAFTERS = {
    "none": lambda model: None,
    "model": lambda model: ModelDrafter(perturbed(model)),
    "lookup": lambda model: PromptLookupDrafter(4),
    "eagle3": lambda model: EagleDrafter(EagleHead(eagle_config(model, "eagle3")).cuda(), model),
}


@pytest.fixture(autouse=True)
def _exact_float32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def on_gpu(name):
    ids, mask = ragged_prompts(VOCAB, 5, 1, 9)
    return build(name).cuda(), ids.cuda(), mask.cuda()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_equals_that_of_hugging_face(name, drafter):
    model, ids, mask = on_gpu(name)
    options = {"max_new_tokens": 24, "do_sample": False}
    generator = SpeculativeGenerator(model, DRAFTERS[drafter](model))
    ours = generator.generate(ids, mask, **options).sequences
    assert torch.equal(ours, model.generate(ids, attention_mask=mask, **options))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_p": 0.9, "seed": 1}], ids=str)
def test_an_eager_step_never_waits_for_the_device(drafter, options):
    model, ids, mask = on_gpu("llama")
    generator = SpeculativeGenerator(model, DRAFTERS[drafter](model), graphs=False)
    state = generator.start(ids, mask, max_new_tokens=24, **options)
    generator.step(state)  # constants are copied to the device once
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            generator.step(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_noise_is_the_same_bits_on_every_device():
    start = torch.tensor([3, 2**31])
    here = Noise([7, 2**63]).at(start, 5)
    there = Noise([7, 2**63], device="cuda").at(start.cuda(), 5)
    for stream in Stream:
        assert torch.equal(here.uniform(stream), there.uniform(stream).cpu())
