"""`Request`: prompts and options of one call, checked before anything is computed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from specdec.arguments import check_integer, name_of, plain_numbers
from specdec.hf.forward import is_prefix_lm
from specdec.request.keywords import OURS, OUTPUTS, GenerateOptions
from specdec.request.options import (
    checked_options,
    ends_among,
    sampling_of,
)
from specdec.request.prompts import check_ids, read_batch
from specdec.request.remembered import resolve_once
from specdec.request.sampling import Sampling
from specdec.request.warpers import split_warpers
from specdec.samplers.logits_filter import LogitsFilter
from specdec.targets import Target

if TYPE_CHECKING:
    from specdec.request.given import Given, GivenRows
    from specdec.targets.prompt_inputs import PromptInputs


@dataclass(frozen=True, eq=False)
class Request:
    """One call: prompts and all that was asked for, checked. `read_request` and `request_of` make
    it.

    Args:
        padded: `[B, T]` int64 on the target's device, exactly as it was passed.
        tokens: `[B, T']` int64 on the host, real tokens from column 0; then anything.
        lengths: real tokens of each row.
        max_new_tokens: that each row may get; 0 where the prompts fill the allowed length.
        sampling: the record of what tokens are drawn from.
        logits_filter: arguments of `LogitsFilter`; every value a scalar or one per row.
        seeds: one per row, or `None` for a greedy generation.
        eos: ids that end a row.
        pad: fills a row after its end.
        processors: which rows see which logits processors.
        criteria: stopping criteria other than length and end of sequence, asked by the host.
        is_alone: processors and criteria see each row alone, as natively, and not the batch, as
            through HF's hook.
        draft_probs: whether the sampler gets the probabilities of draft tokens.
        num_draft_tokens: of each step; `None` for the drafter's own K.
        outputs: names of what is kept of every new token.
        tokenizer: of the target.
        row_inputs: `[B, ...]` by name, on the host, what steps read of each row.
        prompt_inputs: what the target reads of the prompts where they are more than ids.
        read_prompts: reads the prompts by another target; `None` where they are ids, or where HF
            has read them for this one.
        is_embedded: the prompts are embeddings and have no ids; those of `tokens` stand for them.
    """

    padded: Tensor
    tokens: Tensor
    lengths: list[int]
    max_new_tokens: int
    sampling: Sampling
    logits_filter: dict[str, Any]
    seeds: list[int] | None
    eos: tuple[int, ...] = ()
    pad: int = 0
    processors: tuple[tuple[slice, LogitsProcessorList], ...] = ()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    is_alone: bool = True
    draft_probs: bool = True
    num_draft_tokens: int | None = None
    outputs: tuple[str, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    row_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt_inputs: PromptInputs | None = None
    read_prompts: Callable[[Target], PromptInputs] | None = None
    is_embedded: bool = False

    @property
    def step_inputs(self) -> dict[str, Tensor]:
        """All that steps read of each row: what the call brought, and what its prompts are."""
        own = {} if self.prompt_inputs is None else self.prompt_inputs.row_inputs
        return {**self.row_inputs, **{name: value.cpu() for name, value in own.items()}}

    @property
    def prompts(self) -> list[list[int]]:
        """The ids of each row, without padding."""
        rows = zip(self.tokens.tolist(), self.lengths, strict=True)
        return [row[:length] for row, length in rows]

    @cached_property
    def shown_prompts(self) -> list[list[int]]:
        """Each row's prompt as processors and stopping criteria see it: natively without padding,
        through the hook as HF shows it. Embeddings are shown nobody.
        """
        if self.is_embedded:
            return [[] for _ in self.lengths]
        return self.prompts if self.is_alone else self.padded.tolist()

    def filled_to(self, rows: int) -> Request:
        """The call with inert rows after its own, up to so many: prompts of the one token 0, the
        sampling values of the last row, seed 0. Whoever loads it lets them commit nothing.
        """
        missing = rows - len(self.lengths)
        if missing == 0:
            return self
        from specdec.request.filling import filled

        return filled(self, missing)


def read_request(
    target: Target, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
) -> Request:
    """A call with `GenerateOptions`, resolved by HF once they are checked for what HF would ignore
    or take for something else.
    """
    if target.fault_of_generate:
        target.refuse_own_generate()
    options = dict(options)
    if isinstance(input_ids, Mapping) or target.reads_source:
        from specdec.request.given import unpacked

        input_ids, attention_mask, options = unpacked(target, input_ids, attention_mask, options)
    has_more = not options.keys() <= GenerateOptions.__annotations__.keys()
    beside = None
    if has_more:
        from specdec.request.given import native

        beside = native(target, options)
    if beside is None or not beside.is_embedded(input_ids):
        check_ids(input_ids)
    given = checked_options(target, options)
    own = {name: given.pop(name) for name in OURS & given.keys()}
    if isinstance(own.get("row_inputs"), Mapping) and "prompt" in own["row_inputs"]:
        from specdec.request.given import with_rows

        own["row_inputs"], beside = with_rows(own["row_inputs"], beside)
    ids = input_ids if beside is None else beside.ids(target, input_ids)
    *asked, of_rows, alone = resolve_once(target, ids, given)
    passed = [name_of(processor) for processor in given.get("logits_processor", ())]
    request = request_of(
        *(target, input_ids, attention_mask, *asked),
        **{"tokenizer": given.get("tokenizer"), "of_rows": of_rows, "alone": alone},
        **{"passed": passed, "beside": beside, **own},
    )
    if target.fault_of_generate:  # of the model as it is now, which `request_of` looks at
        target.refuse_own_generate()
    if "seed" in own and request.seeds is None:
        from specdec.request.hints import warn_of_seed

        warn_of_seed(given)
    return request


def request_of(
    target: Target,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    of_rows: dict[str, Any] | None = None,
    alone: Callable[[Tensor], LogitsProcessorList] | None = None,
    passed: Sequence[str] = (),
    seed: int | Sequence[int] | None = None,
    row_inputs: Mapping[str, Any] | None = None,
    beside: Given | GivenRows | None = None,
    **own: Any,
) -> Request:
    """The call that HF has resolved. What prompts bring beside ids is read last, when all else is
    known to be right.

    Args:
        target: of the generator.
        input_ids: `[B, T]`.
        attention_mask: as in `generate`. Through HF's hook what comes without one has no padding:
            HF has looked for the padding id itself, and drops masks of ones.
        processors, criteria, config: what HF hands to a decoding function.
        tokenizer: of the target.
        of_rows: values of a filter that only specdec knows.
        alone: makes the processors of one row from its prompt `[1, t]`; `None` where they see the
            padded batch.
        passed: names of the processors that the call itself passed.
        seed: as in `generate`.
        row_inputs: as in `generate`.
        beside: what the prompts are beside ids.
        own: fields of `Request`, and options of `OUTPUTS`.

    Raises:
        TypeError, ValueError: a prompt or an option that cannot be right, or what specdec does not
            do; nothing has been computed then.
    """
    eos, max_length, others = ends_among(criteria)
    padding_id, copies = config.pad_token_id, config.num_return_sequences or 1
    padded, tokens, lengths = _read_ids(
        *(target, input_ids, attention_mask, beside),
        padding_id=None if alone is None or padding_id in eos else padding_id,
    )
    added = 1 if alone is None else copies  # through the hook HF has added rows
    if added > 1:
        padded, tokens = (x.repeat_interleave(added, dim=0) for x in (padded, tokens))
        lengths = [length for length in lengths for _ in range(added)]
    if beside is not None and alone is None and beside.is_embedded(input_ids):
        max_length += padded.shape[1]  # through the hook HF counts ids
    rows, room = len(lengths), max_length - padded.shape[1]
    if "alora_offsets" in target.own_inputs:
        row_inputs = target.activation(tokens, lengths, row_inputs)
    inputs = {}
    if row_inputs is not None:
        from specdec.request.row_inputs import row_inputs_of

        inputs = row_inputs_of(target, row_inputs, rows, added)
    _check_room(target, lengths, room, inputs)
    history, logits_filter = split_warpers(processors, config)
    logits_filter = {
        "temperature": 1.0 if config.do_sample else 0.0,
        **logits_filter,
        **(of_rows or {}),
    }
    is_greedy = LogitsFilter(rows, **logits_filter).is_greedy
    request = Request(
        *(padded, tokens, lengths, room),
        sampling=replace(sampling_of(config, eos), **(of_rows or {}), processors=list(passed)),
        logits_filter=logits_filter,
        seeds=_read_seeds(target, seed, rows, copies, is_greedy=is_greedy),
        eos=eos,
        pad=padding_id if padding_id is not None else next(iter(eos), 0),
        criteria=others,
        is_alone=alone is not None,
        outputs=_outputs(config, own),
        tokenizer=tokenizer,
        row_inputs=inputs,
        **own,
    )
    if beside is not None:
        from specdec.request.given import as_passed, read_beside

        request = replace(request, **as_passed(request, beside, input_ids))
    if history:
        from specdec.request.processors import started

        request = replace(request, processors=started(request, history, alone))
    if beside is None:
        return request
    parts = input_ids, attention_mask, lengths[::added], padded.shape[1]
    read = partial(read_beside, beside=beside, parts=parts, copies=added)
    prompts = read(target)
    _check_room(target, lengths, room, prompts.row_inputs)
    is_open = alone is not None and not request.is_embedded
    return replace(request, prompt_inputs=prompts, read_prompts=read if is_open else None)


def _outputs(config: GenerationConfig, own: dict[str, Any]) -> tuple[str, ...]:
    """Names of the outputs that a call asks for; takes specdec's own options of them out."""
    asked = {option for option in OUTPUTS if own.pop(option, False)}
    if config.return_dict_in_generate:
        asked |= {option for option in OUTPUTS.keys() - OURS if getattr(config, option)}
    return tuple(name for option in OUTPUTS if option in asked for name in OUTPUTS[option])


def _read_ids(
    target: Target,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    beside: Given | GivenRows | None,
    *,
    padding_id: int | None,
) -> tuple[Tensor, Tensor, list[int]]:
    """`read_batch` of ids of the target's vocabulary."""
    ids = input_ids if beside is None else beside.ids(target, input_ids)
    if attention_mask is None and beside is not None and beside.is_embedded(input_ids):
        attention_mask = torch.ones_like(ids)
    padded, tokens, lengths = read_batch(
        *(ids, attention_mask),
        **{"vocab_size": target.vocab_size, "device": target.device},
        padding_id=padding_id,
    )
    # One token sees itself only.
    if beside is None and max(lengths) > 1 and is_prefix_lm(target.model):
        from specdec.targets.reading import refuse_text

        refuse_text(target.model)
    return padded, tokens, lengths


def _check_room(
    target: Target, lengths: list[int], room: int, row_inputs: Mapping[str, Tensor]
) -> None:
    """Raises `ValueError` for texts that are longer than the target has positions for, and where
    the target was changed so that it cannot be decoded.
    """
    longest = max(lengths)
    if "position_offset" in row_inputs:
        offsets = row_inputs["position_offset"].tolist()
        longest = max(n + offset for n, offset in zip(lengths, offsets, strict=False))
    total, limit = longest + room, target.max_positions
    if limit is not None and total > limit:
        from specdec.request.refusals import refuse_room

        refuse_room(target.config, longest, room, limit)
    target.check_unchanged(num_tokens=total)


def _read_seeds(
    target: Target,
    seed: int | Sequence[int] | Tensor | None,
    rows: int,
    copies: int,
    *,
    is_greedy: bool,
) -> list[int] | None:
    """One for each row; `None` in a greedy call, whose seed is checked all the same."""
    if seed is None:
        return None if is_greedy else _random_seeds(target, rows)
    seed = plain_numbers(seed)
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * (rows // copies)
    for value in seeds:
        check_integer("seed", value, 0, 2**64 - 1)
    if len(seeds) * copies == rows:
        seeds = [(value + copy) % 2**64 for value in seeds for copy in range(copies)]
    if len(seeds) != rows:
        from specdec.request.refusals import refuse_seeds

        refuse_seeds(len(seeds), rows)
    return None if is_greedy else seeds


def _random_seeds(target: Target, rows: int) -> list[int]:
    """A seed per row; the same in all processes over which a target is spread."""
    from specdec.processes import agreed

    return agreed([secrets.randbits(64) for _ in range(rows)], target.model)
