"""Every public layout of EAGLE and mask-token heads, with each flag of its dialect, is read as its
producer means it, by the family that it is of.

What is read of EAGLE is also run: the logits of a first step's drafts are those of
`eagle_reference`, computed from the file's tensors and HF's own hidden states.
"""

import itertools

import pytest
import torch
from architectures import VOCAB
from checkpoint_cases import DFLASH, EAGLE3, EAGLE_CASES, MASK_CASES, SPECULATORS, own_names
from checkpoint_files import (
    DRAFT_VOCAB,
    HIDDEN,
    TARGET,
    Files,
    full_vocabulary,
    read,
    rope,
    survey,
    tiny_llama,
)
from checkpoint_layouts import (
    IDS,
    MASK_LAYOUTS,
    amazon,
    deepspec,
    nvidia,
    pard,
    safeailab_eagle3,
    specforge,
    specforge_peagle,
    speculators,
    vllm,
    z_lab,
)
from eagle_heads import features_and_logits, flagged
from eagle_reference import draft_outputs
from mtp_checkpoints import write_numbered

from specdec import EagleDrafter, MaskTokenDrafter, SpeculativeGenerator, Target
from specdec.checkpoints import files as checkpoint_files
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.checkpoints.mtp import MTP
from specdec.checkpoints.survey import family_of
from specdec.lab.inspection import alternatives

TARGET64 = tiny_llama().double()
WRAPPED64 = Target(TARGET64)
PROMPT = torch.tensor([[5, 17, 3, 41, 22, 8, 60, 13]])
GREEDY = {"max_new_tokens": 5, "do_sample": False}
PLAIN = SpeculativeGenerator(WRAPPED64, None).generate(PROMPT, **GREEDY).sequences
ORDERS = (EAGLE, MASK_TOKEN, MTP), (MTP, MASK_TOKEN, EAGLE)


def check_read(case, folder, family):
    """Family, configuration and tensors are the expected ones."""
    files, expected, _ = case
    for order in ORDERS:
        assert family_of(files.write(folder), families=order) is family
    checkpoint, (tensors, d2t) = read(folder), own_names(files, expected)
    assert checkpoint.config == expected
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert checkpoint.tensors[name].equal(tensor), name
    ids = None if d2t is None else torch.arange(DRAFT_VOCAB) + d2t
    assert checkpoint.target_ids is None if ids is None else checkpoint.target_ids.equal(ids)
    return checkpoint


def published_logits(files, config, drafted):
    """Logits `[K, Vd]` of K draft steps behind `PROMPT`, by the published wiring, in float64."""
    weights = {name: tensor.double() for name, tensor in own_names(files, config)[0].items()}
    features, _ = features_and_logits(TARGET64, PROMPT, config.feature_layers)
    modules = TARGET64.get_input_embeddings(), TARGET64.get_output_embeddings()
    tables = [module.weight.detach() for module in modules]
    return draft_outputs(config, weights, tables, PROMPT[0].tolist(), features[0, :-1], drafted)[0]


@pytest.mark.parametrize("case", EAGLE_CASES, ids=str)
def test_an_eagle_head_is_read_and_drafts_as_its_producer_means(case, tmp_path):
    ids = check_read(case, tmp_path, EAGLE).target_ids
    drafter = EagleDrafter.from_pretrained(tmp_path, TARGET64, num_draft_tokens=4)
    seen, logits = [], drafter.head.logits
    drafter.head.logits = lambda *args: seen.append(logits(*args)) or seen[-1]
    generator = SpeculativeGenerator(WRAPPED64, drafter)
    result = generator.generate(PROMPT, trace=True, **GREEDY)
    drafted = result.trace[0][0].draft_tokens
    published = published_logits(case.files, case.config, drafted)
    assert torch.cat(seen[:4], dim=1)[0].sub(published).abs().max() < 1e-9
    best = published.argmax(dim=1)
    assert (best if ids is None else ids[best]).tolist() == drafted
    assert result.sequences.equal(PLAIN)


@pytest.mark.parametrize("case", MASK_CASES, ids=str)
def test_a_mask_token_head_is_read_as_its_producer_means(case, tmp_path):
    checkpoint = check_read(case, tmp_path, MASK_TOKEN)
    head = checkpoint.build()
    assert all(t.equal(checkpoint.tensors[name]) for name, t in head.state_dict().items())
    assert head.training is False
    if "vocab_size" not in case.files.config and "speculators_version" not in case.files.config:
        with pytest.raises(ValueError, match="leaves vocab_size to the target: pass one"):
            survey(tmp_path, None)
        return
    found = survey(tmp_path, None)
    assert found.config == case.config
    assert found.faults == ()
    assert found.unread_keys == ()


def test_a_case_read_as_another_would_show_in_the_logits():
    logits = {}
    for files, config, _ in EAGLE_CASES:
        flags = repr(flagged(config, max_position_embeddings=1))
        logits[flags] = published_logits(files, config, [7, 8, 9, 10])
    assert len(logits) > 30
    for (a, x), (b, y) in itertools.combinations(logits.items(), 2):
        assert x.shape != y.shape or (x - y).abs().max() > 1e-3, (a, b)


@pytest.mark.parametrize("write", MASK_LAYOUTS)
def test_a_layout_without_more_words_is_a_mask_token_head_in_any_order(write, tmp_path):
    folder = write().write(tmp_path)
    assert {family_of(folder, families=order) for order in ORDERS} == {MASK_TOKEN}


def test_modules_among_more_tensors_than_are_read_are_found_in_any_order(tmp_path, monkeypatch):
    _, tensors = write_numbered(tmp_path, "DeepseekV3", num_depths=1)
    of_modules = sum("layers.3." in name for name in tensors)
    monkeypatch.setattr(checkpoint_files, "MAX_TENSORS", of_modules)
    assert {family_of(tmp_path, families=order) for order in ORDERS} == {MTP}


# Containers, names and tables.


@pytest.mark.parametrize("container", ["sharded", "bin", "sharded bin"])
def test_containers_hold_the_same_head(container, tmp_path):
    options = {"allow_pickle": True} if container.endswith("bin") else {}
    other = read(nvidia().write(tmp_path / "other", container), **options)
    plain = read(nvidia().write(tmp_path / "plain"))
    assert other.config == plain.config
    assert all(other.tensors[name].equal(plain.tensors[name]) for name in plain.tensors)


def test_safetensors_are_preferred_to_a_pickle(tmp_path):
    files = safeailab_eagle3()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in files.tensors.items()}
    Files(files.config, zeros).write(tmp_path, "bin")
    files.write(tmp_path)
    found = read(tmp_path, allow_pickle=True).tensors
    assert found["fc.weight"].equal(files.tensors["fc.weight"])


@pytest.mark.parametrize("prefix", ["model.", "speculator.", "speculator.model."])
def test_prefixes_of_wrapping_modules_are_dropped(prefix, tmp_path):
    files, bare = vllm(), ("d2t", "t2d", "lm_head.weight")
    wrapped = {k if k in bare else prefix + k: t for k, t in files.tensors.items()}
    checkpoint = read(Files(files.config, wrapped).write(tmp_path))
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
    target = tiny_llama()
    table = target.get_input_embeddings().weight.detach().clone()
    odd = torch.nn.Parameter(table.as_subclass(Incomparable))
    target.get_input_embeddings().weight = odd
    files = safeailab_eagle3().plus({"embed_tokens.weight": table})
    checkpoint = read(files.write(tmp_path), target)
    assert checkpoint.config.has_embed_tokens
    assert checkpoint.tensors["embed_tokens.weight"].equal(table)


@pytest.mark.parametrize(("part", "prefix"), [("embed_tokens", "model."), ("lm_head", "")])
@pytest.mark.parametrize("is_copy", [True, False])
def test_a_copy_of_the_targets_own_part_is_shared(part, prefix, is_copy, tmp_path):
    copy = TARGET.get_parameter(f"{prefix}{part}.weight").detach().clone()
    copy[3, 4] += 0 if is_copy else 0.001
    files = full_vocabulary(specforge(), draft_vocab_size=VOCAB)
    checkpoint = read(files.plus({f"{part}.weight": copy}).write(tmp_path))
    assert (part in checkpoint.shared) is is_copy
    assert (f"{part}.weight" in checkpoint.tensors) is not is_copy


def test_a_tied_table_that_is_the_targets_stays(tmp_path):
    table = TARGET.get_input_embeddings().weight.detach().clone()
    checkpoint = read(pard(tied=True).plus({"model.embed_tokens.weight": table}).write(tmp_path))
    assert checkpoint.tensors["embed_tokens.weight"].equal(table)
    hidden = torch.randn(1, 3, HIDDEN)
    torch.testing.assert_close(checkpoint.build().unembed(hidden), hidden @ table.T)


@pytest.mark.parametrize(("own", "cut"), [(VOCAB + 5, VOCAB), (VOCAB - 5, VOCAB - 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_padding_of_a_pard_models_vocabulary_is_cut_or_left_out(own, cut, tied, tmp_path):
    files = pard(vocab_size=own, tied=tied)
    checkpoint = read(files.write(tmp_path))
    config, table = checkpoint.config, files.tensors["model.embed_tokens.weight"]
    assert (config.vocab_size, config.draft_vocab_size) == (VOCAB, cut)
    embeddings = checkpoint.tensors["embed_tokens.weight"]
    assert embeddings.shape == (VOCAB, HIDDEN)
    assert embeddings[:cut].equal(table[:cut])
    assert not bool(embeddings[own:].any())
    drafter = MaskTokenDrafter(checkpoint.build(), TARGET, 2)
    logits = drafter.head.over_target_ids(drafter.logits(torch.randn(1, 3, HIDDEN)))
    assert logits.shape == (1, 3, VOCAB)
    assert bool(logits[..., own:].isinf().all())
    assert bool(logits[..., :cut].isfinite().all())


# What a caller may know better, and what is told.

NUMBERINGS = {
    "top level": (lambda ids: vllm(ids=ids), 0),
    "another key": (lambda ids: vllm(**{IDS: ..., "aux_hidden_state_layer_ids": ids}), 0),
    "TensorRT-LLM": (lambda ids: vllm(**{IDS: ..., "eagle3_layers_to_capture": ids}), 1),
    "speculators": (lambda ids: speculators(ids=ids), 0),
    "SpecForge": (lambda ids: specforge(ids=ids), 1),
    "NVIDIA": (lambda ids: nvidia(ids=ids), 0),
    "DeepSpec": (lambda ids: deepspec(ids=ids), 1),
}


@pytest.mark.parametrize("numbering", NUMBERINGS)
def test_every_numbering_becomes_that_of_hidden_states_and_can_be_overridden(numbering, tmp_path):
    make, shift = NUMBERINGS[numbering]
    folder = make([1, 3, 6]).write(tmp_path)
    shifted, as_they_are = (2, 4, 7), (1, 3, 6)
    assert survey(folder).config.feature_layers == (shifted if shift else as_they_are)
    for convention, expected in (("hidden_state", as_they_are), ("layer_output", shifted)):
        found = survey(folder, layer_convention=convention)
        assert found.config.feature_layers == expected
        assert any("as asked for" in note for note in found.notes)
    explicit = survey(folder, feature_layers=(8, 0, "final"))
    assert explicit.config.feature_layers == (8, 0, "final")


def test_keys_that_agree_may_stand_side_by_side_and_name_the_last_hidden_state(tmp_path):
    files = specforge(ids=[1, 3, 7], **{IDS: [2, 4, 8]})
    assert survey(files.write(tmp_path)).config.feature_layers == (2, 4, 8)


FIVE = safeailab_eagle3().plus({"fc.weight": (HIDDEN, 5 * HIDDEN)})
ASKED = [
    (speculators(), SPECULATORS, {"norm_before_residual": True, "feedback_norm": True}),
    (FIVE, EAGLE3, {"feature_layers": (0, 2, 4, 6, 8)}),
    (z_lab(), DFLASH, {"alignment": "next-token"}),
    (z_lab(), DFLASH, {"is_causal": True}),
    (z_lab(), DFLASH, {"feature_layers": (1, 4)}),
]
FOUND = [
    (speculators(), {"rope_theta": 77.0}, SPECULATORS, {"rope": rope(77)}),
    (z_lab(), {"layer_convention": "hidden_state"}, DFLASH, {"feature_layers": (1, 4)}),
    (z_lab(), {"layer": {"windows": (4, None)}}, DFLASH, {"windows": (4, None)}),
]


@pytest.mark.parametrize(
    ("files", "options", "config", "changes"),
    [*((files, asked, config, asked) for files, config, asked in ASKED), *FOUND],
)
def test_a_caller_may_know_better(files, options, config, changes, tmp_path):
    found = survey(files.write(tmp_path), **options)
    assert found.config == flagged(config, **changes)
    assert "asked for" in " ".join(found.notes)


@pytest.mark.parametrize("write", [specforge_peagle, amazon])
def test_the_id_of_a_mask_can_be_asked_for(write, tmp_path):
    assert survey(write().write(tmp_path), mask_token_id=4).config.mask_token_id == 4


def test_default_hidden_states_wait_for_a_target(tmp_path):
    found = survey(safeailab_eagle3().write(tmp_path), None)
    assert found.config.feature_layers == (2, "N//2", "N-3")
    assert not found.faults


NOTES = [
    ("NVIDIA's training routes differ", nvidia()),
    ("50170", nvidia(ids=None)),
    ("no rope_theta: base 10000", safeailab_eagle3()),
    ("norm_output is taken as SpecForge's", specforge(norm_output=True)),
    ("vLLM would take it for true", speculators(norm_before_residual=...)),
    ("after the final norm", deepspec()),
    ("the latter counts", specforge(rope_parameters=rope(5))),
]


@pytest.mark.parametrize(("note", "files"), NOTES)
def test_doubtful_readings_are_noted(note, files, tmp_path):
    assert note in "\n".join(survey(files.write(tmp_path)).notes)


def test_unexpected_tensors_can_be_ignored_by_name_and_harmless_ones_are(tmp_path):
    extra = {"extra.weight": (3,), "layers.0.input_norm.bias": (3,)}
    found = survey(vllm().plus(extra).write(tmp_path), ignore_tensors=list(extra))
    assert found.unread == dict.fromkeys(extra, "ignored on request")
    assert found.load(TARGET).tensors.keys().isdisjoint(extra)
    names = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")
    harmless = dict.fromkeys((*names, "verifier_norm.weight"), (4,))
    found = survey(vllm().plus(harmless).write(tmp_path))
    assert set(found.unread) == set(harmless)
    assert not found.faults


def test_other_readings_are_those_that_the_tensors_allow(tmp_path):
    names = {}
    for kind, files in {"p-eagle": amazon(), "pard": pard(), "dflash": z_lab()}.items():
        found = survey(files.write(tmp_path / kind))
        readings = alternatives(found, found.load(TARGET), TARGET)
        names[kind] = [reading.name for reading in readings]
        for reading in readings:
            reading.checkpoint.build()  # the same tensors fit
    higher = "one layer higher: hidden states {}".format
    assert names["pard"] == ["as read", "rope base 10000, the target's"]
    lower = "one layer lower: hidden states {}".format
    assert names["p-eagle"][:3] == ["as read", lower("1, 3, 4"), higher("3, 5, 6")]
    assert "norm_before_residual True" in names["p-eagle"]
    assert "d2t as absolute ids" not in names["dflash"]
    others = ["alignment next-token", "is_causal True"]
    assert names["dflash"][1:5] == [lower("1, 4"), higher("3, 6"), *others]
