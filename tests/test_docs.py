"""The API pages have every public name, and the guides' links and figures have their commands."""

import importlib
import pkgutil
import re
import runpy
from pathlib import Path

import pytest

import specdec

DOCS = Path(specdec.__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "api").glob("*.md"))
SHOWN = [
    name
    for page in PAGES
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
]
ROOMS = [
    "specdec",
    *(f"specdec.{room.name}" for room in pkgutil.iter_modules(specdec.__path__) if room.ispkg),
]


def is_shown(room: str, name: str) -> bool:
    """Whether a page has the room, the module that defines a name, or the name alone."""
    value = getattr(importlib.import_module(room), name)
    if isinstance(value, type(specdec)):  # a public name that is a module
        return value.__name__ in SHOWN
    home = getattr(value, "__module__", None) or room
    return not {room, home, f"{home}.{name}"}.isdisjoint(SHOWN)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_a_page(room):
    names = getattr(importlib.import_module(room), "__all__", [])
    constants = {"PAD_TOKEN"}  # shown with their module; an integer does not name its own
    assert [name for name in names if not is_shown(room, name) and name not in constants] == []
    assert "specdec.types" in SHOWN


WITHOUT_EXAMPLE: set[str] = set()
"""Public callables, `room.name`, whose docstrings need no example."""


def without_example(room: str) -> set[str]:
    """Public callables of a room whose own docstrings have no example to run."""
    module, found = importlib.import_module(room), set()
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if callable(value) and not re.search(r"^ *Example:\n +>>> ", value.__doc__ or "", re.M):
            found.add(f"{room}.{name}")
    return found


def test_every_public_callable_has_an_example():
    found = {name for room in ROOMS for name in without_example(room)}
    assert found - WITHOUT_EXAMPLE == set()
    assert found >= WITHOUT_EXAMPLE, "an exception is left over"


def test_a_planted_callable_without_an_example_is_found(monkeypatch):
    monkeypatch.setattr(specdec.Draft, "__doc__", "A draft, as `>>> Draft(tokens)` makes it.")
    assert "specdec.Draft" in without_example("specdec")


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_page_shows_exists(name):
    pkgutil.resolve_name(name)


def test_no_name_is_shown_twice():
    assert sorted(SHOWN) == sorted(set(SHOWN))


def test_tables_of_names_are_those_of_the_code():
    """`python docs/api/make.py` writes them."""
    space = runpy.run_path(str(DOCS / "api/make.py"))
    assert {page: page.read_text(encoding="utf-8") for page in PAGES} == space["pages"]()


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages == set(re.findall(r": (\S+\.md)$", navigation, flags=re.MULTILINE))


def test_every_paper_that_the_code_names_has_a_row():
    number = re.compile(r"\b\d{4}\.\d{5}\b")
    sources = [*DOCS.parent.glob("specdec/**/*.py"), *DOCS.parent.glob("specdec/**/*.md")]
    named = {n for source in sources for n in number.findall(source.read_text(encoding="utf-8"))}
    table = (DOCS.parent / "papers.md").read_text(encoding="utf-8")
    assert len(named) > 15
    assert named - set(number.findall(table)) == set()


def test_what_papers_md_names_in_code_exists():
    """The first column: classes, functions, files and folders of the package, and examples."""
    table = (DOCS.parent / "papers.md").read_text(encoding="utf-8")
    code = "\n".join(p.read_text(encoding="utf-8") for p in DOCS.parent.glob("specdec/**/*.py"))
    for line in table.splitlines():
        first = line.split("|")[1] if line.startswith("| ") else ""
        for name in re.findall(r"`([A-Za-z_/]+(?:\.py)?)`", first):
            places = DOCS.parent / "specdec" / name, DOCS.parent / name
            is_there = any(place.exists() for place in places)
            is_defined = re.search(rf"^(class|def) {name}\b", code, flags=re.MULTILINE)
            assert is_there or is_defined or name == "train", name


def test_every_file_that_the_page_about_tests_names_exists():
    tests = DOCS.parent / "tests"
    pages = [tests / name for name in ("README.md", "cosmic_ray.toml")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r"[\w/*]+\.(?:py|toml)\b", text))
    roots = [DOCS.parent, tests, DOCS.parent / "specdec"]
    assert len(named) > 30
    assert [name for name in sorted(named) if not any(any(r.glob(name)) for r in roots)] == []


def test_every_test_of_the_short_suite_for_other_versions_exists():
    files = (DOCS.parent / "tests/versions/suite.txt").read_text(encoding="utf-8").split()
    assert [file for file in files if not (DOCS.parent / file).is_file()] == []
    assert len(files) > 10


def test_the_slices_for_a_gpu_have_every_test_that_needs_one():
    page = (DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- slices for a GPU -->\n```bash\n(.*?)```", page, flags=re.DOTALL)
    slices = [DOCS.parent / name for name in re.findall(r"tests/\S+", block)]
    files = [
        path
        for path in (DOCS.parent / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu|PLACES", path.read_text(encoding="utf-8"))
        and path != Path(__file__)
    ]
    assert len(files) > 10
    assert [path for path in files if not any(path.is_relative_to(s) for s in slices)] == []
    assert all("-m gpu" in line for line in block.splitlines())


def test_every_cell_about_others_has_its_source_and_ours_exist():
    read = [(DOCS / name).read_text(encoding="utf-8") for name in ("peers.md", "peers-sources.md")]
    cells, sources = "".join(read).split("## Sources")
    used = set(re.findall(r"\[([a-z]\d+)\]", cells))
    rows = dict(re.findall(r"^\| ([a-z]\d+) \| (.*) \|$", sources, flags=re.MULTILINE))
    assert used == set(rows)
    for name in (name for name in rows if name.startswith("s")):
        for path in re.findall(r"`([^`]+)`", rows[name]):
            assert (DOCS.parent / path).exists()


PROSE = [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_pictures_exist_are_small_and_say_in_words_what_they_show(page):
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for words, path in re.findall(r"!\[([^]]*)\]\((.*?)\)", text):
        most = 60_000 if path.endswith(".svg") else 150_000
        assert (page.parent / path).stat().st_size < most, path
        assert len(words.split()) > 8, path


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_tables_of_more_than_12_rows_are_folded(page):
    text = re.sub(r"<details.*?</details>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert [table[:80] for table in tables if table.count("\n") > 2 + 12] == []


def test_a_cell_that_links_to_its_study_has_numbers_of_that_page():
    cell = re.compile(r"\| \[(\d\.\d\d(?:, \d\.\d\d)*)\]\(([\w-]+\.md)\)")
    cells = cell.findall((DOCS / "drafters.md").read_text(encoding="utf-8"))
    studies = {page: (DOCS / page).read_text(encoding="utf-8") for _, page in cells}
    assert len(cells) > 8
    assert [
        each for each in cells if not all(n in studies[each[1]] for n in each[0].split(", "))
    ] == []
