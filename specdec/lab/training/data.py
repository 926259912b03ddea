"""Text to training batches: documents of a file or folder, packed end to end.

Legend: B rows of a batch, T tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
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


def beginning_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the tokenizer puts before every text, mostly one id or none.

    Example:
        >>> from specdec.lab import zoo
        >>> beginning_of(zoo.load_tokenizer())
        []
    """
    plain = tokenizer("a", add_special_tokens=False).input_ids
    whole = tokenizer("a").input_ids
    return next((whole[:i] for i in range(len(whole)) if whole[i:][: len(plain)] == plain), [])


def begun(ids: np.ndarray, beginning: Sequence[int]) -> np.ndarray:
    """Ids with the beginning before them; ids that begin so are returned as they are."""
    if ids[: len(beginning)].tolist() == list(beginning):
        return ids
    return np.concatenate([np.array(beginning, dtype=ids.dtype), ids])


def encode_texts(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, chunk_size: int = 256
) -> list[np.ndarray]:
    """Ids `[num_tokens]` of each text: begun as the tokenizer begins a text, and closed by the
    end-of-sequence token. A chat template may have written either of them, which is not repeated.

    `chunk_size` texts are encoded together: an encoding takes a hundred times its ids' memory.

    Example:
        >>> from specdec.lab import zoo
        >>> [len(ids) for ids in encode_texts(["def f(x):", ""], zoo.load_tokenizer())]
        [6, 1]
    """
    check_integer("chunk_size", chunk_size, 1)
    if isinstance(texts, str):
        raise TypeError("texts must be a list of texts, got one text; put it into a list")
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    beginning = beginning_of(tokenizer)
    texts, documents = iter(texts), []
    while chunk := list(islice(texts, chunk_size)):
        # Not verbose: it would warn that documents are longer than the target's context.
        for ids in tokenizer(chunk, add_special_tokens=False, verbose=False).input_ids:
            is_closed = tokenizer.eos_token_id is None or _is_closed(ids, tokenizer)
            ids = ids if is_closed else [*ids, tokenizer.eos_token_id]
            documents.append(begun(np.array(ids, dtype=dtype), beginning))
    return documents


def _is_closed(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether an end-of-sequence token is the last one, or white space alone follows it."""
    tail, end = ids[-4:], tokenizer.eos_token_id
    if end not in tail:
        return False
    after = tail[len(tail) - tail[::-1].index(end) :]
    return not tokenizer.decode(after).strip()


def hold_out(
    documents: list[np.ndarray], num_prompts: int, beginning: Sequence[int] = ()
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Keeps documents from the end of the data for evaluation, at most every fourth; if there are
    too few documents for that, they are cut into pieces first, each of which is `begun`.

    Returns:
        The documents, or pieces of them, to train on; and those that are kept from training, at
        most `num_prompts`, each of at least 64 tokens.
    """
    check_integer("the number of evaluation prompts", num_prompts, 0)
    if sum(len(ids) >= PROMPT_TOKENS for ids in documents) < 4 * num_prompts:
        size = max(sum(map(len, documents)) // (4 * num_prompts), PROMPT_TOKENS)
        documents = [
            begun(ids[start : start + size], beginning)
            for ids in documents
            for start in range(0, len(ids), size)
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

    Args:
        documents: ids of each.
        seed: of their order.
        beginning: with which every text begins (`beginning_of`). It stands once before each
            document, and in the first places of every row that is cut from within a document.

    Example:
        >>> stream = PackedStream([np.arange(5), np.arange(5, 12)], seed=0)
        >>> next(stream.batches([(2, 3)]))
        tensor([[0, 1, 2, 3],
                [3, 4, 5, 6]])
    """

    def __init__(self, documents: list[np.ndarray], *, seed: int, beginning: Sequence[int] = ()):
        check_integer("seed", seed, 0)
        if not any(len(ids) for ids in documents):
            raise ValueError("there is no text to train on: expected at least one document")
        for ids in documents:
            if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
                raise TypeError(
                    f"documents must be NumPy arrays of integer ids, got {shown(ids)}; "
                    "encode_texts makes them of texts, ids.numpy() of a tensor"
                )
        self.documents = [begun(ids, beginning) for ids in documents]
        self.seed, self.beginning = seed, list(beginning)
        self.num_tokens = sum(map(len, self.documents))

    def batches(self, shapes: Iterable[tuple[int, int]], *, skip: int = 0) -> Iterator[Tensor]:
        """Ids `[B, T + 1]` of each batch: inputs and, shifted by one, their labels.

        What an epoch has left after its last whole batch is not seen in that epoch.

        Args:
            shapes: (B, T) of each batch.
            skip: how many batches to leave out at the beginning; their shapes are counted.
        """
        epoch, position, packed = 0, 0, None
        shared = max(1, len(self.beginning))  # tokens of a row that the row before it has, too
        for index, (batch_size, length) in enumerate(shapes):
            advice = f"a text begins with {len(self.beginning)} ids"
            check_integer("the tokens of a row", length, shared, advice=advice)
            stride = length + 1 - shared
            needed = batch_size * stride + shared
            if needed > self.num_tokens:
                raise ValueError(
                    f"a batch takes {needed} tokens and the text has {self.num_tokens}; give more "
                    "text or train with fewer tokens per step"
                )
            if position + needed > self.num_tokens:
                epoch, position, packed = epoch + 1, 0, None
            if index >= skip:
                packed = self._pack(epoch) if packed is None else packed
                yield self._cut(*packed, position + stride * np.arange(batch_size), length)
            position += batch_size * stride

    def _pack(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's documents end to end, and where each begins and the last one ends; the order
        depends on seed and epoch alone.
        """
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.documents))
        documents = [self.documents[index] for index in order]
        return np.concatenate(documents), np.cumsum([0, *map(len, documents)])

    def _cut(
        self, stream: np.ndarray, edges: np.ndarray, starts: np.ndarray, length: int
    ) -> Tensor:
        """Rows `[B, length + 1]` from the starts `[B]` on, each with the beginning in its first
        places. Where a document begins in these places, the row begins with the document.
        """
        count = len(self.beginning)
        edge = edges[np.searchsorted(edges, starts)]
        starts = np.where(edge - starts <= count, edge, starts)
        rows = stream[(starts[:, None] + np.arange(length + 1)) % len(stream)].astype(np.int64)
        rows[:, :count] = self.beginning
        return torch.from_numpy(rows)
