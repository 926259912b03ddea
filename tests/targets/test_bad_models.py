"""Models that cannot be decoded faithfully are refused by name; broken logits stop a generation.

A wrong text is worse than an error: states outside of HF's cache, ALiBi models and models in
training mode are refused when they are wrapped. NaN and infinite logits raise where a
token would be drawn from them, and only there.
"""

import copy

import pytest
import torch
import transformers
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from fingerprint import fingerprint
from step_faults import faults_of

from specdec import ModelDrafter, SpeculativeGenerator, Target
from specdec.loop.outcome import Fault
from specdec.samplers import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    LogitsFilter,
    RejectionSampler,
    TypicalSampler,
)
from specdec.targets.view import wrap_forward
from specdec.types import Draft

IDS, MASK = ragged_prompts(VOCAB, 2, 5)
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 2, "intermediate_size": 24}


def rwkv():
    config = transformers.RwkvConfig(**SIZES, attention_hidden_size=16)
    return transformers.RwkvForCausalLM(config)


def recurrent_gemma():
    config = transformers.RecurrentGemmaConfig(**SIZES, **HEADS, lru_width=16, head_dim=8)
    return transformers.RecurrentGemmaForCausalLM(config)


def minimax():
    sizes = {"num_key_value_heads": 1, "num_local_experts": 2, "head_dim": 8, "block_size": 16}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = transformers.MiniMaxConfig(**SIZES, **HEADS, **sizes, layer_types=kinds)
    return transformers.MiniMaxForCausalLM(config)


def hybrid():
    """Declares layers of a kind that Zaya has."""
    model = build("llama")
    model.config.layer_types = ["full_attention", *["hybrid_sliding"] * 2]
    return model


def forgetful():
    """Declares its layers sliding, and attends over everything."""
    config = copy.deepcopy(build("llama").config)
    config.layer_types, config.sliding_window = ["sliding_attention"] * 3, 7
    return type(build("llama"))(config)


def training():
    return build("llama", attention_dropout=0.1).train()


REFUSED = {
    rwkv: "Rwkv.*its forward has no argument for HF's cache.*Use HF generate",
    recurrent_gemma: "RecurrentGemma.* state does not go through HF's cache.*Use HF generate",
    minimax: "MiniMax.* uses cache of its own.*Use HF generate",
    hybrid: "Llama.* cannot run over slots: hybrid_sliding; use HF generate",
    forgetful: r"Llama.* sees the whole text in layer 0, .* Set config\.sliding_window = None",
    training: r"Llama.* in training mode, .*attention_dropout=0.1.*call model.eval\(\) first",
}


CASES = [*((make, Target) for make in REFUSED), (training, ModelDrafter)]


@pytest.mark.parametrize(("make", "wrap"), CASES, ids=lambda part: part.__name__)
def test_a_model_that_cannot_be_decoded_faithfully_is_refused(make, wrap):
    torch.manual_seed(0)
    model = make() if make is training else make().eval()
    before = fingerprint(model)
    with pytest.raises(ValueError, match=REFUSED[make]):
        wrap(model)
    assert fingerprint(model) == before


SAMPLERS = [
    *(BlockSampler(), RejectionSampler(), CouplingSampler(), TypicalSampler(), EnsembleSampler(0.5))
]
SAMPLED = {"do_sample": True, "seed": 1, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
CASES = [(sampler, "nan", SAMPLED) for sampler in SAMPLERS]
CASES += [(BlockSampler(), "nan", {}), (CouplingSampler(), "nan", {})]
CASES += [(BlockSampler(), "inf", SAMPLED | {"temperature": t}) for t in (0.8, [0.0, 1.0])]


@pytest.mark.parametrize(("sampler", "value", "options"), CASES)
def test_logits_that_are_not_finite_stop_the_generation(sampler, value, options):
    model = build("llama")
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model)), sampler)
    expected = generator.generate(IDS, MASK, max_new_tokens=6).sequences
    weight = model.lm_head.weight[3].clone()  # models can break after they were wrapped
    with torch.no_grad():
        model.lm_head.weight[3] = float(value)  # the logit of token 3: NaN, or +inf, -inf or NaN
    before = fingerprint(model)
    with pytest.raises(ValueError, match=r"row [01] after \d+ new .*logits hold NaN or .*weights"):
        generator.generate(IDS, MASK, max_new_tokens=6, **options)
    assert fingerprint(model) == before
    with torch.no_grad():
        model.lm_head.weight[3] = weight
    assert generator.generate(IDS, MASK, max_new_tokens=6).sequences.equal(expected)


def test_a_model_that_computes_no_numbers_is_refused_as_such():
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(ValueError, match=r"logits that are no numbers \(NaN\).*its weights"):
        SpeculativeGenerator(model, "lookup")


def test_logits_of_a_row_that_has_ended_may_be_anything():
    model = build("llama")
    generator = SpeculativeGenerator(model, None, steps_ahead=1)  # with which such rows stay
    text = generator.generate(IDS, MASK, max_new_tokens=8).new_tokens.tolist()
    eos = text[0][0]
    assert eos not in text[1]
    steps = []

    def break_the_first_row(forward, *args):
        logits = forward(*args)
        steps.append(logits.shape)
        if len(steps) > 2:  # the prompt, and the step that ends the row
            logits[0] = float("nan")
        return logits

    # In the view, past the trial that a hook of the model's would bring.
    wrap_forward(generator.target._views.step.lm_head, break_the_first_row)
    result = generator.generate(IDS, MASK, max_new_tokens=8, eos_token_id=eos, pad_token_id=0)
    assert result.new_tokens.tolist() == [[eos] + [0] * 7, text[1]]
    assert result.lengths == [1, 8]


@pytest.mark.parametrize("sampler", [*SAMPLERS[:4], EnsembleSampler(1.0)], ids=str)
def test_logits_behind_a_rejected_token_may_be_anything(sampler):
    impossible = torch.tensor([[2, 2, 2]])
    draft = Draft(impossible, torch.nn.functional.one_hot(impossible, 4).float())
    logits = torch.tensor([0.0, 1.0, -torch.inf, 0.5]).repeat(1, 4, 1)
    noise = sampler.noise_type([7]).at(torch.tensor([5]), 4)
    for value in (torch.nan, torch.inf, -torch.inf):
        logits[:, 1:] = value
        verdict = sampler(draft, logits, LogitsFilter(1), noise)
        assert verdict.num_accepted.tolist() == [0]
        assert faults_of(draft, logits, verdict) == [0]
    logits[:, 0, 1] = float("nan")  # which is not behind it
    verdict = sampler(draft, logits, LogitsFilter(1), noise)
    assert faults_of(draft, logits, verdict) == [Fault.TARGET_LOGITS]
