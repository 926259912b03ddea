"""`specdec reproduce` prints measured lengths beside published ones."""

import json

import pytest

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
    assert "7/7" in captured.err  # a bar
    assert main(command("dspark-table1", data, *output, "--format", "json")) == 0  # nothing to do
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN is no JSON
    assert found["source"] == PROTOCOLS["dspark-table1"].source
    assert found["cells"][0]["DSpark"] == 6.17
    assert f"{found['cells'][0]['value']:.2f}" == lines["gsm8k"][5]
