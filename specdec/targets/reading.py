"""`read_prompts`: how a model's own `generate` reads prompts with pictures, sound or embeddings.

HF's own code runs, in a private view of the model, up to its text decoder: processors' tensors go
through the tower once, and what arrives at the decoder is kept. The first prompts of each kind are
also gone on with by HF, for a few tokens, and specdec's windows are held against these logits: the
self-test of such prompts.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationMixin, MaxLengthCriteria, StoppingCriteriaList

from specdec.arguments import shown
from specdec.hf.forward import CACHES, is_prefix_lm
from specdec.hf.generation import PREFILL, SAMPLE
from specdec.hf.layers import decoder_layers
from specdec.hf.prompts import NOT_READ, why_not_read
from specdec.hf.reached import ReachedError, reached_by
from specdec.slots.attention import sees
from specdec.targets.prompt_inputs import WHOLE, PromptInputs
from specdec.targets.route import Route
from specdec.targets.view import private_view, wrap_forward
from specdec.torch_names import is_hook_table

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk

NUM_COMPARED = 4
"""Tokens that HF goes on for in the self-test of a kind of prompt."""


def reading_view(model: PreTrainedModel) -> PreTrainedModel:
    """A private view whose towers may run: what they write into modules stays in the view."""
    view = private_view(model)
    for module in view.modules():
        if "rope_deltas" in vars(module):  # of somebody's last call
            module.rope_deltas = None
        for name, value in vars(module).items():  # HF registers hooks when towers first run
            if is_hook_table(name) and isinstance(value, dict):
                vars(module)[name] = copy.copy(value)
    return view


def is_not_of_id(view: PreTrainedModel, ids: Tensor, embeds: Tensor) -> Tensor:
    """`[B, T]` bool: the embedding `[B, T, H]` of a token is not that of its id."""
    known = ids.clamp(max=view.config.get_text_config().vocab_size - 1)
    plain = view.get_input_embeddings()(known.to(embeds.device))
    return (plain != embeds).any(dim=-1)


class Recording:
    """What HF made of prompts.

    Attributes:
        view: that ran.
        arguments: of the text decoder in its first call, by name.
        logits: `[B, NUM_COMPARED, V]` of HF's greedy text, `None` where it did not go on.
        new_tokens: `[B, NUM_COMPARED]` of it.
    """

    def __init__(self, model: PreTrainedModel, *, goes_on: bool):
        self.view = reading_view(model)
        self.goes_on = goes_on
        self.arguments: dict[str, Any] | None = None
        self.logits = self.new_tokens = None
        decoder = decoder_layers(self.view)[0]
        names = [*inspect.signature(type(decoder).forward).parameters][1:]

        def record(forward: Callable, *args: Any, **kwargs: Any):
            if self.arguments is None:
                given = dict(zip(names, args, strict=False)) | kwargs
                self.arguments = {n: _copied(value) for n, value in given.items()}
                if not self.goes_on:
                    raise ReachedError
            return forward(*args, **kwargs)

        wrap_forward(decoder, record)

    def generate(
        self, input_ids: Tensor | None, attention_mask: Tensor, given: Mapping[str, Any]
    ) -> None:
        """Prompts as `generate` of the model's class takes them."""

        def take(model, input_ids, logits_processor, stopping_criteria, generation_config, **own):
            self.prepared(input_ids, generation_config, own)
            return input_ids

        self.view.generation_config = GenerationConfig()
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        options |= {"max_new_tokens": NUM_COMPARED, "custom_generate": take}
        type(self.view).generate(
            self.view, input_ids, attention_mask=attention_mask, **options, **given
        )

    def prepared(self, input_ids: Tensor, config: GenerationConfig, own: Mapping[str, Any]) -> None:
        """Prompts as HF hands them to a decoding method."""
        config = copy.copy(config)
        options = {"prefill_chunk_size": None, "do_sample": False, "return_dict_in_generate": True}
        vars(config).update(options, output_logits=True, output_scores=False)
        own = {**own, "use_cache": True}
        own |= {name: copy.deepcopy(own[name]) for name in CACHES if own.get(name) is not None}
        if not self.goes_on:
            reached_by(getattr(self.view, PREFILL), input_ids, config, own)
            return
        most = MaxLengthCriteria(input_ids.shape[1] + NUM_COMPARED)
        parts = LogitsProcessorList(), StoppingCriteriaList([most]), config
        out = getattr(self.view, SAMPLE)(input_ids, *parts, **own)
        self.logits = torch.stack(out.logits, dim=1)
        self.new_tokens = out.sequences[:, input_ids.shape[1] :]


def _copied(value: Any) -> Any:
    """A tensor that later layers cannot write into."""
    return value.clone() if isinstance(value, Tensor) else value


def decoder_of_text(model: PreTrainedModel) -> PreTrainedModel:
    """What is tried as a decoder of text: the model, and of a prefix LM a view that reads text as
    its steps do, each token seeing those before it.
    """
    if not is_prefix_lm(model):
        return model
    view = private_view(model)
    for module in view.modules():
        if vars(module).get("is_causal") is False and hasattr(module, "layer_idx"):
            module.is_causal = True
    return view


def refuse_text(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a prefix LM, whose prompts are not read token after token."""
    if is_prefix_lm(model):
        raise ValueError(
            f"{type(model).__name__} sees its whole prompt both ways, by the types of tokens that "
            "its processor makes; pass all that it returns, generate(**inputs), token_type_ids "
            "among them"
        )


def refuse_prompts(model: PreTrainedModel) -> None:
    """Raises `ValueError` for models of which nothing but text can be read, with the reason."""
    name = type(model).__name__
    reason = why_not_read(model)
    if reason is None and type(model).generate is not GenerationMixin.generate:
        reason = "its class prepares prompts in a generate() of its own"
    if reason is not None:
        raise ValueError(
            f"{name} cannot be decoded with pictures, sound or embeddings in its prompts: {reason}."
            " Use HF generate for such prompts"
        )


def inputs_of(
    recording: Recording,
    route: Route,
    input_ids: Tensor | None,
    attention_mask: Tensor,
) -> PromptInputs:
    """What the text decoder got, as rows from slot 0 on.

    Args:
        recording: of the prompts.
        route: of the model.
        input_ids: `[B, L]`; `None` or `[B, 0]` for embeddings alone.
        attention_mask: `[B, L]` bool, padded on the left.

    Raises:
        ValueError: something that specdec cannot read in slots, by name.
    """
    view, given = recording.view, recording.arguments
    name = type(view).__name__
    if given is None:
        raise ValueError(f"{name} read a prompt without its text decoder; use HF generate")
    rows, width = attention_mask.shape
    lengths = attention_mask.sum(dim=1)
    first = width - lengths  # [B]
    longest = int(lengths.max())
    columns = (first[:, None] + torch.arange(longest, device=first.device)).clamp(max=width - 1)

    def shifted(table: Tensor) -> Tensor:
        index = columns.to(table.device)
        return table[torch.arange(rows, device=table.device)[:, None], index]

    arguments, listed, positions, masks = {}, {}, None, None
    read = _names_in(decoder_layers(view)[0])
    for key, value in given.items():
        if value is None or key in NOT_READ or isinstance(value, bool | int | float | str):
            continue
        if key not in read:  # handed on by the outer forward with all else, to no end
            continue
        if key == "position_ids":
            positions = _shifted_positions(value, columns)
        elif key == "attention_mask":
            masks = value
        elif isinstance(value, Tensor) and value.shape[:2] == (rows, width):
            arguments[key] = shifted(value)
        elif isinstance(value, list | tuple) and all(isinstance(one, Tensor) for one in value):
            listed |= {key: value} if value else {}  # a tower without such layers
        else:
            raise ValueError(
                f"{name} hands {key}={shown(value)} to its text decoder, which specdec cannot "
                "divide into slots; use HF generate for such prompts"
            )
    order = torch.arange(longest, device=lengths.device)
    is_real = order < lengths[:, None]
    marked = {key: _mark_of(name, key, value, given) for key, value in listed.items()}
    embeds = arguments.get("inputs_embeds")
    if embeds is None:
        raise ValueError(
            f"{name} hands no embeddings to its text decoder, so its prompts cannot be read in "
            "slots; use HF generate for them"
        )
    for mark, _ in marked.values():
        arguments[mark] = arguments[mark].bool() & is_real.to(arguments[mark].device)
    kinds = masks if isinstance(masks, Mapping) else {WHOLE: masks}
    windows = {kind: _windows_of(kind, route, view) for kind in kinds}
    visible = {
        kind: _visible_of(name, mask, attention_mask, columns, is_real, windows[kind])
        for kind, mask in kinds.items()
    }
    if all(seen is None for seen in visible.values()):
        visible = {}
    if not visible:
        refuse_text(view)
    ends = (lengths - 1)[:, None]
    for kind, seen in visible.items():
        if seen is not None:
            _refuse_last_that_sees_more(name, seen, lengths, windows[kind])
    offset = torch.zeros_like(lengths)
    if positions is not None:
        last = positions.gather(-1, ends.to(positions.device).expand(*positions.shape[:-1], 1))
        last = last[..., 0].to(lengths.device)
        axes = last[-3:] if last.dim() == 2 else last[None]  # without the axis of the text
        if bool((axes != axes[:1]).any()):
            raise _ends_in_picture(name, int((axes != axes[:1]).any(0).long().argmax()))
        offset = axes[0] - (lengths - 1)
    is_given, last_ids = torch.ones_like(is_real), torch.zeros_like(lengths)
    if input_ids is not None and input_ids.shape[1]:
        ids = shifted(input_ids).clamp(max=view.config.get_text_config().vocab_size - 1)
        is_given = is_not_of_id(view, ids, embeds).to(is_real.device)
        last_ids = ids.gather(1, ends.to(ids.device))[:, 0]
    last_given = is_given.gather(1, ends)[:, 0]
    for mark, _ in marked.values():
        if bool((own := arguments[mark].gather(1, ends.to(arguments[mark].device))[:, 0]).any()):
            raise _ends_in_picture(name, int(own.long().argmax()))
    last = None
    if bool(last_given.any()):
        last = embeds.gather(1, ends[..., None].to(embeds.device).expand(-1, -1, embeds.shape[2]))
    return PromptInputs(
        lengths=lengths.tolist(),
        arguments=arguments,
        position_ids=positions,
        marked=marked,
        visible=visible,
        in_text={kind: partial(_in_text, own) for kind, own in windows.items()},
        is_given=is_given,
        position_offset=offset,
        last_ids=last_ids,
        last=None if last is None else last[:, 0],
    )


def _refuse_last_that_sees_more(
    name: str, seen: Tensor, lengths: Tensor, windows: frozenset[int | Chunk | None]
) -> None:
    """The first step reads the last token once more, and sees what a step sees."""
    order, last = torch.arange(seen.shape[1], device=seen.device), (lengths - 1).to(seen.device)
    own = seen[torch.arange(len(last), device=seen.device), last]
    is_real = order <= last[:, None]
    for window in windows:
        differs = (own != sees(last[:, None], order, window)) & is_real
        if bool(differs.any()):
            raise ValueError(
                f"the prompt of row {int(differs.any(1).long().argmax())} is longer than a sliding "
                f"window of {name}, whose layers let its last token see all of it, but none of the "
                "tokens after it; use HF generate for prompts of this length"
            )


def _names_in(decoder: nn.Module) -> set[str]:
    """Names of the arguments that the modules of a text decoder take."""
    kinds = {type(module) for module in decoder.modules()}
    return {name for kind in kinds for name in inspect.signature(kind.forward).parameters}


def _ends_in_picture(name: str, row: int) -> ValueError:
    return ValueError(
        f"the prompt of row {row} ends in a picture, where {name} gives a token several positions "
        "or states; let at least one token of text follow, as chat templates do"
    )


def _shifted_positions(positions: Tensor, columns: Tensor) -> Tensor:
    columns = columns.to(positions.device)
    index = columns.expand(*positions.shape[:-2], *columns.shape)
    return positions.expand(*positions.shape[:-2], len(columns), -1).gather(-1, index)


def _mark_of(name: str, key: str, layers: Any, given: Mapping[str, Any]) -> tuple[str, list]:
    """The argument that marks as many tokens as each of these tensors has rows."""
    counts = {len(layer) for layer in layers}
    marks = [
        other
        for other, value in given.items()
        if isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() == 2
        if {int(value.sum())} == counts
    ]
    if len(marks) != 1:
        raise ValueError(
            f"{name} hands {key} to its text decoder, and which tokens its rows belong to is not "
            "known; use HF generate for such prompts"
        )
    return marks[0], list(layers)


def _windows_of(kind: str, route: Route, view: PreTrainedModel) -> frozenset[int | Chunk | None]:
    """What layers of a kind see of text."""
    types = getattr(view.config.get_text_config(), "layer_types", None) or ()
    own = {w for i, w in route.layer_windows.items() if kind == WHOLE or types[i] == kind}
    return frozenset(own or {None})


def _in_text(windows: frozenset[int | Chunk | None], order: Tensor) -> Tensor:
    """`[T, T]` bool: whether a token of text sees another, where all layers see the same."""
    (window,) = windows
    return sees(order[:, None], order, window)


def _visible_of(
    name: str,
    mask: Any,
    attention_mask: Tensor,
    columns: Tensor,
    is_real: Tensor,
    windows: frozenset[int | Chunk | None],
) -> Tensor | None:
    """`[B, T, T]` of one of HF's masks, `None` for that of text."""
    if mask is None:
        return None
    if isinstance(mask, Tensor) and torch.equal((mask != 0).to(attention_mask), attention_mask):
        return None
    width = attention_mask.shape[1]
    is_square = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1:3] == (1, width)
    if not is_square or mask.shape[3] < width:
        raise ValueError(
            f"{name} hands the mask {shown(mask)} to its text decoder, which specdec cannot read; "
            "load the model with attn_implementation='sdpa', or use HF generate for such prompts"
        )
    seen = mask[:, 0, :, :width]
    seen = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    index = columns.to(seen.device)
    rows = torch.arange(len(index), device=seen.device)[:, None, None]
    seen = seen.expand(len(index), -1, -1)[rows, index[:, :, None], index[:, None]]
    order, is_real = torch.arange(seen.shape[1], device=seen.device), is_real.to(seen.device)
    is_token = is_real[:, :, None] & is_real[:, None]
    for window in windows:
        if bool(((seen != sees(order[:, None], order, window)) & is_token).any()):
            return seen
    return None
