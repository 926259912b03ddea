"""`Trace`: what every step of a generation did, and the numbers that it was decided by.

Legend: D tokens that a row drafted in a step, at most K.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Self

from specdec.arguments import check_integer
from specdec.atomic import replacing, write_text
from specdec.jsonl import naming_line, read_lines
from specdec.lab.show.table import need
from specdec.lab.trace.page import page_of
from specdec.lab.trace.saved_step import read_step
from specdec.row_step import RowStep
from specdec.tree_shape import depths_of

_FORMAT = "specdec.trace/2"
_SHOWN_ROWS = 8
_OF_STEP = "draft_tokens", "num_accepted", "new_tokens", "parents", "path"
"""What `RowStep.saved` writes, the last two for trees."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step of one row. All probabilities are those that the sampler compared:
    after temperature and truncation, so 0 or 1 in a greedy row.

    Args:
        step: index of the step in the generation.
        position: of the step's root, the last token committed before it.
        draft_probs: D, the drafter's probability of each draft token; 1 for a point mass.
        target_probs: D, the target's probability of each draft token, given those before it.
        accept_draws: D, the uniform numbers that decided; `None` where the rule uses none (greedy
            rows, coupled and typical sampling).
        draft_entropies: D, of the distribution that each draft token was drawn from, in nats; 0 for
            a point mass.
        target_entropies: D + 1, of the target's distribution at each index before temperature and
            truncation, in nats.
        extra_draft_prob: the drafter's probability of the recovered token; 0 for a bonus token.
        extra_target_prob: the target's probability of the recovered or bonus token.
        raw_target_probs: D, as `target_probs`, before temperature and truncation: what a greedy row
            is sure of; `None` in traces that were saved without them.
        raw_draft_probs: D, likewise the drafter's own, of a node given its path; `None` of drafters
            without probabilities.
        raw_extra_target_prob: as `extra_target_prob`, likewise.
    """

    step: int
    position: int
    draft_probs: list[float]
    target_probs: list[float]
    accept_draws: list[float] | None
    draft_entropies: list[float]
    target_entropies: list[float]
    extra_draft_prob: float
    extra_target_prob: float
    raw_target_probs: list[float] | None = None
    raw_draft_probs: list[float] | None = None
    raw_extra_target_prob: float | None = None

    def check_fit(self, step: RowStep) -> None:
        """Raises `ValueError` unless there are as many numbers as the step has draft tokens."""
        drafted = len(step.draft_tokens)
        sizes = dict.fromkeys(("draft_probs", "target_probs", "draft_entropies"), drafted)
        sizes["target_entropies"] = drafted + 1
        for name in ("accept_draws", "raw_target_probs", "raw_draft_probs"):
            if getattr(self, name):
                sizes[name] = drafted
        for name, size in sizes.items():
            if (found := len(getattr(self, name))) != size:
                raise ValueError(f"{name} has {found} numbers for {drafted} draft tokens")


@dataclass(frozen=True)
class StepTimes:
    """How long the parts of one step took, for the whole batch.

    On a CPU by the clock. On a GPU by events on the stream, so `host_ms` is the time in which the
    device waited for the host. What tracing itself costs is in none of the four.

    Args:
        draft_ms: of the drafter.
        verify_ms: of the target's forward (and of logits processors).
        sample_ms: of the sampler and of committing what it emitted.
        host_ms: from there to the beginning of the next step.
    """

    draft_ms: float
    verify_ms: float
    sample_ms: float
    host_ms: float

    @property
    def total_ms(self) -> float:
        """Of the whole step."""
        return self.draft_ms + self.verify_ms + self.sample_ms + self.host_ms


@dataclass(frozen=True, eq=False)
class Trace(Sequence):
    """Every step of a generation. As a sequence it holds the steps of each row: `trace[row]` is a
    list of `RowStep`.

    Args:
        steps: per row its steps.
        numbers: per row the numbers of the same steps.
        times: of each step of the batch.
        prompts: ids of each row's prompt, without padding.
        about: how the text was generated: names of target, drafter and sampler, K, device, dtype,
            seeds, and what tokens were drawn from (a `specdec.request.Sampling`, as a dictionary).
        tokenizer: decodes the tokens where the trace is shown; not saved.
        placeholders: of each row's prompt the runs of tokens, first and end, that stand for
            pictures, sound or embeddings; empty where all prompts are text.
        pictures: of each row, as pages show them; not saved.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
        >>> generator = SpeculativeGenerator(target, zoo.load_drafter("model", target))
        >>> ids = tokenizer("import ", return_tensors="pt").input_ids
        >>> trace = generator.generate(ids, max_new_tokens=8, trace=True).trace
        >>> len(trace), len(trace[0]) == len(trace.numbers[0])
        (1, True)
        >>> trace.with_tokenizer(tokenizer)._repr_html_().startswith("<iframe")
        True
    """

    steps: list[list[RowStep]]
    numbers: list[list[StepNumbers]]
    times: list[StepTimes]
    prompts: list[list[int]]
    about: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    placeholders: list[list[tuple[int, int]]] = field(default_factory=list)
    pictures: Sequence[Sequence[Any]] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, row):
        return self.steps[row]

    def with_tokenizer(self, tokenizer: Any) -> Self:
        """The same trace, shown as text instead of ids.

        Args:
            tokenizer: of the target.
        """
        return dataclasses.replace(self, tokenizer=tokenizer)

    def with_pictures(self, pictures: Sequence[Sequence[Any]]) -> Self:
        """The same trace, whose page shows the pictures of the prompts beside the text.

        Args:
            pictures: for each row those of its prompt, in order, as `PIL.Image`; none for text.

        Raises:
            ValueError: another number of rows.
        """
        if len(pictures) != len(self):
            raise ValueError(
                f"pictures has {len(pictures)} lists for the {len(self)} rows of the trace; pass "
                "one for each, an empty one for text"
            )
        return dataclasses.replace(self, pictures=pictures)

    def to_records(self) -> list[dict]:
        """One record per row, step and draft token, in this order, and one of a bonus token.

        A step that drafted D tokens, a chain, and accepted n of them has the indices 1..D, and
        D + 1 if it ends with a bonus token. `verdict` is `"accepted"` up to n, `"rejected"` at
        n + 1, `"unread"` after that, and `"bonus"` at D + 1. `new_token` is what the row kept at
        the index (`None` after the recovered token, and where the row was cut). Of a tree `index`
        is the depth of a node, and `parent` the node that it hangs on; all children of the last
        accepted node are `"rejected"`, and the recovered token stands beside the first of them.
        """
        return [record for each in self._each_step() for record in self._records_of(*each)]

    def _each_step(self) -> Iterator[tuple[int, RowStep, StepNumbers]]:
        for row, of_row in enumerate(zip(self.steps, self.numbers, strict=True)):
            yield from ((row, step, numbers) for step, numbers in zip(*of_row, strict=True))

    def _records_of(self, row: int, step: RowStep, numbers: StepNumbers) -> Iterator[dict]:
        accepted, drafted = step.path, len(step.draft_tokens)
        parents = [*step.parents, accepted[-1] if accepted else -1]
        depths = depths_of(parents)[1:]  # the last is a bonus token's, which follows all drafted
        verdicts = dict.fromkeys(step.rejected, "rejected") | dict.fromkeys(accepted, "accepted")
        verdicts[drafted] = "bonus"
        target_probs = [*(numbers.target_probs[n] for n in accepted), numbers.extra_target_prob]
        extra = numbers.extra_draft_prob if step.rejected else None
        draft_probs = [*(numbers.draft_probs[n] for n in accepted), extra]
        raw_of = numbers.raw_target_probs or [None] * drafted
        raw = [*(raw_of[n] for n in accepted), numbers.raw_extra_target_prob]
        kept = [*accepted, *(step.rejected[:1] or [drafted])]
        new = zip(step.new_tokens, target_probs, draft_probs, raw, strict=False)  # may be cut
        new_at = dict(zip(kept, new, strict=False))
        of_draft = {
            "draft_token": step.draft_tokens,
            "draft_prob": numbers.draft_probs,
            "target_prob": numbers.target_probs,
            "accept_draw": numbers.accept_draws or [],
            "draft_entropy": numbers.draft_entropies,
            "raw_target_prob": numbers.raw_target_probs or [],
            "raw_draft_prob": numbers.raw_draft_probs or [],
        }
        for node in range(drafted + (not step.rejected)):
            new_token, new_target_prob, new_draft_prob, new_raw = new_at.get(node, (None,) * 4)
            yield {
                "row": row,
                "step": numbers.step,
                "index": depths[node],
                "position": numbers.position + depths[node],
                "parent": parents[node],
                "verdict": verdicts.get(node, "unread"),
                "new_token": new_token,
                "new_target_prob": new_target_prob,
                "new_draft_prob": new_draft_prob,
                "new_raw_target_prob": new_raw,
                "target_entropy": numbers.target_entropies[parents[node] + 1],
                **{n: own[node] if node < len(own) else None for n, own in of_draft.items()},
                **vars(self.times[numbers.step]),
            }

    def to_frame(self):
        """`to_records` as a pandas frame."""
        pandas = need("pandas", "to_frame()")
        frame, whole = pandas.DataFrame(self.to_records()), ("draft_token", "new_token")
        return frame.astype(dict.fromkeys(whole, "Int64")) if len(frame) else frame

    def to_parquet(self, path: str | Path) -> None:
        """Writes `to_frame` as Parquet, with `about` in the file's metadata."""
        arrow, parquet = need("pyarrow", "to_parquet()"), need("pyarrow.parquet", "to_parquet()")
        table = arrow.Table.from_pandas(self.to_frame())
        metadata = {**(table.schema.metadata or {}), b"specdec": json.dumps(self.about).encode()}
        with replacing(path) as file:
            parquet.write_table(table.replace_schema_metadata(metadata), file)

    def to_jsonl(self, path: str | Path) -> None:
        """Writes the whole trace, one line per step of a row after a line about the generation;
        `from_jsonl` reads it back.
        """
        times = [dataclasses.astuple(taken) for taken in self.times]
        header = {"format": _FORMAT, "about": self.about, "prompts": self.prompts, "times": times}
        header["steps"] = [len(row) for row in self.steps]
        if any(self.placeholders):
            header["placeholders"] = self.placeholders
        with replacing(path) as file:
            file.write(json.dumps(header).encode() + b"\n")
            for row, step, numbers in self._each_step():
                own = dict(zip(_OF_STEP, step.saved(), strict=False))
                file.write(json.dumps({"row": row, **own, **vars(numbers)}).encode() + b"\n")

    @classmethod
    def from_jsonl(cls, path: str | Path) -> Trace:
        """Reads a trace that `to_jsonl` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: another kind of file, a line that is cut off or damaged, or lines that are
                missing, repeated or in another order; names the line.
        """
        lines = read_lines(path := Path(path))
        _, header = next(lines, (1, {}))
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError(f"{path} is no trace: its first line must hold format {_FORMAT!r}")
        with naming_line(path, 1):
            times = [StepTimes(*taken) for taken in header["times"]]
            prompts, counts = header["prompts"], list(header["steps"])
            about, steps = dict(header["about"]), [[] for _ in prompts]
            runs = [[(int(a), int(b)) for a, b in row] for row in header.get("placeholders", [])]
            numbers = [[] for _ in prompts]
            whole = cls(steps, numbers, times, prompts, about, placeholders=runs)
            if runs and len(runs) != len(prompts):
                raise ValueError("expected placeholders of each row")
            if len(counts) != len(prompts) or not all(prompts):
                raise ValueError("expected a prompt, and a number of steps, of each row")
        for number, line in lines:
            with naming_line(path, number):
                whole._append(line)
        if (found := [len(row) for row in whole.steps]) != counts:
            raise ValueError(
                f"{path} has {found} steps of its rows, and line 1 says {counts}; write it again"
            )
        return whole

    def _append(self, line: dict) -> None:
        """Reads the next step of a row, as a line of a file."""
        row = check_integer("row", line.pop("row"), 0, len(self.prompts) - 1)
        names = _OF_STEP if "parents" in line else _OF_STEP[:3]
        step = read_step([line.pop(name) for name in names])
        numbers = StepNumbers(**line)
        numbers.check_fit(step)
        steps = self.steps[row]
        check_integer("step", numbers.step, len(steps), min(len(steps), len(self.times) - 1))
        steps.append(step)
        self.numbers[row].append(numbers)

    def to_html(
        self,
        path: str | Path,
        *,
        tokenizer: Any = None,
        rows: Iterable[int] | None = None,
        steps: range | None = None,
    ) -> None:
        """Writes one page for a browser, which needs no network: the text, each token in the colour
        of its origin (draft position, recovered, bonus), with its numbers under the pointer. The
        tokens of a picture in a prompt are one mark; the picture stands above the text, where
        `with_pictures` has brought it.

        Args:
            path: of the page.
            tokenizer: of the target; by default the trace's own, without which ids are shown.
            rows: those to show; all by default.
            steps: those to show, `range(10, 20)` for instance; all by default. The text before them
                is shown as part of the prompt.

        Raises:
            ValueError: rows or steps that the trace does not have.
        """
        page = page_of(self, self.tokenizer if tokenizer is None else tokenizer, rows, steps)
        write_text(path, page)

    def _repr_html_(self) -> str:
        """The page of the first rows, in a frame."""
        page = escape(page_of(self, self.tokenizer, range(min(len(self), _SHOWN_ROWS))))
        return f'<iframe srcdoc="{page}" style="width:100%;height:36em;border:0"></iframe>'

    def __repr__(self) -> str:
        tokens = sum(len(step.new_tokens) for row in self.steps for step in row)
        return (
            f"Trace of {len(self)} rows, {tokens} new tokens, {len(self.times)} steps "
            f"({self.about.get('drafter')}, {self.about.get('sampler')})"
        )
