"""`GenerateOptions`: the keyword arguments of a call, their types and what they mean."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict, TypeVar

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

Method = TypeVar("Method", bound=Callable)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `start`, with HF's names and meanings.

    Sampling values and the seed may be a scalar or a sequence of one value per row. What is left
    out comes from `generation_config`, and then from the model's own, as in HF. `None` turns a
    setting of HF's off, whatever the model ships, as in HF; it leaves any other option out. In a
    `generation_config` a setting that is `None` is left out. A temperature above
    0 samples and 0 is greedy, with `do_sample` or without it (HF ignores a temperature that is
    passed alone). Without a seed, a sampled row draws one at random and reports it in the result.
    One seed for all rows gives equal prompts equal samples: pass `seed=list(range(B))` for B
    samples of one prompt.

    `num_return_sequences=n` makes n rows of each prompt. A prompt's seed s stands for s, s + 1, ...
    s + n - 1, and every other value of a prompt for all of its rows; a sequence of B n values sets
    them one by one. `stop_strings` need the `tokenizer`, which the result shows its text with.
    Processors and criteria see each row as it would stand alone: its prompt without padding, then
    its new tokens. (Through HF's hook they see the padded batch, as HF shows it.) As in HF, a stop
    string may begin in the prompt.
    `output_logits` and `output_scores` keep the target's logits of every emitted token, as the
    model returns them and as they were sampled from; `output_logprobs` keeps two numbers of each
    instead, its log-probability in both.

    `draft_probs=False` keeps the probabilities of draft tokens from the sampler: they become point
    masses, which is lossless too and accepts less. It is there to measure the difference.

    Args:
        max_new_tokens: the most that each row may get, >= 1. As in HF, 20 where neither call nor
            configuration sets a length.
        min_new_tokens: no end-of-sequence token is sampled before so many.
        do_sample: whether to sample, where no temperature says so; `False` is greedy, and raises
            ValueError beside a temperature above 0.
        temperature: logits are divided by it; above 0 it samples, 0 is greedy.
        top_k: only so many of the most likely tokens are sampled from; 0 for all.
        top_p: only the most likely tokens whose probabilities sum to this; 1 for all.
        min_p: only tokens at least this times as likely as the most likely one; 0 for all.
        seed: of each row, in 0..2**64 - 1. `torch.manual_seed` has no effect on samples.
        eos_token_id: ids that end a row; `[]` for none.
        pad_token_id: fills rows that have ended; without a mask it also marks padding, in front of
            a row's first other token.
        logits_processor: functions of `(ids [1, t], scores [1, V])`, called at every position of a
            draft: HF's own, plain functions, `GrammarProcessor`, and those whose author vouches by
            an attribute `is_stateless = True` that the result depends on the arguments alone.
        stopping_criteria: functions of `(ids [1, t], None)`, called after every token of every row.
        stop_strings: texts that end a row.
        tokenizer: of the target.
        num_return_sequences: n rows for each prompt.
        output_scores: keep the logits that were sampled from.
        output_logits: keep the logits as the model returns them.
        output_logprobs: keep the log-probabilities of the new tokens.
        generation_config: HF's, for everything that is left out.
        neutral: options that are left out have their values of untruncated sampling at temperature
            1 without penalties, not the target's own or HF's (which is 50 for `top_k`); of the
            target's configuration only the ids that end and pad a text are used. `evaluate`,
            `compare` and `certify` generate like this.
        draft_probs: whether the sampler gets the probabilities of draft tokens.
        num_draft_tokens: of each step, at most the drafter's own, which is the default.
        row_inputs: what target and drafter read of each row, by name: tensors or sequences with a
            value for each prompt or row. Every target knows `"position_offset"`, an integer >= 0:
            the row's first token stands at this position. A target with LoRA layers of PEFT's knows
            `"adapter"`: the name of the row's, `"__base__"` for none; with Activated LoRA
            `"alora_offsets"`: how many last tokens of the row's prompt are adapted. A target
            that reads pictures or sound knows `"prompt"`: what its processor returns for each
            prompt alone, `None` for text; one with an encoder, too: the source of each row, while
            `input_ids` are the decoder's. A drafter names its own (`Drafter.row_inputs`), an edit
            of the target likewise.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, zoo
        >>> options = GenerateOptions(max_new_tokens=4, temperature=0.7, top_p=0.9, seed=0)
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> generator.generate(torch.tensor([[5, 6]]), **options).lengths
        [4]
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | list[float] | None
    top_k: int | list[int] | None
    top_p: float | list[float] | None
    min_p: float | list[float] | None
    seed: int | list[int] | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    logits_processor: LogitsProcessorList | Sequence[LogitsProcessor] | None
    stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteria] | None
    stop_strings: str | list[str] | None
    tokenizer: PreTrainedTokenizerBase | None
    num_return_sequences: int | None
    output_scores: bool | None
    output_logits: bool | None
    output_logprobs: bool | None
    generation_config: GenerationConfig | None
    neutral: bool
    draft_probs: bool
    num_draft_tokens: int | None
    row_inputs: Mapping[str, Tensor | Sequence] | None


def with_options(method: Method) -> Method:
    """Lists the options one by one in a method's signature, in place of `**options`, so that help
    and completion show them; `...` stands for an option that is left out.
    """
    signature, kind = inspect.signature(method), inspect.Parameter.KEYWORD_ONLY
    *own, _ = signature.parameters.values()
    own += [
        inspect.Parameter(name, kind, default=..., annotation=one.__forward_arg__)
        for name, one in GenerateOptions.__annotations__.items()
    ]
    method.__signature__ = signature.replace(parameters=own)
    return method


OUTPUTS = {
    "output_scores": ("scores",),
    "output_logits": ("logits",),
    "output_logprobs": ("logprobs", "raw_logprobs"),
}
"""Options that keep something of every new token: the names of `loop.outputs` for each."""

OURS = {"seed", "row_inputs", "draft_probs", "num_draft_tokens", "output_logprobs"}
"""Options that HF is not asked about."""
