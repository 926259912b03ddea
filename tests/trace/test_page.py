"""A trace as a page: one file with the records and the text of their tokens, and what a reader sees
of them under the pointer in a browser.
"""

import json
import re
from dataclasses import replace
from html import unescape

import pytest
from chromium import CHROMIUM, chromium
from tokenizers import decoders

from specdec import SpeculativeGenerator, Tree, zoo
from specdec.lab.show.text import visible
from specdec.lab.trace import Trace
from specdec.statistics import SpeculationStats

TOKENIZER, TARGET = zoo.load_tokenizer(), zoo.load_target()
DRAFTERS = {
    "chain": zoo.load_drafter("model", TARGET, num_draft_tokens=3),
    "tree": zoo.load_drafter("eagle3", TARGET, tree=Tree(12, 3)),
}


@pytest.fixture(scope="module", name="traces")
def _traces() -> dict[str, Trace]:
    """Two rows of each kind, so long that every kind of token is among them."""
    ids = TOKENIZER("def f(x):\n    return", return_tensors="pt").input_ids.repeat(2, 1)
    options = {"max_new_tokens": 48, "do_sample": True, "seed": [1, 2], "trace": True}
    generators = {name: SpeculativeGenerator(TARGET, part) for name, part in DRAFTERS.items()}
    return {name: part.generate(ids, **options).trace for name, part in generators.items()}


@pytest.fixture(name="page")
def _page(tmp_path):
    """Writes a page; returns its text, and what Python filled it with."""

    def write(trace: Trace, **options) -> tuple[str, dict]:
        trace.to_html(tmp_path / "page.html", **options)
        html = (tmp_path / "page.html").read_text(encoding="utf-8")
        return html, json.loads(re.search(r'id="trace">(.*?)</script>', html)[1])

    return write


@pytest.mark.parametrize("kind", DRAFTERS)
def test_it_holds_the_records_and_the_whole_text(kind, traces, page):
    trace, (_, content) = traces[kind], page(traces[kind], tokenizer=TOKENIZER)
    names, records = content["columns"], trace.to_records()
    lines = [(row["row"], line) for row in content["rows"] for line in row["records"]]
    assert lines == [(record["row"], [record[name] for name in names]) for record in records]
    assert content["times"] == [list(vars(taken).values()) for taken in trace.times]
    for row, steps in zip(content["rows"], trace, strict=True):
        new = [token for step in steps for token in step.new_tokens]
        assert "".join(text for text, _ in row["pieces"]) == TOKENIZER.decode(new)
        assert {content["texts"][str(token)] for token in new}  # each has a text


@pytest.mark.parametrize("text", ["🙂🙂 x", "a < b & '\"' </pre></script><script>x</script>"])
def test_nothing_of_the_text_becomes_markup_and_nothing_is_fetched(text, traces, page):
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    first, numbers = traces["chain"][0][0], traces["chain"].numbers[0][0]
    steps = [replace(first, num_accepted=0, new_tokens=[token]) for token in tokens]
    numbers = [replace(numbers, step=i) for i in range(len(steps))]
    times = traces["chain"].times[:1] * len(steps)
    html, content = page(
        Trace([steps], [numbers], times, [tokens], {"target": text}), tokenizer=TOKENIZER
    )
    assert "".join(text for text, _ in content["rows"][0]["pieces"]) == visible(text)
    assert html.count("<script") == html.count("</script>") == 2
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", html)


def test_no_space_is_lost_where_the_text_begins(traces, page):
    """With a decoder that drops the space that begins a text, as Llama 2's does."""
    tokenizer, tokens = zoo.load_tokenizer(), TOKENIZER(" the", add_special_tokens=False).input_ids
    parts = [tokenizer.backend_tokenizer.decoder, decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(parts)
    step, other = replace(traces["chain"][0][0], num_accepted=0, new_tokens=tokens), traces["chain"]
    trace = Trace([[step]], [other.numbers[0][:1]], other.times[:1], [tokens], {})
    assert page(trace, tokenizer=tokenizer)[1]["rows"][0]["pieces"][0] == [" the", 0]


def test_rows_and_steps_are_chosen(traces, page):
    trace = traces["chain"]
    (row,) = page(trace, tokenizer=TOKENIZER, rows=[1], steps=range(2, 5))[1]["rows"]
    assert (row["row"], {line[0] for line in row["records"]}) == (1, {2, 3, 4})
    before = [token for step in trace[1][:2] for token in step.new_tokens]
    assert row["prompt"] == [TOKENIZER.decode(trace.prompts[1] + before)]
    ids = page(trace)[1]
    shown = "".join(f"{token} " for token in trace.prompts[0])
    assert (ids["texts"], ids["rows"][0]["prompt"]) == (None, [shown])
    assert page(Trace([], [], [], []))[1]["rows"] == []


REFUSED = {
    "a row of the trace must be an integer in 0..1, got 2": {"rows": [2]},
    "a step of the trace must be an integer in 0.*got 998": {"steps": range(999)},
    r"steps must be a range such as range\(10, 20\), got \[1, 2\]": {"steps": [1, 2]},
    r"steps must be a range such as .*, got range\(0, 9, 2\)": {"steps": range(0, 9, 2)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_trace_does_not_have_is_refused_and_nothing_is_written(message, traces, tmp_path):
    with pytest.raises(ValueError, match=message):
        traces["chain"].to_html(tmp_path / "page.html", **REFUSED[message])
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_the_page_of_the_first_rows_in_a_frame(traces, page):
    few = traces["chain"]
    many = replace(few, steps=few.steps * 5, numbers=few.numbers * 5, prompts=few.prompts * 5)
    many = many.with_tokenizer(TOKENIZER)
    (shown,) = re.findall(r'<iframe srcdoc="([^"]*)"', many._repr_html_())
    assert unescape(shown) == page(many, rows=range(8))[0]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_reader_sees_the_numbers_of_the_token_under_the_pointer(kind, traces, page, tmp_path):
    page(trace := traces[kind], tokenizer=TOKENIZER)
    with chromium(tmp_path / "profile") as browser:
        browser.open(tmp_path / "page.html")
        for row in (0, 1):
            browser.run(f"at('row').value = {row}, at('row').dispatchEvent(new Event('change'))")
            of_row = [record for record in trace.to_records() if record["row"] == row]
            kept = [record for record in of_row if record["new_token"] is not None]
            for verdict in ("accepted", "rejected", "bonus"):
                at = [record["verdict"] for record in kept].index(verdict)
                browser.hover(f'[data-token="{at}"]')
                check_panel(browser, kept[at], [r for r in of_row if r["step"] == kept[at]["step"]])
            stats = SpeculationStats([trace[row]], trace.about["num_draft_tokens"])
            length = f"acceptance length {stats.acceptance_length:.2f}"
            assert length in browser.run("at('summary').innerText")
            bars = browser.run("[...at('bars').children].map(bar => bar.innerText.slice(0, 4))")
            assert bars == [f"{rate:.2f}" for rate in stats.joint_rates]
        browser.run("spans()[0].focus()")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert f"position {kept[1]['position']} of" in browser.run("at('panel').innerText")
        browser.run("at('from').value = 2, at('from').dispatchEvent(new Event('input'))")
        chosen = len([record for record in kept if record["step"] >= 2])
        summary = f"{chosen} tokens in {len(trace[1]) - 2} steps"
        assert summary in browser.run("at('summary').innerText")
        outside = browser.run("document.querySelectorAll('.outside').length")
        assert outside == len(kept) - chosen


FACTS = {
    **{"target probability": "new_target_prob", "draft probability": "new_draft_prob"},
    **{"target entropy, nats": "target_entropy", "draft entropy, nats": "draft_entropy"},
    "accept draw": "accept_draw",
    "target's own, before temperature": "new_raw_target_prob",
    "draft's own, before temperature": "raw_draft_prob",
}


def check_panel(browser, record: dict, step: list[dict]) -> None:
    """What stands in the panel are a record's numbers, and those of what was drafted beside it."""
    texts = "[...document.querySelectorAll('#panel {}')].map(one => one.innerText)"
    names, values, cells = (browser.run(texts.format(tag)) for tag in ("dt", "dd", "td"))
    facts = {label: record[name] for label, name in FACTS.items() if record[name] is not None}
    assert dict(zip(names, map(float, values), strict=True)) == pytest.approx(facts, rel=1e-3)
    raw = ("new_raw_target_prob", "raw_draft_prob")
    num_raw = sum(record[name] is not None for name in raw)
    assert len(facts) == (2 if record["verdict"] == "bonus" else 5) + num_raw
    drafted = [one for one in step if one["verdict"] != "bonus"]
    if any(one["parent"] != i - 1 for i, one in enumerate(drafted)):  # a tree
        drafted = [one for one in drafted if one["parent"] == record["parent"]]
    for i, name in enumerate(("target_prob", "draft_prob", "accept_draw"), start=1):
        numbers = [one[name] for one in drafted]
        assert [float(cell) for cell in cells[i::5]] == pytest.approx(numbers, rel=1e-2)
    assert cells[4::5] == [one["verdict"] for one in drafted]
    (verify_ms,) = re.findall("verify (.*?) ms", browser.run("at('panel').innerText"))
    assert float(verify_ms) == pytest.approx(record["verify_ms"], rel=1e-2)
