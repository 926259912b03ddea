"""New multi-token prediction heads and their objective: every depth beside the next, on a frozen
target.

Depth d at index t reads token t + d + 1 beside the hidden state of index t, and predicts token
t + d + 2, as in inference.

Legend: B rows, T tokens, R indices of a row that are trained, D depths, F width of features, H
width of the head, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.checkpoints.layout import Layout
from specdec.checkpoints.mtp import config_for, layout_of
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.head.window import Pass
from specdec.drafters.mtp.drafter import MTPDrafter
from specdec.drafters.mtp.head import MTPConfig, MTPHead, Semantics
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.heads import layer_like, untrained
from specdec.lab.training.kind import Kind
from specdec.lab.training.losses import UnrolledObjective
from specdec.lab.training.step_weights import StepWeights


def mtp_config(
    target: PreTrainedModel,
    num_depths: int | None = None,
    *,
    semantics: Semantics = "chain",
    mlp_width: int | None = None,
    layout: str | Layout | None = None,
) -> MTPConfig:
    """The usual head for a target: depths of its width and its attention heads, DeepSeek's wiring,
    the target's embeddings and vocabulary head.

    Args:
        target: an HF causal LM.
        num_depths: D; by default 3, with a layout 1.
        semantics: as in `MTPConfig`.
        mlp_width: of the depths' MLPs; `None` is the target's own.
        layout: `"DeepSeek"`, `"Qwen"` or `"MiMo"`: decoder layers and wiring that engines take
            from the name of the producer, for `save_pretrained(folder, layout, target)`; or a
            record of your own.

    Raises:
        ValueError: `semantics` or `mlp_width` beside a layout, which says both; a target that the
            layout is not for.

    Example:
        >>> from specdec.lab import zoo
        >>> mtp_config(zoo.load_target()).num_layers
        3
        >>> mtp_config(zoo.load_target(), layout="DeepSeek").layer.layer_class.__name__
        'LlamaDecoderLayer'
    """
    usual = 3 if layout is None else 1
    num_depths = check_integer("num_depths", usual if num_depths is None else num_depths, 1)
    if layout is None:
        return MTPConfig(
            layer=layer_like(target, mlp_width=mlp_width),
            vocab_size=target.config.get_text_config().vocab_size,
            num_layers=num_depths,
            semantics=semantics,
        )
    record = layout_of(layout)
    if semantics != "chain" or mlp_width is not None:
        raise ValueError(f"semantics and mlp_width are {record.name}'s own; leave them out")
    return config_for(target, record, num_depths)


def new_head(
    target: PreTrainedModel,
    num_depths: int | None = None,
    *,
    seed: int = 0,
    **flags: Any,
) -> MTPHead:
    """An untrained head in float32, on the CPU.

    Args: as `mtp_config`; the weights depend on `seed` alone.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = MTPDrafter(new_head(target), target, num_draft_tokens=3)
    """
    config = mtp_config(target, num_depths, **flags)
    return untrained(lambda: MTPHead(config), target, seed=seed)


class MultiTokenPrediction(UnrolledObjective):
    """Compares the distribution of every depth with the target's at the same token.

    Depths run one after the other over the whole text, as they do while drafting: the entries of
    a depth depend on the tokens of the text alone, so one causal pass per depth trains it.

    Args:
        drafter: whose head is to be trained; D is the number of depths that it uses.
        target, loss: as for `HeadObjective`.
        depth_weight: the weight of a depth, as a multiple of that of the depth before; or a
            `StepWeights`.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = MTPDrafter(new_head(target), target, num_draft_tokens=3)
        >>> MultiTokenPrediction(drafter, target)(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: DeepSeek-AI, arXiv:2412.19437, eqs. 21 to 25, with the target's distribution in the
    place of the text's next token.
    """

    def __init__(
        self,
        drafter: MTPDrafter,
        target: PreTrainedModel,
        depth_weight: float | StepWeights = 1.0,
        loss: Loss = soft_ce,
    ):
        super().__init__(drafter, target, drafter.num_depths, depth_weight, loss)
        if drafter.num_depths < drafter.config.num_layers:
            raise ValueError(
                f"the drafter uses {drafter.num_depths} of its head's {drafter.config.num_layers} "
                "depths; give it at least as many num_draft_tokens"
            )

    def logits(self, out: Tensor, step: int) -> Tensor:
        """Logits `[n, V]` of the outputs `[n, H]` of a depth."""
        return self.drafter.logits(out, depth=step)

    def unroll(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """The outputs of every depth, as `UnrolledObjective`'s."""
        drafter, head = self.drafter, self.drafter.head
        count = ids.shape[1] - drafter.num_depths  # indices that have a label at every depth
        hidden, embeds = head.fuse(features[:, :count]), drafter.embed(ids)
        whole = torch.arange(count, device=head.device)[None]  # no cache
        step, steps = Pass(self.angles(count), attend_causally, whole), []
        for depth in range(drafter.num_depths):
            out = head(depth, embeds[:, 1 + depth : 1 + depth + count], hidden, step)
            steps.append(out)
            if drafter.config.semantics == "chain":
                hidden = head.feedback(depth, out)
        return steps


def _new(target: PreTrainedModel, k: int, *, depths: int | None = None, **rest: Any):
    sizes = {name: rest.pop(name) for name in ("layout", "mlp_width", "seed") if name in rest}
    head = new_head(target, depths, **sizes)
    drafter = MTPDrafter(head, target, max(k, head.config.num_layers))
    return drafter, MultiTokenPrediction(drafter, target, **rest)


MTP = "depths", "mlp_width", "layout", "loss", "step_weights"
KINDS = {"mtp": Kind(_new, "mtp", {"method": "mtp"}, MTP, weights="depth_weight")}
