"""The same run in the words of other projects, whose definitions differ.

| here | vLLM | SGLang, SpecForge | Spec-Bench |
|---|---|---|---|
| acceptance length | over the steps that drafted | - | "mean accepted tokens" |
| block efficiency | - | "accept length" | - |
| acceptance rate | the same | the same (SGLang) | - |
| joint rate at i | "per-position acceptance rate" | - | - |

Each function takes the steps of each row, `result.steps`.

SGLang samples the first output token of a request while it reads the prompt; here the first step
emits it. So n tokens take (n - 1) / L verifications there and n / L here, and SGLang's own figure
for the same drafter is larger by the factor n / (n - 1).
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.arguments import check_number
from specdec.results import RowStep, SpeculationStats


def as_vllm(steps: Sequence[Sequence[RowStep]], num_draft_tokens: int) -> dict[str, object]:
    """vLLM's log line for the same steps.

    A step without a draft is no "draft" there, so its mean acceptance length is over the others.

    Reference: vllm/v1/spec_decode/metrics.py, `SpecDecodingLogging.log`.

    Example:
        >>> steps = [[RowStep([1, 2], 1, [1, 9]), RowStep([], 0, [4])]]
        >>> as_vllm(steps, 2)["mean_acceptance_length"]
        2.0
    """
    drafts = [step for row in steps for step in row if step.draft_tokens]
    stats = SpeculationStats([drafts], num_draft_tokens)
    return {
        "mean_acceptance_length": stats.acceptance_length,
        "avg_draft_acceptance_rate": stats.acceptance_rate,
        "per_position_acceptance_rate": stats.joint_rates,
        "num_drafts": len(drafts),
        "num_draft_tokens": sum(stats.drafted),
        "num_accepted_tokens": sum(stats.accepted),
    }


def as_sglang(steps: Sequence[Sequence[RowStep]]) -> dict[str, object]:
    """SGLang's `meta_info` of each request, summed over requests.

    Reference: sglang/srt/managers/tokenizer_manager.py.

    Example:
        >>> as_sglang([[RowStep([1, 2], 2, [1, 2])]])["spec_accept_length"]  # cut by the limit
        2.0
    """
    stats = _stats_of(steps)
    return {
        "spec_accept_length": stats.block_efficiency,
        "spec_accept_rate": stats.acceptance_rate,
        "spec_verify_ct": sum(stats.steps),
        "completion_tokens": sum(stats.emitted),
    }


def as_specforge(steps: Sequence[Sequence[RowStep]]) -> dict[str, object]:
    """What SpecForge's benchmarker prints: all output tokens / all verifications.

    Reference: SpecForge/benchmarks/benchmarker/utils.py, `compute_metrics`.

    Example:
        >>> as_specforge([[RowStep([1], 1, [1, 5])], [RowStep([1], 0, [2])]])
        {'accept_length': 1.5}
    """
    return {"accept_length": _stats_of(steps).block_efficiency}


def as_spec_bench(
    steps: Sequence[Sequence[RowStep]], seconds: Sequence[float] | None = None
) -> dict[str, object]:
    """What Spec-Bench's `speed.py` prints: the mean of `accept_lengths`, and the mean over prompts
    of tokens per second (not the quotient of the sums).

    `accept_lengths` holds by how many tokens each step made the text longer, 1 + accepted: its
    loops look for the end of the text after a step and cut nothing.

    Args:
        steps: per prompt its steps, all turns together.
        seconds: per prompt, of generation; `None` where they are not known.

    Reference: hemingkx/Spec-Bench, evaluation/speed.py, `speed`.

    Example:
        >>> steps = [[RowStep([1], 1, [1, 5])], [RowStep([1], 0, [2])]]
        >>> as_spec_bench(steps, [1.0, 2.0])
        {'mean_accepted_tokens': 1.5, 'tokens_per_second': 1.25}
    """
    lengths = [1 + step.num_accepted for row in steps for step in row]
    figures: dict[str, object] = {"mean_accepted_tokens": sum(lengths) / max(1, len(lengths))}
    if seconds is not None:
        for index, taken in enumerate(seconds):
            check_number(f"seconds[{index}]", taken, above=0)
        rows = zip(steps, seconds, strict=True)
        speeds = [sum(len(step.new_tokens) for step in row) / taken for row, taken in rows]
        figures["tokens_per_second"] = sum(speeds) / max(1, len(speeds))
    return figures


def _stats_of(steps: Sequence[Sequence[RowStep]]) -> SpeculationStats:
    """Counts of steps of any draft length."""
    lengths = [len(step.draft_tokens) for row in steps for step in row]
    return SpeculationStats(steps, max(lengths, default=0))
