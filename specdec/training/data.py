"""Text to training batches: documents of a file or folder, packed end to end.

Legend: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_integer, check_path, check_type

PROMPT_TOKENS = 64
"""Of each text that is held out for evaluation."""


def read_texts(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The documents of a file or a folder.

    Args:
        path: `.jsonl`: a document per line, an object with `text`, or with `messages` (or
            `conversations`) of `role` and `content` that go through the tokenizer's chat template,
            or with `turns`, texts that are joined by blank lines (Spec-Bench, MT-bench).
            Any other file: one document, in UTF-8, invalid bytes replaced. A folder: all its files
            and those of its subfolders, sorted, but for hidden ones.
        tokenizer: the target's.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: a `.jsonl` line without `text` or `messages`; names file and line. Raised when
            the line is reached.
    """
    path = check_path("path", path)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not is_hidden:
                yield from read_texts(file, tokenizer)
    elif not path.exists():
        raise FileNotFoundError(f"no training data at {path}: expected a .jsonl or text file")
    elif path.suffix == ".jsonl":
        with path.open("rb") as lines:  # as text, some characters inside a string would end a line
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _text_of(line, f"{path}, line {number}", tokenizer)
    else:
        yield path.read_text(encoding="utf-8-sig", errors="replace")


def _text_of(line: bytes, where: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The document of a line."""
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError(f"{where} is not JSON in UTF-8: too deeply nested") from None
    except ValueError as error:
        raise ValueError(f"{where} is not JSON in UTF-8: {error}") from None
    entry = entry if isinstance(entry, dict) else {}
    if isinstance(entry.get("text"), str):
        return entry["text"]
    turns = entry.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return "\n\n".join(turns)
    messages = entry.get("messages") or entry.get("conversations") or turns
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        shown = line[:60].decode("utf-8", errors="replace")
        raise ValueError(
            f"{where} must be an object with 'text', with 'turns' of texts, or with 'messages' of "
            f"'role' and 'content', got {shown!r}"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:  # a template is a program of the tokenizer's authors
        raise ValueError(f"{where}: the tokenizer has no chat template for it: {error}") from error


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def encode_texts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, chunk_size: int = 256
) -> list[np.ndarray]:
    """Encodes texts, each closed by the end-of-sequence token.

    Args:
        texts: the documents.
        tokenizer: the target's; it adds no other token.
        chunk_size: texts encoded together: an encoding takes a hundred times its ids' memory.

    Returns:
        Ids `[num_tokens]` of each.

    Raises:
        TypeError: a text that is none, or no tokenizer.
        ValueError: a chunk size below 1, or a text that UTF-8 cannot hold.

    Example:
        >>> from specdec import zoo
        >>> [len(ids) for ids in encode_texts(["def f(x):", ""], zoo.load_tokenizer())]
        [6, 1]
    """
    check_type("tokenizer", tokenizer, PreTrainedTokenizerBase)
    check_integer("chunk_size", chunk_size, 1)
    check_type("texts", texts, Iterable, advice="pass a list of texts")
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, got one text; put it into a list")
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts, documents = iter(texts), []
    while chunk := list(islice(texts, chunk_size)):
        for index, text in enumerate(chunk, start=len(documents)):
            _check_text(text, f"text {index}")
        # Not verbose: it would warn that documents are longer than the target's context.
        for ids in tokenizer(chunk, add_special_tokens=False, verbose=False).input_ids:
            documents.append(np.array([*ids, *end], dtype=dtype))
    return documents


def _check_text(text: object, where: str) -> None:
    check_type(where, text, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} cannot be encoded in UTF-8: {error}") from error


def _check_ids(ids: object, where: str) -> None:
    check_type(where, ids, np.ndarray, advice="pass arrays of ids")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(
            f"{where} must hold integer ids [num_tokens], got {ids.dtype} of shape {ids.shape}"
        )
    if len(ids) and ids.min() < 0:
        raise ValueError(f"{where} holds the id {ids.min()}; ids are >= 0")


def hold_out(
    documents: list[np.ndarray], num_prompts: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keeps documents from the end of the data for evaluation, at most every fourth; if there are
    too few documents for that, they are cut into pieces first.

    Args:
        documents: ids of each.
        num_prompts: how many are to be kept; there may be fewer.

    Returns:
        The documents, or pieces of them, to train on; and those that are kept from training, each
        of at least 64 tokens.

    Raises:
        ValueError: a negative number of prompts.
    """
    check_integer("the number of evaluation prompts", num_prompts, 0)
    check_type("documents", documents, Sequence, advice="pass a list of arrays of ids")
    if sum(len(ids) >= PROMPT_TOKENS for ids in documents) < 4 * num_prompts:
        size = max(sum(map(len, documents)) // (4 * num_prompts), PROMPT_TOKENS)
        documents = [
            ids[start : start + size] for ids in documents for start in range(0, len(ids), size)
        ]
    long = [index for index, ids in enumerate(documents) if len(ids) >= PROMPT_TOKENS]
    held_out = long[max(len(long) - num_prompts, (3 * len(long) + 3) // 4) :]
    kept = set(held_out)
    rest = [ids for index, ids in enumerate(documents) if index not in kept]
    return rest, [documents[index] for index in held_out]


def prompts_of(documents: list[np.ndarray]) -> Tensor:
    """The starts of documents of at least 64 tokens, ids `[num_documents, 64]`."""
    starts = np.array([ids[:PROMPT_TOKENS] for ids in documents], dtype=np.int64)
    return torch.from_numpy(starts.reshape(-1, PROMPT_TOKENS))


class PackedStream:
    """Endless training rows: each epoch shuffles the documents and cuts them end to end.

    It is seeded, and resumable with `state_dict` and `load_state_dict`.

    Args:
        documents: ids of each.
        seed: of the order.

    Raises:
        TypeError: documents that are no arrays of ids.
        ValueError: there are no documents, or nothing in them, or an id below 0.

    Example:
        >>> stream = PackedStream([np.arange(5), np.arange(5, 12)], seed=0)
        >>> stream.take(batch_size=2, length=3)
        tensor([[0, 1, 2, 3],
                [3, 4, 5, 6]])
        >>> stream.num_epochs
        0.5
    """

    def __init__(self, documents: list[np.ndarray], *, seed: int):
        check_integer("seed", seed, 0)
        check_type("documents", documents, Sequence, advice="pass a list of arrays of ids")
        for index, ids in enumerate(documents):
            _check_ids(ids, f"document {index}")
        if not any(len(ids) for ids in documents):
            raise ValueError("there is no text to train on: expected at least one document")
        self.documents = documents
        self.seed = seed
        self.epoch = 0
        self.position = 0  # in tokens, inside the epoch's stream
        self._pack()

    @property
    def num_epochs(self) -> float:
        """Passes over the documents so far."""
        return self.epoch + self.position / len(self._stream)

    @property
    def largest_id(self) -> int:
        """Of all documents."""
        return max(int(ids.max()) for ids in self.documents if len(ids))

    def take(self, batch_size: int, length: int) -> Tensor:
        """The next rows, ids `[B, T + 1]`: inputs and, shifted by one, their labels.

        What an epoch has left after its last whole batch is not seen in that epoch.

        Raises:
            ValueError: one batch needs more tokens than there are, or has no rows or no tokens.
        """
        check_integer("batch_size", batch_size, 1)
        check_integer("length", length, 1)
        needed = batch_size * length + 1
        if needed > len(self._stream):
            raise ValueError(
                f"a batch takes {needed} tokens and the text has {len(self._stream)}; give more "
                "text or train with fewer tokens per step"
            )
        if self.position + needed > len(self._stream):
            self.epoch, self.position = self.epoch + 1, 0
            self._pack()
        starts = self.position + length * np.arange(batch_size)[:, None]
        self.position += batch_size * length
        rows = self._stream[starts + np.arange(length + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def settings(self) -> dict[str, Any]:
        """Which text it is, in which order: what two runs must have in common to be the same."""
        digest = hashlib.sha256()
        for ids in self.documents:
            digest.update(len(ids).to_bytes(8, "little"))
            digest.update(np.ascontiguousarray(ids, dtype=np.int64).tobytes())
        sizes = {"documents": len(self.documents), "tokens": len(self._stream)}
        return {"seed": self.seed, **sizes, "sha256": digest.hexdigest()[:16]}

    def state_dict(self) -> dict[str, int]:
        """The position in the stream; the documents themselves are not part of it."""
        position = {"seed": self.seed, "epoch": self.epoch, "position": self.position}
        return position | {"num_tokens": len(self._stream)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Returns to the position of `state_dict`; `ValueError` if that was in another text."""
        names = self.state_dict().keys()
        if not isinstance(state, dict) or state.keys() != names:
            raise ValueError(f"expected the state of a stream, {', '.join(names)}, got {state!r}")
        for name, value in state.items():
            check_integer(name, value, 0)
        if state["num_tokens"] != len(self._stream):
            raise ValueError(
                f"the position was in a text of {state['num_tokens']} tokens, this one has "
                f"{len(self._stream)}"
            )
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self._pack()

    def _pack(self) -> None:
        """Lays this epoch's documents end to end; the order depends on seed and epoch alone."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.documents))
        self._stream = np.concatenate([self.documents[index] for index in order])
