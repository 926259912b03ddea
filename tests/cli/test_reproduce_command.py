"""`specdec reproduce` prints measured lengths beside published ones."""

import json

import pytest

from specdec import zoo
from specdec.cli import main
from specdec.evaluation.protocols import PROTOCOLS


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [json.dumps({"turns": [f"def f{i}(a, b):"]}) + "\n" for i in range(7)]
    for name in ("gsm8k", "math500"):
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def command(name, data, *more):
    options = ["--data", str(data), "--sets", "gsm8k,math500", "--max-new-tokens", "4"]
    return ["reproduce", name, "--drafter", "zoo:mask-token", *options, *more]


def test_measured_lengths_stand_beside_published_ones(data, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = ["--output", str(tmp_path / "out")]
    assert main(command("dspark-table1", data, *output)) == 0
    captured = capsys.readouterr()
    lines = {line.split()[0]: line.split() for line in captured.out.splitlines() if line}
    assert lines["gsm8k"][:5] == ["gsm8k", "chain", "of", "7", "7"]
    assert lines["gsm8k"][-3:] == ["(4.33)", "6.17", "(5.17)"]
    assert lines["math500"][-6:] == ["4.77", "(3.77)", "4.91", "(3.91)", "5.78", "(4.78)"]
    assert lines["gsm8k"][8] == f"({float(lines['gsm8k'][5]) - 1:.2f})"
    assert "Tokens per step with the target's own token, and (without it)." in captured.out
    assert "[" in " ".join(lines["gsm8k"])  # an interval
    assert "14/14" in captured.err  # a bar, of plain decoding as well
    assert main(command("dspark-table1", data, *output, "--format", "json")) == 0  # nothing to do
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN is no JSON
    assert found["source"] == PROTOCOLS["dspark-table1"].source
    assert found["cells"][0]["DSpark"] == 6.17
    assert f"{found['cells'][0]['value']:.2f}" == lines["gsm8k"][5]


def test_a_dry_run_says_what_it_takes_and_loads_nothing(data, tmp_path, capsys, monkeypatch):
    """Counts by hand: 7 prompts, 4 tokens each, plainly and with the published lengths."""

    def loading(*args, **options):
        raise AssertionError("a dry run loads nothing")

    monkeypatch.setattr("specdec.loading.load_target", loading)
    output = tmp_path / "out"
    whole = command("dspark-table1", data, "--dry-run", "--output", str(output))
    assert main([*whole, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lengths = [
        [row.lengths[name] for row in PROTOCOLS["dspark-table1"].figures]
        for name in ("gsm8k", "math500")
    ]
    forwards = [int(28 * (1 + len(own) / sum(own))) for own in lengths]
    assert found["forwards"] == sum(forwards)
    files = {n: zoo.WEIGHTS_DIR / n / "model.safetensors" for n in ("target", "mask_token")}
    sizes = {"zoo": files["target"], "zoo:mask-token": files["mask_token"]}
    assert found["weight_bytes"] == {name: path.stat().st_size for name, path in sizes.items()}
    assert not output.exists()
    plain = int(28 * len(lengths[0]) / sum(lengths[0]))
    assert main([*whole, "--no-plain", "--sets", "gsm8k", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["forwards"] == plain
    missing = ["reproduce", "dspark-table1", "--drafter", "nobody/here", "--data", str(data)]
    assert main([*missing, "--dry-run", "--device", "cpu"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "aime25 30 not there 30" in shown
    assert "nobody/here: not known" in shown
