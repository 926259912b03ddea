"""New EAGLE heads and their objectives: EAGLE-3's training-time test, EAGLE-1's feature and token
loss.

Row t of a head's input holds (embedding of token t + 1, feature of position t) and predicts token
t + 2, as in inference.

Legend: B rows, T tokens, R positions of a row that are trained, F width of all features together, M
unrolled steps, H width of the head, V vocabulary, Vd ids of the head, D width of an attention head.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import repeat
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_choice, check_number
from specdec.drafters.eagle import EagleDrafter, EagleHead
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.head.causal import attend_causally
from specdec.kernels import AttentionOptions
from specdec.kernels.types import CAUSAL
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.heads import layer_like, untrained, usual_hidden_states
from specdec.lab.training.kind import Kind
from specdec.lab.training.losses import HeadObjective, UnrolledObjective, losses_of

HeadKind = Literal["eagle1", "eagle3"]


def eagle_config(
    target: PreTrainedModel,
    kind: HeadKind,
    *,
    mlp_width: int | None = None,
    draft_vocab_size: int | None = None,
    window: int | None = None,
) -> EagleConfig:
    """The usual one-layer head for a target: its width and its attention heads.

    Args:
        target: an HF causal LM.
        kind: `"eagle1"`, or `"eagle3"` with the usual features.
        mlp_width: of the head's MLP; `None` is the target's own.
        draft_vocab_size: ids that an EAGLE-3 head can propose; `None` for all of the target's.
        window: an EAGLE-3 head sees so many positions of a text, the last ones; `None` for all.

    Example:
        >>> from specdec.lab import zoo
        >>> eagle_config(zoo.load_target(), "eagle3").feature_layers
        (2, 8, 13)
    """
    check_choice("kind", kind, ("eagle1", "eagle3"))
    theirs, is_first = target.config.get_text_config(), kind == "eagle1"
    if is_first and draft_vocab_size not in (None, theirs.vocab_size):
        raise ValueError(
            "an EAGLE-1 head uses the target's vocabulary head and proposes all of its ids; train "
            "'eagle3' for a smaller draft vocabulary"
        )
    if is_first and window is not None:
        raise ValueError(
            "no engine's files have EAGLE-1 heads with a window; train 'eagle3' with one"
        )
    return EagleConfig(
        fusion="input" if is_first else "attention",
        layer=layer_like(target, mlp_width=mlp_width, windows=() if window is None else (window,)),
        vocab_size=theirs.vocab_size,
        draft_vocab_size=draft_vocab_size or theirs.vocab_size,
        feature_layers=("final",) if is_first else usual_hidden_states(target),
        target_hidden_size=theirs.hidden_size,
        fc_bias=is_first,
        output_norm=not is_first,
        has_lm_head=not is_first,
    )


def new_head(
    target: PreTrainedModel,
    kind: HeadKind,
    *,
    mlp_width: int | None = None,
    target_ids: Tensor | None = None,
    window: int | None = None,
    seed: int = 0,
) -> EagleHead:
    """An untrained head in float32, on the CPU. An EAGLE-3 head's `lm_head` is initialised with the
    target's rows; an EAGLE-1 head uses the target's.

    Args:
        target, kind, mlp_width, window: as for `eagle_config`.
        target_ids: `[Vd]` int64, the target's ids that the head can propose (`frequent_ids`);
            `None` for all.
        seed: the weights depend on it alone.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = EagleDrafter(new_head(target, "eagle1"), target)
    """
    count = None if target_ids is None else len(target_ids)
    sizes = {"mlp_width": mlp_width, "draft_vocab_size": count, "window": window}
    config = eagle_config(target, kind, **sizes)
    return untrained(lambda: EagleHead(config, target_ids), target, seed=seed)


class TrainingTimeTest(UnrolledObjective):
    """Unrolls a head over its own outputs, as drafting will, and compares the distribution of every
    step with the target's.

    Step 0 reads the target's features. Step m reads at every position the output of step m - 1
    there, beside the token one further on. It attends to step 0 as a draft does to the committed
    rows, and to the later steps of its own position.

    Args:
        drafter, target, num_steps, step_weight, loss: as for `UnrolledObjective`.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = EagleDrafter(new_head(target, "eagle3"), target)
        >>> TrainingTimeTest(drafter, target)(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Li et al., arXiv:2503.01840, section 3.1 and Fig. 6.
    """

    def unroll(self, ids: Tensor, features: Tensor, angles: Tensor | None = None) -> list[Tensor]:
        """As `UnrolledObjective`'s. Step m at position t has read the text up to token t + m + 1
        and the target's features up to position t. `angles` `[B, 1, T + 1, 2 D]` are those of
        positions 0, 1, ... if `None`.
        """
        drafter, head = self.drafter, self.drafter.head
        count = ids.shape[1] - self.num_steps  # positions that have a label at every step
        embeds = drafter.embed(ids)
        angles = self.angles(ids.shape[1]) if angles is None else angles
        attention = UnrolledAttention()
        hidden, steps = head.fuse(features[:, :count]), []
        for m in range(self.num_steps):
            beside = embeds[:, 1 + m : 1 + m + count]
            out = head(beside, hidden, angles[:, :, m : m + count], attention)
            steps.append(out)
            hidden = head.feedback(out)
        return steps


class FeatureAndToken(HeadObjective):
    """EAGLE-1's objective: the next feature by a smooth L1 loss, and the target's distribution.

    Args:
        drafter, target, loss: as for `HeadObjective`.
        token_weight: of the loss of distributions beside that of features.
        noise: in training mode features are moved by up to this much, uniformly, so that the head
            learns to go on from its own errors. It comes from torch's global generator.

    Raises:
        ValueError: the head's output has not the width of what it reads, so it cannot predict it.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = EagleDrafter(new_head(target, "eagle1"), target)
        >>> FeatureAndToken(drafter, target)(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Li et al., arXiv:2401.15077, section 3.2.
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        target: PreTrainedModel,
        token_weight: float = 0.1,
        noise: float = 0.1,
        loss: Loss = soft_ce,
    ):
        super().__init__(drafter, target, loss)
        config = drafter.config
        if config.feature_width != config.hidden_size:
            raise ValueError(
                f"the head reads features of width {config.feature_width} and its output is "
                f"{config.hidden_size} wide; it cannot learn to predict them. Train it with "
                "TrainingTimeTest"
            )
        self.token_weight = check_number("token_weight", token_weight, 0)
        self.noise = check_number("noise", noise, 0)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss over ids `[B, T + 1]`."""
        (labels, features), head = self.read(ids, 1, "features"), self.drafter.head
        read = features[:, :-1]
        if self.training and self.noise:
            read = read + self.noise * (2 * torch.rand_like(read) - 1)
        embeds, angles = self.drafter.embed(ids[:, 1:]), self.angles(read.shape[1])
        out = head(embeds, head.fuse(read), angles, attend_causally)
        feature_loss = F.smooth_l1_loss(head.feedback(out).float(), features[:, 1:].float())
        due = labels.at(1, out.shape[1])
        (token_loss,) = losses_of(out, self.drafter.logits, due, self.loss)
        return feature_loss + self.token_weight * token_loss.mean()


class UnrolledAttention:
    """Attention of the unrolled steps: causal over step 0, and each position over its own later
    steps; in a layer with a sliding window over as many of these as drafting will see.

    An `Attend` function that keeps the keys and values of every step; make a new one for every
    forward.
    """

    def __init__(self):
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(
        self,
        index: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions = CAUSAL,
    ) -> Tensor:
        """`[B, Hq, R, D]`, of the step after those seen so far."""
        count, groups = query.shape[2], query.shape[1] // key.shape[1]
        keys = self._keys.setdefault(index, [])
        values = self._values.setdefault(index, [])
        keys.append(repeat(key, "b h r d -> b (h g) r d", g=groups))
        values.append(repeat(value, "b h r d -> b (h g) r d", g=groups))
        query = query * query.shape[-1] ** -0.5
        hidden = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
        step, window = len(keys) - 1, options.sliding_window
        if window is not None:  # the query of row t is at position t + step
            hidden |= torch.ones_like(hidden).tril(step - window)
        scores = (query @ keys[0].transpose(-1, -2)).masked_fill(hidden, -torch.inf)
        own = [(query * k).sum(dim=-1, keepdim=True) for k in keys[1:]]  # [B, Hq, R, 1]
        for at in range(1, step + 1 - (window or step + 1)):  # steps before the window
            own[at - 1] = torch.full_like(own[at - 1], -torch.inf)
        weights = torch.cat([scores, *own], dim=-1).float().softmax(dim=-1).to(query.dtype)
        out = weights[..., :count] @ values[0]
        for m, v in enumerate(values[1:]):
            out = out + weights[..., count + m : count + m + 1] * v
        return out


def _eagle1(target: PreTrainedModel, k: int, *, mlp_width=None, seed: int = 0, **losses: Any):
    drafter = EagleDrafter(new_head(target, "eagle1", mlp_width=mlp_width, seed=seed), target, k)
    return drafter, FeatureAndToken(drafter, target, **losses)


def _eagle3(
    target: PreTrainedModel,
    k: int,
    *,
    unrolled_steps: int = 5,
    mlp_width: int | None = None,
    target_ids: Tensor | None = None,
    window: int | None = None,
    seed: int = 0,
    **losses: Any,
):
    sizes = {"mlp_width": mlp_width, "target_ids": target_ids, "window": window, "seed": seed}
    drafter = EagleDrafter(new_head(target, "eagle3", **sizes), target, k)
    return drafter, TrainingTimeTest(drafter, target, unrolled_steps, **losses)


EAGLE3 = "draft_vocab_size", "unrolled_steps", "window", "mlp_width", "loss", "step_weights"
KINDS = {
    "eagle1": Kind(_eagle1, "eagle", {"method": "eagle"}, ("mlp_width", "loss")),
    "eagle3": Kind(_eagle3, "eagle", {"method": "eagle3"}, EAGLE3),
}
"""EAGLE-1 heads use the target's vocabulary head, and so propose all of its ids."""
