"""Tables fit the terminal, and cells cannot break them; what a library is missing for says so."""

import ast
import io
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec
from specdec.evaluation import plots, read_prompts
from specdec.results import RowStep, SpeculationStats
from specdec.show.table import Table, Tabular
from specdec.trace import Trace


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
    assert r"a \& b \textbackslash " in first
    assert r"\{c\}" in first
    assert r"\#\$" in first
    assert r"a\_b & 100 \%" in table.latex()
    assert table.latex().endswith("% n")
    assert "&lt;b&gt;" in table.html()
    assert "z" * 99 in table.html()
    text = str(Table(["a\x1b[2Jb"], [["c\rd"], ["e\nf"]]))
    assert text.splitlines() == ["a\\x1b[2Jb", "c\\rd", "e\\nf"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_gets_a_rule_and_wide_characters_stand_in_their_columns(
    is_terminal, monkeypatch
):
    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stdout", stdout)
    lines = str(Table(["name", "[b]x"], [["漢字", "1"], ["a", "23"]], ("a note",))).splitlines()
    rules = [line for line in lines if set(line) == {"\u2500"}]
    assert len(rules) == is_terminal
    gap = " " * (3 if is_terminal else 2)
    assert [line for line in lines if line not in rules] == [
        f"name{gap}[b]x",
        f"漢字{gap}   1",
        f"a   {gap}  23",
        "a note",
    ]


STATS = SpeculationStats([[RowStep([1, 2], 1, [1, 9])]], num_draft_tokens=2)
TRACE = Trace([], [], [], [])


class Shown(Tabular):
    """One cell."""

    def tables(self) -> list[Table]:
        """One."""
        return [Table(["a"], [["1"]])]

    def records(self) -> list[dict]:
        """One."""
        return [{"a": 1}]


NEED = {
    "statistics": ("pandas", STATS.to_frame),
    "rows": ("pandas", STATS.to_frame_of_rows),
    "trace": ("pandas", TRACE.to_frame),
    "parquet": ("pyarrow", lambda: TRACE.to_parquet("/nowhere")),
    "frame": ("pandas", Shown().to_frame),
    "latex": ("pandas", Shown().to_latex),
    "plots": ("matplotlib", lambda: plots.timeline(TRACE)),
}


@pytest.mark.parametrize("door", NEED)
def test_what_needs_a_library_names_the_extra_that_brings_it(door, monkeypatch):
    library, call = NEED[door]
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)  # as Python notes what is not there
    message = rf"needs {library}[.a-z]*: pip install 'specdec-torch\[plots\]'$"
    with pytest.raises(ImportError, match=message):
        call()


def test_prompts_in_parquet_need_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "prompts.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"needs pyarrow.parquet: pip install 'specdec-torch"):
        read_prompts(tmp_path / "prompts.parquet")


def test_no_file_imports_an_optional_library_by_a_statement():
    for file in Path(specdec.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [
                alias.name for alias in getattr(node, "names", []) if isinstance(node, ast.Import)
            ]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {name.split(".")[0] for name in names}
            assert not found & {"pandas", "matplotlib", "pyarrow"}, file
