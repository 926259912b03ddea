"""`evaluate`: true acceptance and speed, measured by generating.

Legend: B rows of a batch, T tokens of a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_file, check_integer, check_number, check_type
from specdec.evaluation import prompts as prompt_sets
from specdec.evaluation import provenance
from specdec.evaluation.evaluation import EvaluatedBatch, EvaluatedRow, Evaluation
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.run_file import RunFile
from specdec.evaluation.timing import timed
from specdec.generator import SpeculativeGenerator
from specdec.request import GenerateOptions, Sampling
from specdec.request.call import read_options
from specdec.settings import plain

_OWN = {
    "do_sample": "a temperature above 0 samples",
    "num_return_sequences": "samples=n takes n texts of each prompt",
    "streamer": "generator.stream shows text while it is written",
    "trace": "generator.generate(..., trace=True) returns one",
    "output_scores": "generator.generate returns them",
    "output_logits": "generator.generate returns them",
}
"""Options of `generate` that would change or lose what is measured, and what to do instead."""
_TURN_SEEDS = 2**32
"""Seeds of a later turn are this far from those of the one before."""


@dataclass(frozen=True)
class Plan:
    """How an evaluation generates; all of it decides the result.

    Args:
        max_new_tokens: of each turn.
        temperature: 0 is greedy.
        batch_size: prompts that are generated together; `None` for all.
        samples: texts of each prompt; more than 1 needs a temperature.
        seed: of the first row; prompt i has `seed + i`, its later turns and samples others.
        max_prompt_tokens: longer prompts lose their first tokens; `None` refuses them where the
            target has no room.
        options: more options of `generate`.

    Raises:
        ValueError: a number that cannot be right.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    batch_size: int | None = 1
    samples: int = 1
    seed: int = 0
    max_prompt_tokens: int | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for name in ("max_new_tokens", "batch_size", "samples", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None or name in ("max_new_tokens", "samples"):
                check_integer(name, value, 1)
        check_number("temperature", self.temperature, 0)
        check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples > 1 are all the same at temperature 0; pass a temperature")
        for name in self.options.keys() & _OWN.keys():
            raise TypeError(f"evaluate has no option {name}: {_OWN[name]}")

    def sampling(self, seeds: list[int]) -> dict[str, Any]:
        """Options of `generate` for rows of these seeds."""
        options = {"neutral": True, "num_return_sequences": 1, **self.options}
        if self.temperature == 0:
            return {"do_sample": False, **options}
        return {"do_sample": True, "temperature": self.temperature, "seed": seeds, **options}


def evaluate(
    generator: SpeculativeGenerator,
    prompts: Tensor | Iterable[str | Prompt | Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int | None = None,
    samples: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    warmup: int = 0,
    shard: tuple[int, int] = (0, 1),
    output: str | Path | None = None,
    progress: bool = False,
    **options: Unpack[GenerateOptions],
) -> Evaluation:
    """Generates from every prompt and counts; torch's global generator is not used.

    Rows with temperature are sampled with seeds of their own, `seed + i` for prompt i, so that the
    result does not depend on batches, processes or interruptions.

    Sampling starts from neutral values, not from the target's `generation_config`, of which only
    the ids that end and pad a text are used: what is not passed here truncates and penalises
    nothing. With `neutral=False` the target's own settings are measured. What tokens were drawn
    from is in `about["run"]["sampling"]`.

    Args:
        generator: target, drafter and sampler to be measured.
        prompts: ids `[B, T]`, padded left or right; or a list of texts, ids or `Prompt` records
            (`read_prompts` reads them from a file). A `Prompt` of several turns is answered turn
            by turn.
        attention_mask: `[B, T]` or `None`, for ids in a tensor.
        tokenizer: of the target; encodes texts, through its chat template where it has one.
        max_new_tokens: of each turn.
        temperature: 0 is greedy.
        batch_size: prompts generated together, those of one category only; `None` is all rows of a
            tensor, and 1 for lists.
        samples: texts of each prompt.
        seed: of the first prompt.
        max_prompt_tokens: longer prompts lose their first tokens, and their rows say so.
        warmup: so many batches are generated once before anything is measured.
        shard: (index, count): takes part number `index` of `count` of the batches, for one process
            of several.
        output: a file that holds what is measured, batch by batch. Where it exists, the run goes on
            after its last batch.
        progress: shows a bar on standard error.
        options: of `generate` (top_k, top_p, eos_token_id, ...), the same for all rows.

    Returns:
        The rows, and every number with its interval.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator.generate`, and for a file of a run with
            other settings (names them).

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> evaluation = evaluate(generator, torch.tensor([[7, 8, 9, 7, 8]]), max_new_tokens=8)
        >>> 1 <= evaluation.stats.acceptance_length <= 4
        True
    """
    check_type("generator", generator, SpeculativeGenerator)
    check_type("progress", progress, bool)
    check_integer("warmup", warmup, 0)
    if batch_size is None and not isinstance(prompts, Tensor):
        batch_size = 1
    plan = Plan(max_new_tokens, temperature, batch_size, samples, seed, max_prompt_tokens, options)
    index, count = _checked_shard(shard)
    records = prompt_sets.as_prompts(prompts, attention_mask)
    batches = list(_batches(records, plan))[index::count]
    about = _about(generator, records, plan, tokenizer, shard)
    done: list[EvaluatedBatch] = []
    file = None if output is None else RunFile(check_file("output", output), about)
    if file is not None:
        done = file.read()
    finished = {batch.index for batch in done}
    missing = [(index, rows) for index, rows in batches if index not in finished]
    for _, rows in missing[:warmup]:
        _run(generator, -1, rows, plan, tokenizer)
    with tqdm(total=len(batches), initial=len(finished), disable=not progress, unit="batch") as bar:
        for index, rows in missing:
            batch = _run(generator, index, rows, plan, tokenizer)
            if file is not None:
                file.append(batch)
            done.append(batch)
            bar.update()
            bar.set_postfix_str(_postfix(done), refresh=False)
    done.sort(key=lambda batch: batch.index)
    return Evaluation(done, generator.drafter.num_draft_tokens, about)


def settings_of_run(
    generator: SpeculativeGenerator,
    prompts: Iterable[str | Prompt | Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """What `evaluate` would save about a run as `about["run"]`, but for its shard: two runs with
    equal settings measure the same.

    Args:
        generator: target, drafter and sampler.
        prompts: as for `evaluate`.
        tokenizer: of the target.
        plan: fields of `Plan`.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> settings_of_run(generator, [[7, 8, 9]], seed=5)["drafter"]["max_ngram"]
        3
    """
    records = prompt_sets.as_prompts(prompts)
    run = _about(generator, records, Plan(**plan), tokenizer, (0, 1))["run"]
    return {name: value for name, value in run.items() if name != "shard"}


def _checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """Index and count."""
    if not isinstance(shard, tuple | list) or len(shard) != 2:
        raise TypeError(f"shard must be a pair (index, count), got {shard!r}")
    check_integer("the count of shard", shard[1], 1)
    check_integer("the index of shard", shard[0], 0, shard[1] - 1)
    return shard[0], shard[1]


@dataclass(frozen=True)
class _Row:
    """A prompt to be answered, and the seed of its first turn."""

    prompt: Prompt
    sample: int
    seed: int


def _batches(prompts: list[Prompt], plan: Plan) -> Iterator[tuple[int, list[_Row]]]:
    """Numbered batches of consecutive prompts, each of one category and one number of turns."""
    rows = [
        _Row(prompt, sample, plan.seed + index + sample * len(prompts))
        for index, prompt in enumerate(prompts)
        for sample in range(plan.samples)
    ]
    number, batch = 0, []
    for row in rows:
        kind = row.prompt.category, len(row.prompt.turns)
        is_full = plan.batch_size is not None and len(batch) == plan.batch_size
        if batch and (is_full or kind != (batch[0].prompt.category, len(batch[0].prompt.turns))):
            yield number, batch
            number, batch = number + 1, []
        batch.append(row)
    yield number, batch


def _run(
    generator: SpeculativeGenerator,
    index: int,
    rows: list[_Row],
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase | None,
) -> EvaluatedBatch:
    """All turns of a batch."""
    replies: list[list[str]] = [[] for _ in rows]
    seconds, done = [], []
    for turn in range(len(rows[0].prompt.turns)):
        encoded = [
            prompt_sets.encode(row.prompt, said, tokenizer)
            for row, said in zip(rows, replies, strict=True)
        ]
        kept = [ids[-(plan.max_prompt_tokens or len(ids)) :] for ids in encoded]
        ids, mask = pad(kept, generator.target.device)
        seeds = [row.seed + turn * _TURN_SEEDS for row in rows]
        run = _generation(generator, ids, mask, plan, seeds, rows)
        result, taken = timed(run, generator.target.device)
        seconds.append(taken)
        for b, (row, length) in enumerate(zip(rows, result.lengths, strict=True)):
            done.append(
                EvaluatedRow(
                    prompt=row.prompt.id,
                    category=row.prompt.category,
                    turn=turn,
                    sample=row.sample,
                    num_prompt_tokens=len(kept[b]),
                    was_cut=len(kept[b]) < len(encoded[b]),
                    finish_reason=result.finish_reasons[b],
                    seed=result.seeds[b] if result.seeds else None,
                    steps=result.steps[b],
                )
            )
            if tokenizer is not None and turn + 1 < len(row.prompt.turns):
                new = result.new_tokens[b, :length]
                replies[b].append(tokenizer.decode(new, skip_special_tokens=True))
    return EvaluatedBatch(index, seconds, done)


def _generation(generator, ids: Tensor, mask: Tensor, plan: Plan, seeds: list[int], rows):
    """A call of the generator whose errors name the prompts."""

    def run():
        sampling = plan.sampling(seeds)
        try:
            return generator.generate(ids, mask, max_new_tokens=plan.max_new_tokens, **sampling)
        except ValueError as error:
            names = ", ".join(repr(row.prompt.id) for row in rows[:4])
            is_long = "positions" in str(error) and plan.max_prompt_tokens is None
            hint = "; max_prompt_tokens= shortens long prompts" if is_long else ""
            raise ValueError(f"prompt {names}: {error}{hint}") from error

    return run


def pad(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, T]`, padded on the left.

    Example:
        >>> pad([[5], [6, 7]], torch.device("cpu"))[0]
        tensor([[0, 5],
                [6, 7]])
    """
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _about(
    generator: SpeculativeGenerator,
    prompts: list[Prompt],
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase | None,
    shard: tuple[int, int],
) -> dict[str, Any]:
    """Everything that a saved run needs to be understood, and to be gone on with."""
    values = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    values["options"] = {
        name: provenance.describe_tokenizer(value) if name == "tokenizer" else plain(value)
        for name, value in plan.options.items()
    }
    return {
        "run": {
            **provenance.describe(generator),
            "plan": values,
            "sampling": dataclasses.asdict(_sampling(generator, plan)),
            "prompts": {"count": len(prompts), "sha256": prompt_sets.fingerprint(prompts)},
            "tokenizer": provenance.describe_tokenizer(tokenizer),
            "shard": list(shard),
        },
        "versions": provenance.versions(),
        "git_revision": provenance.git_revision(),
    }


def _sampling(generator: SpeculativeGenerator, plan: Plan) -> Sampling:
    """What the rows draw their tokens from, the same for all prompts."""
    options = {**plan.sampling([]), "max_new_tokens": plan.max_new_tokens}
    prompt = torch.zeros(1, 1, dtype=torch.long, device=generator.target.device)
    return read_options(generator.target, prompt, options).sampling


def _postfix(done: list[EvaluatedBatch]) -> str:
    steps = [step for batch in done for row in batch.rows for step in row.steps]
    length = 1 + sum(step.num_accepted for step in steps) / max(1, len(steps))
    return f" acceptance length {length:.2f}"
