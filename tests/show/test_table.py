"""Tables fit the terminal, and cells cannot break them; what a library is missing for says so."""

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec
from specdec.lab.evaluation import plots, read_prompts
from specdec.lab.show.table import Table, Tabular
from specdec.lab.trace import Trace
from specdec.statistics import SpeculationStats


@settings(max_examples=100, deadline=None)
@given(data=st.data(), columns=st.integers(1, 8), room=st.integers(20, 120))
def test_a_table_fits_the_terminal_and_loses_no_cell(data, columns, room):
    word = st.text("abcxyz", min_size=1, max_size=15)
    lines = data.draw(st.lists(st.lists(word, min_size=columns, max_size=columns), min_size=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(room))
        shown = str(Table(lines[0], lines[1:]))
    blocks = [block.splitlines() for block in shown.split("\n\n")]
    whole = [line.split() for line in blocks[0]]
    for block in blocks[1:]:  # each begins with the first column
        for line, more in zip(whole, block, strict=True):
            assert more.split()[0] == line[0]
            line += more.split()[1:]
    assert whole == lines
    for block in blocks:  # where not even one column has room beside the first, it stands there
        assert max(map(len, block)) <= room or len(block[0].split()) <= 2
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    assert len(blocks) == 1 or sum(widths) - 2 > room


def test_a_cell_cannot_break_a_table_nor_command_the_terminal():
    pytest.importorskip("pandas")
    table = Table(["a_b", "100 %"], [["x | y", r"a & b \ {c} ^~ #$"], ["<b>", "z" * 99]], ("n",))
    assert table.markdown().splitlines()[2] == r"| x \| y | a & b \ {c} ^~ #$ |"
    first = next(line for line in table.latex().splitlines() if "x | y" in line)
    assert r"a \& b \textbackslash{} " in first
    assert r"\{c\}" in first
    assert r"\#\$" in first
    assert r"a\_b & 100 \%" in table.latex()
    assert table.latex().endswith("% n")
    assert "&lt;b&gt;" in table.html()
    assert "z" * 99 in table.html()
    text = str(Table(["a\x1b[2Jb"], [["c\rd"], ["e\nf"]]))
    assert text.splitlines() == ["a\\x1b[2Jb", "c\\rd", "e\\nf"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\x0b", "\u2028"])
def test_an_end_of_a_line_ends_neither_a_row_nor_a_note(end):
    pytest.importorskip("pandas")
    words = f"one{end}\\two", f"three{end}| four", f"five{end}& six"
    table = Table([words[0], "n"], [[words[1], words[2]]], (f"seven{end}eight",))
    lines = table.markdown().split("\n")
    assert lines[:2] == [r"| one \two | n |", "|---|---:|"]
    assert lines[2:] == [r"| three \| four | five & six |", "", "seven eight"]
    rows = table.latex().splitlines()
    assert r"one \textbackslash{}two & n \\" in rows
    assert r"three | four & five \& six \\" in rows
    assert rows[-1] == "% seven eight"
    assert "{\\footnotesize seven eight}" in table.latex(caption="c")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_gets_a_rule_and_wide_characters_stand_in_columns(is_terminal, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    shown = str(Table(["name", "[b]x"], [["漢字", "1"], ["a", "23"]], ("a note",)))
    gap, rule = (" " * 3, "\u2500" * 11 + "\n") if is_terminal else (" " * 2, "")
    assert shown == f"name{gap}[b]x\n{rule}漢字{gap}   1\na   {gap}  23\na note"


class Shown(Tabular):
    def tables(self):
        return [Table(["a"], [["1"]])]

    def records(self):
        return [{"a": 1}]


STATS, TRACE = SpeculationStats([], num_draft_tokens=2), Trace([], [], [], [])
NEED = {
    "statistics": ("pandas", STATS.to_frame),
    "rows": ("pandas", STATS.to_frame_of_rows),
    "trace": ("pandas", TRACE.to_frame),
    "parquet": ("pyarrow", lambda: TRACE.to_parquet("/nowhere")),
    "frame": ("pandas", Shown().to_frame),
    "latex": ("pandas", Shown().to_latex),
    "plots": ("matplotlib.pyplot", lambda: plots.timeline(TRACE)),
    "prompts": ("pyarrow.parquet", lambda: read_prompts("prompts.parquet")),
}


@pytest.mark.parametrize("door", NEED)
def test_what_needs_a_library_names_the_extra_that_brings_it(door, monkeypatch, tmp_path):
    library, call = NEED[door]
    monkeypatch.setitem(sys.modules, library, None)  # as Python notes what is not there
    monkeypatch.chdir(tmp_path)
    Path("prompts.parquet").touch()
    with pytest.raises(
        ImportError, match=rf"needs {library}: pip install 'specdec-torch\[plots\]'$"
    ):
        call()


def test_no_file_imports_these_libraries_by_a_statement():
    for file in Path(specdec.__file__).parent.rglob("*.py"):
        assert not re.search(r"(?m)^\s*(import|from) (pandas|matplotlib|pyarrow)", file.read_text())
