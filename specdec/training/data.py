"""Text to training batches: documents of a file or folder, packed end to end.

Legend: B rows of a batch, T tokens of a row.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_integer, shown
from specdec.jsonl import read_lines

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
        ValueError: a `.jsonl` line without any of these; raised when the line is reached.
    """
    path = Path(path)
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not is_hidden:
                yield from read_texts(file, tokenizer)
    elif not path.exists():
        raise FileNotFoundError(f"no training data at {path}: expected a .jsonl or text file")
    elif path.suffix == ".jsonl":
        for number, entry in read_lines(path):
            yield _text_of(entry, f"{path}, line {number}", tokenizer)
    else:
        yield path.read_text(encoding="utf-8-sig", errors="replace")


def _text_of(entry: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The document of a line."""
    fields = entry if isinstance(entry, dict) else {}
    if isinstance(fields.get("text"), str):
        return fields["text"]
    turns = fields.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return "\n\n".join(turns)
    messages = fields.get("messages") or fields.get("conversations") or turns
    if not isinstance(messages, list) or not all(_is_message(m) for m in messages):
        raise ValueError(
            f"{where} must be an object with 'text', with 'turns' of texts, or with 'messages' of "
            f"'role' and 'content', got {shown(entry)}"
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
    """Ids `[num_tokens]` of each text, closed by the end-of-sequence token and no other.

    `chunk_size` texts are encoded together: an encoding takes a hundred times its ids' memory.

    Example:
        >>> from specdec import zoo
        >>> [len(ids) for ids in encode_texts(["def f(x):", ""], zoo.load_tokenizer())]
        [6, 1]
    """
    check_integer("chunk_size", chunk_size, 1)
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, got one text; put it into a list")
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts, documents = iter(texts), []
    while chunk := list(islice(texts, chunk_size)):
        # Not verbose: it would warn that documents are longer than the target's context.
        for ids in tokenizer(chunk, add_special_tokens=False, verbose=False).input_ids:
            documents.append(np.array([*ids, *end], dtype=dtype))
    return documents


def hold_out(
    documents: list[np.ndarray], num_prompts: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keeps documents from the end of the data for evaluation, at most every fourth; if there are
    too few documents for that, they are cut into pieces first.

    Returns:
        The documents, or pieces of them, to train on; and those that are kept from training, at
        most `num_prompts`, each of at least 64 tokens.
    """
    check_integer("the number of evaluation prompts", num_prompts, 0)
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

    The rows depend on the documents, the seed and the shapes of the batches alone, so an
    interrupted run finds its place again by counting its batches.

    Example:
        >>> stream = PackedStream([np.arange(5), np.arange(5, 12)], seed=0)
        >>> next(stream.batches([(2, 3)]))
        tensor([[0, 1, 2, 3],
                [3, 4, 5, 6]])
    """

    def __init__(self, documents: list[np.ndarray], *, seed: int):
        check_integer("seed", seed, 0)
        if not any(len(ids) for ids in documents):
            raise ValueError("there is no text to train on: expected at least one document")
        if not all(np.issubdtype(ids.dtype, np.integer) for ids in documents):
            raise TypeError("documents must be arrays of integer ids")
        self.documents, self.seed = documents, seed
        self.num_tokens = sum(map(len, documents))

    def batches(self, shapes: Iterable[tuple[int, int]], *, skip: int = 0) -> Iterator[Tensor]:
        """Ids `[B, T + 1]` of each batch: inputs and, shifted by one, their labels.

        What an epoch has left after its last whole batch is not seen in that epoch.

        Args:
            shapes: (B, T) of each batch.
            skip: how many batches to leave out at the beginning; their shapes are counted.
        """
        epoch, position, stream = 0, 0, None
        for index, (batch_size, length) in enumerate(shapes):
            needed = batch_size * length + 1
            if needed > self.num_tokens:
                raise ValueError(
                    f"a batch takes {needed} tokens and the text has {self.num_tokens}; give more "
                    "text or train with fewer tokens per step"
                )
            if position + needed > self.num_tokens:
                epoch, position, stream = epoch + 1, 0, None
            if index >= skip:
                stream = self._pack(epoch) if stream is None else stream
                starts = position + length * np.arange(batch_size)[:, None]
                yield torch.from_numpy(stream[starts + np.arange(length + 1)].astype(np.int64))
            position += batch_size * length

    def _pack(self, epoch: int) -> np.ndarray:
        """An epoch's documents end to end; the order depends on seed and epoch alone."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
        return np.concatenate([self.documents[index] for index in order])
