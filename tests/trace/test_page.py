"""A trace as a page: one file, the records and the text of their tokens, and what a reader sees of
them under the pointer in a browser.
"""

import json
import re
from dataclasses import replace
from html import unescape

import pytest
from chromium import CHROMIUM, chromium

from specdec import SpeculativeGenerator, Tree, zoo
from specdec.results import SpeculationStats
from specdec.show.text import visible
from specdec.trace import Trace

TOKENIZER = zoo.load_tokenizer()
TARGET = zoo.load_target()
GENERATORS = {
    "chain": SpeculativeGenerator(TARGET, zoo.load_drafter("model", TARGET, num_draft_tokens=3)),
    "tree": SpeculativeGenerator(TARGET, zoo.load_drafter("eagle3", TARGET, tree=Tree(12, 3))),
}


@pytest.fixture(scope="module", name="traces")
def _traces() -> dict[str, Trace]:
    """Two rows of each kind, so long that every kind of token is among them."""
    ids = TOKENIZER("def f(x):\n    return", return_tensors="pt").input_ids.repeat(2, 1)
    options = {"max_new_tokens": 48, "do_sample": True, "temperature": 1.0, "trace": True}
    return {
        name: generator.generate(ids, seed=[1, 2], **options).trace
        for name, generator in GENERATORS.items()
    }


@pytest.fixture(name="page")
def _page(tmp_path):
    """Writes a page and returns its text."""

    def write(trace: Trace, **options) -> str:
        trace.to_html(tmp_path / "page.html", **options)
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return write


def content_of(html: str) -> dict:
    """What Python filled the page with."""
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', html)[1])


@pytest.mark.parametrize("kind", GENERATORS)
def test_it_holds_the_records_and_the_whole_text(kind, traces, page):
    content = content_of(page(traces[kind], tokenizer=TOKENIZER))
    records = traces[kind].to_records()
    for row, shown in enumerate(content["rows"]):
        named = [dict(zip(content["columns"], line, strict=True)) for line in shown["records"]]
        own = [record for record in records if record["row"] == row]
        assert named == [{name: record[name] for name in content["columns"]} for record in own]
        new = [record["new_token"] for record in own if record["new_token"] is not None]
        text = "".join(text for text, _ in shown["pieces"])
        assert text == TOKENIZER.decode(new)
        assert shown["prompt"] == TOKENIZER.decode(traces[kind].prompts[row])
        assert {token: content["texts"][str(token)] for token in new}  # each has its text
    assert content["times"] == [list(vars(taken).values()) for taken in traces[kind].times]


@pytest.mark.parametrize(
    "text", ["🙂🙂 x", "a < b && c > '\"' </pre></script><script>x()</script>\x1b"]
)
def test_nothing_of_the_text_becomes_markup_and_nothing_is_fetched(text, traces, page):
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    first = traces["chain"].steps[0][0]
    steps = [replace(first, num_accepted=0, new_tokens=[token]) for token in tokens]
    numbers = [replace(traces["chain"].numbers[0][0], step=i) for i in range(len(steps))]
    times, about = traces["chain"].times[:1] * len(steps), {"target": text}
    html = page(Trace([steps], [numbers], times, [tokens], about), tokenizer=TOKENIZER)
    content = content_of(html)
    assert "".join(text for text, _ in content["rows"][0]["pieces"]) == visible(text)
    assert html.count("<script") == html.count("</script>") == 2
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|url\(", html.replace(text, ""))


def test_rows_and_steps_are_chosen(traces, page):
    trace = traces["chain"]
    content = content_of(page(trace, tokenizer=TOKENIZER, rows=[1], steps=range(2, 5)))
    (row,) = content["rows"]
    assert (row["row"], {line[0] for line in row["records"]}) == (1, {2, 3, 4})
    before = [token for step in trace[1][:2] for token in step.new_tokens]
    assert row["prompt"] == TOKENIZER.decode(trace.prompts[1] + before)
    ids = content_of(page(trace))
    assert ids["texts"] is None
    assert ids["rows"][0]["prompt"] == f"{trace.prompts[0]} "
    assert content_of(page(Trace([], [], [], [])))["rows"] == []


REFUSED = {
    "row": ({"rows": [2]}, "a row of the trace must be an integer in 0..1, got 2"),
    "step": ({"steps": range(0, 999)}, "a step of the trace must be an integer in 0.*got 998"),
    "list": ({"steps": [1, 2]}, r"steps must be a range such as range\(10, 20\), got \[1, 2\]"),
    "gaps": ({"steps": range(0, 9, 2)}, r"steps must be a range such as .*, got range\(0, 9, 2\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_trace_does_not_have_is_refused_and_nothing_is_written(case, traces, tmp_path):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        traces["chain"].to_html(tmp_path / "page.html", **options)
    assert not list(tmp_path.iterdir())


def test_a_notebook_shows_the_page_of_the_first_rows_in_a_frame(traces, page):
    trace = traces["chain"].with_tokenizer(TOKENIZER)
    many = Trace(trace.steps * 5, trace.numbers * 5, trace.times, trace.prompts * 5)
    many = many.with_tokenizer(TOKENIZER)
    (shown,) = re.findall(r'<iframe srcdoc="([^"]*)"', many._repr_html_())
    assert unescape(shown) == page(many, rows=range(8))


FACTS = {"target probability": "new_target_prob", "draft probability": "new_draft_prob"}
FACTS |= {"target entropy, nats": "target_entropy", "draft entropy, nats": "draft_entropy"}
READ = "[...document.querySelectorAll('#panel {}')].map(e => e.innerText.trim())"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("kind", GENERATORS)
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
                browser.hover(f"document.querySelector('[data-token=\"{at}\"]')")
                check_panel(browser, kept[at], [r for r in of_row if r["step"] == kept[at]["step"]])
            stats = SpeculationStats([trace[row]], trace.about["num_draft_tokens"])
            assert f"acceptance length {stats.acceptance_length:.2f}" in browser.run(
                "at('summary').innerText"
            )
            shares = browser.run("[...at('bars').children].map(bar => bar.innerText)")
            assert [share.split()[0] for share in shares] == [f"{x:.2f}" for x in stats.joint_rates]
        browser.run("spans()[0].focus()")
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert f"position {kept[1]['position']} of" in browser.run("at('panel').innerText")
        browser.run("at('from').value = 2, at('from').dispatchEvent(new Event('input'))")
        chosen = len([record for record in kept if record["step"] >= 2])
        summary = f"{chosen} tokens in {len(trace[1]) - 2} steps"
        assert summary in browser.run("at('summary').innerText")
        outside = browser.run("document.querySelectorAll('.outside').length")
        assert outside == len(kept) - chosen


def check_panel(browser, record: dict, step: list[dict]) -> None:
    """What stands in the panel are a record's numbers, and those of what was drafted beside it."""
    names, values = (browser.run(READ.format(tag)) for tag in ("dt", "dd"))
    shown = {name: float(value) for name, value in zip(names, values, strict=True)}
    facts = {name: record[column] for name, column in FACTS.items()}
    if record["verdict"] == "accepted":
        facts["accept draw"] = record["accept_draw"]
    elif record["verdict"] == "bonus":
        del facts["draft probability"], facts["draft entropy, nats"]
    assert shown == pytest.approx(facts, rel=1e-3)
    drafted = [one for one in step if one["verdict"] != "bonus"]
    if any(one["parent"] != i - 1 for i, one in enumerate(drafted)):  # a tree
        drafted = [one for one in drafted if one["parent"] == record["parent"]]
    columns = ("target_prob", "draft_prob", "accept_draw")
    expected = [f"{one[name]:.3g}" for one in drafted for name in columns]
    cells = browser.run(READ.format("td"))
    numbers = [cell for i, cell in enumerate(cells) if i % 5 in (1, 2, 3)]
    assert [float(cell) for cell in numbers] == pytest.approx(list(map(float, expected)))
    assert cells[4::5] == [one["verdict"] for one in drafted]
    (verify_ms,) = re.findall("verify (.*?) ms", browser.run("at('panel').innerText"))
    assert float(verify_ms) == pytest.approx(record["verify_ms"], rel=1e-2)
