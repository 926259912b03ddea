"""The source of a call of an encoder-decoder: what the user's call brings for the encoder, read as
the model's own `generate` reads it, becomes prompts of the decoder and row inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from specdec.arguments import shown
from specdec.hf.encoders import prepared
from specdec.hf.forward import CACHES, forward_arguments
from specdec.targets import Target
from specdec.targets.edits.cross import rows_of
from specdec.targets.slot_model import SlotModel
from specdec.targets.source import SOURCE

_OF_DECODER = {"decoder_input_ids", "decoder_start_token_id", "language", "task", "prompt_ids"}
_NOT_READ = {
    *("labels", "decoder_inputs_embeds", "use_cache", "return_dict", "input_ids", *CACHES),
    *("attention_mask", "output_attentions", "output_hidden_states", "self", "kwargs"),
}
_OF_SOURCE = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
"""Settings of processors that read the ids of the source, with the value that does nothing."""


class Source(NamedTuple):
    """Of one call.

    Args:
        encoder: of the target.
        parts: inputs of the encoder, by the names of the model's own `generate`, and what that
            hands to a decoding method: of all rows together, or of one row after the other.
    """

    encoder: nn.Module
    parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]


class SourceRows(dict):
    """Row inputs of a call, and the source that some of them were made of.

    Attributes:
        others: those that the call brought itself.
    """

    def __init__(self, rows: Mapping[str, Any], source: Source):
        super().__init__(rows)
        self.source = source
        self.others = {name: value for name, value in rows.items() if name not in SOURCE}


def native(
    target: Target,
    input_ids: Tensor | Mapping[str, Any] | None,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Prompts of the decoder, their mask, and the options of a call, with the source among its row
    inputs.

    Args:
        target: whose model has an encoder.
        input_ids: of the source, `[B, S]`; or all that a tokenizer or processor returns.
        attention_mask: of the source.
        options: of the call; those of the source are taken out.

    Raises:
        TypeError, ValueError: no source, or a recording that is longer than the encoder reads.
    """
    whole, options = target.model.whole, dict(options)
    _refuse_processors(options.get("generation_config"), whole.generation_config)
    given = options.get("row_inputs") or {}
    if isinstance(given, Mapping) and "adapter" in given:
        raise ValueError(
            "row_inputs['adapter'] is not supported for a target with an encoder, which reads all "
            "rows with one adapter; generate with one at a time (model.set_adapter, then "
            "generator.refresh())"
        )
    if isinstance(given, Mapping) and given.get("prompt") is not None:
        return _by_rows(target, input_ids, attention_mask, options)
    given = _given(target, input_ids, attention_mask, options)
    config = {name: options[name] for name in ("generation_config",) if options.get(name)}
    is_whole = "decoder_input_ids" not in given
    ids, found = prepared(whole, {**given, **config}, is_whole=is_whole)
    rows = _rows(target, given, found)
    source = Source(whole.get_encoder(), [(given, found)])
    options["row_inputs"] = SourceRows({**(options.get("row_inputs") or {}), **rows}, source)
    mask = found.get("decoder_attention_mask")
    return ids, torch.ones_like(ids) if mask is None else mask, options


def _given(
    target: Target,
    input_ids: Tensor | Mapping[str, Any] | None,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What the model's own `generate` is given, by name; taken out of the options of a call."""
    whole = target.model.whole
    given = {"input_ids": input_ids, "attention_mask": attention_mask}
    if isinstance(input_ids, Mapping):
        given = {**given, "input_ids": None, **input_ids}
    names = (forward_arguments(whole) - _NOT_READ) | _OF_DECODER
    given |= {name: options.pop(name) for name in names & options.keys()}
    given = {name: _on(value, target.device) for name, value in given.items() if value is not None}
    own = whole.main_input_name
    if own not in given and not given.keys() & {"encoder_outputs", "inputs_embeds"}:
        raise TypeError(
            f"{type(whole).__name__} reads a source by its encoder: expected {own} or "
            f"encoder_outputs, got {', '.join(sorted(given)) or 'nothing'}; the decoder's own "
            "prompt is decoder_input_ids"
        )
    longest = 2 * getattr(whole.config, "max_source_positions", 0)
    frames = given[own].shape[-1] if own == "input_features" and own in given else 0
    if longest and frames > longest:
        raise ValueError(
            f"input_features has {frames} frames, and the encoder reads {longest} at "
            "once; call model.generate(..., custom_generate=generator), which goes window by window"
        )
    if own == "input_ids" and own in given and "attention_mask" in given:
        given |= _from_the_left(given[own], given["attention_mask"])
    return given


def through_hook(
    target: Target, call: Mapping[str, Any], model_kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], SourceRows]:
    """What HF hands to a decoding method, by the names that it has in decoder-only models, and the
    row inputs of the source.

    Args:
        call: what HF's `generate` was given, of `hf.generation.call_of_generate`.
        model_kwargs: that it hands over.
    """
    inputs, mask = call.get("inputs_tensor"), model_kwargs.get("attention_mask")
    given = {}
    if call.get("encoder_outputs") is None and isinstance(inputs, Tensor):
        given[call["model_input_name"]] = inputs
        if mask is not None:  # HF has added rows to it, and not to the others
            given["attention_mask"] = mask[:: len(mask) // len(inputs)]
    source = Source(target.model.whole.get_encoder(), [(given, model_kwargs)])
    rows = SourceRows(_rows(target, given, model_kwargs), source)
    own = {n: v for n, v in model_kwargs.items() if n not in ("encoder_outputs", "attention_mask")}
    return {n.removeprefix("decoder_"): value for n, value in own.items()}, rows


def _by_rows(
    target: Target, ids: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """The same where `row_inputs["prompt"]` has the source of each row, and ids are the decoder's.

    Raises:
        TypeError, ValueError: another number of rows, or a row without a source.
    """
    given = dict(options["row_inputs"])
    whole, rows, parts, tables = target.model.whole, given.pop("prompt"), [], []
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(rows) != len(ids):
        raise ValueError(
            f"row_inputs['prompt'] has the sources of {len(rows)} rows, so input_ids must be the "
            f"prompts of their decoder, [{len(rows)}, T], got {shown(ids)}"
        )
    for row in rows:
        own = {n: _on(v, target.device) for n, v in row.items() if not n.startswith("decoder_")}
        found = prepared(whole, own, is_whole=False)[1]
        parts.append((own, found))
        tables.append(_rows(target, own, found))
    source = Source(whole.get_encoder(), parts)
    options["row_inputs"] = SourceRows({**given, **_joined(tables)}, source)
    return ids, mask, options


def _joined(tables: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Row inputs of several batches of sources, filled up to the longest."""
    if len(tables) == 1:
        return dict(tables[0])
    most = max(one["source_mask"].shape[1] for one in tables)
    fills = {"source_mask": False, "source_ids": -1}

    def filled(name: str, table: Tensor, missing: int) -> Tensor:
        sides = (0, missing) if name in fills else (0, 0, 0, missing)
        return F.pad(table, sides, value=fills.get(name, 0))

    lengths = [most - one["source_mask"].shape[1] for one in tables]
    return {
        name: torch.cat(
            [filled(name, one[name], n) for one, n in zip(tables, lengths, strict=True)]
        )
        for name in tables[0]
    }


def _from_the_left(ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Sources that are padded on the left, padded on the right: encoders count positions from the
    first column, so each row is read as it would be alone.
    """
    columns = torch.arange(ids.shape[1], device=ids.device)
    columns = (columns + (mask != 0).long().argmax(dim=1, keepdim=True)) % ids.shape[1]
    return {"input_ids": ids.gather(1, columns), "attention_mask": mask.gather(1, columns)}


def inert(target: Target, ids: Tensor) -> dict[str, Any]:
    """Options of a call of prompts `[B, T]` of the decoder whose sources are zeros."""
    length = getattr(target.model.whole.config, "max_source_positions", 1)
    shape = len(ids), length, target.model.source_width
    states = torch.zeros(shape, dtype=target.dtype, device=target.device)
    made = BaseModelOutput(last_hidden_state=states)
    return {"encoder_outputs": made, "decoder_input_ids": ids, "decoder_start_token_id": 0}


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


@torch.no_grad()
def _rows(target: Target, given: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Tensor]:
    """Row inputs of what HF has prepared; ids of the source, where it is a text."""
    mask = found.get("attention_mask")
    rows = rows_of(target.step_view, found["encoder_outputs"], mask)
    ids = given.get("input_ids")
    if ids is not None and ids.dim() == 2 and ids.shape[1] == found["encoder_outputs"][0].shape[1]:
        ids = ids.repeat_interleave(len(rows[SOURCE[0]]) // len(ids), dim=0)
        seen = rows["source_mask"][:, : ids.shape[1]]
        ids = torch.where(seen, ids, -1)
        rows["source_ids"] = F.pad(ids, (0, rows["source_mask"].shape[1] - ids.shape[1]), value=-1)
    return rows


def rows_of_draft(draft: SlotModel, source: Source) -> dict[str, Tensor]:
    """Row inputs of a draft model with an encoder: its own, or that of the target, which has run.

    Raises:
        ValueError: the call brought what the target's encoder made, and not what it was made of.
    """
    whole, tables = draft.model.whole, []
    names = {whole.main_input_name, "inputs_embeds"}
    for inputs, found in source.parts:
        if whole.get_encoder() is not source.encoder:
            given = {n: v for n, v in inputs.items() if n in {*names, "attention_mask"}}
            if not given.keys() & names:
                raise ValueError(
                    f"the draft model has an encoder of its own, and the call brought "
                    f"encoder_outputs of the target's; pass {whole.main_input_name}, or let both "
                    "have one encoder (draft.model.encoder = target.model.encoder)"
                )
            found = prepared(whole, given, is_whole=False)[1]
        own = found["encoder_outputs"], found.get("attention_mask")
        tables.append(rows_of(draft.step_view, *own))
    return _joined(tables)


def _refuse_processors(config: Any, of_model: Any) -> None:
    """Raises `ValueError` for settings that read the ids of the source, which a call of a
    generator's own does not show its processors.
    """
    for name, usual in _OF_SOURCE.items():
        value = getattr(config, name, None)
        value = getattr(of_model, name, None) if value is None else value
        if value not in (None, usual):
            raise ValueError(
                f"{name}={value!r} reads the ids of the source, which processors of a generator's "
                "own calls do not see; call model.generate(..., custom_generate=generator), or "
                f"pass generation_config=GenerationConfig({name}={usual})"
            )


def with_source(given: SourceRows, others: Mapping[str, Tensor], rows: int) -> SourceRows:
    """Row inputs of so many rows: others, and those of the source, which stay on the device."""
    own = {name: given[name] for name in SOURCE if name in given}
    own = {name: value.repeat_interleave(rows // len(value), dim=0) for name, value in own.items()}
    return SourceRows({**others, **own}, given.source)


def with_drafters(request: Any, drafter: Any) -> Any:
    """The call with the row inputs that a drafter makes of the source itself."""
    rows = request.row_inputs
    more = drafter.read_source(rows.source)
    if not more or more.keys() <= rows.keys():
        return request
    copies = len(request.lengths) // len(next(iter(more.values())))
    more = {name: value.repeat_interleave(copies, dim=0) for name, value in more.items()}
    return replace(request, row_inputs=SourceRows({**rows, **more}, rows.source))
