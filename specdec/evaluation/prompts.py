"""Prompts of an evaluation: read from the field's files, and encoded turn by turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.arguments import shown
from specdec.jsonl import read_lines


@dataclass(frozen=True)
class Prompt:
    """What a user says, in one turn or several.

    Args:
        id: unique in its set.
        turns: texts, or ids of one turn that is encoded already.
        category: of the set's table; may be empty.
    """

    id: str
    turns: tuple[str | tuple[int, ...], ...]
    category: str = ""

    def __post_init__(self):
        for turn in self.turns:
            is_ids = isinstance(turn, tuple | list) and all(type(token) is int for token in turn)
            if not (isinstance(turn, str) or (is_ids and len(self.turns) == 1)) or not turn:
                raise ValueError(
                    f"turns of prompt {self.id!r} must be a tuple of texts, or of one tuple of "
                    f"ids, none of them empty, got {turn!r}"
                )
        if isinstance(self.turns, str) or not self.turns:
            raise ValueError(f"prompt {self.id!r} needs a tuple of turns, got {self.turns!r}")


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a JSONL file.

    Every line is an object of one of these forms:

    - `turns`, a list of texts: Spec-Bench and MT-bench, with `question_id` and `category`;
    - `prompt`: HumanEval, with `task_id`; or any text to be continued;
    - `question`: GSM8K;
    - `text`: any text to be continued.

    Without a category of its own a prompt is of the category that its form names, `humaneval` or
    `gsm8k`, else of none. Without an id of its own it is numbered by its line.

    Args:
        path: of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line of another form, an empty prompt, or an id that two prompts share.

    Example:
        >>> prompts = own_prompts()
        >>> len(prompts), prompts[0].category
        (16, 'code')
    """
    path = Path(path)
    return as_prompts([_prompt_of(line, number, path) for number, line in read_lines(path)])


def own_prompts() -> list[Prompt]:
    """The small set that comes with specdec: 16 prompts in four categories, one of them with two
    turns each.
    """
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))


def as_prompts(
    prompts: Tensor | Iterable[str | Prompt | Sequence[int]], attention_mask: Tensor | None = None
) -> list[Prompt]:
    """Prompts in any of the forms that `evaluate` takes: texts, ids, `Prompt` records, or ids
    `[B, T]` with a mask of their real tokens.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of texts, got one text; put it into a list")
    if isinstance(prompts, Tensor):
        mask = torch.ones_like(prompts) if attention_mask is None else attention_mask
        prompts = [row[real.bool()] for row, real in zip(prompts, mask, strict=True)]
    elif attention_mask is not None:
        raise TypeError("attention_mask belongs to prompts in one tensor; lists have no padding")
    read = [_as_prompt(index, prompt) for index, prompt in enumerate(prompts)]
    if not read:
        raise ValueError("there are no prompts")
    for name, count in Counter(prompt.id for prompt in read).items():
        if count > 1:
            raise ValueError(
                f"{count} prompts have the id {name!r}; ids must be unique, since intervals and "
                "saved runs go by them"
            )
    return read


def encode(
    prompt: Prompt, replies: Sequence[str], tokenizer: PreTrainedTokenizerBase | None
) -> list[int]:
    """Ids of the turn after so many replies.

    The turns and the replies so far go through the tokenizer's chat template, where it has one.
    Else they are one text: after a reply a blank line, then the next turn. A prompt of ids needs
    no tokenizer.
    """
    turns = prompt.turns[: len(replies) + 1]
    if not isinstance(turns[0], str):
        return list(turns[0])
    if tokenizer is None:
        raise ValueError(f"prompt {prompt.id!r} is a text; pass tokenizer= to encode it")
    if getattr(tokenizer, "chat_template", None):
        messages = []
        for turn, reply in zip_longest(turns, replies):
            messages.append({"role": "user", "content": turn})
            messages.append({"role": "assistant", "content": reply})
        del messages[-1]  # after the last turn there is no reply
        options = {"tokenize": False, "add_generation_prompt": True}
        text = tokenizer.apply_chat_template(messages, **options)
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    text = "".join(f"{reply}\n\n{turn}" for reply, turn in zip(replies, turns[1:], strict=True))
    return tokenizer(turns[0] + text, verbose=False).input_ids


def _prompt_of(entry: Any, number: int, path: Path) -> Prompt:
    turns, form = _turns_of(entry) if isinstance(entry, dict) else ([], "")
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(
            f"{path}, line {number} must be an object with 'turns' (a list of texts), 'prompt', "
            f"'question' or 'text', none of them empty, got {shown(entry)}"
        )
    names = ("question_id", "task_id", "id")
    own = next((entry[name] for name in names if entry.get(name) is not None), number)
    return Prompt(str(own), tuple(turns), str(entry.get("category") or form))


def _turns_of(entry: dict) -> tuple[list, str]:
    """The turns of a line, and the category that its form names."""
    if isinstance(entry.get("turns"), list):
        return entry["turns"], ""
    if "prompt" in entry:
        return [entry["prompt"]], "humaneval" if "canonical_solution" in entry else ""
    if "question" in entry:
        return [entry["question"]], "gsm8k" if "answer" in entry else ""
    return [entry["text"]] if "text" in entry else [], ""


def _as_prompt(index: int, prompt: str | Prompt | Sequence[int]) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(str(index), (prompt,))
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(ids, Sequence):
        raise TypeError(f"prompt {index} must be a text, a Prompt or ids, got {shown(prompt)}")
    return Prompt(str(index), (tuple(ids),))
