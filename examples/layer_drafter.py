"""A drafter that runs some of the target's layers over the target's own KV cache."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from specdec import Context, Draft, Drafter, Drawing, Proposal, Target


class LayerDrafter(Drafter):
    """Drafts with some of the target's layers, its final norm and its vocabulary head. It writes
    where the target's next step writes, so it keeps no cache and takes nothing back.

    Args:
        target: of the generator.
        layers: those that run, by their index.
        num_draft_tokens: K.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> target = Target(zoo.load_target())
        >>> generator = SpeculativeGenerator(target, LayerDrafter(target, range(target.num_layers)))
        >>> ids = torch.tensor([[5, 6]])
        >>> generator.generate(ids, max_new_tokens=10).stats.acceptance_rate  # by all layers
        1.0
    """

    reads_target = True

    def __init__(self, target: Target, layers: Iterable[int], num_draft_tokens: int = 4):
        super().__init__()
        self.num_draft_tokens, self.proposal = num_draft_tokens, Proposal("sample")
        self.part = target.part(layers)

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises `ValueError` where the target's modules are others than those of the part."""
        self.part.check_unchanged()

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> None:
        """Nothing to remember between steps."""

    def prefill(self, context: Context, state: None) -> None:
        """The target has read the prompt."""

    def propose(self, context: Context, state: None, drawing: Drawing) -> Draft:
        """Chains of K tokens."""
        token = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])  # the root
        drafting = self.proposal.begin(drawing)
        for i in range(drawing.num_draft_tokens):
            logits, _ = context.target.forward(self.part, token, offset=i)
            token = drafting.draw(logits)
        return drafting.end()
