"""`Target`: the model whose distribution the output must have."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from specdec.arguments import check_choice
from specdec.targets.edits.edit import Edit
from specdec.targets.slot_model import SlotModel
from specdec.types import FeatureLayer

if TYPE_CHECKING:
    from specdec.slots.spans import Chunk
    from specdec.targets.prompt_inputs import PromptInputs

MAX_VOCAB_PADDING = 1024
"""Vocabularies that share a tokenizer differ by the padding of their embedding tables, at most by
this, and at most by an eighth of the larger one.
"""


class Target(SlotModel):
    """Wraps an unmodified HF causal LM for prefill and verification.

    A target holds no state of a generation: the rows' keys and values live in the `SlotCache` that
    is passed in, and their lengths with the caller, so one target serves any number of generations
    at a time, in any number of threads.

    Args:
        model: a decoder-only HF model in eval mode.
        feature_layers: which hidden states to return as features: hidden state `b` is the residual
            stream after b decoder layers (0: embeddings), `"final"` the state after the final norm.
            Normally set by the drafter's needs.
        fuse: all that makes a step faster and changes no more than rounding. Products of q, k, v
            and of gate, up become one product each: their parameters, still the model's own, become
            views of one buffer each. The small work between products (norms, rotary embeddings,
            gated activations) is compiled with Inductor, which takes some seconds at first, and
            int8 and float8 weights of torchao's are multiplied as they are. The self-test holds
            all to its limits, and `notes` says what was done and what was not. `False` leaves this
            out, but not attention to latents and experts that do not wait for the device. `None`
            leaves out these, too: all products are those of HF's modules.
        edits: functions that each change a private view of the model: interventions, such as
            steering of new tokens alone. They are what the target is: text is that of the edited
            model, and features and a `SelfDrafter` see them. The model itself stays as it is. A
            self-test compares windows of several sizes with one window over the whole text: an edit
            that depends on how a text is cut raises ValueError. See `specdec.targets.window_of`.

    Raises:
        TypeError: `model` is not an HF model, or `edits` is no tuple of functions.
        ValueError: the model cannot be decoded this way, or a feature layer does not exist.

    Example:
        >>> from specdec import Target, zoo
        >>> from specdec.types import Draft
        >>> target = Target(zoo.load_target())
        >>> cache, text = target.init_cache(batch_size=1, num_slots=32), torch.tensor([[5, 6, 7]])
        >>> target.prefill(cache, text, torch.tensor([2]), offset=0)
        >>> nothing = Draft(text[:, :0])
        >>> out = target.verify(cache, torch.tensor([2]), text[:, 2], nothing)
        >>> out.logits.shape
        torch.Size([1, 1, 2048])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        feature_layers: tuple[FeatureLayer, ...] = (),
        fuse: bool | None = False,
        edits: Sequence[Edit] = (),
    ):
        super().__init__(model, fuse=check_choice("fuse", fuse, (True, False, None)), edits=edits)
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
        """These as a tuple; raises `ValueError` for those that do not exist."""
        from specdec.targets.features import check_layers

        return check_layers(feature_layers, self.model, self.route)

    def part(self, layers: Sequence[int]) -> Target:
        """A target that runs some of the decoder layers, then the final norm and the vocabulary
        head, over the same cache: what a drafter runs behind the text.

        Args:
            layers: indices of those that run; a layer left out hands on what it was given.

        Raises:
            ValueError: a layer that does not exist, or some are to be left out of a model with
                recurrent ones.
        """
        from specdec.targets.edits.layers import check_part

        check_part(layers, self.model, self.route)
        other = copy.copy(self)
        other.layers = tuple(layers)
        _ = other._views  # no cache is asked of a part, and a step is no time to open them
        return other

    @property
    def row_inputs(self) -> tuple[str, ...]:
        """Names of what a call may bring for each row: `"adapter"` for layers of PEFT's, what
        an encoder made of a source, and what edits declare.
        """
        of_edits = (name for edit in self.edits for name in getattr(edit, "row_inputs", ()))
        return tuple(dict.fromkeys(("position_offset", *self.own_inputs, *of_edits)))

    def activation(
        self, tokens: Tensor, lengths: Sequence[int], given: Mapping[str, Any] | None
    ) -> Mapping[str, Any] | None:
        """What a call brought for each row, with where Activated LoRA of PEFT's begins in prompts.

        Args:
            tokens: `[B, L]`, each row's prompt from the first column on.
            lengths: tokens of each prompt.
            given: `row_inputs` of the call.
        """
        from specdec.targets.edits.adapters import activation

        return {**activation(self.outer, self.model, tokens, lengths), **(given or {})}

    def adapter_indices(self, names: Sequence[str]) -> list[int]:
        """Numbers of the rows' adapters, for `SlotCache.row_inputs`, from PEFT's names,
        `"__base__"` for none.

        Raises:
            TypeError: not a sequence of names.
            ValueError: no such adapter, or layers that cannot have one for each row: others than
                plain LoRA, or such that do not get the tokens by rows, as a forward shows.
        """
        from specdec.targets.edits.adapters import tried_indices

        return tried_indices(self, names)

    @property
    def layer_windows(self) -> Mapping[int, int | Chunk | None]:
        """Sliding window of each attention layer, in positions, or its `Chunk`; `None` for full
        attention.
        """
        return self.route.layer_windows

    @property
    def feature_width(self) -> int:
        """Width F of the features, 0 when there are none."""
        return sum(self.feature_widths(self.feature_layers))

    def feature_widths(self, layers: Sequence[FeatureLayer]) -> list[int]:
        """Width of each of these features."""
        from specdec.targets.features import widths

        return widths(layers, self.config, self.route)

    @torch.inference_mode()
    def read_prompts(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor,
        given: Mapping[str, Any],
        config: GenerationConfig | None = None,
    ) -> PromptInputs:
        """Prompts that are more than ids, as the model's own `generate` prepares them and its own
        outer forward hands them to its text decoder. Towers run once, by the model's modules. The
        first prompts of a kind are tried: HF goes on with them for a few tokens, and
        windows over slots must have the same logits.

        Args:
            input_ids: `[B, L]`, padded on the left; `None` for embeddings alone.
            attention_mask: `[B, L]`, 1 for tokens.
            given: what `generate` takes beside them, by name.
            config: where HF has prepared them for a decoding method, what it hands to one; `given`
                is then the rest of that.

        Raises:
            ValueError: a model that reads nothing but text, or such prompts otherwise than slots
                can hold; with the reason.
        """
        from specdec.targets.trial.prompts import read_prompts

        return read_prompts(self, input_ids, attention_mask, given, config)
