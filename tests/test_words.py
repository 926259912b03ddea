"""Pages use the field's words, in sentences that a reader does not have to read twice."""

import re

import pytest
from pages import PAGES

NAMES = """
    acceptance-length certificates certify evaluation glossary ideas own-drafter own-head own-layout
    own-rule parts rematch rollouts serve stability training
"""
SWEPT = NAMES.split()
"""Pages of `docs/` that this test holds."""
RETIRED = {
    r"trials?": "self-test",
    r"(?<!sliding )(?<!sliding-)windows?(?! attention)": "verification pass, draft block",
    r"(?<!square )roots?": "last accepted token",
    r"neutral(?:ly)?": "temperature 1, untruncated",
    r"refus(?:e|es|ed|ing|al)": "raises ValueError with",
    r"laws?": "distribution",
    r"sentinels?": "monitor",
    r"(?<!KV cache )slots?": "KV cache slot",
    r"verifiers?": "target",
    r"x plain|plain x": "step cost",
    r"leaning|witness(?:es)?|bench|teams?|heirs|warps?|ledger|theirs": "the field's term",
}
"""House words, as whole words of prose, and what stands in their place."""
KEPT: dict[str, set[str]] = {}
"""By page, the retired words that it may have."""
MOST_WORDS = 30
LONG: dict[str, set[str]] = {}
"""By page, the first words of sentences that may be longer."""


def prose(text: str) -> list[str]:
    """Paragraphs, items of lists and cells of tables; code is one word, a link its text."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"``.+?``|`[^`]+`", "CODE", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^>]+>", "\n", text)
    text = re.sub(r"^#+ .*$|^[-:| ]+$", "\n", text, flags=re.MULTILINE)
    rows = re.compile(r"^\|.*$", re.MULTILINE)
    text = rows.sub(lambda row: "\n" + row[0].replace("|", "\n\n"), text)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def sentences(text: str) -> list[str]:
    """Of all paragraphs; they end at a full stop, a question mark or the paragraph's end."""
    ends = r"(?<=[.?!])[*)\"]*\s+(?=[*(\"]*[A-Z\d])"
    return [each for part in prose(text) for each in re.split(ends, part)]


def long_ones(text: str) -> list[str]:
    """Sentences of too many words."""
    found = sentences(text)
    return [each for each in found if len(re.findall(r"\S*\w\S*", each)) > MOST_WORDS]


def retired(text: str) -> dict[str, str]:
    """House words of a text, and what is written in their place."""
    whole = "\n".join(prose(text))
    found = {}
    for pattern, better in RETIRED.items():
        for word in re.findall(rf"(?<![\w-])(?:{pattern})(?![\w-])", whole, flags=re.IGNORECASE):
            found[word.lower()] = better
    return found


@pytest.mark.parametrize("page", SWEPT)
def test_no_sentence_is_long(page):
    allowed = LONG.get(page, set())
    found = {each for each in long_ones(PAGES[f"docs/{page}.md"])}
    assert {each for each in found if not any(each.startswith(a) for a in allowed)} == set()
    assert all(any(each.startswith(a) for each in found) for a in allowed), "one is left over"


@pytest.mark.parametrize("page", SWEPT)
def test_no_house_word_is_left(page):
    found, kept = retired(PAGES[f"docs/{page}.md"]), KEPT.get(page, set())
    assert {word: found[word] for word in found if word not in kept} == {}
    assert kept <= found.keys(), "an exception is left over"


def test_pages_are_short():
    assert {page for page in SWEPT if len(PAGES[f"docs/{page}.md"].split()) > 2000} == set()


def test_planted_words_and_sentences_are_found():
    words = " ".join(["word"] * 31)
    text = (
        f"# The root\n\nA trial was `refused`.\n\n- one\n- two {words}. Short one.\n\n| a law |\n"
    )
    assert retired(text) == {"trial": "self-test", "law": "distribution"}
    assert [each[:8] for each in long_ones(text)] == ["two word"]
    assert retired("a sliding window, sliding-window attention, a KV cache slot, flaws") == {}
    assert long_ones(f"```python\n{words}\n```\n\n{words[:140]}. Next {words[:100]}.") == []
