"""`Given`: what a call brings of its prompts beside token ids and mask: pictures, sound and
embeddings, by the names under which the target's own `generate` takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec.arguments import check_tensor, shown
from specdec.hf.forward import CACHES
from specdec.hf.prompts import prompt_inputs
from specdec.hf.special_ids import special_tokens
from specdec.targets import Target
from specdec.targets.prompt_inputs import PromptInputs

EMBEDS = "inputs_embeds"
_KNOWN_TO_HOOK = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES}


@dataclass(frozen=True, eq=False)
class Given:
    """Of one call.

    Args:
        values: by name.
        config: what HF hands to a decoding method, where it has prepared the prompts for one, and
            `values` is all that it hands over; `None` natively.
    """

    values: Mapping[str, Any]
    config: GenerationConfig | None = None

    def ids(self, target: Target, input_ids: Tensor | None) -> Tensor:
        """`[B, T]` ids of the target's vocabulary: those that stand for pictures may lie beyond it,
        and embeddings have none.

        Raises:
            TypeError, ValueError: embeddings that are not `[B, T, H]`, or ids of another size.
        """
        embeds = self.values.get(EMBEDS)
        if embeds is not None:
            hidden = target.config.hidden_size
            check_tensor(EMBEDS, embeds, (None, None, hidden), (target.dtype,))
            if not embeds.numel():
                raise ValueError(
                    f"{EMBEDS} is empty, {list(embeds.shape)}; pass at least one token"
                )
            if self.is_embedded(input_ids):
                return torch.zeros(embeds.shape[:2], dtype=torch.long, device=target.device)
            if input_ids.shape != embeds.shape[:2]:
                raise ValueError(
                    f"{EMBEDS} {list(embeds.shape)} and input_ids {list(input_ids.shape)} are of "
                    "other prompts; leave input_ids out"
                )
        if input_ids.is_floating_point():
            return input_ids  # raises a TypeError later that names input_ids
        beyond = torch.tensor(
            [i for i in special_tokens(target.model) if i >= target.vocab_size],
            dtype=input_ids.dtype,
            device=input_ids.device,
        )
        return input_ids.masked_fill(torch.isin(input_ids, beyond), 0)

    def is_embedded(self, input_ids: Tensor | None) -> bool:
        """The prompts are embeddings without ids."""
        return EMBEDS in self.values and (input_ids is None or input_ids.shape[1:2] == (0,))

    def read(
        self,
        target: Target,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        lengths: Sequence[int],
        width: int,
    ) -> PromptInputs:
        """The prompts as the text decoder reads them; see `Target.read_prompts`.

        Args:
            target: of the generator.
            input_ids: `[B, T]` as they were passed.
            attention_mask: `[B, T]`, `None` where padding is known by its id.
            lengths: tokens of each row.
            width: T.

        Raises:
            ValueError: padding on the right, or see `Target.read_prompts`.
        """
        if attention_mask is not None and bool((attention_mask[:, -1] == 0).any()):
            raise ValueError(
                "prompts with pictures, sound or embeddings are padded on the right, where HF "
                "generate goes on after the padding; set processor.tokenizer.padding_side='left'"
            )
        device = target.device
        columns = torch.arange(width, device=device)
        mask = (columns >= width - torch.tensor(lengths, device=device)[:, None]).long()
        if self.config is not None:
            return target.read_prompts(input_ids, mask, self.values, self.config)
        ids = None if self.is_embedded(input_ids) else input_ids.to(device).long()
        given = {name: _on(value, device) for name, value in self.values.items()}
        return target.read_prompts(ids, mask, given)


@dataclass(frozen=True, eq=False)
class GivenRows:
    """The same, prompt by prompt: `row_inputs["prompt"]`.

    Args:
        rows: for each prompt what the target's processor makes of it alone, ids and mask included;
            `None` for text.
    """

    rows: Sequence[Mapping[str, Any] | None]

    def ids(self, target: Target, input_ids: Tensor) -> Tensor:
        """As `Given.ids`."""
        return Given({}).ids(target, input_ids)

    def is_embedded(self, input_ids: Tensor | None) -> bool:
        """Prompts that are read one by one have ids."""
        return False

    def read(
        self,
        target: Target,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        lengths: Sequence[int],
        width: int,
    ) -> PromptInputs:
        """As `Given.read`; each prompt is read alone.

        Raises:
            TypeError, ValueError: another number of prompts, or other ids than those of the call.
        """
        if len(self.rows) != len(lengths):
            raise ValueError(
                f"row_inputs['prompt'] has {len(self.rows)} values for {len(lengths)} prompts"
            )
        first = [0] * len(lengths)
        if attention_mask is not None:
            first = (attention_mask != 0).long().argmax(dim=1).tolist()
        elif min(lengths) < width:
            first = [width - length for length in lengths]
        read = []
        for row, (own, length) in enumerate(zip(self.rows, lengths, strict=True)):
            ids = input_ids[row, first[row] : first[row] + length].to(target.device).long()[None]
            values = self._values(target, row, own, ids)
            read.append(target.read_prompts(ids, torch.ones_like(ids), values))
        return PromptInputs.joined(read)

    @staticmethod
    def _values(target: Target, row: int, own: Any, ids: Tensor) -> dict[str, Any]:
        if own is None:
            return {}
        if not isinstance(own, Mapping):
            raise TypeError(
                f"row_inputs['prompt'][{row}] must be what the processor returns for one prompt, "
                f"or None for text, got {shown(own)}"
            )
        theirs = own.get("input_ids")
        if not isinstance(theirs, Tensor) or not torch.equal(theirs.to(ids), ids):
            raise ValueError(
                f"row_inputs['prompt'][{row}] must be of one prompt, with input_ids [1, "
                f"{ids.shape[1]}] that are those of the call without padding, got {shown(theirs)}"
            )
        known = prompt_inputs(target.model)
        rest = {n: _on(v, ids.device) for n, v in own.items() if v is not None}
        rest = {n: v for n, v in rest.items() if n not in ("input_ids", "attention_mask")}
        if unknown := sorted(rest.keys() - known):
            raise ValueError(
                f"{type(target.model).__name__} does not know {', '.join(unknown)} of "
                f"row_inputs['prompt'][{row}]"
            )
        return rest


def by_rows(row_inputs: Any) -> tuple[Any, GivenRows | None]:
    """Takes what is of the prompts out of a call's row inputs."""
    if not isinstance(row_inputs, Mapping) or row_inputs.get("prompt") is None:
        return row_inputs, None
    rows = row_inputs["prompt"]
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise TypeError(
            "row_inputs['prompt'] must be a list of what the processor returns for each prompt, "
            f"got {shown(rows)}"
        )
    rest = {name: value for name, value in row_inputs.items() if name != "prompt"}
    return rest or None, GivenRows(rows) if any(row is not None for row in rows) else None


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def native(target: Target, options: dict[str, Any]) -> Given | None:
    """Takes what is of the prompts out of a call's options; `None` if nothing is."""
    names = prompt_inputs(target.model) & options.keys()
    values = {name: options.pop(name) for name in names}
    values = {name: value for name, value in values.items() if value is not None}
    return Given(values) if values else None


def through_hook(
    target: Target, config: GenerationConfig, model_kwargs: Mapping[str, Any]
) -> Given | None:
    """The same of what HF hands to a decoding method.

    Raises:
        ValueError: something that the target's `generate` does not take.
    """
    own = {name: v for name, v in model_kwargs.items() if name not in _KNOWN_TO_HOOK}
    own = {name: v for name, v in own.items() if v is not None and not _is_empty(v)}
    known = prompt_inputs(target.model)
    unknown = sorted(own.keys() - known)
    if unknown:
        raise ValueError(
            f"specdec does not know these inputs of {type(target.model).__name__}: "
            f"{', '.join(unknown)}; it reads {shown(sorted(known))} beside input_ids"
        )
    positions = model_kwargs.get("position_ids")
    has_axes = positions is not None and positions.dim() == 3
    has_axes = has_axes and bool((positions != positions[:1]).any())  # of text all are the same
    return Given(dict(model_kwargs), config) if own or has_axes else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def ids_of(inputs: Mapping[str, Any]) -> list[int]:
    """The ids of one prompt, of what a processor returns for it.

    Raises:
        ValueError: not of one prompt.
    """
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if "decoder_input_ids" in inputs:  # the others are of the encoder
        ids, mask = inputs["decoder_input_ids"], None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
        raise ValueError(
            "a prompt with pictures is what a processor returns for one prompt, with input_ids "
            f"[1, T], got {shown(ids)}"
        )
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError("a prompt with pictures is one prompt, without padding")
    return ids[0].tolist()


def with_rows(row_inputs: Any, beside: Given | None) -> tuple[Any, Given | GivenRows | None]:
    """`by_rows` of a call with row inputs of the prompts; what prompts are beside ids.

    Raises:
        TypeError: they are said twice, or see `by_rows`.
    """
    row_inputs, rows = by_rows(row_inputs)
    if rows is not None and beside is not None:
        raise TypeError(
            f"row_inputs['prompt'] says what prompts are, and so do {', '.join(beside.values)}; "
            "leave one of them out"
        )
    return row_inputs, beside or rows


def unpacked(
    target: Target,
    input_ids: Mapping,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
    """Ids and mask, which a tokenizer returns as one object, and a processor with all that its
    model reads of a prompt; that is among the options returned. Of an encoder-decoder all of it is
    the source.
    """
    if target.reads_source:
        from specdec.request.source import native as of_source

        return of_source(target, input_ids, attention_mask, options)
    own = prompt_inputs(target.model)
    read = {name: value for name, value in input_ids.items() if name in own}
    surplus = input_ids.keys() - {"input_ids", "attention_mask", "token_type_ids"} - own
    twice = read.keys() & options.keys()
    if (
        not input_ids.keys() & {"input_ids", "inputs_embeds"}
        or surplus
        or twice
        or (attention_mask is not None)
    ):
        raise TypeError(
            "expected input_ids as a tensor, or a tokenizer's output with input_ids and "
            f"attention_mask in one object; got one with {', '.join(map(str, input_ids))}"
            + (" and an attention_mask beside it" if attention_mask is not None else "")
        )
    return input_ids.get("input_ids"), input_ids.get("attention_mask"), {**options, **read}


def read_beside(
    target: Target, *, beside: Given | GivenRows, parts: tuple, copies: int
) -> PromptInputs:
    """What the prompts are beside ids, read by a target, so many rows of each."""
    prompts = beside.read(target, *parts)
    return prompts.repeated(copies) if copies > 1 else prompts


def as_passed(request: Any, beside: Given | GivenRows, input_ids: Tensor | None) -> dict[str, Any]:
    """Fields of the call with ids as they were passed: those of pictures may lie beyond the
    vocabulary, and embeddings have none.
    """
    if "position_offset" in request.row_inputs:
        raise ValueError(
            "row_inputs['position_offset'] has no effect in a call that brings more than ids: the "
            "model's own generate() prepares its positions; leave it out"
        )
    if beside.is_embedded(input_ids):
        return {"padded": request.padded[:, :0], "is_embedded": True}
    rows, own = len(request.padded), input_ids.to(request.padded.device).long()
    return {"padded": own.repeat_interleave(rows // len(own), dim=0)}
