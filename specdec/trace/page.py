"""A trace as one page for a browser: `page.html`, filled with the trace's records and the text of
their tokens.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

from specdec.show.text import pieces, printable, visible

_TEMPLATE = Path(__file__).with_name("page.html")
_COLUMNS = (
    *("step", "index", "position", "parent", "verdict", "new_token", "new_target_prob"),
    *("new_draft_prob", "target_entropy", "draft_token", "draft_prob", "target_prob"),
    *("accept_draw", "draft_entropy"),
)
"""Of the records: all but the row, and the times, which are those of the step."""


def page_of(trace: Any, tokenizer: Any) -> str:
    """The page; it needs nothing but a browser.

    Args:
        trace: a `specdec.trace.Trace`; rows without steps are left out.
        tokenizer: decodes the tokens; `None` shows ids.
    """
    rows = {
        row: {"row": row, "prompt": f"{ids} ", "pieces": [], "records": []}
        for row, ids in enumerate(trace.prompts)
        if trace.steps[row]
    }
    for record in trace.to_records():
        rows[record["row"]]["records"].append([record[name] for name in _COLUMNS])
    for row, content in rows.items():
        tokens = [token for step in trace.steps[row] for token in step.new_tokens]
        content["pieces"] = [(visible(text), at) for text, at in pieces(tokenizer, tokens)]
        if tokenizer is not None:
            content["prompt"] = visible(tokenizer.decode(trace.prompts[row]))
    steps = [step for row in trace.steps for step in row]
    found = {token for step in steps for token in step.draft_tokens + step.new_tokens}
    content = {
        "about": _about(trace.about),
        "columns": _COLUMNS,
        "times": [astuple(taken) for taken in trace.times],
        "texts": tokenizer and {token: printable(tokenizer.decode([token])) for token in found},
        "rows": list(rows.values()),
    }
    text = json.dumps(content, separators=(",", ":")).replace("<", r"\u003c")  # ends no element
    return _TEMPLATE.read_text(encoding="utf-8").replace("{{trace}}", text)


def _about(about: dict[str, Any]) -> str:
    """How the text was generated, in one line."""
    values = {**about, **about.get("sampling", {})}
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    return printable(" · ".join(f"{name.replace('_', ' ')} {v}" for name, v in plain.items()))
