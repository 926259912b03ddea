"""Prompts of an evaluation: read from the field's files, and encoded turn by turn."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from specdec.arguments import shown
from specdec.jsonl import read_lines
from specdec.lab.evaluation.pictures import (
    inputs_of,
    is_processor,
    load_processor,
    message,
    open_pictures,
    tokenizer_of,
)
from specdec.lab.show.table import need
from specdec.request.given import ids_of

_SUFFIXES = (".jsonl", ".json", ".parquet")
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Turns of SPEED-Bench on the hub begin so, until its `prepare_data.py` has put the text in."""
_IDS = ("question_id", "prompt_id", "task_id", "unique_id", "instance_id", "uid", "id")
_REASONING = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."


@dataclass(frozen=True)
class Prompt:
    """What a user says, in one turn or several.

    Args:
        id: unique in its set.
        turns: texts, or ids of one turn that is encoded already.
        category: of the set's table; may be empty.
        inputs: of a prompt of one turn that is more than ids, what the target's processor returns
            for it.
        images: paths of pictures, which stand before the text of the first turn. The target's
            processor reads them when the prompt is answered.

    Example:
        >>> prompt = Prompt("sums", ("What is 2 + 2?", "And 3 + 3?"), category="math")
        >>> len(prompt.turns), Prompt("ids", ((5, 6, 7),)).turns
        (2, ((5, 6, 7),))
    """

    id: str
    turns: tuple[str | Any, ...]  # `Any` is ids: of prompts of texts no type checker asks
    category: str = ""
    inputs: Mapping[str, Any] | None = None
    images: tuple[str, ...] = ()

    @classmethod
    def of(cls, id: str, inputs: Mapping[str, Any], category: str = "") -> Prompt:
        """A prompt of what the target's processor returns for it alone."""
        return cls(id, (tuple(ids_of(inputs)),), category, inputs)

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
        if isinstance(self.images, str) or (self.images and not isinstance(self.turns[0], str)):
            raise ValueError(
                f"prompt {self.id!r}: images must be a tuple of paths, beside turns that are "
                "texts; Prompt.of(id, inputs) takes what a processor has made of them"
            )


class _Form(NamedTuple):
    """The fields of a published set's entries, the first of which holds the prompt; the category of
    those without one; and the wording around prompts in the benchmarks of DFlash.
    """

    fields: tuple[str, ...]
    category: str = ""
    wording: str = "{prompt}"


_FORMS = (
    _Form(("turns",)),
    _Form(("messages",)),
    _Form(
        ("prompt", "canonical_solution"),
        "humaneval",
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n{prompt}\n```",
    ),
    _Form(("prompt", "test_list"), "mbpp"),
    _Form(("prompt",)),
    _Form(("question", "answer"), "gsm8k", "{prompt}" + _REASONING),
    _Form(("question",)),
    _Form(("problem",), "math", "{prompt}" + _REASONING),
    _Form(
        ("problem_statement",),
        "swe-bench",
        "Problem Statement:\n{prompt}\nPlease fix the issue described above.",
    ),
    _Form(
        ("question_content",),
        "livecodebench",
        "You are an expert Python programmer. You will be given a question (problem "
        "specification) and will generate a correct Python program that matches the specification "
        "and passes all tests. You will NOT return anything except for the program\n\n"
        "### Question:\n{prompt}\n\n### Format: {format}:\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)",
    ),
    _Form(("instruction",), "alpaca"),
    _Form(("text", "test_list"), "mbpp"),
    _Form(("text",)),
)


def read_prompts(path: str | Path, *, worded: bool = False) -> list[Prompt]:
    """The prompts of a file in JSON lines, JSON or Parquet, or of all JSONL and Parquet files of a
    folder in the order of their names.

    Every entry is an object with one of these fields, as the sets are published:

    - `turns`, a list of texts: SPEED-Bench, Spec-Bench, MT-bench; or `messages` of users;
    - `prompt`: HumanEval, MBPP, Arena-Hard, any text to be continued; or turns, MT-bench;
    - `question`: GSM8K; `problem`: MATH-500, AIME; `question_content`: LiveCodeBench;
    - `problem_statement`: SWE-bench; `instruction`, perhaps with `input`: Alpaca;
    - `text`: any text to be continued.

    Without a category of its own a prompt is of the category that its form names, `humaneval` or
    `gsm8k` for instance, else of none. Without an id of its own it is numbered by its line.

    Beside these, `images` is a list of paths of pictures, seen from the file's folder. They stand
    before the text of the first turn. The content of `messages` may also be parts, as chat
    templates take them: `{"type": "image"}` for each of the pictures, then the text.

    Args:
        path: of the file or folder.
        worded: puts the instructions of the benchmarks of DFlash, DDTree and DSpark around
            prompts; entries with `turns` hold them already.

    Raises:
        FileNotFoundError: there is no such file, or no such file in the folder.
        ValueError: an entry of another form, an empty prompt, a missing picture, a prompt of
            SPEED-Bench that its `prepare_data.py` has to fetch, or an id that two prompts share.

    Example:
        >>> prompts = own_prompts()
        >>> len(prompts), prompts[0].category
        (16, 'code')

    Reference: z-lab/dflash, dflash/benchmark.py; deepseek-ai/DeepSpec, eval_datasets.
    """
    path, files = Path(path), [Path(path)]
    if not path.exists():
        raise FileNotFoundError(f"there is no file of prompts {path}; texts go into a list")
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.suffix in (".jsonl", ".parquet"))
        if not files:
            raise FileNotFoundError(f"{path} holds no .jsonl or .parquet file")
    prompts, last = [], 0
    for file in files:
        before = last
        for number, entry in _entries(file):
            last = before + number
            prompts.append(_prompt_of(entry, last, file, f"{file}, line {number}", worded))
    return as_prompts(prompts)


def own_prompts() -> list[Prompt]:
    """The small set that comes with specdec: 16 prompts in four categories, one of them with two
    turns each.

    Example:
        >>> prompts = own_prompts()
        >>> len(prompts), len({prompt.category for prompt in prompts})
        (16, 4)
    """
    return read_prompts(Path(__file__).with_name("prompts.jsonl"))


def as_prompts(
    prompts: Tensor | Iterable[str | Prompt | Sequence[int] | Mapping],
    attention_mask: Tensor | None = None,
) -> list[Prompt]:
    """Prompts in any of the forms that `evaluate` takes: texts, ids, what a processor returns for
    one prompt, `Prompt` records, or ids `[B, T]` with a mask of their real tokens.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of texts, got one text; put it into a list")
    if isinstance(prompts, Tensor):
        mask = torch.ones_like(prompts) if attention_mask is None else attention_mask
        prompts = [row[real.bool()] for row, real in zip(prompts, mask, strict=True)]
    elif isinstance(prompts, Mapping):
        raise TypeError(
            "prompts must be a list, got one object; put what a processor returns for each prompt "
            "into a list"
        )
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
    prompt: Prompt,
    replies: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of the turn after so many replies.

    The turns and the replies so far go through the tokenizer's chat template, where it has one,
    with the variables of `chat_template_kwargs`. Else they are one text: after a reply a blank
    line, then the next turn. A prompt of ids needs no tokenizer.
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
        options = {"tokenize": False, "add_generation_prompt": True, **(chat_template_kwargs or {})}
        text = tokenizer.apply_chat_template(messages, **options)
        return tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    text = "".join(f"{reply}\n\n{turn}" for reply, turn in zip(replies, turns[1:], strict=True))
    return tokenizer(turns[0] + text, verbose=False).input_ids


def reply_of(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, *, is_ended: bool = False
) -> str:
    """An answer as the model wrote it, for the turns after it: special tokens inside of it stay.

    Args:
        tokens: of the answer.
        tokenizer: of the target.
        is_ended: the last token is an end-of-sequence token, which the chat template writes.
    """
    kept = list(tokens)[: len(tokens) - is_ended]
    return tokenizer.decode(kept, clean_up_tokenization_spaces=False)


def read(
    prompt: Prompt,
    replies: Sequence[str],
    reader: PreTrainedTokenizerBase | ProcessorMixin | None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[list[int], Mapping[str, Any] | None]:
    """Ids of the turn after so many replies, as `encode`; and all that the target reads of it where
    it is more: its own inputs, or what a processor makes of its pictures, with pixels of a `dtype`.
    """
    check_reader([prompt], reader)
    if not is_processor(reader) or not isinstance(prompt.turns[0], str):
        return encode(prompt, replies, tokenizer_of(reader), chat_template_kwargs), prompt.inputs
    messages = []
    for turn, reply in zip_longest(prompt.turns[: len(replies) + 1], replies):
        pictures = [] if messages else open_pictures(prompt.images)
        messages.append(message("user", turn, pictures))
        messages.append(message("assistant", reply or ""))
    inputs = inputs_of(reader, messages[:-1], dtype=dtype, **(chat_template_kwargs or {}))
    is_more = bool(prompt.images) or "token_type_ids" in inputs  # which some models need
    return ids_of(inputs), inputs if is_more else None


def check_reader(prompts: Iterable[Prompt], reader: Any) -> None:
    """Raises `ValueError` for prompts with pictures where there is no processor."""
    for prompt in prompts:
        if prompt.images and not is_processor(reader):
            raise ValueError(
                f"prompt {prompt.id!r} has pictures, which the target's processor reads; pass "
                f"tokenizer=AutoProcessor.from_pretrained(path_or_id), got {shown(reader)}"
            )


def processor_for(target: str, prompts: Iterable[Prompt]) -> ProcessorMixin | None:
    """The processor of a target that is a name, where one of the prompts has pictures."""
    return load_processor(target) if any(prompt.images for prompt in prompts) else None


def template_reads(tokenizer: PreTrainedTokenizerBase | None, name: str) -> bool:
    """Whether the tokenizer has a chat template that reads a variable; HF ignores others."""
    template = str(getattr(tokenizer, "chat_template", None) or "")
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _entries(path: Path) -> Iterable[tuple[int, Any]]:
    """Numbered contents of a file."""
    if path.suffix == ".jsonl" or path.suffix not in _SUFFIXES:
        return read_lines(path)
    try:
        if path.suffix == ".parquet":
            with path.open("rb") as file:
                found = need("pyarrow.parquet", "a Parquet file").read_table(file).to_pylist()
        else:
            found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no {path.suffix[1:]} file: {error}") from None
    if not isinstance(found, list):
        raise ValueError(f"{path} must hold a list of objects, got {shown(found)}")
    return enumerate(found, start=1)


def _prompt_of(entry: Any, number: int, file: Path, place: str, worded: bool) -> Prompt:
    fields = entry if isinstance(entry, dict) else {}
    form = next((f for f in _FORMS if all(fields.get(n) is not None for n in f.fields)), None)
    turns = _turns_of(fields, form, worded) if form else []
    has_parts = form is not None and form.fields == ("messages",) and "image" in str(fields)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(
            f"{place} must be an object with 'turns' (a list of texts), 'prompt', 'question', "
            "'problem', 'text' or another field that read_prompts names, none of them empty"
            f"{', pictures before the text of the first message' if has_parts else ''}, got "
            f"{shown(entry)}"
        )
    if any(_PLACEHOLDER in turn for turn in turns):
        raise ValueError(
            f"{place} has a placeholder for its text: prepare SPEED-Bench with prepare_data.py of "
            "NVIDIA/Model-Optimizer, examples/specdec_bench, and pass the file that it writes"
        )
    own = next((fields[name] for name in _IDS if fields.get(name) is not None), number)
    images = _images_of(fields, file.parent, place)
    category = str(fields.get("category") or form.category)
    return Prompt(str(own), tuple(turns), category, images=images)


def _images_of(fields: dict, folder: Path, place: str) -> tuple[str, ...]:
    """Paths of an entry's pictures."""
    given = fields.get("images")
    given = [] if given is None else given
    if not isinstance(given, list) or not all(isinstance(path, str) and path for path in given):
        raise ValueError(
            f"{place}: images must be a list of paths, seen from {folder}, got {shown(given)}"
        )
    paths = [str(folder / Path(path).expanduser()) for path in given]
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"{place}: there is no picture {path}")
    asked = sum(map(_num_pictures, fields.get("messages") or []))
    if asked and asked != len(paths):
        raise ValueError(
            f"{place}: the messages have {asked} parts of type image, and images has {len(paths)} "
            "paths"
        )
    return tuple(paths)


def _num_pictures(message: Any) -> int:
    """Parts of a message that stand for pictures."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return sum(isinstance(part, dict) and part.get("type") == "image" for part in parts)


def _text_of(content: Any, *, is_first: bool) -> Any:
    """The text of a message's parts: pictures, in the first message alone, and then one text.
    Other content stays as it is, and the caller raises an error.
    """
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    kinds = [part.get("type") for part in content]
    is_known = kinds == ["image"] * (len(kinds) - 1) + ["text"]
    return content[-1].get("text") if is_known and (is_first or len(kinds) == 1) else None


def _turns_of(entry: dict, form: _Form, worded: bool) -> list:
    """The turns of an entry; not texts where it holds none."""
    field, held = form.fields[0], entry[form.fields[0]]
    if field == "messages":
        own = held if isinstance(held, list) and all(isinstance(m, dict) for m in held) else []
        return [
            _text_of(message.get("content"), is_first=number == 0)
            if message.get("role") == "user"
            else None
            for number, message in enumerate(own)
        ]
    if field == "turns" or isinstance(held, list):
        return held if isinstance(held, list) and field in ("turns", "prompt") else []
    if form.category == "alpaca" and entry.get("input"):
        held = f"{held}\n\nInput:\n{entry['input']}"
    if not worded or not isinstance(held, str):
        return [held]
    code = entry.get("starter_code")
    how = "Use the following code structure" if code else "Write your code in the following format"
    return [form.wording.format(prompt=held, format=how, code=code or "# YOUR CODE HERE")]


def _as_prompt(index: int, prompt: str | Prompt | Sequence[int] | Mapping) -> Prompt:
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, Mapping):
        return Prompt.of(str(index), prompt)
    if isinstance(prompt, str):
        return Prompt(str(index), (prompt,))
    ids = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    if not isinstance(ids, Sequence):
        raise TypeError(f"prompt {index} must be a text, a Prompt or ids, got {shown(prompt)}")
    return Prompt(str(index), (tuple(ids),))
