"""The source of a call of an encoder-decoder: what the user's call brings for the encoder, read as
the model's own `generate` reads it, becomes prompts of the decoder and row inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from specdec.arguments import shown
from specdec.graphs.tree import modules_of
from specdec.hf.encoders import prepared
from specdec.hf.forward import CACHES, forward_arguments
from specdec.targets import Target
from specdec.targets.edits.cross import handed, unwritten, write
from specdec.targets.source import SOURCE
from specdec.targets.target import SlotModel

_OF_DECODER = {"decoder_input_ids", "decoder_start_token_id", "language", "task", "prompt_ids"}
_NOT_READ = {
    *("labels", "decoder_inputs_embeds", "use_cache", "return_dict", "input_ids", *CACHES),
    *("attention_mask", "output_attentions", "output_hidden_states", "self", "kwargs"),
}
_OF_SOURCE = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0}
"""Settings of processors that read the ids of the source, with the value that does nothing."""


MULTIPLE = 64
"""Lengths of sources are filled up to a multiple of this: storage, and captured steps, are of one
length.
"""


class Source(NamedTuple):
    """The sources of one call.

    Args:
        encoder: of the target.
        parts: inputs of the encoder, by the names of the model's own `generate`, and what that
            hands to a decoding method: of all rows together, or of one row after the other.
    """

    encoder: nn.Module
    parts: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]

    def read(self, model: SlotModel) -> tuple[Tensor, Tensor]:
        """States `[B, S, E]`, and which of them there are, `[B, S]`, for the decoder of a model:
        of its own encoder, or of the target's where that is the same.

        Raises:
            ValueError: a source is all padding; or the call brought what the target's encoder made,
                and not what it was made of.
        """
        whole, found = model.model.whole, []
        for given, made in self.parts:
            if whole.get_encoder() is not self.encoder:
                made = prepared(whole, _of_encoder(whole, given), is_whole=False)[1]
            own = made["encoder_outputs"], made.get("attention_mask")
            found.append(handed(model.step_view, *own))
        length = -(-max(seen.shape[1] for _, seen in found) // MULTIPLE) * MULTIPLE
        states = [F.pad(x, (0, 0, 0, length - x.shape[1])) for x, _ in found]
        seen = [F.pad(x, (0, length - x.shape[1])) for _, x in found]
        return torch.cat(states), torch.cat(seen)

    def ids(self, length: int) -> Tensor | None:
        """`[B, length]`, 0 behind each source; `None` for what is no text."""
        found = []
        for given, made in self.parts:
            ids = given.get("input_ids")
            if ids is None or ids.shape[1:] != made["encoder_outputs"][0].shape[1:2]:
                return None
            found.append(F.pad(ids, (0, length - ids.shape[1])))
        return torch.cat(found)


class SourceRows(dict):
    """Row inputs of a call that brings sources: what it brought besides, and what models read of
    the sources. Keys and values of the cross attention are shapes here, without data: they are
    written where steps read them, and stand nowhere else.

    Args:
        others: what it brought besides.
        source: of the call.
        rows: of the call, so many of each source after the other.
    """

    def __init__(self, others: Mapping[str, Any], source: Source, rows: int = 0):
        super().__init__(others)
        self.others, self.source, self._rows = others, source, rows
        self._written: dict[str, tuple[SlotModel, Tensor]] = {}

    def __reduce__(self) -> tuple:
        return dict, (dict(self.others),)

    def read_by(self, model: SlotModel, prefix: str = "") -> None:
        """Adds what the decoder of a model reads, under names with this prefix."""
        states, seen = self.source.read(model)
        cache, mask, ids = (f"{prefix}{name}" for name in SOURCE)
        self[cache] = unwritten(model.step_view, states, self._rows)
        self[mask] = seen.repeat_interleave(self._rows // len(seen), dim=0)
        self._written[cache] = model, states
        if not prefix and (text := self.source.ids(seen.shape[1])) is not None:
            text = text.repeat_interleave(self._rows // len(text), dim=0)
            self[ids] = torch.where(self[mask], text, -1)

    def write(self, tables: Mapping[str, Tensor]) -> None:
        """Writes keys and values into the tables of a batch that has these rows first."""
        for name, (model, states) in self._written.items():
            write(model.step_view, states, tables[name][: self._rows])


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
    source = Source(whole.get_encoder(), [(given, found)])
    options["row_inputs"] = SourceRows(options.get("row_inputs") or {}, source)
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
    rows = SourceRows({}, Source(target.model.whole.get_encoder(), [(given, model_kwargs)]))
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
    whole, rows, parts = target.model.whole, given.pop("prompt"), []
    if not isinstance(ids, Tensor) or ids.dim() != 2 or len(rows) != len(ids):
        raise ValueError(
            f"row_inputs['prompt'] has the sources of {len(rows)} rows, so input_ids must be the "
            f"prompts of their decoder, [{len(rows)}, T], got {shown(ids)}"
        )
    for row in rows:
        own = {n: _on(v, target.device) for n, v in row.items() if not n.startswith("decoder_")}
        parts.append((own, prepared(whole, own, is_whole=False)[1]))
    options["row_inputs"] = SourceRows(given, Source(whole.get_encoder(), parts))
    return ids, mask, options


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


def _of_encoder(whole: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs for the encoder of a draft model, of what the call brought for the target's."""
    names = {whole.main_input_name, "inputs_embeds"}
    if not given.keys() & names:
        raise ValueError(
            "the draft model has an encoder of its own, and the call brought encoder_outputs of "
            f"the target's; pass {whole.main_input_name}, or let both have one encoder "
            "(draft.model.encoder = target.model.encoder)"
        )
    return {name: given[name] for name in given.keys() & {*names, "attention_mask"}}


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


def with_source(
    target: Target, given: SourceRows, others: Mapping[str, Tensor], rows: int
) -> SourceRows:
    """Row inputs of so many rows: others, and what the target reads of the sources."""
    found = SourceRows(others, given.source, rows)
    found.read_by(target)
    return found


def read_by_drafter(rows: SourceRows, drafter: nn.Module) -> None:
    """Adds what a draft model with an encoder reads of the sources.

    Raises:
        ValueError: two draft models have encoders.
    """
    parts = [part for part in modules_of(drafter) if getattr(part, "source_reader", None)]
    if len(parts) > 1:
        raise ValueError(
            f"expected one draft model with an encoder, and {type(drafter).__name__} has "
            f"{len(parts)}, whose row inputs have the same names; join one of them"
        )
    for part in parts:
        rows.read_by(*part.source_reader)
