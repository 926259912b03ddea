"""The decoders of encoder-decoders over slots: cross attention to row inputs, and positions by the
window.

HF makes keys and values of the cross attention in the first forward and keeps them in a cache of
its own, and its decoders count positions from one length of all rows. In a view keys, values and
mask are row inputs (`targets/source.py`), tables of positions are read where each token stands, and
T5's relative biases are made for all slots, each at the position of its token.

Legend: B rows, N tokens of a window, S positions of the source, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.hf.encoders import (
    BIAS,
    CrossAttention,
    cross_attentions,
    position_tables,
    relative_bias,
)
from specdec.slots.cache import Window
from specdec.targets.source import SOURCE, CausalDecoder
from specdec.targets.view import wrap_forward


def edit(view: PreTrainedModel, attention: str | None = None) -> None:
    """Makes the decoder of a private view read what a window says of its rows' sources."""
    wrap_forward(view.decoder, partial(_decode, view))
    for index, cross in enumerate(cross_attentions(view.decoder)):
        wrap_forward(cross.module, partial(_attend, view, cross, index))
    for table, *where in position_tables(view.decoder):
        wrap_forward(table, partial(_look_up, view, table, *where))
    for module in view.decoder.modules():
        if getattr(module, "has_relative_attention_bias", False):
            setattr(module, BIAS, partial(_biases, view, module, getattr(module, BIAS)))


def compared(view: PreTrainedModel) -> list[str]:
    """Names of modules whose output the self-test compares."""
    paths = {id(module): path for path, module in view.named_modules()}
    return [paths[id(cross.module)] for cross in cross_attentions(view.decoder)]


def inputs_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Names of what calls bring for each row."""
    return SOURCE


def notes(model: CausalDecoder) -> list[tuple[str, str]]:
    """What a source takes, as a note of a route."""
    layers = cross_attentions(model.decoder)
    size = sum(len(p.weight) for cross in layers for p in (cross.key, cross.value))
    size *= model.dtype.itemsize
    longest = getattr(model.whole.config, "max_source_positions", 1000)
    text = f"cross attention of {len(layers)} layers keeps {size / 1e3:.1f} kB of each position of "
    text += f"a row's source: {size * longest / 1e6:.1f} MB a row for {longest} positions"
    return [("source", text)]


def unwritten(view: CausalDecoder, states: Tensor, rows: int) -> Tensor:
    """The shape of `SOURCE`'s cache for so many rows, of sources with states `[B, S, E]`: a tensor
    without data, on torch's device `meta`.
    """
    layers = cross_attentions(view.decoder)
    one = _by_head(layers[0].key(states[:1, :1]), layers[0])
    shape = rows, len(layers), 2, one.shape[1], states.shape[1], one.shape[3]
    return torch.empty(shape, dtype=one.dtype, device="meta")


def write(view: CausalDecoder, states: Tensor, table: Tensor) -> None:
    """Writes keys and values of states `[B, S, E]` into a table of that shape, as many rows of each
    source as it has: layer by layer, so that nothing of it stands twice.
    """
    for index, cross in enumerate(cross_attentions(view.decoder)):
        for kind, project in enumerate((cross.key, cross.value)):
            made = _by_head(project(states), cross)
            table[:, index, kind].unflatten(0, (len(states), -1)).copy_(made[:, None])


@torch.no_grad()
def rows_of_trial(model: CausalDecoder, view: CausalDecoder, texts: Tensor) -> dict[str, Tensor]:
    """Row inputs of the sources of a self-test's texts, by an edited view of the model."""
    states, seen = handed(view, *view.trial_source(texts).values())
    table = torch.zeros_like(unwritten(view, states, len(states)), device=states.device)
    write(view, states, table)
    return dict(zip(SOURCE, (table, seen), strict=False))


class _HandedError(Exception):
    """The decoder was reached, and need not run."""


@torch.no_grad()
def handed(view: CausalDecoder, encoder_outputs: Any, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """States `[B, S, E]` and mask `[B, S]` bool, as the whole model hands them to its decoder.

    Args:
        view: that was edited.
        encoder_outputs: of the whole model's encoder.
        mask: `[B, ...]` of its inputs, HF's `attention_mask`; `None` for none.

    Raises:
        ValueError: a source is all padding.
    """
    view.running.reads_source = True
    ids = torch.zeros(len(encoder_outputs[0]), 1, dtype=torch.long, device=view.device)
    try:
        CausalDecoder.forward(view, ids, encoder_outputs=encoder_outputs, source_mask=mask)
    except _HandedError as found:
        states, seen = found.args
    finally:
        view.running.reads_source = False
    seen = states.new_ones(states.shape[:2]) != 0 if seen is None else seen != 0
    if not bool(seen.any(dim=1).all()):
        raise ValueError(
            f"row {seen.any(dim=1).tolist().index(False)} of the source is all padding; every "
            "source needs at least one token"
        )
    return states, seen


def _decode(view: CausalDecoder, forward: Callable, *args: Any, **own: Any) -> Any:
    states, name = own.get("encoder_hidden_states"), "encoder_hidden_states"
    if getattr(view.running, "reads_source", False):
        raise _HandedError(states, own.get("encoder_attention_mask"))
    window = view.running.window
    if states is not None and states.shape[1] == 0:
        own[name] = None  # of what a layer stores of a token, nothing is of the source
        if window is not None:
            own[name] = states.new_zeros(len(states), 1, states.shape[2])
    return forward(*args, **own)


def _attend(
    view: CausalDecoder,
    cross: CrossAttention,
    index: int,
    forward: Callable,
    hidden_states: Tensor,
    *args: Any,
    **own: Any,
) -> tuple:
    """Cross attention of hidden states `[B, N, H]` to the rows' sources."""
    window = view.running.window
    if window is None:
        return forward(hidden_states, *args, **own)
    table, mask = _read(window.on(hidden_states.device))
    query = _by_head(cross.query(hidden_states), cross)
    own = {"attn_mask": mask[:, None, None], "scale": cross.module.scaling}
    out = F.scaled_dot_product_attention(query, *table[:, index].unbind(1), **own)
    out = cross.out(out.transpose(1, 2).flatten(2))
    return (out, *[None] * (cross.num_returned - 1))


def _read(window: Window) -> tuple[Tensor, Tensor]:
    """Keys and values, and mask, of a window's rows.

    Raises:
        ValueError: nobody has brought a source.
    """
    rows = window.row_inputs
    if SOURCE[0] not in rows:
        raise ValueError(
            "expected the source of each row, which an encoder-decoder reads in every step, and "
            "the call brought none; call generator.generate(input_ids, attention_mask) of the "
            "source, or with input_features; a draft model with an encoder needs a target with one"
        )
    return rows[SOURCE[0]], rows[SOURCE[1]]


def _by_head(states: Tensor, cross: CrossAttention) -> Tensor:
    """`[B, heads, N, width]`."""
    return states.unflatten(-1, (cross.num_heads, -1)).transpose(1, 2)


def _look_up(
    view: CausalDecoder,
    table: nn.Module,
    name: str,
    offset: int,
    forward: Callable,
    *args: Any,
    **own: Any,
) -> Tensor:
    """Rows of a table of positions, where each token of a window stands."""
    window = view.running.window
    if window is None:
        return forward(*args, **own)
    weight = getattr(table, name)
    rows = (window.on(weight.device).text_positions + offset).clamp(max=len(weight) - 1)
    if name == "weights":  # which are read by ids, and padding has a row of its own
        rows = rows.masked_fill(args[0] == table.padding_idx, table.padding_idx)
    return F.embedding(rows, weight)


def _biases(
    view: CausalDecoder, attention: nn.Module, make: Callable, *sizes: int, **own: Any
) -> Tensor:
    """`[B, heads, N, W]`: biases of all slots, each where its token stands."""
    window = view.running.window
    if window is None:
        return make(*sizes, **own)
    window = window.on(own["device"])
    count, slots = window.num_attended, window.slots
    keys = torch.arange(count + 1, device=own["device"]).expand(len(slots), -1)
    if window.positions is not None:  # nodes of a tree
        keys = keys.scatter(1, slots.clamp(max=count), window.positions)
    queries = slots if window.positions is None else window.positions
    return relative_bias(attention, keys[:, None, :count] - queries[..., None])
