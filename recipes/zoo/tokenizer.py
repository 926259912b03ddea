"""The zoo's byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

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
