"""A trace in which every token of a text is a root, for `replay`.

A run visits few positions of its text: those after which its own draft length and sampler happened
to stop. A run with other settings stops elsewhere, so nothing follows for it from the first run's
trace alone. Here the finished text is read once more: at every position the drafter drafts, and
each token that it "draws" is the text's own, so that the trace holds draft and target probability
of the text after every root.

Legend: B rows, K draft tokens, T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from specdec.arguments import check_integer, shown
from specdec.drafters import Drafter
from specdec.generator import SpeculativeGenerator
from specdec.lab.trace import Trace
from specdec.lab.trace.record import StepNumbers
from specdec.request import Sampling
from specdec.request.lists import left_padded
from specdec.row_step import RowStep
from specdec.samplers import LogitsFilter, Sampler
from specdec.samplers.given import GivenText, emit
from specdec.types import Draft, Verdict


def every_position(generator: SpeculativeGenerator, trace: Trace) -> Trace:
    """Reads the texts of a trace once more, with a root at every token.

    Costs one step per token, and so about what plain decoding costs with K draft tokens beside it.

    Args:
        generator: whose target wrote the text; its drafter's K bounds the K of a replay. Its
            sampler does not matter.
        trace: of any run (`generate(..., trace=True)`), also of a target that has been given
            another `generation_config` since: what tokens were drawn from is in the trace.

    Returns:
        A trace of the same texts whose steps all emit one token. Draft tokens are the text's, but
        for deterministic proposals, which are the drafter's own. Drafts end with the text.

    Raises:
        ValueError: the run passed logits processors (a trace has their names only), the
            generator's target writes another text, or its drafter drafts trees.

    Example:
        >>> import torch
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = zoo.load_drafter("model", target, num_draft_tokens=3)
        >>> generator = SpeculativeGenerator(target, drafter)
        >>> options = dict(max_new_tokens=8, do_sample=True, seed=0, trace=True)
        >>> trace = generator.generate(torch.tensor([[7, 8, 9]]), **options).trace
        >>> [len(step.draft_tokens) for step in every_position(generator, trace)[0]]
        [3, 3, 3, 3, 3, 3, 2, 1]
    """
    if not isinstance(trace, Trace):
        raise TypeError(
            f"trace must be a Trace, got {shown(trace)}; pass generate(..., trace=True).trace"
        )
    if "sampling" not in trace.about:
        raise ValueError("the trace does not say what its tokens were drawn from; generate it anew")
    _refuse_trees(generator.drafter)
    sampling = Sampling(**trace.about["sampling"])
    options = sampling.options()
    rows = len(trace)
    is_greedy = LogitsFilter(rows, **sampling.logits_filter).is_greedy
    texts = [[token for step in row for token in step.new_tokens] for row in trace]
    lengths = [len(text) for text in texts]
    if not any(lengths):
        raise ValueError("the trace holds no new tokens")
    device = generator.target.device
    whole = [[*prompt, *text] for prompt, text in zip(trace.prompts, texts, strict=True)]
    sampler = _OneToken() if is_greedy else GivenText(whole, device, drafts_text=True)
    reader = SpeculativeGenerator(
        generator.target,
        generator.drafter,
        sampler,
        prefill_chunk_size=generator.prefill_chunk_size,
    )
    if not is_greedy:  # rows are named by their seeds, by which their noise finds their text
        options["seed"] = list(range(rows))
    inputs = left_padded(trace.prompts, device)
    read = reader.generate(*inputs, max_new_tokens=max(lengths), trace=True, **options).trace
    steps, numbers = [], []
    for row, text in enumerate(texts):
        if text != [step.new_tokens[0] for step in read.steps[row][: len(text)]]:
            raise ValueError(
                f"the generator's target does not write the text of row {row}; pass the generator "
                "of the trace"
            )
        left = range(len(text), 0, -1)  # tokens of the text, with which drafts end
        pairs = zip(left, read.steps[row], read.numbers[row], strict=False)
        kept = [_cut(step, their, min(len(step.draft_tokens), n)) for n, step, their in pairs]
        steps.append([step for step, _ in kept])
        numbers.append([their for _, their in kept])
    about = {**trace.about, "roots": "every", "sampler": None}
    about["num_draft_tokens"] = read.about["num_draft_tokens"]
    return Trace(steps, numbers, read.times, trace.prompts, about, trace.tokenizer)


def with_draft_length(drafter: Drafter, num_draft_tokens: int) -> Drafter:
    """The same drafter, over the same weights, with another K.

    Args:
        drafter: left as it is.
        num_draft_tokens: K, at most the drafter's own.

    Example:
        >>> from specdec import PromptLookupDrafter
        >>> with_draft_length(PromptLookupDrafter(8), 3).num_draft_tokens
        3
    """
    _refuse_trees(drafter)
    advice = "the drafter's own is the largest; make it with a larger one"
    check_integer("num_draft_tokens", num_draft_tokens, 0, drafter.num_draft_tokens, advice=advice)
    other = copy.copy(drafter)
    other.num_draft_tokens = num_draft_tokens
    return other


def _refuse_trees(drafter: Drafter) -> None:
    if drafter.tree_depth is not None:
        raise ValueError(
            f"a replay reads chains, and {type(drafter).__name__} drafts trees; pass a generator "
            "whose drafter has no tree"
        )


class _OneToken(Sampler):
    """Commits one token per step. Greedy texts are written again by target and drafter
    themselves.
    """

    lossless = True
    uses_accept_draws = False

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: Any
    ) -> Verdict:
        """Not called: all rows are greedy."""
        raise AssertionError("a sampled text is read by GivenText")

    def accept_greedily(self, draft: Draft, target_logits: Tensor) -> Verdict:
        """The target's token."""
        return emit(target_logits[:, :1].argmax(dim=-1), draft)


def _cut(step: RowStep, numbers: StepNumbers, count: int) -> tuple[RowStep, StepNumbers]:
    """A step of a chain with so many draft tokens."""
    names = ("draft_probs", "target_probs", "draft_entropies")
    shorter = {name: getattr(numbers, name)[:count] for name in names}
    entropies = numbers.target_entropies[: count + 1]
    shorter_step = replace(step, draft_tokens=step.draft_tokens[:count], parents=None)
    return shorter_step, replace(numbers, **shorter, target_entropies=entropies)
