"""`Teacher`: the frozen target that objectives compare with; `SoftLabels`, what it predicts.

Legend: B rows, T tokens, F width of all features together, V vocabulary, Vd ids of the head.
"""

from types import SimpleNamespace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from specdec import processes
from specdec.hf.forward import forward_arguments
from specdec.lab.training.divergences import bounded
from specdec.targets.features import Features
from specdec.targets.view import private_view
from specdec.targets.views import catch_features
from specdec.types import FeatureLayer


class SoftLabels(NamedTuple):
    """The target's distributions at the ids that a head can propose, a quarter of the size that
    float32 probabilities of the whole vocabulary have: logits as the target computed them, and the
    one number per position that makes probabilities of them.

    Args:
        logits: `[B, T, Vd]`, in the target's data type.
        log_sums: `[B, T, 1]` float32, over the whole vocabulary.
    """

    logits: Tensor
    log_sums: Tensor

    @classmethod
    def of(cls, logits: Tensor, target_ids: Tensor | None = None) -> Self:
        """Those of the target's logits `[B, T, V]`, at ids `[Vd]`; `None` for all ids."""
        # Row by row: a float32 copy of all logits would be the largest tensor of a training step.
        log_sums = [row.float().logsumexp(dim=-1, keepdim=True) for row in logits]
        return cls(logits if target_ids is None else logits[..., target_ids], torch.stack(log_sums))

    def at(self, start: int, count: int) -> Self:
        """Those of `count` positions from `start` on."""
        return SoftLabels(*(tensor.narrow(1, start, count) for tensor in self))

    def gather(self, positions: Tensor) -> Self:
        """Those at positions `[B, A]` of each row."""
        logits, log_sums = (
            tensor.gather(1, positions[..., None].expand(-1, -1, tensor.shape[-1]))
            for tensor in self
        )
        return SoftLabels(logits, log_sums)

    def probs(self) -> Tensor:
        """`[..., Vd]` float32. The sum is below 1 where the head's ids lack probability mass."""
        return self.log_probs().exp()

    def log_probs(self) -> Tensor:
        """`[..., Vd]` float32, `bounded`."""
        return bounded(self.logits.float() - self.log_sums)


class Teacher:
    """A frozen target that returns logits, and features where an objective needs them.

    It is no module, so that an objective that holds it neither trains nor saves the target.

    Args:
        target: an HF causal LM; it is frozen, put into eval mode, and moved to where the ids are.
        feature_layers: hidden states, or `"final"`.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: tuple[FeatureLayer, ...] = ()):
        num_layers = target.config.get_text_config().num_hidden_layers
        for layer in feature_layers:
            if layer != "final" and not 0 <= layer <= num_layers:
                raise ValueError(
                    f"the head reads hidden state {layer}, and this target has {num_layers} "
                    "layers; pass the target that the drafter was made for"
                )
        self.target = target.eval().requires_grad_(False)
        self.feature_layers = feature_layers
        self._view = self.open_view(target)
        self._features: Features = {}  # of the last forward
        self._view.running = SimpleNamespace(window=SimpleNamespace(features=self._features))
        catch_features(self._view, feature_layers)

    def open_view(self, target: PreTrainedModel) -> PreTrainedModel:
        """The view that runs."""
        return private_view(target)

    @torch.compiler.disable  # any target, with hooks in it: only what is trained is compiled
    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits `[B, T, V]` and features `[B, T, F]` of ids `[B, T]`. The processes over which a
        target is spread read the rows of each in turn, and each keeps what is of its own.
        """
        if self.target.device != ids.device:
            self.target.to(ids.device)
        rows, own = processes.rows_of_all(ids, self.target)
        for index, each in enumerate(rows):
            if index == own:
                kept = self._read(each)
            else:
                self._take_part(each)
        return kept

    def _take_part(self, ids: Tensor) -> None:
        """In the forward of another process's rows, of which nothing is kept."""
        head = self.target.get_output_embeddings()
        is_whole = head is not None and not any(isinstance(w, DTensor) for w in head.parameters())
        takes = "logits_to_keep" in forward_arguments(self.target)
        # A vocabulary head in parts needs all processes for all rows.
        fewest = {"logits_to_keep": 1} if is_whole and takes else {}
        self._view(input_ids=ids, use_cache=False, **fewest)
        self._features.clear()

    def _read(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = self._view(input_ids=ids, use_cache=False).logits
        if not self.feature_layers:
            return logits, None
        features = torch.cat([self._features[layer] for layer in self.feature_layers], dim=-1)
        self._features.clear()  # they would take memory until the next forward
        return logits, features
