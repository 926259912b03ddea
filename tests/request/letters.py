"""A tokenizer of one letter per token, for models of the small vocabulary."""

from architectures import VOCAB
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

LETTERS = [chr(40 + token) for token in range(VOCAB)]


def letter_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)
