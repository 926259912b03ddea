"""Half precision at real width, and targets spread over devices: `python -m pytest -m gpu`.

A random target of Llama 3's 8B shape (4096 wide, 32 layers, 128 256 tokens) in bfloat16 and in
float16, every drafter and sampler, odd and even prompt lengths from 1 to 4 097. Its MLPs are
narrow: it has 6.4 GB in place of 16, so that several processes share a GPU. (`gpu_check.py` has the
whole shape.)

Two attention kernels differ by rounding in half precision, so a greedy text is judged token by
token: the target's plain forward over the finished text must rank every emitted token within twice
the largest difference that two attention implementations of that same forward show. That allows no
wrong mask or position, which changes logits by their own size.
"""

import pytest
import torch
from accelerate import dispatch_model
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import (
    EagleDrafter,
    EnsembleSampler,
    MaskTokenDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)
from specdec.drafters.eagle import EagleHead
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.mask_token.head import MaskTokenConfig, MaskTokenHead
from specdec.lab.training.eagle import new_head

pytestmark = pytest.mark.gpu
V = 128_256
SHAPE = {
    "vocab_size": V,
    "hidden_size": 4096,
    "intermediate_size": 2048,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTHS = [1, 511, 513, 4097]
SAMPLERS = ["block", "rejection", "coupling", EnsembleSampler(0.9), "typical"]


def random_llama(dtype, seed, **changed):
    torch.manual_seed(seed)
    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return LlamaForCausalLM(LlamaConfig(**SHAPE | changed)).eval()
        finally:
            torch.set_default_dtype(default)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def target(request):
    model = random_llama(request.param, 0)
    yield model
    del model
    torch.cuda.empty_cache()


def eagle3(target, num_draft_tokens=3):
    layer = LayerConfig(4096, 14336, 32, 8, 128)
    config = EagleConfig("attention", layer, V, 32_000, (2, 16, 29), 4096)
    head = EagleHead(config, target_ids=torch.arange(32_000)).to("cuda", target.dtype)
    return EagleDrafter(head, target, num_draft_tokens)


def dflash(target, num_draft_tokens=7):
    layer = LayerConfig(4096, 14336, 32, 8, 128, has_qk_norm=True)
    config = MaskTokenConfig(
        *("same-position", "keys", layer, V, V, (2, 9, 16, 23, 29), 4096),
        num_layers=2,
        mask_token_id=V - 1,
        block_size=8,
        is_causal=False,
        has_lm_head=False,
    )
    head = MaskTokenHead(config).to("cuda", target.dtype)
    return MaskTokenDrafter(head, target, num_draft_tokens)


DRAFTERS = {
    "none": lambda target: None,
    "lookup": lambda target: PromptLookupDrafter(7),
    "model": lambda target: ModelDrafter(random_llama(target.dtype, 1, num_hidden_layers=1), 3),
    "eagle3": eagle3,
    "eagle3, K = 1": lambda target: eagle3(target, 1),
    "dflash": dflash,
    "dflash, K = 1": lambda target: dflash(target, 1),
}


def prompt(length, rows=1):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, V, (rows, length), generator=generator).cuda()


@torch.no_grad()
def logits_of(model, ids, implementation):
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        return model(input_ids=ids, logits_to_keep=8).logits.float()
    finally:
        model.set_attn_implementation(before)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_the_targets_up_to_its_own_rounding(target, drafter, length):
    generator = SpeculativeGenerator(target, DRAFTERS[drafter](target))
    result = generator.generate(prompt(length), max_new_tokens=7)
    text = result.sequences
    plain = logits_of(target, text, "sdpa")[0, :-1]  # what each new token was chosen from
    rounding = (plain - logits_of(target, text, "eager")[0, :-1]).abs().max()
    chosen = plain.gather(1, text[0, -7:, None])[:, 0]
    assert float((plain.amax(dim=1) - chosen).max()) <= 2 * float(rounding) + 1e-6
    assert float(rounding) < 0.5 * float(plain.std())


@pytest.mark.parametrize(
    ("drafter", "sampler"),
    [*((name, SAMPLERS[0]) for name in DRAFTERS), *(("eagle3", s) for s in SAMPLERS[1:])],
    ids=str,
)
def test_every_sampler_samples_with_every_drafter(target, drafter, sampler):
    generator = SpeculativeGenerator(target, DRAFTERS[drafter](target), sampler)
    mask = torch.ones(3, 513, dtype=torch.long).cuda()
    mask[1, :200], mask[2, :512] = 0, 0
    options = {"do_sample": True, "temperature": [0.0, 0.8, 1.2], "top_p": 0.9, "seed": [1, 2, 3]}
    result = generator.generate(prompt(513, 3), mask, max_new_tokens=9, **options)
    assert result.lengths == [9, 9, 9]
    assert bool(((result.new_tokens >= 0) & (result.new_tokens < V)).all())


def test_a_deep_target_is_wrapped_every_time(target):
    for _ in range(5):
        SpeculativeGenerator(target, None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("exact_float32")
@pytest.mark.parametrize("name", ["none", "lookup", "model", "eagle3"])
def test_a_target_over_two_devices_gives_the_text_of_one(name):
    ids, mask = (x.cuda() for x in ragged_prompts(VOCAB, 5, 1, 9))
    options = {"max_new_tokens": 24, "do_sample": False}
    whole = build("qwen3").cuda()
    expected = whole.generate(ids, attention_mask=mask, pad_token_id=0, **options)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    places |= {f"model.layers.{i}": int(i > 0) for i in range(3)}
    model = dispatch_model(build("qwen3"), places)
    drafter = {
        "none": lambda: None,
        "lookup": lambda: PromptLookupDrafter(4),
        "model": lambda: ModelDrafter(perturbed(build("qwen3")).cuda(), 4),
        "eagle3": lambda: EagleDrafter(new_head(build("qwen3"), "eagle3").cuda(), model, 4),
    }[name]()
    found = SpeculativeGenerator(model, drafter).generate(ids, mask, **options)
    assert torch.equal(found.sequences, expected)
    sampled = {"do_sample": True, "seed": 3, "temperature": 0.8, "max_new_tokens": 24}
    one = SpeculativeGenerator(whole, None).generate(ids, mask, **sampled)
    two = SpeculativeGenerator(model, None).generate(ids, mask, **sampled)
    assert torch.equal(one.sequences, two.sequences)
