"""`CommonVocabulary`: what a draft model of another tokenizer can read and propose."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_tensor

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, eq=False)
class CommonVocabulary:
    """The tokens that two vocabularies share. A draft model proposes these alone, by its
    distribution renormalised over them (token-level intersection).

    Args:
        target_ids: `[n]` int64, distinct ids of the target.
        draft_ids: `[n]` int64, the draft model's ids of the same tokens, distinct as well.
        readable: `[Vt]` int64, the draft model's id that each id of the target is read as.

    Raises:
        TypeError, ValueError: other shapes or data types.

    Example:
        >>> target_ids, draft_ids = torch.tensor([4, 2]), torch.tensor([0, 1])
        >>> vocabulary = CommonVocabulary(target_ids, draft_ids, torch.tensor([0, 0, 1, 0, 0]))
        >>> vocabulary.over_target_ids(torch.tensor([[0.5, 0.7]]), vocab_size=5)
        tensor([[  -inf,   -inf, 0.7000,   -inf, 0.5000]])

    Reference: Timor et al., arXiv:2502.05202, token-level intersection.
    """

    target_ids: Tensor
    draft_ids: Tensor
    readable: Tensor

    def __post_init__(self):
        check_tensor("vocabulary.target_ids", self.target_ids, (None,), (torch.long,))
        check_tensor("vocabulary.draft_ids", self.draft_ids, self.target_ids.shape, (torch.long,))
        check_tensor("vocabulary.readable", self.readable, (None,), (torch.long,))

    @classmethod
    def of(
        cls, target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase
    ) -> CommonVocabulary:
        """Of two tokenizers, byte-level (Llama 3, Qwen, GPT-2) or SentencePiece (Llama 2, Gemma).

        Tokens of the same bytes are common, and so are special tokens of the same name, and the
        tokens that begin and end a text. Each other token of the target is read as the draft
        model's longest token that it ends with: one token stands for one, so that no text has to be
        tokenized again, and what comes next depends most on how a token ends.

        Raises:
            ValueError: less than half of the smaller vocabulary is common, as between tokenizers of
                different kinds, where tokens that look alike are not the same text; or a tokenizer
                is of neither kind.

        Example:
            >>> from specdec.lab import zoo
            >>> len(CommonVocabulary.of(zoo.load_tokenizer(), zoo.load_tokenizer()).target_ids)
            2048
        """
        theirs, own = _keys(target, "target"), _keys(draft, "draft model")
        id_of = {key: i for i, key in reversed(own.items())}  # the first of equal ones
        read = {i: id_of[key] for i, key in theirs.items() if key in id_of}
        pairs = {draft_id: i for i, draft_id in reversed(read.items())}
        least = min(len(theirs), len(own))
        if 2 * len(pairs) < least:
            raise ValueError(
                f"the tokenizers of target and draft model share {len(pairs)} tokens, less than "
                f"half of the {least} of the smaller one; use a draft model of the target's family "
                "or StringDrafter(model, target_tokenizer, draft_tokenizer)"
            )
        for role in ("eos_token_id", "bos_token_id"):  # which may be one token
            ids = getattr(target, role), getattr(draft, role)
            if None not in ids and ids[0] not in read:
                read[ids[0]] = ids[1]
                pairs.setdefault(ids[1], ids[0])
        unknown = next((i for i in (draft.unk_token_id, draft.eos_token_id) if i is not None), 0)
        readable = torch.full((max(theirs) + 1,), unknown, device="cpu")
        for i, key in theirs.items():
            text = key if isinstance(key, bytes) else key.encode()
            ends = (id_of[text[n:]] for n in range(1, len(text)) if text[n:] in id_of)
            readable[i] = read[i] if i in read else next(ends, unknown)
        draft_ids, target_ids = (
            torch.tensor(list(x), device="cpu") for x in (pairs, pairs.values())
        )
        return cls(target_ids, draft_ids, readable)

    def on(self, device: torch.device, vocab_size: int) -> CommonVocabulary:
        """The same on a device, for a target of `vocab_size` ids; padding is read as id 0."""
        readable = F.pad(self.readable, (0, max(vocab_size - len(self.readable), 0)))
        tables = self.target_ids, self.draft_ids, readable
        return CommonVocabulary(*(table.to(device) for table in tables))

    def over_target_ids(self, logits: Tensor, vocab_size: int) -> Tensor:
        """The draft model's logits `[..., Vd]` over the target's `vocab_size` ids; `-inf` for those
        that are not common.
        """
        wide = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return wide.index_copy(-1, self.target_ids, logits.index_select(-1, self.draft_ids))


def _keys(tokenizer: PreTrainedTokenizerBase, whose: str) -> dict[int, bytes | str]:
    """What each id stands for: the bytes of a token of text, the name of a special one. Bytes that
    stand in for missing characters come last: a character of its own goes before.
    """
    added = tokenizer.added_tokens_decoder  # among them Gemma's runs of spaces and new lines
    text = {token: i for token, i in tokenizer.get_vocab().items() if i not in added}
    found: dict[int, bytes | str] = {
        i: token.content if token.special else token.content.replace("▁", " ").encode()
        for i, token in added.items()
    }
    if "▁" in text:  # which may have a "Ġ", a letter of Maltese, as well
        stands_for = {token: _BYTE.fullmatch(token) for token in text}
        for token in sorted(text, key=lambda token: stands_for[token] is not None):
            byte, plain = stands_for[token], token.replace("▁", " ").encode()
            found[text[token]] = bytes.fromhex(byte[1]) if byte else plain
        return found
    if "Ġ" in text:
        alphabet = sorted(ByteLevel.alphabet())
        byte_of = {char: ord(char) for char in alphabet if ord(char) < 256}
        others = (byte for byte in range(256) if chr(byte) not in byte_of)
        byte_of |= dict(zip(alphabet[len(byte_of) :], others, strict=True))
        text = {token: i for token, i in text.items() if byte_of.keys() >= set(token)}
        return found | {i: bytes(byte_of[c] for c in token) for token, i in text.items()}
    raise ValueError(
        f"the {whose}'s tokenizer is neither byte-level nor SentencePiece (it has neither 'Ġ' nor "
        "'▁' as a token), so its tokens cannot be compared; use one of the target's tokenizer"
    )
