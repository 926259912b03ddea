"""A checkpoint that is damaged or hostile ends in one clear error, and runs nothing.

Every error names the file and what was expected. A file that could do harm (a pickle with code in
it, an index or a link that leads out of the folder) is refused before it is opened; the tests would
see its effect.
"""

import contextlib
import json
import os
import struct

import pytest
import torch
from checkpoint_files import read, refuses, survey
from checkpoint_layouts import EAGLE_LAYOUTS, safeailab_eagle1, safeailab_eagle3, specforge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from specdec import EagleDrafter, zoo
from specdec.checkpoints.files import MAX_JSON_BYTES, MAX_TENSORS, CheckpointFolder
from specdec.lab.inspection import describe

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
TARGET = zoo.load_target()


def eagle3(folder, container="safetensors"):
    return safeailab_eagle3().write(folder, container)


def header_of(data):
    """Where the header of a file of tensors ends."""
    return 8 + struct.unpack("<Q", data[:8])[0]


def with_header(change):
    """The file with its header changed, and the same data behind it."""

    def rewritten(data):
        header = change(data[8 : header_of(data)])
        return struct.pack("<Q", len(header)) + header + data[header_of(data) :]

    return rewritten


OVERLAP = b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},'
DAMAGED = "model.safetensors is damaged or truncated: "
DAMAGE = {
    **{f"cut at {cut}": (lambda data, cut=cut: data[:cut], "") for cut in (0, 5, 40, -1)},
    "no JSON": (with_header(lambda header: header[1:]), "header"),
    "a key twice": (with_header(lambda header: b'{"d2t":{},' + header[1:]), "header"),
    "an entry that is none": (with_header(lambda header: b'{"x":7,' + header[1:]), "header"),
    "a negative size": (with_header(lambda h: h.replace(b"[32]", b"[-32]", 1)), "header"),
    "more than there is": (with_header(lambda h: h.replace(b"[32]", b"[33]", 1)), "header"),
    "data that overlap": (with_header(lambda header: OVERLAP + header[1:]), "header"),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_file_is_refused(fault, tmp_path):
    change, named = DAMAGE[fault]
    path = eagle3(tmp_path) / WEIGHTS
    path.write_bytes(change(path.read_bytes()))
    refuses(tmp_path, f"{DAMAGED} .. {named}")


def test_a_header_is_bounded_before_it_is_read(tmp_path):
    path = eagle3(tmp_path) / WEIGHTS
    path.write_bytes(struct.pack("<Q", 2**60) + b"{}")
    refuses(tmp_path, "declares a header of")
    save_file({f"x{i}": torch.empty(0) for i in range(MAX_TENSORS + 1)}, path)
    refuses(tmp_path, "holds 4097 tensors; at most 4096")
    (tmp_path / "config.json").write_text(" " * (MAX_JSON_BYTES + 1))
    refuses(tmp_path, "config.json has 8388609 bytes")


# Indices and links.


def outside(tmp_path, name):
    """A head with an index that leads to weights outside of its folder."""
    folder, elsewhere = eagle3(tmp_path / "head"), eagle3(tmp_path / "elsewhere")
    (folder / WEIGHTS).unlink()
    weight_map = dict.fromkeys(safeailab_eagle3().tensors, name.format(folder=elsewhere))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder, elsewhere


UP = [f"../elsewhere/{WEIGHTS}", "{folder}/" + WEIGHTS, "", rf"..\elsewhere\{WEIGHTS}"]


@pytest.mark.parametrize("name", UP)
def test_an_index_that_points_outside_its_folder_is_refused(name, tmp_path):
    refuses(outside(tmp_path, name)[0], "only plain names of files in the same folder")


def test_links_that_lead_outside_the_folder_are_refused(tmp_path):
    folder, elsewhere = outside(tmp_path, "shard.safetensors")
    for name, source in (
        ("shard.safetensors", WEIGHTS),
        (WEIGHTS, WEIGHTS),
        ("config.json", "config.json"),
    ):
        (folder / name).unlink(missing_ok=True)
        os.symlink(elsewhere / source, folder / name)
        refuses(folder, f"{name} lies outside of")


def test_a_snapshot_of_the_hubs_cache_may_link_to_its_own_blobs(tmp_path):
    blobs = eagle3(tmp_path / "models--a--b" / "blobs")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    for name in ("config.json", WEIGHTS):
        os.symlink(blobs / name, snapshot / name)
    assert read(snapshot).tensors


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "occur twice: a"),
        (f'{{"weight_map": {{"fc.weight": "{SHARDS[0]}"}}}}', "disagree on"),
        ('{"weight_map": {"fc.weight": "none.safetensors"}}', "none.safetensors does not exist"),
    ],
)
def test_a_broken_index_is_refused(index, message, tmp_path):
    (eagle3(tmp_path, "sharded") / INDEX).write_text(index)
    refuses(tmp_path, message)


def is_of_the_head(name):
    return name.startswith("model.layers.61.")


def test_only_the_shards_that_hold_wanted_tensors_are_opened(tmp_path):
    """A target's own checkpoint, whose last shard holds a prediction module; others are missing."""
    tensor = torch.arange(6.0).view(2, 3)
    last = {"model.layers.61.eh_proj.weight": tensor, "model.norm.weight": torch.ones(3)}
    save_file(last, tmp_path / SHARDS[1])
    (tmp_path / "config.json").write_text("{}")
    weight_map = dict.fromkeys((f"model.layers.{i}.weight" for i in range(60)), SHARDS[0])
    weight_map |= dict.fromkeys((f"model.layers.62.{i}" for i in range(4939)), SHARDS[0])
    weight_map |= dict.fromkeys(last, SHARDS[1])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    ((name, found),) = CheckpointFolder(tmp_path).tensors(is_of_the_head).items()
    assert name == "model.layers.61.eh_proj.weight"
    assert (found.dtype, found.shape) == ("F32", (2, 3))
    assert found.read().equal(tensor)
    with pytest.raises(ValueError, match=f"lists 5001 tensors; at most {MAX_TENSORS} are read"):
        CheckpointFolder(tmp_path).tensors()
    del weight_map["model.norm.weight"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"disagree on the tensors model\.norm\.weight"):
        CheckpointFolder(tmp_path).tensors(is_of_the_head)


def test_a_whole_file_is_read_in_part(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / WEIGHTS)
    (tmp_path / "config.json").write_text("{}")
    assert list(CheckpointFolder(tmp_path).tensors(lambda name: name == "b")) == ["b"]


# Pickles.


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
    refuses(folder, "allow_pickle=True .. origin you trust")
    refuses(folder, "damaged or holds more than tensors", allow_pickle=True)
    assert not mark.exists()


def test_a_pickle_must_hold_tensors_by_name(tmp_path):
    path = safeailab_eagle1().write(tmp_path, "bin") / "pytorch_model.bin"
    for content in ([torch.ones(2)], {"a": {"b": torch.ones(2)}}, {3: torch.ones(2)}):
        torch.save(content, path)
        refuses(tmp_path, "must hold", allow_pickle=True)
    path.write_bytes(b"not a pickle")
    refuses(tmp_path, "damaged", allow_pickle=True)


# Folders, paths and the hub.


def test_a_folder_without_weights_says_what_it_holds(tmp_path):
    folder = safeailab_eagle1().write(tmp_path)
    (folder / WEIGHTS).rename(folder / "other.safetensors")
    refuses(folder, "no model.safetensors .. holds config.json, other.safetensors")
    (folder / "config.json").unlink()
    refuses(folder, "config.json does not exist")
    refuses(folder / "other.safetensors", "is a file; pass the checkpoint's folder")
    refuses(folder / "none", "is no folder")


@pytest.mark.parametrize("path", [None, 5, b"x", ["a"], "", "x" * 5000, "a\0b"])
def test_a_checkpoint_is_read_from_a_path(path):
    with pytest.raises((ValueError, TypeError), match="the checkpoint must be "):
        EagleDrafter.from_pretrained(path, TARGET)


@pytest.mark.parametrize("name", ["eagle3", "mask-token", "mtp"])
def test_a_checkpoint_is_written_to_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drafter, file = zoo.load_drafter(name, TARGET), tmp_path / "file"
    file.write_text("mine")
    for path in (None, 5, "", "a\0b", file, "/proc/no/such"):
        with pytest.raises((ValueError, TypeError), match="folder"):
            drafter.save_pretrained(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"


def offline(*args, **options):
    assert not any("bin" in pattern for pattern in options.get("allow_patterns") or ())
    raise ConnectionError("no network\nhere")


def unused(*args, **options):
    raise AssertionError("nothing is downloaded")


OFFLINE = "not in the local cache, .. be reached (no network here)"
FAILING = "somebody/head is no folder here, .. (no network here)"


@pytest.mark.parametrize(
    ("info", "download", "message"),
    [(offline, unused, OFFLINE), (lambda *args, **options: None, offline, FAILING)],
)
def test_the_hub_out_of_reach_is_one_line(info, download, message, monkeypatch):
    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", info)
    monkeypatch.setattr("specdec.checkpoints.hub.snapshot_download", download)
    refuses("somebody/head", message)


def test_what_the_cache_holds_is_read_without_a_network(monkeypatch, tmp_path):
    def from_cache(*args, local_files_only, **options):
        assert local_files_only
        return str(eagle3(tmp_path))

    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", offline)
    monkeypatch.setattr("specdec.checkpoints.hub.try_to_load_from_cache", lambda *a, **o: "there")
    monkeypatch.setattr("specdec.checkpoints.hub.snapshot_download", from_cache)
    assert read("somebody/head").config.fusion == "attention"


# Texts of foreign files.

HOSTILE = "\x1b]0;title\x07\x9b2J\n\u202e"
HOSTILE_KEYS = {
    "key": {f"k{HOSTILE}": 1},
    "value": {"hidden_act": HOSTILE},
    "list": {"architectures": [HOSTILE], "layer_types": [HOSTILE]},
    "layer ids": {"eagle_aux_hidden_state_layer_ids": [HOSTILE]},
}


def shown(folder, **options):
    """Everything that reading a checkpoint may print: the report, or the error."""
    try:
        found = survey(folder, **options)
        return describe(found, None) + "".join(found.faults) + str(read(folder, **options))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("place", [*HOSTILE_KEYS, "tensor", "pickle", "file"])
def test_control_characters_of_a_foreign_file_are_shown_as_escapes(place, tmp_path):
    files = safeailab_eagle3().but(**HOSTILE_KEYS.get(place, {}))
    if place in ("tensor", "pickle"):
        files = files.plus({f"x{HOSTILE}": (1,)})
    folder = files.write(tmp_path)
    if place == "pickle":
        torch.save(files.tensors, folder / "pytorch_model.bin")
    if place in ("pickle", "file"):
        (folder / WEIGHTS).rename(folder / f"{HOSTILE.replace('/', '')}.bak")
    text = shown(folder, allow_pickle=place == "pickle")
    assert all(character.isprintable() or character == "\n" for character in text)
    if place != "list":  # which nothing repeats
        assert r"\x1b]0;title\x07\x9b2J\n\u202e" in text.replace(2 * "\\", "\\")


def test_names_that_differ_in_control_characters_only_are_refused(tmp_path):
    files = safeailab_eagle3().plus({"x\x1b": (1,), r"x\x1b": (1,)})
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
    (eagle3(tmp_path) / "config.json").write_text(text)
    refuses(tmp_path, message)


# Whatever is changed, the end is a head or an error.

BYTES = st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255))
any_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)


@any_folder
@given(file=st.sampled_from(["config.json", WEIGHTS]), changes=st.lists(BYTES, max_size=4))
def test_whatever_bytes_are_changed_the_end_is_a_head_or_an_error(file, changes, tmp_path):
    path = specforge(ids=[1, 3, 4]).write(tmp_path) / file
    data = bytearray(path.read_bytes())
    # Headers matter most: of the weights only the first bytes are in reach.
    reach = len(data) if file == "config.json" else header_of(data) + 64
    for place, value in changes:
        data[int(place * reach)] = value
    path.write_bytes(bytes(data))
    with contextlib.suppress(ValueError):
        assert all(tensor.isfinite().all() for tensor in read(tmp_path).tensors.values())


JUNK = [None, True, 0, -1, 2, 10**30, 1.5, "", "x", [], [1], ["a"], {}, {"rope_type": "yarn"}]
SECTIONS = ("eagle_config", "transformer_layer_config")
KEYS = [
    (make, place)
    for make in EAGLE_LAYOUTS.values()
    for place in (
        *((key,) for key in (*make().config, "rope_scaling", "norm_output", "layer_types")),
        *((section, key) for section in SECTIONS for key in make().config.get(section, {})),
    )
]


@any_folder
@given(st.sampled_from(KEYS), st.sampled_from(JUNK))
def test_whatever_a_key_says_the_end_is_a_head_or_an_error(tmp_path, place, value):
    make, (*section, key) = place
    files, changed = make(), {key: value}
    if section:
        changed = {section[0]: files.config[section[0]] | changed}
    with contextlib.suppress(ValueError):
        assert read(files.but(**changed).write(tmp_path)).build()
