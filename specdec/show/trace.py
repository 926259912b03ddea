"""A trace as HTML for notebooks, readable on light and dark pages and without colour."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from specdec.show.text import pieces
from specdec.show.tokens import text_html, token_span

_GREENS = ("#d9f2d9", "#bfe8bf", "#a3dca3", "#86cf86", "#69bf69", "#4dae4d")
"""Background of accepted tokens by draft position; the last serves all later ones."""
_SHOWN_ROWS = 8
_SHOWN_PROMPT = 600
"""Characters; of a longer prompt its end is shown."""


def trace_html(trace: Any, tokenizer: Any) -> str:
    """The first rows of a trace with a key to the colours and the batch's times.

    Args:
        trace: a `specdec.trace.Trace`.
        tokenizer: decodes the tokens; `None` shows ids.
    """
    rows = "".join(_row(trace, row, tokenizer) for row in range(min(len(trace), _SHOWN_ROWS)))
    if len(trace) > _SHOWN_ROWS:
        rows += f"<div>and {len(trace) - _SHOWN_ROWS} rows more</div>"
    return f'<div class="specdec-trace">{_key(trace)}{rows}{_times(trace)}</div>'


def _row(trace: Any, row: int, tokenizer: Any) -> str:
    steps = list(zip(trace.steps[row], trace.numbers[row], strict=True))
    marks = [mark for step, numbers in steps for mark in _marks(step, numbers, tokenizer)]
    tokens = [token for step, _ in steps for token in step.new_tokens]
    ids = trace.prompts[row]
    prompt = f"{ids} " if tokenizer is None else tokenizer.decode(ids)
    start = "" if len(prompt) <= _SHOWN_PROMPT else "\u2026"
    shown = escape(start + prompt[-_SHOWN_PROMPT:])
    spans = [f'<span style="opacity:.6" title="prompt of {len(ids)} tokens">{shown}</span>']
    for text, index in pieces(tokenizer, tokens):
        kind, title, background = marks[index]
        spans.append(token_span(text, kind, background=background, title=title))
    return text_html(spans)


def _marks(step: Any, numbers: Any, tokenizer: Any) -> Iterator[tuple[str, str, str | None]]:
    """Kind, explanation and colour of each token that the step emitted."""
    nodes = [*step.accepted, *step.rejected[:1]]
    for i, kind in enumerate(step.kinds):
        background, above = None, nodes[i - 1] if i else -1
        if kind == "bonus":
            what = f"bonus; target {numbers.extra_target_prob:.3f}"
        else:
            node = nodes[i]
            probs = (
                f"target {numbers.target_probs[node]:.3f}, draft {numbers.draft_probs[node]:.3f}"
            )
            if kind == "accepted":
                draw = f", draw {numbers.accept_draws[node]:.3f}" if numbers.accept_draws else ""
                what = f"draft token {i + 1} accepted; {probs}{draw}"
                background = _GREENS[min(i, len(_GREENS) - 1)]
            else:
                tokens = [step.draft_tokens[child] for child in step.rejected]
                if tokenizer is not None:
                    tokens = [repr(tokenizer.decode([token])) for token in tokens]
                what = (
                    f"recovered (target {numbers.extra_target_prob:.3f}) in place of draft token "
                    f"{', '.join(map(str, tokens))} ({probs})"
                )
        where = f"step {numbers.step}, position {numbers.position + i + 1}"
        entropy = f"target entropy {numbers.target_entropies[above + 1]:.2f} nats"
        yield kind, f"{where}: {what}; {entropy}", background


def _key(trace: Any) -> str:
    widest = max((step.depth for row in trace for step in row), default=0)
    shown = [
        token_span(
            f"{i + 1}{'+' * (i + 1 == len(_GREENS) < widest)}", "accepted", background=colour
        )
        for i, colour in enumerate(_GREENS[:widest])
    ]
    shown += [token_span(kind, kind) for kind in ("recovered", "bonus")]
    return (
        f"<div>accepted at draft position {' '.join(shown)} &ndash; point at a token for its "
        "numbers</div>"
    )


def _times(trace: Any) -> str:
    if not trace.times:
        return ""
    names = ("draft", "verify", "sample", "host")
    sums = {name: sum(getattr(t, f"{name}_ms") for t in trace.times) for name in names}
    total = sum(sums.values()) or 1.0
    text = ", ".join(f"{name} {ms:.1f} ms ({100 * ms / total:.0f} %)" for name, ms in sums.items())
    return f"<div>{len(trace.times)} steps: {text}</div>"
