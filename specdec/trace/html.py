"""A trace as HTML for notebooks, readable on light and dark pages and without colour."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from specdec.results import pieces

if TYPE_CHECKING:
    from specdec.results import RowStep
    from specdec.trace.record import StepNumbers, Trace

_GREENS = ("#d9f2d9", "#bfe8bf", "#a3dca3", "#86cf86", "#69bf69", "#4dae4d")
"""Background of accepted tokens by draft position; the last serves all later ones."""
_RECOVERED, _BONUS = "#f6c1c1", "#bcd4f6"
_TOKEN = "color:#111;border-radius:2px;padding:0 1px;background:"


def render(trace: Trace, tokenizer: Any) -> str:
    """All rows of a trace with a key to the colours and the batch's times."""
    rows = "".join(_row(trace, row, tokenizer) for row in range(len(trace)))
    return f'<div class="specdec-trace">{_key(trace)}{rows}{_times(trace)}</div>'


def _row(trace: Trace, row: int, tokenizer: Any) -> str:
    marks = [
        mark
        for step, numbers in zip(trace.steps[row], trace.numbers[row], strict=True)
        for mark in _marks(step, numbers)
    ]
    tokens = [token for step in trace.steps[row] for token in step.new_tokens]
    prompt = trace.prompts[row]
    shown = f"{prompt} " if tokenizer is None else tokenizer.decode(prompt)
    spans = "".join(_span(text, *marks[index]) for text, index in pieces(tokenizer, tokens))
    return (
        '<pre style="white-space:pre-wrap;line-height:1.6;margin:.5em 0">'
        f'<span style="opacity:.6">{escape(shown)}</span>{spans}</pre>'
    )


def _span(text: str, colour: str, title: str) -> str:
    shown = escape(text).replace("\n", "<br>")
    # A token of nothing but white space would have no area to point at.
    shown = shown if text.strip() else shown.replace(" ", "&nbsp;") or "&nbsp;"
    return f'<span style="{_TOKEN}{colour}" title="{escape(title)}">{shown}</span>'


def _marks(step: RowStep, numbers: StepNumbers) -> list[tuple[str, str]]:
    """Colour and explanation of each token that the step emitted."""
    marks = []
    for i, kind in enumerate(step.kinds):
        head = f"step {numbers.step}, position {numbers.position + i + 1}: "
        entropy = f"target entropy {numbers.target_entropies[i]:.2f} nats"
        if kind == "accepted":
            draw = f", draw {numbers.accept_draws[i]:.3f}" if numbers.accept_draws else ""
            marks.append(
                (
                    _GREENS[min(i, len(_GREENS) - 1)],
                    f"{head}draft token {i + 1} accepted; target {numbers.target_probs[i]:.3f}, "
                    f"draft {numbers.draft_probs[i]:.3f}{draw}; {entropy}",
                )
            )
        elif kind == "recovered":
            rejected = step.draft_tokens[i]
            marks.append(
                (
                    _RECOVERED,
                    f"{head}recovered (target {numbers.extra_target_prob:.3f}) in place of draft "
                    f"token {rejected} (target {numbers.target_probs[i]:.3f}, draft "
                    f"{numbers.draft_probs[i]:.3f}); {entropy}",
                )
            )
        else:
            marks.append(
                (_BONUS, f"{head}bonus; target {numbers.extra_target_prob:.3f}; {entropy}")
            )
    return marks


def _key(trace: Trace) -> str:
    widest = max((len(step.draft_tokens) for row in trace for step in row), default=0)
    shown = [(str(i + 1), colour) for i, colour in enumerate(_GREENS[:widest])]
    shown += [("recovered", _RECOVERED), ("bonus", _BONUS)]
    marks = " ".join(f'<span style="{_TOKEN}{colour}">{name}</span>' for name, colour in shown)
    return f"<div>accepted at draft position {marks} &ndash; point at a token for its numbers</div>"


def _times(trace: Trace) -> str:
    if not trace.times:
        return ""
    names = ("draft", "verify", "sample", "host")
    sums = {name: sum(getattr(t, f"{name}_ms") for t in trace.times) for name in names}
    total = sum(sums.values()) or 1.0
    text = ", ".join(f"{name} {ms:.1f} ms ({100 * ms / total:.0f} %)" for name, ms in sums.items())
    return f"<div>{len(trace.times)} steps: {text}</div>"
