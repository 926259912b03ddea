"""`Target`: the HF model whose distribution the output must have."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_choice, check_integer, shown
from specdec.target.cache import SlotCache
from specdec.target.features import FeatureLayer
from specdec.target.hf_model import SlotModel
from specdec.types import Draft, TargetOutput


class Target(SlotModel):
    """Wraps an unmodified HF causal LM for prefill and verification.

    A target holds no state of a generation: the rows' keys and values live in the `SlotCache` that
    is passed in, and their lengths with the caller, so one target serves any number of generations
    at a time, in any number of threads.

    Args:
        model: a decoder-only HF model in eval mode.
        feature_layers: which hidden states to return as features: boundary `b` is the residual
            stream after b decoder layers (0: embeddings), `"final"` the state after the final norm.
            Normally set by the drafter's needs.
        fuse: all that makes a step faster and changes no more than rounding. Products of q, k, v
            and of gate, up become one product each: their parameters, still the model's own, become
            views of one buffer each. The small work between products (norms, rotary embeddings,
            gated activations) is compiled with Inductor, which takes some seconds at first. The
            self-test holds both to its limits, and `notes` says what was done and what was not.

    Raises:
        TypeError: `model` is not an HF model.
        ValueError: the model cannot be decoded this way, or a feature layer does not exist.

    Example:
        >>> from specdec import Target, zoo
        >>> from specdec.types import Draft
        >>> target = Target(zoo.load_target())
        >>> cache, text = target.init_cache(batch_size=1, num_slots=32), torch.tensor([[5, 6, 7]])
        >>> target.prefill(cache, text, torch.tensor([2]), offset=0)
        >>> nothing = Draft(text[:, :0])
        >>> out = target.verify(cache, torch.tensor([2]), text[:, 2], nothing, num_attended=3)
        >>> out.logits.shape
        torch.Size([1, 1, 2048])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        feature_layers: tuple[FeatureLayer, ...] = (),
        fuse: bool = False,
    ):
        super().__init__(model, fuse=check_choice("fuse", fuse, (True, False)))
        self.feature_layers = self._checked(feature_layers)

    def with_features(self, feature_layers: tuple[FeatureLayer, ...]) -> Target:
        """A target over the same model that returns the given features.

        Raises:
            ValueError: a feature layer does not exist.
        """
        other = copy.copy(self)
        other.feature_layers = self._checked(feature_layers)
        return other

    def _checked(self, feature_layers: Sequence[FeatureLayer]) -> tuple[FeatureLayer, ...]:
        if not isinstance(feature_layers, tuple | list):
            got = f"got {shown(feature_layers)}"
            raise TypeError(f"feature_layers must be a tuple, {got}; boundaries, or 'final'")
        for layer in feature_layers:
            is_boundary = type(layer) is int and 0 <= layer <= self.num_layers
            if layer != "final" and not is_boundary:
                raise ValueError(
                    f"feature layer {layer!r} does not exist: expected 'final' or a boundary "
                    f"0..{self.num_layers}"
                )
        return tuple(feature_layers)

    @property
    def feature_width(self) -> int:
        """Width F of the features, 0 when there are none."""
        return len(self.feature_layers) * self.config.hidden_size

    def prefill(
        self,
        cache: SlotCache,
        tokens: Tensor,
        lengths: Tensor,
        *,
        offset: int | Tensor,
        num_attended: int | None = None,
    ) -> Tensor | None:
        """Reads one chunk of the prompts; rows shorter than the chunk write nothing.

        No logits come back: the last prompt token is left to the first `verify`, so the first
        generated token is produced exactly as every other one.

        Args:
            cache: rows to extend.
            tokens: `[B, C]` prompt tokens of positions `offset..offset + C - 1`.
            lengths: `[B]` how many tokens of each prompt to read in all; positions at or beyond it
                are skipped.
            offset: position of the chunk's first token; a tensor `[]` where it is on the device.
            num_attended: host upper bound of the positions in use, the chunk's included; `None` is
                `offset + C`.

        Returns:
            Features `[B, C, F]`, or `None`.
        """
        _check_rows(cache, tokens)
        if num_attended is None:
            num_attended = check_integer("offset", offset, 0) + tokens.shape[1]
        positions = offset + torch.arange(tokens.shape[1], device=tokens.device)
        slots = torch.where(positions < lengths[:, None], positions, cache.trash)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # after a row's end there may be anything
        _, features = self.forward(
            tokens, cache, slots, num_attended=num_attended, logits_to_keep=1, is_chunk=True
        )
        return features

    def verify(
        self, cache: SlotCache, start: Tensor, anchor: Tensor, draft: Draft, *, num_attended: int
    ) -> TargetOutput:
        """One forward over the anchor and the K draft tokens, a chain or a tree: nodes stand at
        positions by their depth, and see the text and their ancestors.

        Keys and values of the window are written, token after token; what is not accepted is
        garbage that the next window overwrites.

        Args:
            cache: rows to read.
            start: `[B]` position of the anchor.
            anchor: `[B]` the last committed token, not yet read by the target.
            draft: `[B, K]` tokens of the target's vocabulary.
            num_attended: host upper bound of the positions in use, the window's included:
                `max(start) + 1 + K` or more. It is believed, since `start` is on the device; with a
                smaller number slots in use are not attended, and the logits are wrong.

        Returns:
            Logits `[B, K + 1, V]` and features.
        """
        _check_rows(cache, draft.tokens)
        tokens = torch.cat([anchor[:, None], draft.tokens], dim=1)  # [B, N]
        slots = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
        tree = {}
        if draft.parents is not None:
            tree = {"positions": start[:, None] + draft.depths, "visible": draft.ancestors}
        return TargetOutput(*self.forward(tokens, cache, slots, num_attended=num_attended, **tree))


def _check_rows(cache: SlotCache, tokens: Tensor) -> None:
    if len(tokens) != cache.num_rows:
        raise ValueError(f"the cache has {cache.num_rows} rows, got tokens of {len(tokens)}")
