"""What training minimises: modules that map ids `[B, T + 1]` to a mean loss.

Targets are run on the fly and never trained; an objective holds them outside its parameters.

Legend: B rows of a batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.target.features import PlainFeatures


class NextToken(nn.Module):
    """Cross-entropy of the text's next tokens: pre-training of a language model.

    Args:
        model: an HF causal LM.

    Example:
        >>> from specdec import zoo
        >>> NextToken(zoo.load_target())(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per token of ids `[B, T + 1]`."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class Distillation(nn.Module):
    """Cross-entropy to the target's next-token law: KL(target || draft) and a constant.

    Args:
        model: the draft LM.
        target: the teacher, of the same vocabulary; frozen.

    Example:
        >>> from specdec import zoo
        >>> target = zoo.load_target()
        >>> objective = Distillation(zoo.load_drafter("model").model, target)
        >>> objective(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])

    Reference: Hinton et al., arXiv:1503.02531; Zhou et al., arXiv:2310.08461 (DistillSpec).
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel):
        super().__init__()
        self.model = model
        self._teacher = Teacher(target)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per token of ids `[B, T + 1]`."""
        teacher, _ = self._teacher(ids[:, :-1])
        student = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return soft_cross_entropy(student, teacher)


class Teacher:
    """A frozen target that gives logits, and features where they are asked for.

    It is no module, so that whoever holds it neither trains nor saves the target.

    Args:
        target: an HF causal LM; it is frozen, put into eval mode, and moved to where the ids are.
        feature_layers: boundaries, or `"final"`.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: tuple = ()):
        self.target = target.eval().requires_grad_(False)
        self.feature_layers = feature_layers
        num_layers = target.config.get_text_config().num_hidden_layers
        self._plain = PlainFeatures(target, num_layers, feature_layers)

    @torch.compiler.disable  # any target, with hooks in it: only what is trained is compiled
    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits `[B, T, V]` and features `[B, T, F]` of ids `[B, T]`."""
        target = self.target
        if target.device != ids.device:
            target.to(ids.device)
        logits = self._plain.model(input_ids=ids, use_cache=False).logits
        if not self.feature_layers:
            return logits, None
        caught = [self._plain.features[layer] for layer in self.feature_layers]
        return logits, torch.cat(caught, dim=-1)


def soft_cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over places of `-sum_v teacher_v log student_v`, from logits `[B, T, V]` of both."""
    return F.cross_entropy(
        student.float().flatten(0, 1), teacher.float().flatten(0, 1).softmax(dim=-1)
    )
