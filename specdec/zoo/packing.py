"""The zoo's byte-level tokenizer, and files through it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
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
