"""What only a GPU can show: `python -m pytest -m gpu`. In float32 with TF32 off, as law 3 asks.

A step must not wait for the device (CUDA's own check, where `no_host_sync` is a model of it), the
host reads one step late, and noise is the same bits as on a CPU.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from mask_heads import ALIGNMENTS, CORRECTED, WINDOWED, head_for
from mtp_checkpoints import write_numbered

from specdec import (
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)
from specdec.drafters import EagleHead
from specdec.samplers import Noise, Stream
from specdec.training.eagle import eagle_config
from specdec.training.mtp import new_head as new_mtp_head

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]
NAMES = ["llama", "qwen3_moe", "gemma2", "gemma3", "gpt_oss", "gpt2", "deepseek_v3", "gptj"]
DRAFTERS = {
    "none": lambda model: None,
    "model": lambda model: ModelDrafter(perturbed(model)),
    "lookup": lambda model: PromptLookupDrafter(4),
    "eagle3": lambda model: EagleDrafter(EagleHead(eagle_config(model, "eagle3")).cuda(), model),
    "mtp": lambda model: MTPDrafter(new_mtp_head(model).cuda(), model, 3),
    "mtp, looped": lambda model: MTPDrafter(new_mtp_head(model, 2).cuda(), model, 4),
    **{
        name: lambda model, name=name: MaskTokenDrafter(head_for(model, name).cuda(), model)
        for name in (*ALIGNMENTS, *CORRECTED, *WINDOWED)
    },
}


def on_gpu(name):
    ids, mask = ragged_prompts(VOCAB, 5, 1, 9)
    return build(name).cuda(), ids.cuda(), mask.cuda()


@pytest.mark.parametrize(
    ("name", "drafter"),
    [*((name, "model") for name in NAMES), *(("gemma2", drafter) for drafter in DRAFTERS)],
)
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


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe"])
def test_modules_of_the_targets_own_class_draft_the_tokens_of_a_cpu(tmp_path, family):
    model, _ = write_numbered(tmp_path, family, num_depths=3, seed=2, vocab_size=7)
    ids = torch.tensor([[5, 1, 4, 2, 6], [3, 3, 1, 2, 5]])
    traces = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        drafter = MTPDrafter.from_pretrained(tmp_path, model, 4)
        generator = SpeculativeGenerator(model, drafter)
        there, mask = ids.to(device), torch.ones_like(ids).to(device)
        result = generator.generate(there, mask, max_new_tokens=24, do_sample=False, trace=True)
        traces.append([[step.draft_tokens for step in row] for row in result.trace])
    assert traces[0] == traces[1]
