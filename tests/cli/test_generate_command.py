"""`specdec generate --trace` writes what it shows."""

import pytest

from specdec.lab.cli import main
from specdec.lab.trace import Trace


@pytest.mark.smoke
@pytest.mark.parametrize("form", ["html", "jsonl", "parquet"])
def test_a_trace_is_written_in_the_form_that_its_name_ends_with(form, tmp_path, capsys):
    command = ["generate", "--target", "zoo", "--prompt", "def f(", "--max-new-tokens", "12"]
    assert main([*command, "--trace", str(tmp_path / f"trace.{form}")]) == 0
    if form == "html":
        assert '"draft_prob"' in (tmp_path / "trace.html").read_text()
    elif form == "jsonl":
        trace = Trace.from_jsonl(tmp_path / "trace.jsonl")
        assert sum(len(step.new_tokens) for step in trace[0]) == 12
    else:
        pandas = pytest.importorskip("pandas")
        assert pandas.read_parquet(tmp_path / "trace.parquet").new_token.count() == 12
    assert capsys.readouterr().err == ""
