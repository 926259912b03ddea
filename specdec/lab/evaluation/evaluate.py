"""`evaluate`: true acceptance and speed, measured by generating.

Legend: B rows of a batch, T tokens of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from specdec import processes
from specdec.arguments import check_choice, check_integer, shown
from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates import Sentinel
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.lab.evaluation.plan import Plan
from specdec.lab.evaluation.prompts import Prompt, as_prompts
from specdec.lab.evaluation.run import Run, measure, progress_bar
from specdec.request import GenerateOptions


def evaluate(
    generator: SpeculativeGenerator,
    prompts: Tensor | Iterable[str | Prompt | Sequence[int] | Mapping[str, Any]],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int | None = None,
    samples: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    warmup: int = 0,
    share: bool = False,
    output: str | Path | None = None,
    progress: bool = False,
    certify: bool = False,
    **options: Unpack[GenerateOptions],
) -> Evaluation:
    """Generates from every prompt and counts; torch's global generator is not used.

    Rows with temperature are sampled with seeds of their own, `seed + i` for prompt i, so that the
    result does not depend on batches, processes or interruptions.

    Options that are not passed truncate and penalise nothing: of the target's `generation_config`
    only the ids that end and pad a text are used. With `neutral=False` the target's own settings
    are measured. What tokens were drawn from is in `about["run"]["sampling"]`.

    Args:
        generator: target, drafter and sampler to be measured.
        prompts: ids `[B, T]`, padded left or right; or a list of texts, ids, `Prompt` records
            (`read_prompts` reads them from a file), or of what the target's processor returns for
            one prompt that is more. A `Prompt` of several turns is answered turn by turn.
        attention_mask: `[B, T]` or `None`, for ids in a tensor.
        tokenizer: of the target; encodes texts, through its chat template where it has one. Prompts
            with pictures of files (`images`) need the target's processor in its place.
        max_new_tokens: of each turn.
        temperature: 0 is greedy, above 0 samples; `do_sample` may be passed if it says the same.
        batch_size: prompts generated together, those of one category only; `None` is all rows of a
            tensor, and 1 for lists.
        samples: texts of each prompt.
        seed: of the first prompt.
        max_prompt_tokens: longer prompts lose their first tokens, and their rows say so.
        chat_template_kwargs: variables of the chat template, `{"enable_thinking": False}` for
            instance.
        warmup: the first batch is generated so often before anything is measured.
        share: the processes that `accelerate launch` or `torchrun` started share the prompts, and
            all of them return the same; every one of them must call. The processes over which one
            target is spread all read all prompts.
        output: a file of what is measured. Until it is whole, finished batches are in a hidden
            folder beside it; a run that was interrupted goes on after them. All processes with one
            `output`, however they were started, share the prompts, and return the same.
        progress: shows a bar on standard error.
        certify: bets along the sampled texts against the claim that they have the target's
            distribution, at the cost of one more forward per text, which is not timed
            (`specdec.lab.certificates.Sentinel`). Each process judges the texts that it writes.
        options: of `generate` (top_k, top_p, eos_token_id, ...), the same for all rows.

    Returns:
        The rows, and every number with its interval.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator.generate`, for variables that the chat
            template does not read, and for a file of a run with other settings (names them); for
            `certify` with greedy texts.
        CertificateError: with `certify`, texts that a sound generator writes with a chance below
            1e-6.

    Example:
        >>> import torch
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> evaluation = evaluate(generator, torch.tensor([[7, 8, 9, 7, 8]]), max_new_tokens=8)
        >>> 1 <= evaluation.stats.acceptance_length <= 4
        True
    """
    if not isinstance(generator, SpeculativeGenerator | HFGenerate):
        raise TypeError(
            f"generator must be a SpeculativeGenerator or HFGenerate, got {shown(generator)}; "
            "SpeculativeGenerator(model, None) decodes a model plainly"
        )
    check_integer("warmup", warmup, 0)
    check_choice("certify", certify, (True, False))
    if certify and temperature == 0:
        raise ValueError(
            "certify=True bets on drawn tokens, and greedy texts have none; pass a temperature > 0"
        )
    plan = Plan(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=1 if batch_size is None and not isinstance(prompts, Tensor) else batch_size,
        samples=samples,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        options=options,
    )
    team = processes.team(generator.target.model, share=share)
    sentinel = Sentinel(generator) if certify else None
    run = Run(generator, as_prompts(prompts, attention_mask), plan, tokenizer, team, sentinel)
    with run.recorded(output), progress_bar(team, len(run.order), is_wanted=progress) as bar:
        measure([run], [run], warmup=warmup, bar=bar)
    return run.evaluation()
