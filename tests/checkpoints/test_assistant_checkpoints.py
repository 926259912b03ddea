"""Folders with assistants of Gemma 4, as transformers writes them."""

import copy
import json

import pytest
import torch
from assistants import SHAPES, assistant_of_plain, drafter_of, pair
from diagonal import first
from drafter_table import MODEL
from refusals import refused
from safetensors.torch import load_file, save_file

from specdec import AssistantDrafter, SpeculativeGenerator
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.assistant import ASSISTANT
from specdec.drafters.assistant import AssistantHead
from specdec.lab.cli import main
from specdec.loading import load_drafter

PROMPT = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "trace": True}


def steps_of(model, drafter):
    generator = SpeculativeGenerator(model, drafter)
    result = generator.generate(torch.tensor([[7, 3, 21, 40, 11]]), eos_token_id=None, **PROMPT)
    return [*map(vars, result.trace[0])]


@pytest.fixture(name="folder")
def _folder(tmp_path):
    pair("E2B")[1].save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    """Changes the tensors of a folder in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, section=None, **values):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config if section is None else config[section]).update(values)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("shape", first(SHAPES, ["E2B", "31B"]))
def test_a_folder_is_recognised_and_drafts_as_the_model_that_was_saved(tmp_path, shape):
    model, assistant = pair(shape)
    assistant.save_pretrained(tmp_path)
    drafter = load_drafter(str(tmp_path), model, 3)
    assert type(drafter) is AssistantDrafter
    assert steps_of(model, drafter) == steps_of(model, drafter_of(shape, 3))
    named = load_drafter(f"assistant:{tmp_path}", model, tree="6x3", proposal="argmax")
    assert (named.tree_depth, named.proposal.kind) == (3, "argmax")
    survey = survey_checkpoint(tmp_path, model, families=(ASSISTANT,))
    assert (survey.faults, survey.unread, survey.unread_keys) == ((), {}, ())


def test_weights_take_the_data_type_of_the_target_and_ids_stay_ids(folder):
    model = copy.deepcopy(pair("E2B")[0]).to(torch.bfloat16)
    edit(folder, lambda x: x.update({ORDERING: x[ORDERING].int()}))
    drafter = AssistantDrafter.from_pretrained(folder, model, 3)
    assert drafter.head.dtype == torch.bfloat16
    assert drafter.head.token_ordering.dtype == torch.int32
    assert len(steps_of(model, drafter)) > 2


def test_a_head_in_another_data_type_than_its_target_drafts():
    model = pair("31B")[0]
    drafter = drafter_of("31B", 3)
    drafter.head.to(torch.bfloat16)
    assert len(steps_of(model, drafter)) > 2


def test_a_vocabulary_head_that_is_not_tied_is_read(tmp_path):
    model, assistant = pair("31B")
    assistant = copy.deepcopy(assistant)
    assistant.config.tie_word_embeddings = assistant.config.text_config.tie_word_embeddings = False
    assistant.lm_head.weight = torch.nn.Parameter(-assistant.lm_head.weight)
    assistant.save_pretrained(tmp_path)
    drafter = AssistantDrafter.from_pretrained(tmp_path, model, 3)
    assert drafter.head.lm_head.weight.equal(assistant.lm_head.weight)
    assert steps_of(model, drafter) == steps_of(
        model, AssistantDrafter(AssistantHead.of(assistant), model, 3)
    )


def test_inspect_names_it(folder, capsys):
    main(["inspect", str(folder)])
    said = capsys.readouterr().out
    assert "Google (model_type gemma4_assistant)" in said
    assert "Gemma 4 assistant, 3 layers of Gemma4TextDecoderLayer, width 96" in said
    assert "the state after the final norm; 32 wide" in said
    assert "num_centroids 12, top_centroids 4" in said
    assert "none missing, none unexpected" in said


ORDERING = "masked_embedding.token_ordering"
DAMAGES = {
    "lacks a tensor": (lambda x: x.pop("pre_projection.weight"), "missing pre_projection.weight"),
    "has one more": (lambda x: x.update(extra=torch.zeros(2)), "unexpected extra"),
    "a weight that is not finite": (
        lambda x: x["post_projection.weight"].fill_(torch.nan),
        "NaN or infinity in post_projection.weight",
    ),
    "ids as numbers": (lambda x: x.update({ORDERING: x[ORDERING].half()}), "is stored as F16"),
    "ids twice": (lambda x: x[ORDERING].fill_(3), "token_ordering must hold every id .. once"),
    "integers for weights": (
        lambda x: x.update({"pre_projection.weight": x["pre_projection.weight"].long()}),
        "pre_projection.weight is stored as I64",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(folder, name):
    change, message = DAMAGES[name]
    edit(folder, change)
    with refused(message):
        AssistantDrafter.from_pretrained(folder, pair("E2B")[0])


CONFIGS = {
    "another target": ({"backbone_hidden_size": 33}, "a hidden size of 33 .. has 32"),
    "centroids that do not share out": ({"num_centroids": 7}, "num_centroids 7 .. of 60"),
    "more than there are": (
        {"centroid_intermediate_top_k": 13},
        "num_centroids 12 (the best 13 of them",
    ),
    "no number of layers": ({"section": "text_config", "num_hidden_layers": "3"}, "an integer in"),
    "a value that HF refuses": (
        {"section": "text_config", "hidden_size_per_layer_input": 4},
        "hidden_size_per_layer_input",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_that_cannot_be_is_refused(folder, name):
    values, message = CONFIGS[name]
    edit_config(folder, **values)
    with refused(message):
        AssistantDrafter.from_pretrained(folder, pair("E2B")[0])


def test_targets_whose_keys_it_cannot_read_are_refused():
    head = AssistantHead.of(pair("E2B")[1])
    with refused("made for a target with a vocabulary of 60 .. has 61"):
        AssistantDrafter(head, MODEL)
    kinds = ["sliding_attention", "full_attention"]
    with refused("reads keys of sliding_attention .. LlamaForCausalLM has none that fit"):
        assistant_of_plain(MODEL, {}, layer_types=kinds)
    with refused("reads keys of full_attention with 4 heads of 16 .. none that fit"):
        assistant_of_plain(MODEL, {}, global_head_dim=16)
    with refused("reads keys of full_attention with 3 heads of 8 .. none that fit"):
        assistant_of_plain(MODEL, {}, num_attention_heads=3, num_key_value_heads=1)
    elsewhere = copy.deepcopy(pair("E2B")[0])
    elsewhere.model.layers.to("meta")  # and the embeddings are here
    with refused("the assistant is on cpu, and layer 2 of its target is on another .. load both"):
        AssistantDrafter(head, elsewhere)


def test_what_an_assistant_does_not_have_is_refused():
    drafter = drafter_of("31B")
    with refused("transformers writes assistants .. save_pretrained of the HF model"):
        drafter.save_pretrained("nowhere")
    with refused("an assistant has no vocabulary map"):
        AssistantHead(drafter.config, torch.arange(60))
