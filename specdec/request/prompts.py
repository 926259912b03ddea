"""Reads a padded batch of prompts: checks it, and moves every row to slot 0."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prompts:
    """A checked batch of prompts.

    Args:
        padded: `[B, T]` int64, the batch exactly as it was passed.
        tokens: `[B, T']` int64, each row's real tokens from column 0; what follows them is
            meaningless.
        lengths: real tokens of each row, known to the host.
    """

    padded: Tensor
    tokens: Tensor
    lengths: list[int]

    @classmethod
    def read(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        vocab_size: int,
        device: torch.device,
    ) -> "Prompts":
        """Checks a batch as HF users pass it.

        Args:
            input_ids: `[B, T]` integers.
            attention_mask: `[B, T]`, 1 for real tokens: one unbroken run per row, padded left or
                right. `None` when every token is real.
            vocab_size: ids must be below it.
            device: where the tokens are needed.

        Raises:
            TypeError: `input_ids` is no integer tensor.
            ValueError: wrong shape, an empty prompt, a mask with holes or with other values than 0
                and 1, or ids outside the vocabulary.
        """
        _check_ids(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
            shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}, got "
                f"{shape}"
            )
        if mask.layout != torch.strided or mask.is_meta:
            raise TypeError(
                "attention_mask must be a plain tensor with data, got layout "
                f"{mask.layout} on {mask.device}"
            )
        mask = mask.to(input_ids.device)
        if bool(((mask != 0) & (mask != 1)).any()):
            odd = mask[(mask != 0) & (mask != 1)][0].item()
            raise ValueError(
                f"attention_mask must hold 1 for real tokens and 0 for padding, got {odd}; an "
                "additive mask (0 and -inf) is not one"
            )
        mask = mask != 0
        lengths = mask.sum(dim=1).tolist()
        if 0 in lengths:
            raise ValueError(
                f"row {lengths.index(0)} of the batch is all padding; every prompt needs at least "
                "one token"
            )
        first = mask.long().argmax(dim=1)
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        ends = first + torch.tensor(lengths, device=input_ids.device)
        is_run = ((columns >= first[:, None]) & (columns < ends[:, None])) == mask
        if not is_run.all():
            row = int((~is_run.all(dim=1)).long().argmax())
            raise ValueError(
                f"the attention_mask of row {row} has holes; real tokens must be one unbroken run, "
                "with padding "
                "on the left or on the right only"
            )
        source = (first[:, None] + columns[: max(lengths)]).clamp(max=input_ids.shape[1] - 1)
        tokens = input_ids.gather(1, source)
        outside = mask & ((input_ids < 0) | (input_ids >= vocab_size))
        if outside.any():
            row, column = outside.nonzero()[0].tolist()
            raise ValueError(
                f"input_ids[{row}, {column}] is {int(input_ids[row, column])}, outside the "
                "target's vocabulary "
                f"of {vocab_size}; was the prompt encoded with the target's tokenizer?"
            )
        return cls(input_ids.to(device).long(), tokens.to(device).long(), lengths)

    def alone(self) -> list[Tensor]:
        """`[1, t]` for each row, without padding."""
        rows = zip(self.tokens.split(1), self.lengths, strict=True)
        return [row[:, :length] for row, length in rows]

    def repeated(self, count: int) -> "Prompts":
        """Each prompt `count` times, in rows that follow each other."""
        if count == 1:
            return self
        tables = (table.repeat_interleave(count, dim=0) for table in (self.padded, self.tokens))
        return Prompts(*tables, [length for length in self.lengths for _ in range(count)])

    def filled_to(self, rows: int) -> "Prompts":
        """So many rows: after those of the batch, prompts of the one token 0."""
        missing = rows - len(self.lengths)
        if missing == 0:
            return self
        padded = torch.nn.functional.pad(self.padded, (0, 0, 0, missing))
        tokens = torch.nn.functional.pad(self.tokens, (0, 0, 0, missing))
        return Prompts(padded, tokens, [*self.lengths, *[1] * missing])


def _check_ids(input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be an integer tensor [B, T], got {type(input_ids).__name__}; "
            "tokenizer(text, return_tensors='pt').input_ids is one"
        )
    if input_ids.layout != torch.strided or input_ids.is_meta:
        raise TypeError(
            "input_ids must be a plain tensor with data, got layout "
            f"{input_ids.layout} on {input_ids.device}; call to_dense() on a sparse one"
        )
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids must hold integer token ids, got dtype {input_ids.dtype}")
    if input_ids.dim() != 2:
        raise ValueError(
            f"input_ids must be [B, T], got shape {list(input_ids.shape)}; add a batch dimension "
            "with ids[None]"
        )
    if input_ids.numel() == 0:
        raise ValueError(
            f"the prompt is empty (shape {list(input_ids.shape)}); pass at least one token, "
            "for example the tokenizer's bos_token_id"
        )
