"""`model.generate(custom_generate=generator)` reads what HF passes on, and refuses what it would
otherwise ignore.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import GenerationConfig

from specdec import ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
IDS, MASK = ragged_prompts(VOCAB, 3, 6)
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}


def hooked(ids=IDS, **options):
    return MODEL.generate(ids, custom_generate=GENERATOR, **{**OPTIONS, **options})


@pytest.mark.parametrize("column", [0, 2, -1])
def test_a_mask_of_ones_says_that_the_padding_id_is_a_token(column):
    ids = torch.tensor([[5, 9, 2, 7], [4, 8, 3, 6]])
    ids[0, column] = 0
    expected = MODEL.generate(ids, attention_mask=torch.ones_like(ids), **OPTIONS)
    found = hooked(ids, attention_mask=torch.ones_like(ids))
    assert torch.equal(found, expected)


def test_without_a_mask_padding_is_told_as_hf_tells_it():
    assert torch.equal(hooked(), MODEL.generate(IDS, **OPTIONS))


def test_positions_that_follow_from_the_mask_are_accepted_and_others_refused():
    positions = (MASK.cumsum(dim=1) - 1).clamp(min=0)
    expected = MODEL.generate(IDS, attention_mask=MASK, **OPTIONS)
    assert torch.equal(hooked(attention_mask=MASK, position_ids=positions), expected)
    for wrong in (positions + 1, positions.flip(1)):
        with pytest.raises(ValueError, match=r"position_ids other than 0, 1, 2.* leave pos"):
            hooked(attention_mask=MASK, position_ids=wrong)


REFUSED = {
    "force_words_ids": [[3]],
    "constraints": [object()],
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "num_assistant_tokens": 7,
    "num_assistant_tokens_schedule": "heuristic_transient",
    "assistant_confidence_threshold": 0.9,
    "assistant_ensemble_weight": 0.5,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mode_of_hfs_that_would_be_dropped_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*(drafter|use HF generate)"):
        hooked(attention_mask=MASK, **{name: REFUSED[name]})


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_tensors_that_no_result_holds_are_refused_with_the_reason(name):
    """As a keyword of either way, and in a configuration."""
    config = GenerationConfig(**{name: True}, return_dict_in_generate=True)
    for call, error in (
        (lambda: hooked(attention_mask=MASK, **{name: True}), ValueError),
        (lambda: GENERATOR.generate(IDS, MASK, **{name: True}), TypeError),
        (lambda: GENERATOR.generate(IDS, MASK, generation_config=config), ValueError),
    ):
        with pytest.raises(error, match=f"{name}.*no result holds them .* use HF generate"):
            call()


def test_what_only_the_hook_could_be_asked_for_is_refused_with_the_reason_natively():
    with pytest.raises(TypeError, match="unknown option 'num_beams': specdec decodes greedily or"):
        GENERATOR.generate(IDS, MASK, num_beams=3)


def test_processes_in_step_that_hf_drops_on_the_way_are_refused():
    with pytest.raises(ValueError, match="synced_gpus=True is not supported"):
        hooked(attention_mask=MASK, synced_gpus=True)
    assert hooked(attention_mask=MASK, synced_gpus=False).equal(hooked(attention_mask=MASK))


def test_an_assistant_model_that_hf_drops_on_the_way_is_refused():
    with pytest.raises(ValueError, match=r"assistant_model .*ModelDrafter"):
        hooked(attention_mask=MASK, assistant_model=perturbed(MODEL))


def test_hfs_own_defaults_of_assisted_generation_are_no_request():
    defaults = {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"}
    assert torch.equal(hooked(attention_mask=MASK, **defaults), hooked(attention_mask=MASK))
