"""A drafter with queries of its own over the target's keys and values. It is not trained, and shows
the interface: `context.target` has the KV cache, and `attend` runs one layer of attention over it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec import Context, Draft, Drafter, Drawing, Proposal
from specdec.kernels import AttentionOptions
from specdec.slots.attention import attend


class QueryDrafter(Drafter):
    """One query of the last token over the target's last layer; each draft token reads the one
    before alone. Keys hold rotary positions: rotate a query that should know them by
    `context.target.positions` `[B]`. Neither the last accepted token nor drafted ones are keys.

    Args:
        model: the target, whose embeddings and vocabulary head it uses.
        num_draft_tokens: K.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> target = zoo.load_target()
        >>> generator = SpeculativeGenerator(target, QueryDrafter(target))
        >>> generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4).lengths
        [4]
    """

    reads_target = True
    proposal = Proposal("sample")

    def __init__(self, model: PreTrainedModel, num_draft_tokens: int = 3):
        super().__init__()
        config = model.config
        self.num_draft_tokens = num_draft_tokens
        self.layer, self.num_heads = config.num_hidden_layers - 1, config.num_attention_heads
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        width = self.num_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=False)
        self.output = nn.Linear(width, config.hidden_size, bias=False)

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Made of this target's own parts."""

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> None:
        """Nothing to remember between steps."""

    def prefill(self, context: Context, state: None) -> None:
        """The target has read the prompt."""

    def propose(self, context: Context, state: None, drawing: Drawing) -> Draft:
        """Chains of K tokens."""
        text = context.target
        window, (keys, values) = text.window(1), text.keys_values(self.layer)
        token = context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])  # the root
        drafting = self.proposal.begin(drawing)
        for _ in range(drawing.num_draft_tokens):
            query = self.query(self.embed(token)).unflatten(2, (self.num_heads, -1))
            seen = attend(window, query.transpose(1, 2), keys, values, AttentionOptions())
            token = drafting.draw(self.head(self.output(seen.flatten(2))))
        # A row whose target has read nothing yet, after a prompt of one token, has no keys.
        num_valid = (text.lengths > 0) * drawing.num_draft_tokens
        return replace(drafting.end(), num_valid=num_valid)
