"""`Drafter`: what a component must do to propose tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from specdec.arguments import check_integer
from specdec.drafters.settable import Settable
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft, FeatureLayer

if TYPE_CHECKING:
    from specdec.drafters.verified import Verified
    from specdec.targets.prompt_inputs import PromptInputs
    from specdec.targets.target import Target


class Drafter(Settable, nn.Module, ABC):
    """A drafter holds weights only; everything that changes lives in a state that the loop owns.

    The loop calls `prefill` over the prompt, chunk by chunk, and then `propose` once per step; it
    calls neither where `num_draft_tokens` is 0.
    Every context starts where verified history ends: a drafter first brings its own state up to
    date with the newly committed tokens and then drafts, so what it speculated in an earlier step
    never survives.

    Attributes:
        num_draft_tokens: K, the most tokens that a proposal may have; of trees, the nodes.
        tree_depth: D, the most tokens on a path of its trees; `None` for a drafter of chains.
        feature_layers: which target features the context must carry (hidden states or `"final"`).
        row_inputs: names of what calls may bring for each row (`generate(row_inputs=)`), and
            contexts do then, `Context.row_inputs`.
        reads_target: contexts bring the target's keys and values of the text, `Context.target`.
        reads_outcome: `learn` is called at the end of each step, with what became of the draft.
        extra_slots: so many tokens more than K + 1 may be run behind the text
            (`TargetText.forward`); every row's storage is longer by that.
        has_memory: drafts depend on earlier requests, so the same call need not draft the same
            again. `certify` then compares no drafts, and judges the texts. Lossless as long as no
            text is remembered that the same seed has written: give every call seeds of its own.

    Example:
        >>> class RepeatLast(Drafter):
        ...     num_draft_tokens = 2
        ...     validate = init_state = prefill = lambda self, *args, **sizes: None
        ...     def propose(self, context, state, drawing):
        ...         last = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])
        ...         return Draft(last.expand(-1, drawing.num_draft_tokens))
        >>> context = Context(torch.tensor([[5, 7]]), None, torch.tensor([3]), torch.tensor([1]))
        >>> RepeatLast().propose(context, None, Drawing(2, None, None, None)).tokens
        tensor([[7, 7]])
    """

    num_draft_tokens: int
    tree_depth: int | None = None
    feature_layers: tuple[FeatureLayer, ...] = ()
    row_inputs: tuple[str, ...] = ()
    reads_target: bool = False
    reads_outcome: bool = False
    extra_slots: int = 0
    has_memory: bool = False

    def settings(self) -> dict[str, Any]:
        """What distinguishes this drafter from others, as plain values: its class, its public
        attributes and a fingerprint of its weights. Saved runs hold it, and go on with no other.
        """
        from specdec.settings import settings_of

        return settings_of(self)

    @abstractmethod
    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises `ValueError` if it cannot draft for a target of this vocabulary on this device."""

    def check_target(self, target: Target) -> None:
        """Raises `ValueError` if it cannot draft for this target, for a drafter that was made with
        one. Called after `validate`: where a generator is built, and before every call.
        """

    def read_prompts(
        self, prompts: PromptInputs, read: Callable[[Target], PromptInputs] | None
    ) -> PromptInputs | None:
        """What it reads itself of prompts that are more than ids; `None` where it reads these.

        Args:
            prompts: what the target reads of them.
            read: has another target read the prompts of the call (`Target.read_prompts`); `None`
                where these cannot be read again.
        """

    @abstractmethod
    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> Any:
        """Fresh state for rows of at most `max_length` tokens, the last proposal included: a tree
        of tensors, zeros with rows first (a dataclass, a tuple, a dict; `None` where there is
        nothing to remember). `prefill` and `propose` change it in place.

        The loop owns it. It drops rows that have ended (`specdec.graphs.rows.keep_rows`), and fills
        the whole state with zeros before each call. Fields of a dataclass that are
        `specdec.graphs.shared()`, the same for all rows, are left alone.
        """

    @abstractmethod
    def prefill(self, context: Context, state: Any, /) -> None:
        """Reads verified tokens without drafting; called on consecutive chunks of the prompt."""

    @abstractmethod
    def propose(self, context: Context, state: Any, drawing: Drawing, /) -> Draft:
        """Brings the state up to date with `context` and drafts K tokens after it.

        Args:
            context: at most D + 1 newly committed tokens per row, K + 1 after chains.
            state: this drafter's, updated in place.
            drawing: K >= 1 of this step, which may be smaller than `num_draft_tokens`, and how
                tokens are to be drawn. Most drafters hand it to their `Proposal`.

        Returns:
            K tokens per row and the probabilities that they were drawn from, over the target's
            vocabulary; `None` instead for a deterministic proposal. A drafter of trees says as well
            which node each hangs on.
        """

    def learn(self, verified: Verified, state: Any, /) -> None:
        """Takes from a step that is over what later steps are to know; called where
        `reads_outcome` is set.

        The loop keeps nothing of it: what a drafter needs (the target's most likely tokens, its
        logits of one row, a count) it writes into its state, as in `propose`, and `num_new` says
        which rows are still going. The next step draws with numbers of its own, so the text keeps
        the target's distribution whatever is learnt here.

        Args:
            verified: the draft, the target's logits and features of the whole window, and the
                verdict. Its tensors are overwritten by the next step.
            state: this drafter's, updated in place.
        """


def check_num_draft_tokens(num_draft_tokens: int, *, of: str = "") -> int:
    """Returns K, or raises `TypeError` or `ValueError` if it is not an integer >= 0; messages name
    the class and a dot that it is `of`.
    """
    advice = "0 decodes plainly, 4 is a usual value"
    return check_integer(f"{of}num_draft_tokens", num_draft_tokens, 0, advice=advice)
