"""A trace as HTML: the text is the decoded text, every token has the colour of its origin, and
nothing of the text can end a tag.
"""

import re
from html import unescape

import pytest

from specdec import SpeculativeGenerator, zoo
from specdec.results import RowStep
from specdec.show.tokens import END_OF_LINE
from specdec.trace import StepNumbers, StepTimes, Trace

TOKENIZER = zoo.load_tokenizer()


def trace_of(text: str, *, prompt: str = "p") -> Trace:
    """One row that emits a text in blocks: two accepted and a recovered token, then bonus ones."""
    tokens = TOKENIZER(text, add_special_tokens=False).input_ids
    steps, start = [], 0
    while start < len(tokens):
        new = tokens[start : start + 3]
        accepted = min(2, len(new))
        drafted = [*new[:accepted], 7, 7][: 3 if len(steps) % 2 == 0 else accepted]
        steps.append(RowStep(drafted, accepted, new))
        start += 3
    numbers = [
        StepNumbers(
            step=i,
            position=3 * i,
            draft_probs=[0.5] * len(step.draft_tokens),
            target_probs=[0.25] * len(step.draft_tokens),
            accept_draws=[0.125] * len(step.draft_tokens),
            draft_entropies=[1.0] * len(step.draft_tokens),
            target_entropies=[2.0] * (len(step.draft_tokens) + 1),
            extra_draft_prob=0.0,
            extra_target_prob=0.75,
        )
        for i, step in enumerate(steps)
    ]
    times = [StepTimes(1.0, 2.0, 0.5, 0.5)] * len(steps)
    return Trace([steps], [numbers], times, [TOKENIZER(prompt).input_ids])


def shown(html: str) -> str:
    """What a browser shows of the text."""
    body = html.split("<pre", 1)[1].split(">", 1)[1].split("</pre>")[0]
    body = body.replace(END_OF_LINE, "<br>")  # a mark that is not copied
    return unescape(re.sub(r"<[^>]*>", "", body.replace("<br>", "\n"))).replace("\xa0", " ")


@pytest.mark.parametrize(
    "text", ["def f():\n    return 1", "🙂🙂 x", "a < b && c > '\"' </pre><script>x()</script>"]
)
def test_it_shows_the_text_and_nothing_of_the_text_becomes_markup(text):
    html = trace_of(text, prompt="<b>").html(TOKENIZER)
    assert shown(html) == "<b>" + text
    tags = set(re.findall(r"</?([a-z]+)", html))
    assert tags <= {"div", "pre", "span", "br"}


def test_every_origin_has_its_colour_and_its_numbers():
    html = trace_of("alpha beta gamma delta epsilon zeta").html(TOKENIZER)
    titles = re.findall(r'background:(#\w+)" title="([^"]*)"', html.split("<pre", 1)[1])
    kinds = {}
    for colour, title in titles:
        kind = re.search(r"token \d accepted|recovered|bonus", title).group()
        kinds.setdefault(kind, set()).add(colour)
        assert "target entropy 2.00 nats" in title
    assert set(kinds) == {"token 1 accepted", "token 2 accepted", "recovered", "bonus"}
    colours = [colour for found in kinds.values() for colour in found]
    assert len(colours) == len(set(colours)) == 4
    accepted = next(title for _, title in titles if "token 1 accepted" in title)
    assert "target 0.250, draft 0.500, draw 0.125" in accepted
    assert "draft 2.0 ms (25 %)" in html or "draft" in html.split("steps:")[1]


def test_kinds_differ_without_colours_and_a_rejected_token_is_shown_as_text():
    html = trace_of("alpha beta gamma delta epsilon zeta").html(TOKENIZER)
    spans = re.findall(r'<span style="([^"]*)" title="([^"]*)"', html.split("<pre", 1)[1])
    lines = {}
    for style, title in spans[1:]:  # the first is the prompt's
        kind = re.search(r"accepted|recovered|bonus", title).group()
        lines.setdefault(kind, set()).add(re.sub(r"background:.*", "", style))
    assert all(len(found) == 1 for found in lines.values())
    assert len(set.union(*lines.values())) == len(lines) == 3
    rejected = repr(TOKENIZER.decode([7]))
    assert any(f"in place of draft token {rejected} " in unescape(title) for _, title in spans)


@pytest.mark.parametrize(("width", "last"), [(3, "3"), (6, "6"), (9, "6+")])
def test_the_last_colour_of_the_key_stands_for_later_positions(width, last):
    trace = trace_of("x = 1")
    step = RowStep([7] * width, 0, trace.steps[0][0].new_tokens[:1])
    number = StepNumbers(
        0, 0, [0.5] * width, [0.5] * width, None, [1.0] * width, [2.0] * (width + 1), 0.0, 1.0
    )
    html = Trace([[step]], [[number]], trace.times[:1], trace.prompts).html(TOKENIZER)
    key = html.split("<pre", 1)[0]
    assert f">{last}</span>" in key
    assert key.count('title="accepted"') == min(width, 6)


def test_every_end_of_line_is_marked_and_can_be_pointed_at():
    html = trace_of("x\n\n\ny").html(TOKENIZER)
    assert html.count(END_OF_LINE) == 3


def test_long_prompts_and_many_rows_are_shown_in_part():
    trace = trace_of("x = 1", prompt="word " * 500)
    assert shown(trace.html(TOKENIZER)).startswith("\u2026")
    assert shown(trace.html(TOKENIZER)).endswith("word x = 1")
    assert len(shown(trace.html(TOKENIZER))) < 700
    rows = 20
    many = Trace(trace.steps * rows, trace.numbers * rows, trace.times, trace.prompts * rows)
    assert many.html(TOKENIZER).count("<pre") == 8
    assert "and 12 rows more" in many.html(TOKENIZER)


def test_without_a_tokenizer_it_shows_ids_and_a_notebook_shows_what_it_was_given():
    trace = trace_of("x = 1")
    assert str(trace.prompts[0]) in trace._repr_html_()
    assert trace.with_tokenizer(TOKENIZER)._repr_html_() == trace.html(TOKENIZER)
    assert trace.tokenizer is None


def test_a_real_generation_is_shown_as_its_text():
    target = zoo.load_target()
    generator = SpeculativeGenerator(target, zoo.load_drafter("model", target))
    ids = TOKENIZER("def f(", return_tensors="pt").input_ids
    result = generator.generate(ids, max_new_tokens=24, trace=True)
    text = TOKENIZER.decode(result.sequences[0, : ids.shape[1] + result.lengths[0]])
    assert shown(result.trace.html(TOKENIZER)) == text
