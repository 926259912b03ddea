"""`specdec inspect` shows the reading, and its parity check finds a head that is read wrongly.

The heads of these tests are fitted to a random target under one reading and stored so that they are
read in another, as happens to public heads. The check must name the reading that they were fitted
under.
"""

import functools
import re

import pytest
import torch
from checkpoint_cases import FC_NORMS
from checkpoint_files import tiny_llama
from checkpoint_layouts import (
    nvidia,
    pard,
    safeailab_eagle1,
    safeailab_eagle3,
    specforge,
    specforge_peagle,
    z_lab,
)
from diagonal import first
from eagle_heads import flagged, head_for
from eagle_heads import learned as learned_eagle
from mask_heads import learned
from safetensors.torch import load_file, save_file

from specdec import SpeculativeGenerator, Target, zoo
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.drafters import EagleDrafter, MaskTokenDrafter
from specdec.drafters.eagle import EagleHead
from specdec.lab.cli import main
from specdec.lab.inspection import Trial, alternatives, table, try_readings

ROPE = {"rope_type": "default", "rope_theta": 100.0}
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8}
TARGET = tiny_llama(rope_parameters=ROPE)
WRAPPED = Target(TARGET)
PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
NEW_TOKENS = 24


@functools.cache
def head_that_knows(name):
    """The greedy text after `PROMPTS`, by heart."""
    generator = SpeculativeGenerator(WRAPPED, None)
    text = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False).sequences
    if name == "dflash":
        return learned(TARGET, name, 2, text, feature_layers=(3, 5), rope=ROPE)
    wide = {"hidden_size": 128, "intermediate_size": 128, "has_embed_tokens": True}
    flags = wide | {"norm_before_residual": name == "residual", "rope": ROPE}
    return learned_eagle(TARGET, head_for(TARGET, feature_layers=(3, 5, 6), **flags), text)


def misread(head, **changes):
    """The same weights under a config that says something else."""
    other = type(head)(flagged(head.config, **changes), head.target_ids)
    other.load_state_dict(head.state_dict())
    return other


def saved(head, folder):
    drafter = EagleDrafter if isinstance(head, EagleHead) else MaskTokenDrafter
    drafter(head, TARGET, 2).save_pretrained(folder, "speculators", verifier="a/b")
    return folder


def compare(folder, **options):
    survey = survey_checkpoint(folder, TARGET, families=(EAGLE, MASK_TOKEN), **options)
    readings = alternatives(survey, survey.load(TARGET), TARGET)
    drafter = EagleDrafter if survey.family is EAGLE else MaskTokenDrafter
    options = {"max_new_tokens": NEW_TOKENS, "num_draft_tokens": 2}
    trials = try_readings(readings, drafter, TARGET, PROMPTS, **options)
    return max(trials, key=lambda trial: trial.acceptance_length).reading, table(trials)


FAULTS = {
    "layers": (
        "residual",
        {"feature_layers": (2, 4, 5)},
        "one layer higher: hidden states 3, 5, 6",
    ),
    "norm": ("residual", {"norm_before_residual": False}, "norm_before_residual True"),
    "rope base": ("rope", {"rope": ROPE | {"rope_theta": 1e6}}, "rope base 100, the target's"),
    "rows": ("dflash", {"alignment": "next-token"}, "alignment same-position"),
    "window": ("rope", {"windows": (3,)}, "without sliding windows"),
    "YaRN": ("rope", {"rope": ROPE | YARN}, "without rope scaling"),
    "partial": ("rope", {"rope": ROPE | {"partial_rotary_factor": 0.67}}, "whole heads turned"),
}


@pytest.mark.parametrize("fault", first(FAULTS, ["layers", "rope base", "rows"]))
def test_the_parity_check_names_the_fault(fault, tmp_path):
    name, changes, expected = FAULTS[fault]
    best, shown = compare(saved(misread(head_that_knows(name), **changes), tmp_path))
    assert best.name == expected, shown
    assert f"'{expected}' accepts more; to load the head so: {best.how}" in shown


@pytest.mark.parametrize("name", ["residual", "rope", "dflash"])
def test_the_parity_check_finds_no_fault_in_a_sound_head(name, tmp_path):
    best, shown = compare(saved(head_that_knows(name), tmp_path))
    assert best.name == "as read", shown
    assert "no usual misreading accepts more" in shown


def test_a_causal_reading_of_a_block_is_noticed(tmp_path):
    best, shown = compare(saved(head_that_knows("dflash"), tmp_path), is_causal=True)
    assert best.name == "is_causal False", shown


def test_the_parity_check_names_a_map_of_absolute_ids(tmp_path):
    """Absolute ids in the place of offsets can be a sound map by chance, and a useless one."""
    head = head_that_knows("residual")
    few = EagleHead(flagged(head.config, draft_vocab_size=30), torch.arange(30))
    weights = head.state_dict()
    few.load_state_dict(weights | {"lm_head.weight": weights["lm_head.weight"][:30]})
    path = saved(few, tmp_path) / "model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = torch.arange(30)  # draft id 3 would mean id 6 now
    del tensors["t2d"]
    save_file(tensors, path)
    best, shown = compare(tmp_path)
    assert best.name == "d2t as absolute ids", shown
    assert "to load the head so: store d2t as offsets" in shown


def test_each_alternative_is_what_its_options_load(tmp_path):
    folder = saved(head_for(TARGET, draft_vocab_size=20, feature_layers=(3, 5, 6)), tmp_path)
    survey = survey_checkpoint(folder, TARGET, families=(EAGLE,))
    readings = alternatives(survey, survey.load(TARGET), TARGET)
    readings = [r for r in readings if "d2t" not in r.how]
    assert len(readings) >= 6
    options = {"max_new_tokens": 8, "num_draft_tokens": 3}
    trials = try_readings(readings, EagleDrafter, TARGET, PROMPTS, **options)
    for trial in trials:
        options = eval(f"dict({trial.reading.how})")
        drafter = EagleDrafter.from_pretrained(folder, TARGET, 3, proposal="argmax", **options)
        result = SpeculativeGenerator(WRAPPED, drafter).generate(
            PROMPTS, max_new_tokens=8, do_sample=False
        )
        assert result.stats.acceptance_length == trial.acceptance_length, trial.reading.name


def test_a_head_of_final_features_is_tried_before_the_final_norm(tmp_path):
    no_aux = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}
    for i, files in enumerate((nvidia(eagle=no_aux).but("fc.weight"), safeailab_eagle1())):
        folder = files.write(tmp_path / str(i))
        survey = survey_checkpoint(folder, TARGET, families=(EAGLE,))
        readings = alternatives(survey, survey.load(TARGET), TARGET)
        names = {reading.name: reading for reading in readings}
        assert names["before the final norm"].checkpoint.config.feature_layers == (8,)
        assert names["as read"].checkpoint.config.feature_layers == ("final",)


def test_a_small_advantage_is_called_noise(tmp_path):
    folder = safeailab_eagle3().write(tmp_path)
    survey = survey_checkpoint(folder, TARGET, families=(EAGLE,))
    readings = alternatives(survey, survey.load(TARGET), TARGET)[:2]
    trials = [Trial(readings[0], 2.0, 0.1, [0.5]), Trial(readings[1], 2.3, 0.1, [0.6])]
    assert "within the noise" in table(trials)
    trials[1] = Trial(readings[1], 2.5, 0.1, [0.6])
    assert "accepts more; to load the head so: feature_layers=" in table(trials)


NORMS = specforge(ids=[1, 3, 4], norm_output=True, fc_norm=True).plus(FC_NORMS)
EAGLE_IDS = nvidia(ids=(1, 3, 6))
ROPE_7 = ["--rope-theta", "7"]
SHOWN = [
    (
        *(NORMS, []),
        [
            r"producer +SpecForge \(tensors midlayer",
            "head +EAGLE-3, 1 layer, width 32",
            "features +hidden state 2, hidden state 4, hidden state 5; 32 wide",
            "wiring +fusion attention, norm_before_fc False, fc_norm True",
            "rope +rope_theta 1000000.0",
            "vocabulary +20 draft ids, 61 of the target",
            "parts +embeddings: its own; vocabulary head: its own",
            "tensors +17 make up such a head: none missing, none unexpected",
            "note +eagle_config.eagle_aux.* are outputs of layers",
            "note +norm_output is taken as SpecForge's",
            "note +d2t: 20 of 61 ids, injective, in range, equal to t2d, ascending",
        ],
    ),
    (z_lab(), [], ["block_size 6", "hidden state 2, hidden state 5; 32 wide"]),
    (pard(), ROPE_7, ["features      none", "rope_theta 7.0"]),
    (specforge_peagle(), ["--mask-token-id", "5"], ["mask_token_id 5"]),
    (
        EAGLE_IDS,
        ROPE_7,
        ["features      hidden state 1, hidden state 3, hidden state 6", "rope_theta 7.0"],
    ),
    (
        EAGLE_IDS,
        ["--layer-convention", "layer_output"],
        ["hidden state 2, hidden state 4, hidden state 7"],
    ),
    (
        EAGLE_IDS,
        ["--feature-layers", "0,8,final"],
        ["hidden state 0, hidden state 8, the state after"],
    ),
]


@pytest.mark.parametrize(("files", "options", "lines"), SHOWN)
def test_the_report_names_every_decision(files, options, lines, tmp_path, capsys):
    assert main(["inspect", str(files.write(tmp_path)), *options]) == 0
    report = capsys.readouterr().out
    assert not [line for line in lines if not re.search(line, report)], report


FAULTY = safeailab_eagle3(odd_key=3).but("fc.weight").plus({"y": (1,)})
REFUSED = [
    (FAULTY, "safetensors", [], "missing fc.weight; unexpected y\n"),
    (safeailab_eagle3(), "bin", [], "--allow-pickle"),
    (EAGLE_IDS, "safetensors", ["--feature-layers", "two"], "must be like 2,16,final, got two"),
    (specforge_peagle(), "safetensors", [], "names no id of a mask token; pass mask_token_id="),
    (specforge(), "safetensors", ["--target", "zoo"], "size of 32, but LlamaForCausalLM has 128"),
]


@pytest.mark.parametrize(("files", "container", "options", "message"), REFUSED)
def test_a_faulty_checkpoint_ends_in_one_line(files, container, options, message, tmp_path, capsys):
    folder = str(files.write(tmp_path / "head", container))
    assert main(["inspect", folder, *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert len(printed.err.splitlines()) == 1
    if files is FAULTY:
        assert re.search(
            "fault .*odd_key = 3.*\nfault +missing fc.weight\nfault +unexpected y\n", printed.out
        )
    if container == "bin":
        assert main(["inspect", folder, "--allow-pickle"]) == 0
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["eagle3", "mask_token", "mtp"])
def test_a_head_of_the_librarys_own_is_called_so_and_every_key_of_it_is_read(name, capsys):
    assert main(["inspect", str(zoo.WEIGHTS_DIR / name)]) == 0
    report = capsys.readouterr().out
    assert "producer      specdec (" in report
    assert "\nfault" not in report
