"""Drafters that read the target's keys and values: what an author writes, in full."""

import torch
from torch import Tensor, nn

from specdec import Draft, Drafter, Target
from specdec.drafters.proposal import Proposal
from specdec.kernels import AttentionOptions
from specdec.slots.attention import attend


class TargetReader(Drafter):
    """Has no state of its own, and nothing to read of a prompt."""

    reads_target = True

    def __init__(self, target: Target, num_draft_tokens: int = 4, **kind):
        super().__init__()
        self.num_draft_tokens = num_draft_tokens
        self.proposal = Proposal(**kind)
        self._target = target

    def validate(self, **target) -> None:
        self._target.check_unchanged()

    def init_state(self, *sizes, **target) -> None:
        pass

    def prefill(self, context, state) -> None:
        pass


class LayerDrafter(TargetReader):
    """Drafts with some of the target's layers, behind the text, over the target's own cache."""

    def __init__(self, target: Target, layers, num_draft_tokens: int = 4, **kind):
        super().__init__(target.part(layers), num_draft_tokens, **kind)

    def propose(self, context, state, drawing) -> Draft:
        tokens, drafting = roots(context), self.proposal.begin(drawing)
        for i in range(drawing.num_draft_tokens):
            logits, _ = context.target.forward(self._target, tokens, offset=i)
            tokens = drafting.draw(logits)
        return drafting.end()


class QueryDrafter(TargetReader):
    """A head of queries alone: it attends over the keys and values of the target's last layer."""

    feature_layers = ("final",)

    def __init__(self, target: Target, num_draft_tokens: int = 4, *, seed: int = 0, **kind):
        super().__init__(target, num_draft_tokens, **kind)
        config, model = target.config, target.model
        torch.manual_seed(seed)
        self._heads, width = config.num_attention_heads, config.hidden_size
        size = self._heads * (getattr(config, "head_dim", None) or width // self._heads)
        self.query, self.out = nn.Linear(2 * width, size), nn.Linear(size, width)
        self._embed, self._lm_head = model.get_input_embeddings(), model.get_output_embeddings()

    def propose(self, context, state, drawing) -> Draft:
        text, last = context.target, self._target.num_layers - 1
        keys, values = text.keys_values(last)
        options = AttentionOptions(sliding_window=text.window_of(last))
        tokens, drafting = roots(context), self.proposal.begin(drawing)
        index = (context.num_new - 1).clamp(min=0)[:, None, None]
        hidden = context.features.take_along_dim(index, dim=1)  # [B, 1, H]
        for _ in range(drawing.num_draft_tokens):
            seen = torch.cat([self._embed(tokens), hidden], dim=-1)
            query = self.query(seen).unflatten(-1, (self._heads, -1)).transpose(1, 2)
            hidden = hidden + self.out(
                attend(text.window(1), query, keys, values, options).flatten(2)
            )
            tokens = drafting.draw(self._lm_head(hidden))
        return drafting.end(torch.where(text.lengths > 0, drawing.num_draft_tokens, 0))


def roots(context) -> Tensor:
    """`[B, 1]`, the last committed token of each row, which the target has not read yet."""
    return context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])
