"""`write_answers`: a target's answers to prompts, in a file that `specdec train --data` reads."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from specdec import processes
from specdec.arguments import check_number
from specdec.atomic import write_text
from specdec.evaluation.evaluate import Row, progress_bar, rows_of, run_batch
from specdec.evaluation.plan import Plan, settings_of_run
from specdec.evaluation.prompts import Prompt, as_prompts, encode, reply_of
from specdec.evaluation.run_file import EvaluatedRow, RunFile
from specdec.generator import SpeculativeGenerator
from specdec.jsonl import append_lines, naming_line, read_lines
from specdec.request import GenerateOptions
from specdec.settings import differences

NGRAM = 4
"""Tokens of what counts as repeated."""


@dataclass(frozen=True)
class Answer:
    """A line of the file.

    Args:
        prompt: its id.
        sample: from 0.
        text: what is trained on: all that the target has read, chat template included, and its last
            answer. An end-of-sequence token at its end is left out: `encode_texts` adds it.
        answer: the last answer alone, without special tokens.
        finish_reason: of the last answer; `"length"`: it was cut off.
        num_tokens: of the last answer.
        repeated: the share of its 4-grams that occurred earlier in it.
    """

    prompt: str
    sample: int
    text: str
    answer: str
    finish_reason: Literal["eos", "length", "stop"]
    num_tokens: int
    repeated: float

    def __post_init__(self):
        check_number("repeated", self.repeated, 0, 1)

    @property
    def key(self) -> tuple[str, int]:
        """What names the answer in its file."""
        return self.prompt, self.sample


@dataclass(frozen=True)
class Answers:
    """All lines of a file, and what they are worth; `str` is one line of it.

    Args:
        path: of the file.
        lines: in its order.
    """

    path: Path
    lines: list[Answer]

    @property
    def mean_length(self) -> float:
        """Tokens of an answer."""
        return sum(line.num_tokens for line in self.lines) / len(self.lines)

    @property
    def share_cut(self) -> float:
        """Answers that reached `max_new_tokens`."""
        return sum(line.finish_reason == "length" for line in self.lines) / len(self.lines)

    @property
    def share_repeated(self) -> float:
        """Mean share of an answer's 4-grams that occurred earlier in it."""
        return sum(line.repeated for line in self.lines) / len(self.lines)

    def __str__(self) -> str:
        many = sum(line.repeated > 0.5 for line in self.lines)
        return (
            f"{len(self.lines)} answers in {self.path}: {self.mean_length:.1f} tokens each, "
            f"{self.share_cut:.1%} cut off, {self.share_repeated:.1%} of {NGRAM}-grams repeated, "
            f"{many} answers with more than half"
        )


def write_answers(
    generator: SpeculativeGenerator,
    prompts: Iterable[str | Prompt],
    output: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    batch_size: int = 8,
    samples: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    share: bool = False,
    progress: bool = False,
    **options: Unpack[GenerateOptions],
) -> Answers:
    """Writes the target's answers, a line of JSON each, batch by batch; goes on with a file that an
    interrupted run has left.

    Prompts of like length are generated together. Each text has a seed of its own and depends on no
    other, so that the file has the same lines, in another order, however many processes write it
    and however often they are interrupted. Beside the file lies a hidden one with the settings.

    Args:
        generator: the target, and any drafter.
        prompts: texts or `Prompt` records. Those of several turns are answered turn by turn.
        output: a `.jsonl` file.
        tokenizer: of the target; its chat template is used where it has one.
        batch_size: prompts generated together.
        max_new_tokens, temperature, samples, seed, max_prompt_tokens, chat_template_kwargs, share,
            progress, options: as for `evaluate`.

    Returns:
        All lines of the file.

    Raises:
        ValueError: the file is not one of these, or of another run (says what differs); prompts
            that are no texts; as `evaluate`.

    Example:
        >>> import tempfile
        >>> from specdec import zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "zoo:eagle3")
        >>> sizes = {"tokenizer": zoo.load_tokenizer(), "max_new_tokens": 8}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = write_answers(generator, ["def f(x):"], f"{folder}/texts.jsonl", **sizes)
        >>> found.lines[0].text.startswith("def f(x):"), found.lines[0].num_tokens
        (True, 8)
    """
    plan = Plan(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=batch_size,
        samples=samples,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        options=options,
    )
    chosen = as_prompts(prompts)
    for prompt in chosen:
        if not isinstance(prompt.turns[0], str):
            raise ValueError(f"prompt {prompt.id!r} must be a text, to be read again; got ids")
    settings = settings_of_run(generator, chosen, tokenizer=tokenizer, **vars(plan))
    settings["threads"] = settings["plan"]["batch_size"] = None  # no text depends on them
    team = processes.team(generator.target.model) if share else processes.Team()
    rows = {(row.prompt.id, row.sample): row for row in rows_of(chosen, plan)}
    with ExitStack() as stack:
        found = team.from_first(lambda: _begun(Path(output), settings, stack))
        if found and progress and team.is_first:
            print(f"{len(found)} of {len(rows)} answers are in {output}", file=sys.stderr)
        batches = _batches([r for key, r in rows.items() if key not in found], plan, tokenizer)
        with progress_bar(team, len(batches), is_wanted=progress) as bar:
            together = 1 if team.does_all else team.count
            for start in range(0, len(batches), together):
                new = []
                for batch in team.part(batches[start : start + together]):
                    done = run_batch(generator, start, batch, plan, tokenizer, None).rows
                    new += _answers(batch, done, plan, tokenizer)
                new = team.gather(new)
                if team.is_first:
                    append_lines(Path(output), *map(vars, new))
                found |= {answer.key: answer for answer in new}
                bar.update(min(together, len(batches) - start))
    return Answers(Path(output), list(found.values()))


def _begun(path: Path, settings: dict[str, Any], stack: ExitStack) -> dict[tuple[str, int], Answer]:
    """The answers of the same run so far; the file is this process's until `stack` closes. A last
    line that an interruption cut off is removed.
    """
    if path.suffix != ".jsonl":
        raise ValueError(f"answers go into a .jsonl file, which training reads, got {path}")
    beside = path.with_name(f".{path.name}.settings")  # hidden: a folder of texts does not read it
    if path.exists() and path.stat().st_size and not beside.exists():
        raise ValueError(f"{path} was not begun by this function; choose another file")
    settings = json.loads(json.dumps(settings))
    stack.enter_context(RunFile(path).held())
    if not path.stat().st_size:
        write_text(beside, json.dumps(settings))
        return {}
    try:
        known = json.loads(beside.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(
            f"{beside}, the settings of the answers in {path}, is cut off or damaged; choose "
            "another file, or delete both to begin anew"
        ) from None
    if differing := differences(known, settings):
        raise ValueError(
            f"{path} holds answers of another run; they differ in {', '.join(differing)}; choose "
            "another file"
        )
    found: dict[tuple[str, int], Answer] = {}
    for number, line in read_lines(path, only_whole=True):
        with naming_line(path, number):
            answer = Answer(**line)
            if found.setdefault(answer.key, answer) is not answer:
                raise ValueError(f"prompt {answer.prompt!r}, sample {answer.sample} comes twice")
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)
    return found


def _batches(rows: list[Row], plan: Plan, tokenizer: PreTrainedTokenizerBase) -> list[list[Row]]:
    """Rows of as many turns, the longest first, so that what does not fit fails at once."""
    sizes = {row.prompt.id: len(encode(row.prompt, [], tokenizer)) for row in rows}
    alike: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: -sizes[row.prompt.id]):
        alike.setdefault(len(row.prompt.turns), []).append(row)
    size = plan.batch_size
    return [group[i : i + size] for group in alike.values() for i in range(0, len(group), size)]


def _answers(
    rows: list[Row], done: list[EvaluatedRow], plan: Plan, tokenizer: PreTrainedTokenizerBase
) -> list[Answer]:
    """Of a batch, from all its turns."""
    turns: dict[tuple[str, int], list[EvaluatedRow]] = {}
    for each in done:
        turns.setdefault((each.prompt, each.sample), []).append(each)
    found = []
    for row in rows:
        *earlier, last = turns[row.prompt.id, row.sample]
        replies = [
            reply_of(e.new_tokens, tokenizer, is_ended=e.finish_reason == "eos") for e in earlier
        ]
        read = encode(row.prompt, replies, tokenizer, plan.chat_template_kwargs)
        tokens = last.new_tokens
        kept = tokens[:-1] if tokens[-1:] == [tokenizer.eos_token_id] else tokens
        found.append(
            Answer(
                prompt=row.prompt.id,
                sample=row.sample,
                text=tokenizer.decode(
                    read[-last.num_prompt_tokens :] + kept, clean_up_tokenization_spaces=False
                ),
                answer=tokenizer.decode(tokens, skip_special_tokens=True),
                finish_reason=last.finish_reason,
                num_tokens=len(tokens),
                repeated=repeated_share(tokens),
            )
        )
    return found


def repeated_share(tokens: list[int]) -> float:
    """The share of a text's 4-grams that occurred earlier in it.

    Example:
        >>> repeated_share([1, 2, 1, 2, 1, 2, 1])
        0.5
    """
    grams = list(zip(*(tokens[i:] for i in range(NGRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
