"""A step: propose, verify, accept, commit.

A step reads and writes the tensors of one `StepState`. Nothing in it waits for the device, and
captured it depends on no number of the host: it runs eagerly on a CPU and as a graph on a GPU.

Legend: B rows, K draft tokens (nodes of a tree), D tokens of its longest path (K for a chain), V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specdec.loop.outcome import Outcome
from specdec.loop.state import Parts, StepState
from specdec.samplers.base import Sampler
from specdec.samplers.noise import StepNoise
from specdec.types import Draft, TargetOutput, Verdict

Stepper = Callable[[StepState, int], Outcome]
"""(state, tokens to draft) -> outcome: one step for every row. `step` of some parts is one, and
what replays, compares, traces or processes steps wraps one.
"""

Mark = Callable[[str], None]
"""Called with the name of a part of a step after it: "draft", then "verify"; the last part, which
accepts and commits, ends with the step.
"""

EditLogits = Callable[[Draft, Tensor], Tensor]
"""(draft, logits `[B, K + 1, V]`) -> logits: host code between verification and acceptance."""


def ignore(name: str) -> None:
    """The `Mark` of a step that nobody watches."""


def step(
    parts: Parts,
    state: StepState,
    num_draft_tokens: int,
    *,
    mark: Mark = ignore,
    edit_logits: EditLogits | None = None,
) -> Outcome:
    """One step for every row.

    Args:
        parts: target, drafter and sampler.
        state: updated in place.
        num_draft_tokens: how many tokens to draft, 0..K of the state.
        mark: called after each part of the step but the last.
        edit_logits: host code that changes the target's logits (logits processors). With it the
            step waits for the device and cannot be captured.

    Returns:
        What happened, still on the device.

    Raises:
        TypeError, ValueError: more draft tokens than the state has room for, or drafter or sampler
            returned no draft or verdict of the step's sizes.
    """
    if num_draft_tokens not in range((most := state.signature.num_draft_tokens) + 1):
        from specdec.loop.contract import refuse_length

        refuse_length(num_draft_tokens, most)
    noise = state.noise.at(state.buffer.root_position, num_draft_tokens + 1)
    draft = propose(parts, state, noise, num_draft_tokens)
    mark("draft")
    output = verify(parts, state, draft)
    logits = output.logits if edit_logits is None else edit_logits(draft, output.logits)
    mark("verify")
    return accept(parts, state, noise, draft, output, logits)


def propose(parts: Parts, state: StepState, noise: StepNoise, num_draft_tokens: int) -> Draft:
    """What the drafter proposes, with ids and counts brought into their ranges; `Draft.proposed`
    has them as they came.

    A drafter is never asked for 0 tokens. Where a step wants none, one is drafted and dropped, so
    that the drafter has read what was committed when a later step wants some.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> own = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> state = own.start(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=4).state
        >>> noise = state.noise.at(state.buffer.root_position, width=3)
        >>> with torch.inference_mode():
        ...     propose(Parts(own.target, own.drafter, own.sampler), state, noise, 2).tokens
        tensor([[7, 5]])
    """
    signature, draft = state.signature, None
    if signature.num_draft_tokens > 0:
        draft = _draft(parts, state, noise, max(num_draft_tokens, 1))
    if num_draft_tokens == 0:
        draft = Draft(state.buffer.tokens[:, :0])
    if not (signature.wants_probs or draft.probs is None):
        draft = replace(draft, probs=None)  # they may come unasked
    num_valid, parents = draft.num_valid, None  # a chain's are left out and cost nothing
    if not draft.is_chain:  # each comes before its children, as in a chain
        index = torch.arange(-1, num_draft_tokens - 1, device=state.device)
        parents = torch.minimum(draft.parents.clamp(min=-1), index)
    return replace(
        draft,
        tokens=draft.tokens.clamp(0, state.vocab_size - 1),
        num_valid=None if num_valid is None else num_valid.clamp(0, num_draft_tokens),
        parents=parents,
        proposed=draft,
    )


def _draft(parts: Parts, state: StepState, noise: StepNoise, num_draft_tokens: int) -> Draft:
    """The drafter's own proposal, of the right sizes."""
    sampler, drafter = parts.sampler, parts.drafter
    signature, vocab_size = state.signature, state.vocab_size
    wants = {"wants_probs": signature.wants_probs, "wants_raw": signature.wants_raw}
    drawing = sampler.drawing(num_draft_tokens, state.logits_filter, noise, **wants)
    try:
        draft = drafter.propose(state.context(parts), state.drafter_state, drawing)
    except AttributeError as error:
        from specdec.targets.text import refuse_unread_target

        refuse_unread_target(drafter, error)
        raise
    shape = signature.batch_size, num_draft_tokens
    _check_fit(drafter, draft, Draft, shape, state.device)
    most = signature.tree_depth
    if draft.depth > signature.depth or (most is None and not draft.is_chain):
        from specdec.loop.contract import refuse_depth

        refuse_depth(drafter, draft, most)
    if draft.probs is not None and draft.probs.shape[-1] != vocab_size:
        from specdec.loop.contract import refuse_vocabulary

        refuse_vocabulary(drafter, draft, vocab_size)
    return draft


def verify(parts: Parts, state: StepState, draft: Draft) -> TargetOutput:
    """The target's logits and features of the root and the draft, in the draft's order.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> own = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> parts = Parts(own.target, own.drafter, own.sampler)
        >>> state = own.start(torch.tensor([[5, 6, 7, 5, 6]]), max_new_tokens=4).state
        >>> with torch.inference_mode():
        ...     verify(parts, state, Draft(torch.tensor([[7, 5]]))).logits.shape
        torch.Size([1, 3, 2048])
    """
    start, root = state.buffer.root_position, state.buffer.root
    return parts.target.verify(state.cache, start, root, draft)


def accept(
    parts: Parts,
    state: StepState,
    noise: StepNoise,
    draft: Draft,
    output: TargetOutput,
    logits: Tensor,
) -> Outcome:
    """Lets the sampler decide and commits what it emits.

    Args:
        parts, state, noise, draft: of the step.
        output: of the target.
        logits: `[B, K + 1, V]` that the sampler sees: the target's own, or edited ones.
    """
    verdict = check_verdict(
        parts.sampler, parts.sampler(draft, logits, state.logits_filter, noise), draft
    )
    is_eos = commit(state, draft, verdict, output.features)
    outputs = {}
    if state.signature.outputs:
        from specdec.loop.outputs import outputs_of

        outputs = outputs_of(state, draft, verdict, output, logits)
    num_new, vocab_size = state.buffer.num_new, state.vocab_size
    if parts.drafter.reads_outcome:
        from specdec.loop.learning import learn

        learn(parts, state, draft, output, verdict)
    checked = numbers_to_check(draft, logits)
    return Outcome(draft, verdict, logits, num_new, is_eos, vocab_size, checked, outputs)


def numbers_to_check(draft: Draft, logits: Tensor) -> Tensor:
    """What `outcome.find_faults` looks at of tables that stay on the device.

    Args:
        draft: K tokens per row.
        logits: `[B, N, V]` that it was verified by.

    Returns:
        `[B, N]` float64, the largest logit of each row of the window, NaN where one is NaN; with
        draft probabilities `[B, N + 3 K]`, of each token their sum, the smallest, and its own.
    """
    largest = logits.amax(dim=-1)
    if draft.probs is None:
        return largest.double()
    of_draft = draft.probs.sum(dim=-1), draft.probs.amin(dim=-1), draft.token_probs
    return torch.cat([largest, *of_draft], dim=1).double()


def commit(state: StepState, draft: Draft, verdict: Verdict, features: Tensor | None) -> Tensor:
    """Appends what was emitted, with ids and counts brought into their ranges. Features, keys and
    values of the accepted path move to where a chain has them.

    Returns:
        `[B]` bool: the row ended with an end-of-sequence token in this step.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> own = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> state = own.start(torch.tensor([[5, 6, 7]]), max_new_tokens=4).state
        >>> verdict = Verdict(torch.tensor([[5, 9, -1]]), num_accepted=torch.tensor([1]))
        >>> with torch.inference_mode():
        ...     commit(state, Draft(torch.tensor([[5, 6]])), verdict, None), state.buffer.root
        (tensor([False]), tensor([9]))
    """
    depth = draft.depth
    tokens = verdict.tokens.clamp(0, state.vocab_size - 1)
    is_eos = state.buffer.commit(tokens, verdict.num_accepted.clamp(0, depth))
    if not draft.is_chain:  # of a chain all is there
        rows = verdict.path.clamp(0, draft.tokens.shape[1])
        state.cache.follow(state.buffer.start, rows)
        if features is not None:
            features = features.gather(1, rows[..., None].expand(-1, -1, features.shape[2]))
    if features is not None:
        state.features[:, : depth + 1].copy_(features)
    return is_eos


def check_verdict(sampler: Sampler, verdict: object, draft: Draft) -> Verdict:
    """Returns what a sampler decided, if it is a verdict of the draft's sizes.

    Raises:
        TypeError: no `Verdict`.
        ValueError: other sizes or another device; names both sides. No path through a tree.
    """
    _check_fit(sampler, verdict, Verdict, (len(draft.tokens), draft.depth + 1), draft.tokens.device)
    if verdict.path is None and not draft.is_chain:
        from specdec.loop.contract import refuse_pathless

        refuse_pathless(sampler)
    return verdict


def _check_fit(
    part: object, record: object, kind: type, shape: tuple[int, int], device: torch.device
) -> None:
    """Raises an error unless the record is of this kind and has the sizes of the step."""
    is_one = isinstance(record, kind) and record.tokens.shape == shape
    if not (is_one and record.tokens.device == device):
        from specdec.loop.contract import refuse_record

        refuse_record(part, record, kind, shape, device)
