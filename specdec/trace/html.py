"""A trace as HTML for notebooks, readable on light and dark pages and without colour."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from specdec.results import PRE_STYLE, pieces, token_span

if TYPE_CHECKING:
    from specdec.results import RowStep
    from specdec.trace.record import StepNumbers, Trace

_GREENS = ("#d9f2d9", "#bfe8bf", "#a3dca3", "#86cf86", "#69bf69", "#4dae4d")
"""Background of accepted tokens by draft position; the last serves all later ones."""
_SHOWN_ROWS = 8
_SHOWN_PROMPT = 600
"""Characters; of a longer prompt its end is shown."""


@dataclass(frozen=True)
class _Mark:
    """How a token is shown."""

    kind: str
    title: str
    background: str | None = None


def render(trace: Trace, tokenizer: Any) -> str:
    """The first rows of a trace with a key to the colours and the batch's times."""
    shown = range(min(len(trace), _SHOWN_ROWS))
    rows = "".join(_row(trace, row, tokenizer) for row in shown)
    if len(trace) > _SHOWN_ROWS:
        rows += f"<div>and {len(trace) - _SHOWN_ROWS} rows more</div>"
    return f'<div class="specdec-trace">{_key(trace)}{rows}{_times(trace)}</div>'


def _row(trace: Trace, row: int, tokenizer: Any) -> str:
    marks = [
        mark
        for step, numbers in zip(trace.steps[row], trace.numbers[row], strict=True)
        for mark in _marks(step, numbers, tokenizer)
    ]
    tokens = [token for step in trace.steps[row] for token in step.new_tokens]
    spans = "".join(
        token_span(
            text, marks[index].kind, background=marks[index].background, title=marks[index].title
        )
        for text, index in pieces(tokenizer, tokens)
    )
    prompt = _prompt(trace.prompts[row], tokenizer)
    return f'<pre style="{PRE_STYLE}">{prompt}{spans}</pre>'


def _prompt(ids: list[int], tokenizer: Any) -> str:
    text = f"{ids} " if tokenizer is None else tokenizer.decode(ids)
    start = "" if len(text) <= _SHOWN_PROMPT else "\u2026"
    shown = escape(start + text[-_SHOWN_PROMPT:])
    return f'<span style="opacity:.6" title="prompt of {len(ids)} tokens">{shown}</span>'


def _marks(step: RowStep, numbers: StepNumbers, tokenizer: Any) -> list[_Mark]:
    """Kind, explanation and colour of each token that the step emitted."""
    marks = []
    for i, kind in enumerate(step.kinds):
        head = f"step {numbers.step}, position {numbers.position + i + 1}: "
        entropy = f"target entropy {numbers.target_entropies[i]:.2f} nats"
        if kind == "accepted":
            draw = f", draw {numbers.accept_draws[i]:.3f}" if numbers.accept_draws else ""
            title = (
                f"{head}draft token {i + 1} accepted; target {numbers.target_probs[i]:.3f}, "
                f"draft {numbers.draft_probs[i]:.3f}{draw}; {entropy}"
            )
            marks.append(_Mark(kind, title, _GREENS[min(i, len(_GREENS) - 1)]))
        elif kind == "recovered":
            token = step.draft_tokens[i]
            rejected = token if tokenizer is None else repr(tokenizer.decode([token]))
            title = (
                f"{head}recovered (target {numbers.extra_target_prob:.3f}) in place of draft "
                f"token {rejected} (target {numbers.target_probs[i]:.3f}, draft "
                f"{numbers.draft_probs[i]:.3f}); {entropy}"
            )
            marks.append(_Mark(kind, title))
        else:
            title = f"{head}bonus; target {numbers.extra_target_prob:.3f}; {entropy}"
            marks.append(_Mark(kind, title))
    return marks


def _key(trace: Trace) -> str:
    widest = max((len(step.draft_tokens) for row in trace for step in row), default=0)
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


def _times(trace: Trace) -> str:
    if not trace.times:
        return ""
    names = ("draft", "verify", "sample", "host")
    sums = {name: sum(getattr(t, f"{name}_ms") for t in trace.times) for name in names}
    total = sum(sums.values()) or 1.0
    text = ", ".join(f"{name} {ms:.1f} ms ({100 * ms / total:.0f} %)" for name, ms in sums.items())
    return f"<div>{len(trace.times)} steps: {text}</div>"
