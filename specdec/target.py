"""`Target`: the HF model whose distribution the output must have."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.cache import SlotCache
from specdec.features import FeatureLayer
from specdec.slot_model import SlotModel
from specdec.types import Draft, TargetOutput


class Target:
    """Wraps an unmodified HF causal LM for prefill and verification.

    A target holds no state of a generation: the rows' keys, values and lengths live in the
    `SlotCache` that is passed in, so one target serves any number of generations at a time.

    Args:
        model: a decoder-only HF model in eval mode.
        feature_layers: which hidden states to return as features: boundary `b` is the residual
            stream after b decoder layers (0: embeddings), `"final"` the state after the final norm.
            Normally set by the drafter's needs.

    Raises:
        TypeError: `model` is not an HF model.
        ValueError: the model cannot be decoded this way, or a feature layer does not exist.

    Example:
        >>> from specdec import Target, zoo
        >>> target = Target(zoo.load_target())
        >>> cache = target.init_cache(batch_size=1, max_length=32)
        >>> tokens, lengths = torch.tensor([[5, 6, 7]]), torch.tensor([3])
        >>> features = target.prefill(cache, tokens, lengths, offset=0, reach=3)
        >>> cache.lengths
        tensor([3])
    """

    def __init__(self, model: PreTrainedModel, *, feature_layers: tuple[FeatureLayer, ...] = ()):
        self._slot_model = SlotModel(model)
        self.feature_layers = self._checked(feature_layers)

    def with_features(self, feature_layers: tuple[FeatureLayer, ...]) -> "Target":
        """A target over the same model that returns the given features.

        Raises:
            ValueError: a feature layer does not exist.
        """
        other = copy.copy(self)
        other.feature_layers = self._checked(feature_layers)
        return other

    def _checked(self, feature_layers: tuple[FeatureLayer, ...]) -> tuple[FeatureLayer, ...]:
        for layer in feature_layers:
            is_boundary = type(layer) is int and 0 <= layer <= self.num_layers
            if layer != "final" and not is_boundary:
                raise ValueError(
                    f"feature layer {layer!r} does not exist: expected 'final' or a boundary "
                    f"0..{self.num_layers}"
                )
        return tuple(feature_layers)

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped HF model."""
        return self._slot_model.model

    @property
    def vocab_size(self) -> int:
        """Vocabulary size V of the logits."""
        return self._slot_model.vocab_size

    @property
    def num_layers(self) -> int:
        """Decoder layers L."""
        return self._slot_model.num_layers

    @property
    def feature_width(self) -> int:
        """Width F of the features, 0 when there are none."""
        return len(self.feature_layers) * self._slot_model.config.hidden_size

    @property
    def max_positions(self) -> int | None:
        """Longest sequence that the model has positions for; `None` where the config is silent."""
        return self._slot_model.max_positions

    @property
    def device(self) -> torch.device:
        """Where tokens go in."""
        return self._slot_model.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self._slot_model.dtype

    def init_cache(self, batch_size: int, max_length: int) -> SlotCache:
        """Storage for `batch_size` rows of at most `max_length` tokens, allocated at the first
        forward.
        """
        return SlotCache(batch_size, max_length, device=self.device)

    def prefill(
        self, cache: SlotCache, tokens: Tensor, lengths: Tensor, *, offset: int, reach: int
    ) -> Tensor | None:
        """Reads one chunk of the prompts; rows shorter than the chunk leave nothing behind.

        No logits come back: the last prompt token is left to the first `verify`, so the first
        generated token is produced exactly as every other one.

        Args:
            cache: rows to extend.
            tokens: `[B, C]` prompt tokens of positions `offset..offset + C - 1`.
            lengths: `[B]` how many tokens of each prompt to read in all; positions at or beyond it
                are skipped.
            offset: position of the chunk's first token.
            reach: host upper bound of `lengths`.

        Returns:
            Features `[B, C, F]`, or `None`.
        """
        positions = offset + torch.arange(tokens.shape[1], device=tokens.device)
        slots = torch.where(positions < lengths[:, None], positions, cache.trash)
        end = min(offset + tokens.shape[1], reach)
        tokens = tokens.clamp(0, self.vocab_size - 1)  # behind a row's end there may be anything
        _, features = self._slot_model.forward(
            tokens, cache, slots, reach=end, logits_to_keep=1, feature_layers=self.feature_layers
        )
        torch.minimum(lengths, lengths.new_full((), offset + tokens.shape[1]), out=cache.lengths)
        return features

    def verify(
        self, cache: SlotCache, anchor: Tensor, draft: Draft, *, longest: int
    ) -> TargetOutput:
        """One forward over the anchor and the K draft tokens, behind the rows' committed tokens.

        Lengths are left alone: the loop extends them by what was accepted, and everything behind
        them is garbage to overwrite.

        Args:
            cache: rows to read; their windows' slots are overwritten.
            anchor: `[B]` the last committed token, not yet read by the target.
            draft: `[B, K]` tokens.
            longest: host upper bound of the rows' committed lengths, anchor included.

        Returns:
            Logits `[B, K + 1, V]` and features.
        """
        drafted = draft.tokens if draft.num_valid is None else draft.tokens.clamp(min=0)
        tokens = torch.cat([anchor[:, None], drafted], dim=1)  # [B, N]
        slots = cache.lengths[:, None] + cache.offsets[: tokens.shape[1]]
        logits, features = self._slot_model.forward(
            tokens,
            cache,
            slots,
            reach=longest + draft.tokens.shape[1],
            feature_layers=self.feature_layers,
        )
        return TargetOutput(logits, features)
