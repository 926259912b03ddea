"""The distribution of one round of a sampler, tested by drawing: for rules whose decisions are no
thresholds of their uniforms, so that `enumeration` does not apply.

Drafts are drawn from the problems' draft distributions, uniforms from a seeded generator. The
tokens that a round emits are completed to K + 1 tokens with draws from the target's distribution,
as in `enumeration`. A chi-square test per problem compares the counts of the completed texts with
the target's distribution.

A rule that is wrong at single values of a uniform only, or by less than the total variation that
the tests detect, passes.

Numbers that a rule asks for by names of its own, and races, are drawn by the same generator.

A rule with a `noise_type` of its own is tried on the numbers of that: drafts are drawn by the
rule's own `draw_draft`, and verified, by the numbers of one step. So is one whose draft tokens are
drawn by names of its own.

Legend: N texts of a problem, and see `paths`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.graphs.rows import map_tensors
from specdec.lab.certificates.chisquare import goodness_of_fit
from specdec.lab.certificates.sampler.drafting import DrawnNoise
from specdec.lab.certificates.sampler.enumeration import ExtraDraws, joint_law
from specdec.lab.certificates.sampler.paths import Decide, Paths
from specdec.lab.certificates.sampler.problems import Problems
from specdec.loop.step import check_verdict
from specdec.samplers import LogitsFilter, Sampler, StepNoise
from specdec.types import Draft, Verdict


def own_noise_tests(
    sampler: Sampler,
    problems: Problems,
    generator: torch.Generator,
    *,
    num_draws: int,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[float, int, tuple[int, float, float]]]:
    """As `draw_tests`, of chains with soft drafts, by the numbers of the sampler's `noise_type`."""
    for problem, law in enumerate(joint_law(problems.target)):
        seeds = range(problem * num_draws, (problem + 1) * num_draws)
        source = sampler.noise_type([*seeds], device=device)
        start = torch.full((num_draws,), 7, device=device)
        noise = source.at(start, problems.num_draft_tokens + 1)
        draft = _own_draft(sampler, problems, problem, noise, num_draws, device)
        code = torch.zeros(num_draws, dtype=torch.long, device="cpu")
        prefixes = [code] + [code := code * problems.vocab_size + t for t in draft.tokens.cpu().T]
        logits = [level[problem, at] for level, at in zip(problems.logits, prefixes, strict=True)]
        values = {
            name: [each[problem]] * num_draws for name, each in problems.logits_filter.items()
        }
        logits_filter = LogitsFilter(num_draws, device=device, **values)
        verdict = sampler(draft, torch.stack(logits, dim=1).to(device), logits_filter, noise)
        verdict = map_tensors(Tensor.cpu, check_verdict(sampler, verdict, draft))
        yield _compare(
            _completed(verdict, problems, torch.full_like(code, problem), generator), law
        )


def _own_draft(
    sampler: Sampler, problems: Problems, problem: int, noise: StepNoise, rows: int, device: Any
) -> Draft:
    """Drafts that the sampler's own `draw_draft` draws from the draft's tables."""
    code, drawn = torch.zeros(rows, dtype=torch.long, device="cpu"), []
    for index, level in enumerate(problems.draft):
        logits = level[problem, code].log()[:, None].to(device)
        options = {"wants_probs": sampler.uses_draft_probs}
        drawn.append(
            sampler.draw_draft(logits, LogitsFilter(rows, device=device), noise, index, **options)
        )
        code = code * problems.vocab_size + drawn[-1][0][:, 0].cpu()
    tokens, probs = zip(*drawn, strict=True)
    return Draft(torch.cat(tokens, 1), None if probs[0] is None else torch.cat(probs, 1))


def draw_tests(
    decide: Decide,
    problems: Problems,
    generator: torch.Generator,
    *,
    num_draws: int,
    device: torch.device | str = "cpu",
    draws: ExtraDraws,
) -> Iterator[tuple[float, int, tuple[int, float, float]]]:
    """Draws N texts in every problem and compares their counts with the target's distribution.

    Yields:
        For each problem the p-value and the degrees of freedom, and of the text whose share is
        furthest from its probability the number, the share and the probability.
    """
    paths, laws = Paths(problems, device=device), joint_law(problems.target)
    for problem, law in enumerate(laws):
        here = (paths.problem == problem).nonzero()[:, 0]
        picked = paths.weight[here].multinomial(num_draws, replacement=True, generator=generator)
        codes = _texts(decide, paths, here[picked], generator, draws)
        yield _compare(codes, law)


def _compare(codes: Tensor, law: Tensor) -> tuple[float, int, tuple[int, float, float]]:
    """The result of one problem's test."""
    p_value, df = goodness_of_fit(Counter(codes.tolist()), dict(enumerate(law.tolist())))
    share = torch.bincount(codes, minlength=len(law)) / len(codes)
    worst = (share - law).abs().argmax().item()
    return p_value, df, (worst, share[worst].item(), law[worst].item())


def _texts(
    decide: Decide, paths: Paths, rows: Tensor, generator: torch.Generator, draws: ExtraDraws
) -> Tensor:
    """`[N]` numbers, in base V, of the texts that rounds over these rows of paths lead to."""
    problems = paths.problems
    shape = len(rows), problems.num_draft_tokens
    accept = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
    extra = draws.random(len(rows), problems.vocab_size, generator)
    source = partial(DrawnNoise, generator=generator)
    verdict = paths.runner(decide, rows)(accept, extra, source)
    return _completed(verdict, problems, paths.problem[rows], generator)


def _completed(
    verdict: Verdict, problems: Problems, problem: Tensor, generator: torch.Generator
) -> Tensor:
    """`[N]` numbers of texts, each completed by the target."""
    code, vocab = torch.zeros_like(problem), problems.vocab_size
    for place, level in enumerate(problems.target):
        own = torch.multinomial(level[problem, code], 1, generator=generator)[:, 0]
        is_emitted = place <= verdict.num_accepted
        code = code * vocab + torch.where(is_emitted, verdict.tokens[:, place], own)
    return code
