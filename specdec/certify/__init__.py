"""Certificates of losslessness: of a sampler by exact enumeration, of a generator by audits and
powered tests.

The module is its main function as well: `specdec.certify(sampler)` is
`specdec.certify.certify(sampler)`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, overload

import torch
from torch import Tensor

from specdec.certify.foreign import (
    AnswerFrom,
    ForeignBatchSampler,
    ForeignSampler,
    RuleNoise,
    huggingface_rule,
)
from specdec.certify.generator.law import NUM_TOKENS
from specdec.certify.generator.report import RunReport, certify_generator
from specdec.certify.sampler.exact import Sizes, certify_sampler
from specdec.certify.sampler.report import DrawnEvidence, Failure, SamplerReport
from specdec.generator import SpeculativeGenerator
from specdec.samplers import Sampler

__all__ = [
    "AnswerFrom",
    "DrawnEvidence",
    "Failure",
    "ForeignBatchSampler",
    "ForeignSampler",
    "RuleNoise",
    "RunReport",
    "SamplerReport",
    "certify",
    "certify_generator",
    "certify_sampler",
    "huggingface_rule",
]


@overload
def certify(
    subject: Sampler,
    *,
    sizes: Sizes | None = None,
    trees: tuple[tuple[int, ...], ...] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float64,
    num_draws: int | None = None,
    false_alarm: float = 1e-6,
    progress: Callable[[list], Iterable] = iter,
) -> SamplerReport:
    """Finds the exact law of a sampler on small worlds, see `certify_sampler`."""


@overload
def certify(
    subject: SpeculativeGenerator,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    num_samples: int = 4096,
    num_tokens: int = NUM_TOKENS,
    top_k: int = 4,
    temperature: float = 1.0,
    audit_tokens: int = 64,
    false_alarm: float = 1e-6,
    batch_size: int = 128,
    progress: Callable[[list], Iterable] = iter,
) -> RunReport:
    """Audits and tests the runs of a generator on prompts, see `certify_generator`."""


def certify(
    subject: Sampler | SpeculativeGenerator,
    prompts: Sequence[Sequence[int]] | Tensor | None = None,
    **options: Any,
) -> SamplerReport | RunReport:
    """Tries to show that a sampler, or a generator, is not lossless.

    Args:
        subject: a sampler, whose exact law is enumerated on small worlds (or tested by draws, where
            it does not decide by thresholds), or a generator, whose runs on the prompts are audited
            and tested. Wrap a rule of another library as `ForeignSampler(rule)`.
        prompts: token ids of each, without padding; for a generator.
        options: of `certify_sampler` or `certify_generator`.

    Returns:
        A report with `passed`; its text says what was tried and what was found.

    Example:
        >>> from specdec import RejectionSampler, TypicalSampler, certify
        >>> few = ((3, 1, 4),)  # K = 1 draft token out of V = 3, in 4 worlds of each kind
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
    raise TypeError(
        f"expected a Sampler or a SpeculativeGenerator, got {type(subject).__name__}; wrap a rule "
        "(draft_tokens, draft_probs, target_probs, noise) -> tokens as ForeignSampler(rule)"
    )


def _whole_signature() -> inspect.Signature:
    """Of `certify` with the options of both ways in, so that they complete in a notebook."""
    ways = [
        inspect.signature(way).parameters.values() for way in (certify_sampler, certify_generator)
    ]
    keywords = {p.name: p for way in ways for p in way if p.kind is p.KEYWORD_ONLY}
    own = inspect.signature(certify)
    subject, prompts, _ = own.parameters.values()
    return own.replace(parameters=[subject, prompts, *keywords.values()])


__signature__ = certify.__signature__ = _whole_signature()


class _CallableModule(ModuleType):
    """So that `from specdec import certify` is the function, and the module all the same."""

    def __call__(self, *args: Any, **options: Any) -> SamplerReport | RunReport:
        return certify(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
