"""A checkpoint that is damaged or hostile ends in one clear error, and runs nothing.

Every error names the file and what was expected. A file that could do harm (a
pickle with code in it, an index or a link that leads out of the folder) is refused before it is
opened; the tests would see its effect.
"""

import contextlib
import json
import os
import struct

import pytest
import torch
from checkpoint_parts import TARGET, read_checkpoint, refuses, survey_checkpoint
from checkpoint_writer import LAYOUTS, safeailab_eagle1, safeailab_eagle3, specforge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec.checkpoints.files import MAX_JSON_BYTES, MAX_TENSORS
from specdec.inspection import describe


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_a_truncated_file_is_refused(cut, tmp_path):
    path = safeailab_eagle3().write(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    refuses(tmp_path, "model.safetensors is damaged or truncated: ")


def rewritten(path, change):
    """The file with its header changed, and the same data behind it."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = change(data[8 : 8 + length])
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


HEADERS = {
    "no JSON": lambda header: header[1:],
    "a key twice": lambda header: b'{"d2t":{},' + header[1:],
    "an entry that is none": lambda header: b'{"x":7,' + header[1:],
    "a negative size": lambda header: header.replace(b'"shape":[32]', b'"shape":[-32]', 1),
    "more data than there is": lambda header: header.replace(b'"shape":[32]', b'"shape":[33]', 1),
    "data that overlap": lambda header: (
        b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},' + header[1:]
    ),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_corrupt_header_is_refused(fault, tmp_path):
    path = safeailab_eagle3().write(tmp_path) / "model.safetensors"
    rewritten(path, HEADERS[fault])
    refuses(tmp_path, "model.safetensors is damaged or truncated: .*header")


def test_a_header_is_bounded_before_it_is_read(tmp_path):
    path = safeailab_eagle3().write(tmp_path) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    refuses(tmp_path, "declares a header of")
    many = {f"x{i}": torch.empty(0) for i in range(MAX_TENSORS + 1)}
    save_file(many, path)
    refuses(tmp_path, "holds 4097 tensors; at most 4096")
    (tmp_path / "config.json").write_text(" " * (MAX_JSON_BYTES + 1))
    refuses(tmp_path, "config.json has 8388609 bytes")


def outside(tmp_path, name):
    """A head with an index that leads to weights outside of its folder."""
    folder, elsewhere = tmp_path / "head", tmp_path / "elsewhere"
    files = safeailab_eagle3()
    files.write(folder)
    files.write(elsewhere)
    (folder / "model.safetensors").unlink()
    weight_map = dict.fromkeys(files.tensors, str(name).format(folder=elsewhere))
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "../elsewhere/model.safetensors",
        "{folder}/model.safetensors",
        "",
        "..\\elsewhere\\model.safetensors",
    ],
)
def test_an_index_that_points_outside_its_folder_is_refused(name, tmp_path):
    refuses(outside(tmp_path, name), "only plain names of files in the same folder")


def test_links_that_lead_outside_the_folder_are_refused(tmp_path):
    folder = outside(tmp_path, "shard.safetensors")
    os.symlink(tmp_path / "elsewhere" / "model.safetensors", folder / "shard.safetensors")
    refuses(folder, "shard.safetensors lies outside of")
    os.symlink(tmp_path / "elsewhere" / "model.safetensors", folder / "model.safetensors")
    refuses(folder, "model.safetensors lies outside of")
    (folder / "config.json").unlink()
    os.symlink(tmp_path / "elsewhere" / "config.json", folder / "config.json")
    refuses(folder, "config.json lies outside of")


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_own_blobs(tmp_path):
    blobs = safeailab_eagle3().write(tmp_path / "models--a--b" / "blobs")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        os.symlink(blobs / name, snapshot / name)
    assert read_checkpoint(snapshot, TARGET).tensors


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "occur twice: a"),
        ('{"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}', "disagree on"),
        ('{"weight_map": {"fc.weight": "none.safetensors"}}', "none.safetensors does not exist"),
    ],
)
def test_a_broken_index_is_refused(index, message, tmp_path):
    folder = safeailab_eagle3().write(tmp_path, "sharded")
    (folder / "model.safetensors.index.json").write_text(index)
    refuses(folder, message)


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def test_a_pickle_with_code_in_it_runs_nothing(tmp_path):
    folder, mark = safeailab_eagle1().write(tmp_path / "head", "bin"), tmp_path / "executed"
    content = torch.load(folder / "pytorch_model.bin", weights_only=True)
    torch.save(content | {"x": Payload(mark)}, folder / "pytorch_model.bin")
    refuses(folder, "allow_pickle=True .* origin you trust")
    refuses(folder, "damaged or holds more than tensors", allow_pickle=True)
    assert not mark.exists()


def test_a_pickle_must_hold_tensors_by_name(tmp_path):
    folder = safeailab_eagle1().write(tmp_path)
    (folder / "model.safetensors").unlink()
    for content in ([torch.ones(2)], {"a": {"b": torch.ones(2)}}, {3: torch.ones(2)}):
        torch.save(content, folder / "pytorch_model.bin")
        refuses(folder, "must hold", allow_pickle=True)
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    refuses(folder, "damaged", allow_pickle=True)


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    folder = safeailab_eagle1().write(tmp_path)
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    refuses(folder, "no model.safetensors.* holds config.json, other.safetensors")
    (folder / "config.json").unlink()
    refuses(folder, "config.json does not exist")
    refuses(folder / "other.safetensors", "is a file; pass the checkpoint's folder")
    refuses(folder / "none", "is no folder")


def offline(*args, **options):
    raise ConnectionError("no network\nhere")


def unused(*args, **options):
    raise AssertionError("nothing is downloaded")


def test_the_hub_offline_is_one_line_at_once(monkeypatch):
    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", offline)
    monkeypatch.setattr("specdec.checkpoints.hub.snapshot_download", unused)
    refuses("somebody/head", r"not in the local cache, .* be reached \(no network here\)")


def test_a_failing_download_is_one_line(monkeypatch):
    def failing(*args, **options):
        assert not any("bin" in pattern for pattern in options["allow_patterns"])
        offline()

    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", lambda *a, **options: None)
    monkeypatch.setattr("specdec.checkpoints.hub.snapshot_download", failing)
    refuses("somebody/head", r"somebody/head is no folder here, .* \(no network here\)")


def test_what_the_cache_holds_is_read_without_a_network(monkeypatch, tmp_path):
    folder = safeailab_eagle3().write(tmp_path)

    def from_cache(*args, local_files_only, **options):
        assert local_files_only
        return str(folder)

    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", offline)
    monkeypatch.setattr("specdec.checkpoints.hub.try_to_load_from_cache", lambda *a, **o: "there")
    monkeypatch.setattr("specdec.checkpoints.hub.snapshot_download", from_cache)
    assert read_checkpoint("somebody/head", TARGET).config.fusion == "attention"


HOSTILE = "\x1b]0;title\x07\x9b2J\n\u202e"


def shown(folder, **options):
    """Everything that reading a checkpoint may print: the report, or the error."""
    try:
        survey = survey_checkpoint(folder, TARGET, **options)
        return describe(survey, None) + "".join(survey.faults) + str(survey.load(TARGET))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("place", ["tensor", "key", "value", "list", "layer ids", "pickle", "file"])
def test_control_characters_of_a_foreign_file_are_shown_as_escapes(place, tmp_path):
    files, options = safeailab_eagle3(), {}
    if place in ("tensor", "pickle"):
        files = files.plus(**{f"x{HOSTILE}": torch.ones(1)})
    changes = {
        "key": {f"k{HOSTILE}": 1},
        "value": {"hidden_act": HOSTILE},
        "list": {"architectures": [HOSTILE], "layer_types": [HOSTILE]},
        "layer ids": {"eagle_aux_hidden_state_layer_ids": [HOSTILE]},
    }
    folder = files.but(**changes.get(place, {})).write(tmp_path)
    if place == "pickle":
        torch.save(files.tensors, folder / "pytorch_model.bin")
        options = {"allow_pickle": True}
    if place in ("pickle", "file"):
        (folder / "model.safetensors").rename(folder / f"{HOSTILE.replace('/', '')}.bak")
    text = shown(folder, **options)
    assert all(character.isprintable() or character == "\n" for character in text)
    if place != "list":  # which nothing repeats
        assert r"\x1b]0;title\x07\x9b2J\n\u202e" in text.replace(2 * "\\", "\\")


def test_names_that_differ_in_control_characters_only_are_refused(tmp_path):
    files = safeailab_eagle3().plus(**{"x\x1b": torch.ones(1), r"x\x1b": torch.ones(1)})
    refuses(files.write(tmp_path), "names that differ in control characters only")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hidden_size": 32, "hidden_size": 64}', "occur twice: hidden_size"),
        ('{"rms_norm_eps": NaN}', "NaN is no JSON number"),
        ("[" * 100000, "not valid JSON"),
        ("3", "must be a JSON object"),
    ],
)
def test_a_configuration_that_parsers_read_differently_is_refused(text, message, tmp_path):
    (safeailab_eagle3().write(tmp_path) / "config.json").write_text(text)
    refuses(tmp_path, message)


BYTES = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    file=st.sampled_from(["config.json", "model.safetensors"]), changes=st.lists(BYTES, max_size=4)
)
def test_whatever_bytes_are_changed_the_end_is_a_head_or_an_error(file, changes, tmp_path):
    path = specforge(ids=[1, 3, 4]).write(tmp_path) / file
    data = bytearray(path.read_bytes())
    # Headers matter most: of the weights only the first bytes are in reach.
    reach = len(data) if file == "config.json" else 8 + struct.unpack("<Q", data[:8])[0] + 64
    for place, value in changes:
        data[int(place * reach)] = value
    path.write_bytes(bytes(data))
    try:
        checkpoint = read_checkpoint(tmp_path, TARGET)
    except ValueError:
        return
    assert all(tensor.isfinite().all() for tensor in checkpoint.tensors.values())


JUNK = [None, True, 0, -1, 2, 10**30, 1.5, "", "x", [], [1], ["a"], {}, {"rope_type": "yarn"}]
KEYS = {
    name: [
        *((key,) for key in (*make().config, "rope_scaling", "norm_output", "layer_types")),
        *(
            (section, key)
            for section in ("eagle_config", "transformer_layer_config")
            for key in make().config.get(section, {})
        ),
    ]
    for name, make in LAYOUTS.items()
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_whatever_a_key_says_the_end_is_a_head_or_an_error(data, layout, tmp_path):
    files = LAYOUTS[layout]()
    *section, key = data.draw(st.sampled_from(KEYS[layout]))
    changed = {key: data.draw(st.sampled_from(JUNK))}
    if section:
        changed = {section[0]: files.config[section[0]] | changed}
    folder = files.but(**changed).write(tmp_path)
    with contextlib.suppress(ValueError):
        assert read_checkpoint(folder, TARGET).build()
