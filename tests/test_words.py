"""Pages, docstrings, comments and error messages use the field's words; pages in sentences that a
reader does not have to read twice.
"""

import ast
import re
from collections.abc import Iterator

import pytest
from pages import PAGES, ROOT

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
NAMES_IN_CODE = "window", "root", "sentinel", "slot"
"""House words of pages that are names of classes and variables, so code may use them."""
OF_CODE = {
    pattern: better
    for pattern, better in RETIRED.items()
    if not any(name in pattern for name in NAMES_IN_CODE)
}
"""House words that docstrings, comments and error messages may not have, either."""
KEPT_IN_CODE = {
    "specdec/lab/cli/certify.py": {"law"},  # its --help, as certificates print it
    "specdec/kernels/race/triton.py": {"warps"},  # a GPU's
    "specdec/kernels/sample/triton.py": {"warps"},
    "specdec/kernels/verify/triton.py": {"warps"},
    "specdec/lab/evaluation/sweep.py": {"refused", "refuses"},  # still to be written anew
}
"""By file, the house words that it has."""
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


def house_words(whole: str, words: dict[str, str]) -> dict[str, str]:
    """Those of a table that prose has, and what is written in their place."""
    found = {}
    for pattern, better in words.items():
        for word in re.findall(rf"(?<![\w-])(?:{pattern})(?![\w-])", whole, flags=re.IGNORECASE):
            found[word.lower()] = better
    return found


def retired(text: str) -> dict[str, str]:
    """House words of a page, and what is written in their place."""
    return house_words("\n".join(prose(text)), RETIRED)


def written_in(code: str) -> Iterator[str]:
    """Docstrings, of attributes too, comments, and the texts of `raise` statements."""
    yield from re.findall(r"(?:^ *|  )# (.*)$", code, flags=re.MULTILINE)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Raise):
            parts = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
        elif isinstance(node, ast.Expr):
            parts = [node.value] if isinstance(node.value, ast.Constant) else []
        else:
            continue
        yield from (each.value for each in parts if isinstance(each.value, str))


def house_words_of_code(code: str) -> dict[str, str]:
    """House words of a file; examples, code in backquotes and names of arguments are no prose."""
    no_prose = r"^ *(?:>>>|\.\.\.) .*$|``.+?``|`[^`]+`|^ *\w+(?:, \w+)*: |\b\w+="
    parts = [re.sub(no_prose, "CODE ", part, flags=re.MULTILINE) for part in written_in(code)]
    return house_words("\n".join(parts), OF_CODE)


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


def test_no_house_word_is_left_in_code():
    found, any_word = {}, rf"\b(?:{'|'.join(OF_CODE)})\b"
    for path in (ROOT / "specdec").rglob("*.py"):
        code = path.read_text(encoding="utf-8")
        # Parsing takes long, and most files do not have a house word, even as a name.
        if re.search(any_word, code, re.IGNORECASE):
            found[path.relative_to(ROOT).as_posix()] = house_words_of_code(code)
    left = {(file, word): found[file][word] for file in found for word in found[file]}
    kept = {(file, word) for file, words in KEPT_IN_CODE.items() for word in words}
    assert {place: left[place] for place in left if place not in kept} == {}
    assert kept <= left.keys(), "an exception is left over"


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


PLANTED = '''
"""Refuses a root."""

law = 1  # the law of a draft
"""A trial, in code `witness`."""

def f(neutral):
    """One.

    Args:
        neutral: what is drawn from.

    Example:
        >>> refuse(neutral)
    """
    raise ValueError(f"{neutral} is " f"no {law} of the team; pass verifier=")
'''


def test_planted_words_of_code_are_found():
    assert house_words_of_code(PLANTED).keys() == {"refuses", "law", "trial", "team"}
    assert house_words_of_code("refused = 'refuses'  #: of a window\nraise E('a slot')\n") == {}
