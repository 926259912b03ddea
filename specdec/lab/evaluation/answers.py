"""`write_answers`: a target's answers to prompts, in a file that `specdec train --data` reads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from transformers import PreTrainedTokenizerBase

from specdec import processes
from specdec.arguments import check_number
from specdec.atomic import write_text
from specdec.generator import SpeculativeGenerator
from specdec.lab.evaluation.batches import Row, rows_of, run_batch
from specdec.lab.evaluation.plan import Plan, settings_of_run
from specdec.lab.evaluation.prompts import Prompt, as_prompts, encode, reply_of
from specdec.lab.evaluation.run import progress_bar
from specdec.lab.evaluation.run_file import EvaluatedRow
from specdec.lab.evaluation.shared_file import SharedFile
from specdec.request import GenerateOptions

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
    """Writes the target's answers, a line of JSON each; goes on after an interrupted run.

    Prompts of like length are generated together. Each text has a seed of its own and depends on no
    other, so that the file has the same lines however many processes write it, and however often
    they are interrupted. Beside the file lies a hidden one with the settings and, until all answers
    are there, a hidden folder with those that are.

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
        >>> from specdec.lab import zoo
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
    if Path(output).suffix != ".jsonl":
        raise ValueError(f"answers go into a .jsonl file, which training reads, got {output}")
    settings = settings_of_run(generator, chosen, tokenizer=tokenizer, **vars(plan))
    settings["threads"] = settings["plan"]["batch_size"] = None  # no text depends on them
    team = processes.team(generator.target.model, share=share)
    rows = {(row.prompt.id, row.sample): row for row in rows_of(chosen, plan)}
    places = {key: place for place, key in enumerate(rows)}
    batches = {  # by names that are the same in all processes with this batch size
        f"{places[batch[0].prompt.id, batch[0].sample]}-{len(batch)}": batch
        for batch in _batches(list(rows.values()), plan, tokenizer)
    }
    file = _AnswerFile(output, {"run": settings}, team)

    def wanted() -> list[str]:
        return [name for name, batch in batches.items() if _left(batch, file.lines)]

    bar = progress_bar(team, len(batches), is_wanted=progress)
    with file.joined(), bar:
        if file.lines and not bar.disable:
            print(f"{len(file.lines)} of {len(rows)} answers are in {output}", file=sys.stderr)
        for name in file.pieces(wanted, lambda: file.settle(rows)):
            bar.update(len(batches) - len(wanted()) - bar.n)
            batch = _left(batches[name], file.lines)
            done = run_batch(generator, 0, batch, plan, tokenizer, None).rows
            file.append(*_answers(batch, done, plan, tokenizer))
        bar.update(len(batches) - bar.n)
    return Answers(file.path, [file.lines[key] for key in rows])


class _AnswerFile(SharedFile[Answer]):
    """Answers alone, which training reads; what is known of the run is in a hidden file beside."""

    FORMAT = "specdec.answers/1"

    @property
    def _beside(self) -> Path:
        return self.path.with_name(f".{self.path.name}.settings")

    def _about(self, file: Path, lines: Iterator[tuple[int, Any]]) -> dict[str, Any] | None:
        if file != self.path:
            return super()._about(file, lines)
        if not self._beside.exists():
            raise ValueError(f"{file} was not begun by this function; choose another file")
        try:
            return {"run": json.loads(self._beside.read_text(encoding="utf-8"))}
        except ValueError:
            raise ValueError(
                f"{self._beside}, the settings of the answers in {file}, is cut off or damaged; "
                "choose another file, or delete both to begin anew"
            ) from None

    def _write(self, lines: Iterable[Answer], *header: dict[str, Any]) -> None:
        write_text(self._beside, json.dumps((self.about or {})["run"]))
        super()._write(lines)

    def _parsed(self, content: dict[str, Any]) -> tuple[tuple[str, int], Answer]:
        answer = Answer(**content)
        return answer.key, answer

    def _saved(self, line: Answer) -> dict[str, Any]:
        return vars(line)

    def _called(self, key: Any) -> str:
        return f"prompt {key[0]!r}, sample {key[1]}"


def _left(batch: list[Row], done: Mapping[tuple[str, int], Answer]) -> list[Row]:
    """Rows without an answer."""
    return [row for row in batch if (row.prompt.id, row.sample) not in done]


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
