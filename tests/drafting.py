"""Drafters of known quality and batches of unequal prompts, shared by tests of the whole loop."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import Drafter, ModelDrafter, NoDrafter
from specdec.samplers import Drawing, draw_by_inversion
from specdec.types import Draft


def perturbed(model: PreTrainedModel, *, seed: int = 9, scale: float = 0.1) -> PreTrainedModel:
    """A copy with noise on its matrices: right often enough, and wrong often enough."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(scale * parameter.std() * noise.to(parameter))
    return other


def drawing(
    drafter: Drafter, logits_filter, noise, *, rule=draw_by_inversion, wants_probs=True
) -> Drawing:
    """What a step tells a drafter, all of its tokens being wanted."""
    return Drawing(drafter.num_draft_tokens, logits_filter, noise, rule, wants_probs)


class NumberedRows(NoDrafter):
    """Its state is the number of each row, and one more: which row of the batch it is."""

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        """No row has a number yet."""
        return torch.zeros(batch_size, dtype=torch.long, device=device)

    def prefill(self, context, rows) -> None:
        """Before any row has ended."""
        rows.copy_(torch.arange(1, len(rows) + 1))


class WrongDrafter(Drafter):
    """Asks the target itself and proposes, as a point mass, the id after the one it would pick."""

    def __init__(self, target: PreTrainedModel, num_draft_tokens: int = 4):
        super().__init__()
        self.num_draft_tokens = num_draft_tokens
        self._right = ModelDrafter(target, num_draft_tokens)

    def validate(self, **target) -> None:
        self._right.validate(**target)

    def init_state(self, *sizes, **target):
        return self._right.init_state(*sizes, **target)

    def prefill(self, context, state) -> None:
        self._right.prefill(context, state)

    def propose(self, context, state, drawing) -> Draft:
        """One beside the truth at every position."""
        draft = self._right.propose(context, state, drawing)
        return Draft((draft.tokens + 1) % state.vocab_size, None, draft.num_valid)


def ragged_prompts(vocab_size: int, *lengths: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random prompts of the given lengths, padded on the left with 0: ids and mask `[B, T]`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, vocab_size, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def to_right_padding(ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The same prompts, padded on the right."""
    order = mask.argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, order), mask.gather(1, order)


class ConstantDrafter(NoDrafter):
    """Proposes one and the same token everywhere."""

    def __init__(self, token: int, num_draft_tokens: int = 4):
        super().__init__()
        self.token = token
        self.num_draft_tokens = num_draft_tokens

    def propose(self, context, state, drawing) -> Draft:
        """The token, K times, as a point mass."""
        rows = len(context.start)
        return Draft(torch.full((rows, drawing.num_draft_tokens), self.token))
