"""The way that a GPU attends, run on a CPU: models and heads over `ragged_attention` instead of
dense masks. It has the logits of the dense masks and the text of HF, nothing at or beyond a row's
length counts, and it makes no mask. (DeepSeek-V3's steps have one, over latents.)
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from target_laws import check_found, without_dense_masks

from specdec import EagleDrafter, ModelDrafter, SpeculativeGenerator, Target
from specdec.drafters import EagleHead
from specdec.kernels.attention import reference
from specdec.lab.training.eagle import eagle_config
from specdec.slots import attention, ragged
from specdec.types import Draft

LENGTHS = torch.tensor([2, 7, 4])  # tokens before each row's window
NAMES = ["llama", "mistral_sliding", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "cohere2"]


def no_mask(*_):
    raise AssertionError("a dense mask was made that nobody needs")


@pytest.fixture
def raggedly(monkeypatch):
    """Every window attends as a window of few tokens does on a GPU."""
    monkeypatch.setattr("specdec.slots.cache.has_kernels", lambda devices: True)
    monkeypatch.setattr(reference, "attends_raggedly", lambda *_, **__: True)
    monkeypatch.setattr(attention, "window_mask", no_mask)


def verified_logits(target, poison=0.0):
    """Logits of a ragged window over a cache that holds poison wherever no token was written."""
    tokens = torch.randint(0, VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    cache = target.init_cache(3, 32)
    for buffer in (*cache.keys.values(), *cache.values.values()):
        buffer.fill_(poison)
    target.prefill(cache, tokens[:, :7], LENGTHS, offset=0)
    draft = Draft(tokens[:, 8:11])
    return target.verify(cache, LENGTHS, tokens[:, 7], draft).logits


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_logits_are_those_of_dense_masks_and_nothing_beyond_a_length_is_read(name, request):
    expected = verified_logits(Target(build(name)))
    request.getfixturevalue("raggedly")
    ours = verified_logits(Target(build(name)), poison=torch.nan)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-4)


@torch.no_grad()
def test_the_poison_would_show(raggedly, monkeypatch):
    """With a query that sees one slot more than its own."""
    by_definition = ragged.ragged_attention

    def sees_one_more(query, keys, values, slots, options):
        return by_definition(query, keys, values, slots + 1, options)

    target = Target(build("llama"))
    monkeypatch.setattr(ragged, "ragged_attention", sees_one_more)
    assert not bool(verified_logits(target, poison=torch.nan).isfinite().all())


DRAFTERS = {
    "model": lambda target: ModelDrafter(perturbed(target), num_draft_tokens=3),
    "eagle3": lambda target: EagleDrafter(EagleHead(eagle_config(target, "eagle3")), target, 3),
}


@pytest.mark.parametrize(("drafter", "name"), [("model", "gemma2"), ("eagle3", "llama")])
def test_greedy_text_is_that_of_hf(name, drafter, raggedly):
    model = build(name)
    ids, mask = ragged_prompts(VOCAB, 5, 2, 9)
    options = {"max_new_tokens": 12, "do_sample": False}
    ours = SpeculativeGenerator(model, DRAFTERS[drafter](model)).generate(ids, mask, **options)
    theirs = model.generate(ids, attention_mask=mask, **options, eos_token_id=None)
    assert torch.equal(ours.sequences, theirs)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels are compiled; see test_gpu")
@torch.no_grad()
def test_a_model_over_the_kernels_themselves(raggedly, monkeypatch):
    """In Triton's interpreter, which is slow: one small model."""
    triton = pytest.importorskip("specdec.kernels.attention.triton")
    target = Target(build("gpt_oss"))
    expected = verified_logits(target)
    monkeypatch.setattr(ragged, "ragged_attention", triton.ragged_attention)
    ours = verified_logits(target, poison=torch.nan)
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-5)


def test_a_model_with_a_fault_in_this_way_is_refused(raggedly, monkeypatch):
    """The self-test judges the way that will be used."""
    by_definition = ragged.ragged_attention

    def larger_scale(query, keys, values, slots, options):
        scale = 1.25 * query.shape[-1] ** -0.5
        return by_definition(query, keys, values, slots, options._replace(scale=scale))

    monkeypatch.setattr(ragged, "ragged_attention", larger_scale)
    without_dense_masks(monkeypatch)
    check_found(build("llama"), monkeypatch, "self_attn differs from its plain")
