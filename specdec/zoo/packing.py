"""Text to training batches: the byte-level tokenizer, and documents packed end to end.

Legend: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from specdec.zoo import corpus

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 2048) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, where any text survives encoding and decoding.

    Args:
        texts: The training documents.
        vocab_size: Number of tokens, the 256 bytes and `END_OF_TEXT` included.

    Returns:
        A fast tokenizer whose bos, eos and pad are all `END_OF_TEXT` (id 0); it adds none of
        them by itself.
    """
    bpe = ByteLevelBPETokenizer(add_prefix_space=False)
    bpe.train_from_iterator(
        texts,
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=2048,
        # The clean-up joins " ." and the like, which would damage source code.
        clean_up_tokenization_spaces=False,
    )


def encode_files(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> list[np.ndarray]:
    """Encode each file into ids [num_tokens], closed by the end-of-text token."""
    documents = []
    for start in range(0, len(files), 256):  # an encoding takes a hundred times its ids' memory
        texts = [corpus.read_source(path) for path in files[start : start + 256]]
        for encoding in tokenizer.backend_tokenizer.encode_batch(texts):
            documents.append(np.array([*encoding.ids, tokenizer.eos_token_id], dtype=np.uint16))
    return documents


class PackedStream:
    """Endless training rows: each epoch shuffles the documents and cuts them end to end.

    It is seeded, and resumable with `state_dict` and `load_state_dict`.
    """

    def __init__(self, documents: list[np.ndarray], *, seed: int):
        self.documents = documents
        self.seed = seed
        self.epoch = 0
        self.position = 0  # in tokens, inside the epoch's stream
        self._pack()

    @property
    def num_epochs(self) -> float:
        """Passes over the corpus so far."""
        return self.epoch + self.position / len(self._stream)

    def take(self, batch_size: int, length: int) -> torch.Tensor:
        """Return the next rows, ids [B, T + 1]: inputs and, shifted by one, their labels."""
        if self.position + batch_size * length + 1 > len(self._stream):
            self.epoch, self.position = self.epoch + 1, 0
            self._pack()
        starts = self.position + length * np.arange(batch_size)[:, None]
        self.position += batch_size * length
        rows = self._stream[starts + np.arange(length + 1)]
        return torch.from_numpy(rows.astype(np.int64))

    def state_dict(self) -> dict:
        """Return the place in the stream; the documents themselves are not part of it."""
        return {"seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict) -> None:
        """Return to the place that `state_dict` gave."""
        self.seed, self.epoch, self.position = state["seed"], state["epoch"], state["position"]
        self._pack()

    def _pack(self) -> None:
        """Lay this epoch's documents end to end; the order depends on seed and epoch alone."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.documents))
        self._stream = np.concatenate([self.documents[index] for index in order])
