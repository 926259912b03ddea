"""Every field of HF's `GenerationConfig` means what it means in HF: as a value and as `None`, over
what the model ships and over nothing, by each of three routes: a keyword of `generate`, a
`generation_config`, and HF's own `generate` with the generator as its decoding hook.

The oracle is HF's `generate` of the same call: its texts, and its scores along the text. Sampled
text is drawn from HF's scores by putting our tokens in the place of `torch.multinomial`'s.
"""

import pytest
import torch
from architectures import VOCAB, build
from diagonal import case
from drafting import perturbed
from letters import LETTERS, letter_tokenizer
from transformers import GenerationConfig, WatermarkingConfig
from transformers.generation import CompileConfig

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.hf.generation import UNSUPPORTED, UNUSED
from specdec.request import GenerateOptions

MODEL, TOKENIZER = build("llama"), letter_tokenizer(pad_token=LETTERS[0])
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
IDS = torch.randint(1, VOCAB, (1, 6), generator=torch.Generator().manual_seed(3))
PROMPT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
SHORT, SAMPLED = {"max_new_tokens": 6}, {"max_new_tokens": 6, "do_sample": True}
TEXT = MODEL.generate(**PROMPT, max_new_tokens=6, do_sample=False)[0, 6:].tolist()
ENDING = SHORT | {"eos_token_id": TEXT[2]}
KEPT = {"output_scores": True, "return_dict_in_generate": True}

FIELDS = {  # a value, and what else the call asks for
    "max_length": (9, {}),
    "max_new_tokens": (3, {}),
    "min_length": (10, ENDING),
    "min_new_tokens": (4, ENDING),
    "max_time": (600.0, SHORT),
    "stop_strings": ([TOKENIZER.decode(TEXT[2:4])], SHORT),
    "do_sample": (True, SHORT),
    "temperature": (0.6, SAMPLED),
    "top_k": (7, SAMPLED),
    "top_p": (0.5, SAMPLED),
    "min_p": (0.05, SAMPLED),
    "top_h": (0.5, SAMPLED),
    "typical_p": (0.5, SAMPLED),
    "epsilon_cutoff": (0.03, SAMPLED),
    "eta_cutoff": (0.03, SAMPLED),
    "repetition_penalty": (1.8, SHORT),
    "encoder_repetition_penalty": (0.5, SHORT),
    "no_repeat_ngram_size": (1, SHORT),
    "encoder_no_repeat_ngram_size": (1, SHORT),
    "bad_words_ids": ([[TEXT[0]]], SHORT),
    "renormalize_logits": (True, SAMPLED),
    "forced_bos_token_id": (5, SHORT),
    "forced_eos_token_id": (5, SHORT),
    "remove_invalid_values": (True, SHORT),
    "exponential_decay_length_penalty": ((1, 1.5), ENDING),
    "suppress_tokens": (TEXT[:1], SHORT),
    "begin_suppress_tokens": (TEXT[:1], SHORT),
    "sequence_bias": ([[[TEXT[0]], -9.0]], SHORT),
    "watermarking_config": (WatermarkingConfig(bias=4.0), SHORT),
    "num_return_sequences": (2, SAMPLED),
    "output_scores": (True, SHORT),
    "output_logits": (True, SHORT),
    "return_dict_in_generate": (True, SHORT),
    "pad_token_id": (3, ENDING),
    "bos_token_id": (4, SHORT),
    "eos_token_id": (TEXT[2], SHORT),
    # Of other searches, or of how HF computes: HF's text is the same.
    **{
        name: (value, SHORT)
        for name, value in {
            "early_stopping": True,
            "length_penalty": 0.5,
            "use_cache": False,
            "cache_implementation": "static",
            "cache_config": {"nbits": 4},
            "max_cache_len": 64,
            "prefill_chunk_size": 2,
            "compile_config": CompileConfig(),
            "disable_compile": True,
            "decoder_start_token_id": 3,
            "max_matching_ngram_size": 3,
            "low_memory": True,
            "num_beam_groups": 2,
            "diversity_penalty": 0.5,
            "transformers_version": "5.0",
        }.items()
    },
}
REFUSED = {
    "num_beams": 2,
    "use_mtp": True,
    "guidance_scale": 1.5,
    "output_attentions": True,
    "output_hidden_states": True,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic_transient",
    "assistant_confidence_threshold": 0.9,
    "is_assistant": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "force_words_ids": [[3]],
}
ELSEWHERE = {"token_healing", "constraints", "continuous_batching_config"}
"""`test_bad_input.py`; the last one is of HF's other loop, and deprecated."""
NO_NONE = {"max_length", "num_return_sequences", "num_beams"}
"""HF itself fails with `TypeError` or `ValueError` for a `None` of these."""
CASES = {"a value": (False, True), "None": (False, False), "None over a value": (True, False)}
ROUTES = "keyword", "generation_config", "hook"


def of_hf(options, forced=None, **more):
    """HF's record, of sampled text with our tokens drawn."""
    real, columns = torch.multinomial, iter([] if forced is None else forced.T[:, :, None])
    torch.multinomial = real if forced is None else lambda *_, **__: next(columns)
    try:
        return MODEL.generate(**PROMPT, **options, tokenizer=TOKENIZER, **more)
    finally:
        torch.multinomial = real


def of_ours(route, options):
    """Our result."""
    if route == "hook":
        of_hf(options, custom_generate=GENERATOR)
        return GENERATOR.last_result
    if route == "generation_config":
        options = {"generation_config": GenerationConfig(**options)}
    elif options.keys() <= {*GenerateOptions.__annotations__, "return_dict_in_generate"}:
        options = {n: v for n, v in options.items() if n != "return_dict_in_generate"}
    return GENERATOR.generate(**PROMPT, **options, tokenizer=TOKENIZER)


def shipping(monkeypatch, name, value):
    config = GenerationConfig(pad_token_id=0)
    if value is not None:
        setattr(config, name, value)
    monkeypatch.setattr(MODEL, "generation_config", config)


def test_the_tables_have_every_field_of_hfs():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields <= FIELDS.keys() | REFUSED.keys() | ELSEWHERE
    assert REFUSED.keys() | {"constraints"} == UNSUPPORTED.keys()


def of_fields():
    """All combinations; by default of each field and case one route, and the next one for the next
    field.
    """
    return [
        case([name, route, each], (i + j + k) % 3 == 0)
        for i, name in enumerate(FIELDS)
        for j, route in enumerate(ROUTES)
        for k, each in enumerate(CASES)
    ]


@pytest.mark.filterwarnings("ignore:.* has no effect:UserWarning")
@pytest.mark.parametrize(("name", "route", "case"), of_fields())
def test_a_field_means_what_it_means_in_hf(name, route, case, monkeypatch):
    value, base = FIELDS[name]
    ships, says = CASES[case]
    is_option = name in GenerateOptions.__annotations__
    if not hasattr(GenerationConfig(), name):
        pytest.skip(f"this version of transformers has no {name}")
    shipping(monkeypatch, name, value if ships else None)
    options = {**base, **KEPT, name: value if says else None}
    if route == "keyword" and not is_option:
        with pytest.raises(TypeError, match=f"unknown option '{name}': "):
            GENERATOR.generate(**PROMPT, **base, **{name: options[name]})
        return
    if not says and name in NO_NONE and route != "generation_config":
        with pytest.raises((TypeError, ValueError)):
            of_hf(options)
        return
    if (name, route, ships, says) == ("stop_strings", "hook", True, False):
        with pytest.raises(ValueError, match="could not locate a tokenizer"):  # HF's own words
            of_ours(route, options)
        return
    result = of_ours(route, options)
    asked = options if route != "generation_config" else GenerationConfig(**options)
    if name == "use_cache":  # HF's own text is another one with use_cache=None
        asked = base | KEPT
    forced = None if result.seeds is None else result.new_tokens
    if isinstance(asked, GenerationConfig):
        asked = {"generation_config": asked}
    expected = of_hf(asked, forced)
    if isinstance(expected, torch.Tensor):
        assert result.sequences.equal(expected)
        return
    assert result.sequences.equal(expected.sequences)
    for ours, theirs in ((result.scores, expected.scores), (result.logits, expected.logits)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_field_of_another_search_is_refused(name, route, monkeypatch):
    """Where the model ships it, its `None` turns it off."""
    shipping(monkeypatch, name, None)
    options = {**SHORT, name: REFUSED[name]}
    if not hasattr(GenerationConfig(), name):
        pytest.skip(f"this version of transformers has no {name}")
    with pytest.raises((TypeError, ValueError), match=f"{name}|trust_remote_code|num_mtp_layers"):
        of_ours(route, options)


def test_scores_are_kept_where_the_call_does_not_turn_them_off(monkeypatch):
    shipping(monkeypatch, "output_scores", True)
    assert GENERATOR.generate(**PROMPT, **SHORT).scores is not None
    assert GENERATOR.generate(**PROMPT, **SHORT, output_scores=None).scores is None


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("route", ROUTES[1:])
def test_a_setting_of_hfs_caches_without_effect_is_named(name, route, monkeypatch):
    shipping(monkeypatch, name, None)
    with pytest.warns(UserWarning, match=f"{name}=.* has no effect: .*; leave it out"):
        of_ours(route, {**SHORT, name: FIELDS[name][0]})


def test_none_of_several_options_at_once_and_beside_a_configuration(monkeypatch):
    """The control: without them the shipped values hold."""
    config = GenerationConfig(do_sample=True, top_k=2, top_p=0.3, temperature=0.5, pad_token_id=0)
    monkeypatch.setattr(MODEL, "generation_config", config)
    off, call = dict.fromkeys(("top_k", "top_p", "temperature", "min_p")), {**SHORT, "seed": 1}
    for given in (off, off | {"generation_config": GenerationConfig(do_sample=True)}):
        filters = GENERATOR.generate(**PROMPT, **call, **given).sampling.logits_filter
        assert filters == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    shipped = GENERATOR.generate(**PROMPT, **call).sampling
    assert (shipped.temperature, shipped.top_k, shipped.top_p) == (0.5, 2, 0.3)
    neutral = GENERATOR.generate(**PROMPT, **call, neutral=True, do_sample=True, **off).sampling
    assert neutral.logits_filter == filters
