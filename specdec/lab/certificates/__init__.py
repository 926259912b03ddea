"""Certificates of losslessness: of a sampler by exact enumeration, of a generator by audits and
powered tests.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import shown
from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates.bar import BAR
from specdec.lab.certificates.foreign import (
    AnswerFrom,
    ForeignBatchSampler,
    ForeignSampler,
    RuleNoise,
    huggingface_rule,
)
from specdec.lab.certificates.generator.along import CertificateError, Sentinel
from specdec.lab.certificates.generator.report import RunReport, certify_generator
from specdec.lab.certificates.sampler.exact import Sizes, certify_sampler
from specdec.lab.certificates.sampler.report import SamplerReport
from specdec.samplers import Sampler

__all__ = [
    "AnswerFrom",
    "CertificateError",
    "ForeignBatchSampler",
    "ForeignSampler",
    "RuleNoise",
    "RunReport",
    "SamplerReport",
    "Sentinel",
    "certify",
    "huggingface_rule",
]


@overload
def certify(
    subject: Sampler,
    *,
    sizes: Sizes | None = None,
    trees: tuple[tuple[int, ...], ...] | None = None,
    paths: tuple[tuple[int, int], ...] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    num_draws: int | None = None,
    false_alarm: float = 1e-6,
    progress: Callable[[list], Iterable] = BAR,
) -> SamplerReport:
    """Finds the exact distribution of a sampler on toy problems, see `certify_sampler`."""


@overload
def certify(
    subject: SpeculativeGenerator,
    prompts: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Tensor,
    *,
    num_samples: int = 64,
    max_new_tokens: int = 64,
    settings: Sequence[Mapping[str, Any]] = ({"temperature": 1.0},),
    target_bias: float | None = None,
    until_sure: bool = False,
    audit_tokens: int = 64,
    false_alarm: float = 1e-6,
    batch_size: int = 64,
    reference: PreTrainedModel | None = None,
    progress: Callable[[list], Iterable] = BAR,
) -> RunReport:
    """Audits the runs of a generator on prompts, and bets along them, see `certify_generator`."""


def certify(
    subject: Sampler | SpeculativeGenerator,
    prompts: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Tensor | None = None,
    **options: Any,
) -> SamplerReport | RunReport:
    """Tries to show that a sampler, or a generator, is not lossless.

    Args:
        subject: a sampler, whose exact distribution is enumerated on toy problems (or tested by
            draws, where it does not decide by thresholds), or a generator, whose runs on the
            prompts are audited and tested. Wrap a rule of another library as
            `ForeignSampler(rule)`.
        prompts: token ids of each, without padding; for a generator.
        options: of `certify_sampler` or `certify_generator`.

    Returns:
        A report with `passed`; its text says what was tried and what was found.

    Example:
        >>> from specdec import RejectionSampler, TypicalSampler, certify
        >>> few = ((3, 1, 4),)  # K = 1 draft token out of V = 3, in 4 problems of each kind
        >>> [certify(s, sizes=few).passed for s in (RejectionSampler(), TypicalSampler())]
        [True, False]
    """
    if isinstance(subject, Sampler):
        if prompts is not None:
            raise TypeError(
                "a sampler is certified without prompts; pass a SpeculativeGenerator with them"
            )
        return certify_sampler(subject, **options)
    if isinstance(subject, SpeculativeGenerator):
        if prompts is None:
            raise TypeError("pass prompts, a list of token ids for each, to certify a generator")
        return certify_generator(subject, prompts, **options)
    advice = (
        "wrap a rule (draft_tokens, draft_probs, target_probs, noise) -> tokens as "
        "ForeignSampler(rule)"
    )
    if isinstance(subject, type) and issubclass(subject, Sampler | SpeculativeGenerator):
        advice = f"pass an instance, {subject.__name__}(...)"
    raise TypeError(f"expected a Sampler or a SpeculativeGenerator, got {shown(subject)}; {advice}")


def _whole_signature() -> inspect.Signature:
    """Of `certify` with the options of both ways in, so that they complete in a notebook."""
    own, *ways = (inspect.signature(way) for way in (certify, certify_sampler, certify_generator))
    subject, prompts, _ = own.parameters.values()
    each = [p for way in ways for p in way.parameters.values()]
    options = {p.name: p for p in each if p.kind is p.KEYWORD_ONLY}
    return own.replace(parameters=[subject, prompts, *options.values()])


certify.__signature__ = _whole_signature()
