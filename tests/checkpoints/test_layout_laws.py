"""Laws of every record that is written: what is written reads back equal, and what the record
cannot say is refused before anything is written.
"""

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_cases import LLAMA3
from checkpoint_files import TARGET, read, rope
from eagle_heads import flagged
from eagle_heads import head_for as eagle_head_for
from eagle_heads import random_head as random_eagle_head
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import config_for, random_head

import specdec.checkpoints
from specdec.checkpoints.correction import CORRECTIONS as PARTS
from specdec.checkpoints.export import save_head
from specdec.checkpoints.head_layouts import LAYOUTS, WRITTEN
from specdec.checkpoints.mtp_layouts import LAYOUTS as OF_MODULES
from specdec.checkpoints.mtp_layouts import OWN
from specdec.checkpoints.mtp_layouts import WRITTEN as WRITTEN_MODULES
from specdec.drafters import EagleDrafter, MaskTokenDrafter
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)

WRITTEN = [record for record in WRITTEN if record.kind != "Medusa"]  # heads/test_medusa.py
NONE = type(None)
TABLES = {"embed_tokens": TARGET.model.embed_tokens.weight, "lm_head": TARGET.lm_head.weight}
OPTIONS = {"verifier": "a/b", "target_layers": 8, **TABLES}
WIRING = {  # Of a head that a record of mask-token heads can say.
    "P-EAGLE": "p-eagle",
    "PARD": "pard",
    "DFlash": "dflash",
    "DSpark": "dspark, markov",
    "DFlash 2": "dflash2",
    "XPress": "xpress",
}
CORRECTIONS = {
    NONE: [None],
    MarkovConfig: [MarkovConfig(3), MarkovConfig(2, "gated"), MarkovConfig(3, "rnn")],
    DominoConfig: [DominoConfig(5, 7, first=1), DominoConfig(5, 7)],
    SelectorConfig: [SelectorConfig(3, top_k=6)],
    XPressConfig: [XPressConfig(4), XPressConfig(3, mlp_ratio=1)],
}
ANY = {  # What every record has a word for.
    "rms_norm_eps": [1e-3, 1e-6],
    "hidden_act": ["gelu", "silu"],
    "max_position_embeddings": [77, 4096],
    "head_dim": [4, 10],
    "rope": [
        rope(5e5),
        rope(1e4, rope_type="linear", factor=2.0),
        rope(1e6, rope_type="llama3", **LLAMA3),
    ],
    "feature_layers": [(1, 4, 7), (2, 4, 8), (1, 2, 3), (0, 4, 7), (0, 1, 3, 5, 8)],
    "hidden_size": [16],
    "draft_vocab_size": [20, 61],
}
OTHER = {  # Values that are not the usual ones.
    "num_layers": [2, 3],
    "attention_bias": [True],
    "attention_output_bias": [True],
    "has_qk_norm": [True],
    "windows": [(5, 5, 5)],
    "is_window_causal": [False],
    "is_causal": [True, False],
    "output_norm": [False],
    "has_sinks": [True],
    "norm_before_fc": [True],
    "fc_norm": [True],
    "fc_bias": [True],
    "norm_before_residual": [True],
    "feedback_norm": [True],
    "has_embed_tokens": [True],
    "has_lm_head": [True, False],
    "logit_scale": [0.5],
    "mask_token_id": [3, 0],
    "block_size": [4, 7],
    "ties_embeddings": [True],
    "confidence": ["hidden", "markov"],
}


def base(layout):
    """A configuration that the record can say."""
    if layout.kind.startswith("EAGLE"):
        kind = "input" if layout.kind == "EAGLE-1" else "attention"
        layers = {} if kind == "input" else {"feature_layers": (1, 4, 7)}
        return eagle_head_for(TARGET, kind=kind, **layers).config
    config = config_for(TARGET, WIRING[layout.kind])
    if config.context == "none":
        config = replace(config, max_positions=config.layer.max_position_embeddings)
    return config


def configs(layout):
    """Configurations of any fields."""
    start = base(layout)
    known = vars(start) | vars(start.layer)
    pools = {n: st.sampled_from(v) for n, v in (ANY | OTHER).items() if n in known}
    kinds = st.sampled_from([c for each in CORRECTIONS.values() for c in each])
    optional = pools | ({"correction": kinds} if "correction" in known else {})
    few = st.fixed_dictionaries({}, optional=optional).flatmap(
        lambda flags: st.lists(st.sampled_from([*flags] or [""]), max_size=3).map(
            lambda names: {name: flags[name] for name in names if name}
        )
    )
    return few.map(lambda flags: with_flags(start, flags))


def with_flags(config, flags):
    """The configuration with these flags, as far as they go together; else `None`."""
    flags, layers = dict(flags), flags.get("num_layers", config.num_layers)
    if "windows" in flags:
        flags["windows"] = flags["windows"][:layers]
    if "hidden_size" in flags:  # the target's table does not fit
        flags["has_embed_tokens"] = True
    if not any(flags.get("windows", config.layer.windows)):
        flags["is_window_causal"] = True  # else it means nothing
    if len(config.feature_layers) != 3 or "final" in config.feature_layers:
        flags.pop("feature_layers", None)
    correction = flags.get("correction", getattr(config, "correction", None))
    if isinstance(correction, SelectorConfig):
        flags.pop("draft_vocab_size", None)  # it needs all ids
    if isinstance(correction, XPressConfig) and not flags.get("block_size", config.block_size):
        return None  # it mixes the rows of a block
    if getattr(config, "max_positions", None) and "max_position_embeddings" in flags:
        flags["max_positions"] = flags["max_position_embeddings"]
    try:
        return flagged(config, **flags)
    except ValueError:
        return None


def made(config):
    """A random head, its ids in no order."""
    make = random_eagle_head if hasattr(config, "fusion") else random_head
    return make(config, dtype=torch.float32)


BY_DRAFT_ID = "lm_head", "correction.markov_w2", "correction.embed_proj.2", "correction.readout"
"""Modules that have a row for each draft id."""


def stored(head):
    """What files hold of a head: its draft ids ascend, and rows have moved with them."""
    if head.target_ids is None:
        return head.state_dict(), None
    order = head.target_ids.argsort()
    moved = {f"{name}.weight" for name in BY_DRAFT_ID}
    tensors = {n: x[order] if n in moved else x for n, x in head.state_dict().items()}
    return tensors, head.target_ids[order]


def refusal(head, folder, layout):
    """Why the head is not written; "" if it is."""
    try:
        save_head(head, folder, layout, **OPTIONS)
    except ValueError as error:
        return str(error)
    return ""


def identity(layout):
    return f"{layout.name} {layout.kind}"


@pytest.mark.parametrize("layout", WRITTEN, ids=identity)
def test_what_is_written_reads_back_equal_and_what_is_refused_is_not_begun(layout, tmp_path):
    written = []

    def check(config):
        if config is None:
            return
        folder, head = tmp_path / "head", made(config)
        shutil.rmtree(folder, ignore_errors=True)
        if message := refusal(head, folder, layout):
            assert f"the {layout.name} layout cannot express" in message
            assert not folder.exists()
            return
        family = EagleDrafter if hasattr(config, "fusion") else MaskTokenDrafter
        found, (tensors, ids) = family.from_pretrained(folder, TARGET, 2).head, stored(head)
        assert found.config == config
        assert found.state_dict().keys() == tensors.keys()
        assert all(x.equal(tensors[name]) for name, x in found.state_dict().items())
        assert (found.target_ids is None) == (ids is None)
        assert ids is None or found.target_ids.equal(ids)
        written.append(config)

    drawn = settings(max_examples=24, deadline=None, derandomize=True, database=None)
    drawn(given(configs(layout))(check))()
    if hasattr(base(layout), "correction"):  # has rows of draft ids, too
        for correction in (one for each in CORRECTIONS.values() for one in each):
            fewer = {"draft_vocab_size": 20, "has_lm_head": True, "correction": correction}
            check(with_flags(base(layout), fewer))
    assert len(written) >= 8


def unsaid():
    """Records, and configurations with one field that is not as in `base`. By default run every
    second field of a record, and the others of the next record.
    """
    for number, layout in enumerate(WRITTEN):
        config = base(layout)
        usual = vars(config) | vars(config.layer)
        for index, name in enumerate(sorted(OTHER.keys() & usual.keys()), start=number + 1):
            marks = [pytest.mark.swept] if index % 2 else []
            changes = ({name: value} for value in OTHER[name] if value != usual[name])
            for changed in (with_flags(config, flags) for flags in changes):
                if changed not in (None, config):
                    words = f"{identity(layout)} {name}"
                    yield pytest.param(layout, name, changed, id=words, marks=marks)


@pytest.mark.parametrize(("layout", "name", "config"), [*unsaid()])
def test_a_field_is_read_back_or_refused_by_name(layout, name, config, tmp_path):
    message = refusal(made(config), tmp_path / "head", layout)
    if not message:
        assert read(tmp_path / "head").config == config
        return
    what = message.partition(";")[0]
    others = {"attention_bias": "attention_output_bias", "attention_output_bias": "attention_bias"}
    assert name in what or others[name] in what  # one key for both
    assert not (tmp_path / "head").exists()


def test_a_record_that_promises_too_much_writes_nothing(tmp_path):
    """A key that is written otherwise than it is read."""
    layout, config = WRITTEN[0], replace(base(WRITTEN[0]), logit_scale=0.5)
    wrong = replace(layout, file=(*layout.file, ("logit_scale", 2.0)))
    for record in (layout, wrong):
        assert "logit_scale=0.5" in refusal(made(config), tmp_path / "head", record)
    right = replace(layout, file=(*layout.file, "logit_scale"))
    assert refusal(made(config), tmp_path / "head", right) == ""
    assert read(tmp_path / "head").config == config


FOLDER = Path(specdec.checkpoints.__file__).parent


def compared(file):
    """Words that a file compares something with."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Compare):
            yield from (x.value for x in ast.walk(node) if isinstance(x, ast.Constant))


MODULES = [layout for layout in OF_MODULES if layout is not OWN]  # which no engine reads


def test_no_code_outside_of_a_record_asks_for_a_producer():
    records = (*LAYOUTS, *MODULES, *PARTS)
    words = {word for x in records for word in (x.producer, x.kind, x.name) if word}
    for file in FOLDER.glob("*.py"):
        if not file.stem.endswith("layouts"):
            assert not words & {word for word in compared(file) if isinstance(word, str)}, file


def test_layouts_that_are_written_have_a_name_and_others_have_none():
    for records, written in ((LAYOUTS, WRITTEN), (MODULES, WRITTEN_MODULES)):
        assert {x for x in records if x.name} == set(written)
        assert all(bool(x.name) or not x.file for x in records)
