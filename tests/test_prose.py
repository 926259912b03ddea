"""The pages say what they say in few words, in short sentences, and in the words of the field."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {"docs/types.md"}
"""Whose tables a command writes."""
WRITTEN = {"README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}
"""Pages in the words of the field."""
MOST_WORDS = 2000
MOST_WORDS_OF_A_SENTENCE = 30
RETIRED = {
    r"\btrials?\b": "self-test",
    r"\b(is|are|be|was|were) refused\b": "raises ValueError",
    r"\bthe \*?root\*?\b": "the last accepted token",
    r"\bx plain\b": "step cost (plain = 1)",
    r"\blaws?\b(?! for)": "distribution",
    r"\bwitness(es)?\b": "what the text is compared with",
    r"\bneutral\b": "untruncated sampling at temperature 1",
    r"\bteams?\b": "processes, ranks",
    r"\bwarps?\b": "logits filter",
    r"\bsentinels?\b": "monitor",
}
"""A word that the pages no longer have, and the one in its place."""


def prose(page: str) -> str:
    """The text without code, tables, comments and what pictures show."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$|<!--.*?-->|<[^>]*>", " ", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^(\||#).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "CODE", text)


def sentences(page: str) -> list[str]:
    """One by one; an item of a list ends one."""
    ends = r"(?<=[.?!:;])\)?\*{0,2}\s+(?=[^a-z]|specdec)"
    parts = [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=- )", prose(page))]
    return [sentence for part in parts for sentence in re.split(ends, part)]


@pytest.mark.parametrize("page", sorted(WRITTEN - GENERATED))
def test_a_page_is_short(page):
    assert len((ROOT / page).read_text(encoding="utf-8").split()) <= MOST_WORDS


@pytest.mark.parametrize("page", sorted(WRITTEN))
def test_sentences_are_short(page):
    found = [said for said in sentences(page) if len(said.split()) > MOST_WORDS_OF_A_SENTENCE]
    assert found == []


@pytest.mark.parametrize("page", sorted(WRITTEN))
def test_pages_have_the_words_of_the_field(page):
    text = prose(page).lower()
    found = [(word, use) for word, use in RETIRED.items() if re.search(word, text)]
    assert found == []


def test_a_long_sentence_and_a_retired_word_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_prose.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(f"# A\n\nShort. {'word ' * 31}end.\n\nIt is refused.\n")
    with pytest.raises(AssertionError):
        test_sentences_are_short("page.md")
    with pytest.raises(AssertionError):
        test_pages_have_the_words_of_the_field("page.md")
