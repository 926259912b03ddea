"""Every public layout of EAGLE checkpoints, with each flag of its dialect, is read as published.

What is read is also run: the logits of a first step's drafts are those of `eagle_reference`,
computed from the file's tensors and HF's own hidden states.
"""

import itertools

import pytest
import torch
from architectures import VOCAB
from checkpoint_cases import CASES, EAGLE3, SPECULATORS
from checkpoint_parts import (
    DRAFT_VOCAB,
    TARGET,
    Files,
    full_vocabulary,
    own_names,
    read_checkpoint,
    rope,
    survey_checkpoint,
    tiny_llama,
)
from checkpoint_writer import (
    deepspec,
    nvidia,
    safeailab_eagle3,
    specforge,
    speculators,
    vllm,
)
from eagle_heads import features_and_logits, flagged
from eagle_reference import draft_outputs

from specdec import SpeculativeGenerator, Target
from specdec.drafters import EagleDrafter

TARGET64 = tiny_llama().double()
WRAPPED64 = Target(TARGET64)
PROMPT = torch.tensor([[5, 17, 3, 41, 22, 8, 60, 13]])
GREEDY = {"max_new_tokens": 5, "do_sample": False}
PLAIN = SpeculativeGenerator(WRAPPED64, None).generate(PROMPT, **GREEDY).sequences


def published_logits(files, config, drafted):
    """Logits `[K, Vd]` of K draft steps behind `PROMPT`, by the published wiring, in float64."""
    weights, _ = own_names(files, config)
    features, _ = features_and_logits(TARGET64, PROMPT, config.feature_layers)
    weights = {name: tensor.double() for name, tensor in weights.items()}
    modules = TARGET64.get_input_embeddings(), TARGET64.get_output_embeddings()
    tables = [module.weight.detach() for module in modules]
    return draft_outputs(config, weights, tables, PROMPT[0].tolist(), features[0, :-1], drafted)[0]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_is_read_as_its_producer_means_it(case, tmp_path):
    files, expected = CASES[case]
    checkpoint = read_checkpoint(files.write(tmp_path), TARGET)
    assert checkpoint.config == expected
    weights, d2t = own_names(files, expected)
    assert checkpoint.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert checkpoint.tensors[name].equal(tensor), name
    if d2t is None:
        assert checkpoint.target_ids is None
    else:
        assert checkpoint.target_ids.equal(torch.arange(DRAFT_VOCAB) + d2t)
    drafter = EagleDrafter.from_pretrained(tmp_path, TARGET64, num_draft_tokens=4)
    seen, logits = [], drafter.head.logits
    drafter.head.logits = lambda *args: seen.append(logits(*args)) or seen[-1]
    generator = SpeculativeGenerator(WRAPPED64, drafter)
    result = generator.generate(PROMPT, trace=True, **GREEDY)
    drafted = result.trace[0][0].draft_tokens
    published = published_logits(files, expected, drafted)
    assert torch.cat(seen[:4], dim=1)[0].sub(published).abs().max() < 1e-9
    ids = torch.arange(published.shape[1]) + (0 if d2t is None else d2t)
    assert ids[published.argmax(dim=1)].tolist() == drafted
    assert result.sequences.equal(PLAIN)


def test_a_case_read_as_another_would_show_in_the_logits():
    logits = {}
    for files, config in CASES.values():
        flags = repr(flagged(config, max_position_embeddings=1))
        logits[flags] = published_logits(files, config, [7, 8, 9, 10])
    assert len(logits) > 30
    for (a, x), (b, y) in itertools.combinations(logits.items(), 2):
        assert x.shape != y.shape or (x - y).abs().max() > 1e-3, (a, b)


@pytest.mark.parametrize("container", ["sharded", "bin", "sharded bin"])
def test_containers_hold_the_same_head(container, tmp_path):
    files = nvidia()
    options = {"allow_pickle": True} if container.endswith("bin") else {}
    other = read_checkpoint(files.write(tmp_path / "other", container), TARGET, **options)
    plain = read_checkpoint(files.write(tmp_path / "plain"), TARGET)
    assert other.config == plain.config
    assert all(other.tensors[name].equal(plain.tensors[name]) for name in plain.tensors)


def test_safetensors_are_preferred_to_a_pickle(tmp_path):
    files = safeailab_eagle3()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in files.tensors.items()}
    Files(files.config, zeros).write(tmp_path, "bin")
    files.write(tmp_path)
    read = read_checkpoint(tmp_path, TARGET, allow_pickle=True).tensors
    assert read["fc.weight"].equal(files.tensors["fc.weight"])


@pytest.mark.parametrize("prefix", ["model.", "speculator.", "speculator.model."])
def test_prefixes_of_wrapping_modules_are_dropped(prefix, tmp_path):
    files = vllm()
    wrapped = {
        name if name in ("d2t", "t2d", "lm_head.weight") else prefix + name: tensor
        for name, tensor in files.tensors.items()
    }
    checkpoint = read_checkpoint(Files(files.config, wrapped).write(tmp_path), TARGET)
    assert checkpoint.config == EAGLE3
    assert checkpoint.tensors["fc.weight"].equal(files.tensors["fc.weight"])


def test_a_head_takes_the_type_and_the_modules_of_its_target(tmp_path):
    target = tiny_llama().to(torch.bfloat16)
    drafter = EagleDrafter.from_pretrained(safeailab_eagle3().write(tmp_path), target)
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}
    assert not any(name.startswith("head.embed_tokens") for name, _ in drafter.named_parameters())
    assert not any(p is target.lm_head.weight for p in drafter.parameters())


class Incomparable(torch.Tensor):
    """As torchao's quantised tables: a float by its type, without a comparison."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.equal:
            raise NotImplementedError(func)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_table_that_cannot_be_compared_is_no_copy(tmp_path):
    files = safeailab_eagle3()
    target = tiny_llama()
    table = target.get_input_embeddings().weight.detach().clone()
    odd = torch.nn.Parameter(table.as_subclass(Incomparable))
    target.get_input_embeddings().weight = odd
    checkpoint = read_checkpoint(files.plus(embed_tokens__weight=table).write(tmp_path), target)
    assert checkpoint.config.has_embed_tokens
    assert checkpoint.tensors["embed_tokens.weight"].equal(table)


@pytest.mark.parametrize("part", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("is_copy", [True, False])
def test_a_copy_of_the_targets_own_part_is_shared(part, is_copy, tmp_path):
    own = TARGET.get_parameter(
        "lm_head.weight" if part == "lm_head" else "model.embed_tokens.weight"
    )
    copy = own.detach().clone()
    if not is_copy:
        copy[3, 4] += 0.001
    files = full_vocabulary(specforge(), draft_vocab_size=VOCAB)
    checkpoint = read_checkpoint(files.plus(**{f"{part}.weight": copy}).write(tmp_path), TARGET)
    assert (part in checkpoint.shared) is is_copy
    assert (f"{part}.weight" in checkpoint.tensors) is not is_copy


NUMBERINGS = {
    "top level": (lambda ids: vllm(ids=ids), 0),
    "aux_hidden_state_layer_ids": (
        lambda ids: vllm().but(
            eagle_aux_hidden_state_layer_ids=..., aux_hidden_state_layer_ids=ids
        ),
        0,
    ),
    "TensorRT-LLM": (
        lambda ids: vllm().but(eagle_aux_hidden_state_layer_ids=..., eagle3_layers_to_capture=ids),
        1,
    ),
    "speculators": (lambda ids: speculators(ids=ids), 0),
    "SpecForge": (lambda ids: specforge(ids=ids), 1),
    "NVIDIA": (lambda ids: nvidia(ids=ids), 0),
    "DeepSpec": (lambda ids: deepspec(ids=ids), 1),
}


@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_every_numbering_becomes_boundaries_and_can_be_overridden(numbering, tmp_path):
    make, shift = NUMBERINGS[numbering]
    folder = make([1, 3, 6]).write(tmp_path)
    shifted, as_they_are = (2, 4, 7), (1, 3, 6)
    usual = survey_checkpoint(folder, TARGET)
    assert usual.config.feature_layers == (shifted if shift else as_they_are)
    for convention, expected in (("boundary", as_they_are), ("layer_output", shifted)):
        survey = survey_checkpoint(folder, TARGET, layer_convention=convention)
        assert survey.config.feature_layers == expected
        assert any("as asked for" in note for note in survey.notes)
    explicit = survey_checkpoint(folder, TARGET, feature_layers=(8, 0, "final"))
    assert explicit.config.feature_layers == (8, 0, "final")


def test_keys_that_agree_may_stand_side_by_side_and_name_the_last_boundary(tmp_path):
    files = specforge(ids=[1, 3, 7]).but(eagle_aux_hidden_state_layer_ids=[2, 4, 8])
    assert survey_checkpoint(files.write(tmp_path), TARGET).config.feature_layers == (2, 4, 8)


def test_other_values_can_be_asked_for(tmp_path):
    folder = speculators().write(tmp_path)
    options = {"rope_theta": 77.0, "norm_before_residual": True, "feedback_norm": True}
    config = survey_checkpoint(folder, TARGET, **options).config
    changes = {**options, "rope": rope(77)}
    del changes["rope_theta"]
    assert config == flagged(SPECULATORS, **changes)


def test_default_boundaries_wait_for_a_target(tmp_path):
    survey = survey_checkpoint(safeailab_eagle3().write(tmp_path))
    assert survey.config.feature_layers == (2, "N//2", "N-3")
    assert not survey.faults


def test_doubtful_readings_are_noted(tmp_path):
    def notes(files, name):
        return "\n".join(survey_checkpoint(files.write(tmp_path / name), TARGET).notes)

    assert "NVIDIA's training routes differ" in notes(nvidia(), "a")
    assert "50170" in notes(nvidia(ids=None), "b")
    assert "no rope_theta: base 10000" in notes(safeailab_eagle3(), "c")
    assert "norm_output is taken as SpecForge's" in notes(specforge(norm_output=True), "d")
    assert "vLLM would take it for true" in notes(speculators().but(norm_before_residual=...), "e")
    assert "after the final norm" in notes(deepspec(), "f")
    conflict = specforge().but(rope_parameters={"rope_theta": 5.0, "rope_type": "default"})
    assert "the latter counts" in notes(conflict, "g")


def test_keys_that_nothing_reads_are_listed(tmp_path):
    files = nvidia(eagle={"new_norm": True}, new_flag=1)
    survey = survey_checkpoint(files.write(tmp_path), TARGET)
    assert survey.unread_keys == ("eagle_config.new_norm", "new_flag")
