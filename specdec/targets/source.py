"""`CausalDecoder`: an encoder-decoder of HF's as a causal LM of the text that its decoder writes.

What the encoder made of a row's *source* (a text, sound, a picture) is read by the cross attention
of the decoder's layers, whose keys and values are row inputs (`edits/cross.py`): made once per
call, owned by the state of a batch, and dropped with the row.

Legend: B rows, T tokens of the decoder, S positions of the source, E width of the encoder.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from specdec.hf.encoders import cross_attentions, is_composite, position_tables
from specdec.hf.forward import cache_argument

SOURCE = "source_cache", "source_mask", "source_ids"
"""Names of row inputs: keys and values of the cross attention, `[B, layers, 2, heads, S, width]`,
which positions of the source there are, `[B, S]` bool, and their ids `[B, S]` where the source is
text, -1 where there is none."""


class CausalDecoder(PreTrainedModel, GenerationMixin):
    """An encoder-decoder seen as a causal LM: its forward reads ids of the decoder, and what its
    encoder made of the source.

    Args:
        whole: HF's model, which stays the user's own.

    Raises:
        ValueError: its decoder layers have no cross attention by a name that is known.
    """

    base_model_prefix = "decoder"
    reads_source = True

    def __init__(self, whole: PreTrainedModel):
        torch.nn.Module.__init__(self)  # HF's own makes a generation_config, and checks
        self.whole = whole
        count = len(cross_attentions(self.decoder))
        if not count or not isinstance(self.decoder, PreTrainedModel):
            raise ValueError(
                f"{type(whole).__name__} is an encoder-decoder model whose decoder layers have no "
                "cross attention that specdec knows (encoder_attn, EncDecAttention); use HF "
                "generate for it"
            )
        self.config = config = copy.deepcopy(self.decoder.config)
        config.is_encoder_decoder, config.is_decoder = False, True
        config.num_hidden_layers = count
        for module, name, offset in position_tables(self.decoder):
            config.max_position_embeddings = len(getattr(module, name)) - offset
        self.cache_name, self.is_composite = cache_argument(whole), is_composite(whole)
        self.source_width = whole.get_encoder().config.hidden_size
        # Messages name the class that the user knows.
        self.__class__ = type(type(whole).__name__, (CausalDecoder,), {"__module__": __name__})

    def __reduce__(self) -> tuple:
        return CausalDecoder, (self.whole,)

    @property
    def training(self) -> bool:
        """Of the whole model."""
        return self.whole.training

    @training.setter
    def training(self, mode: bool) -> None:
        """A module of torch's sets it, and there is nothing to set."""

    @property
    def decoder(self) -> PreTrainedModel:
        """HF's own."""
        return self.whole.get_decoder()

    @property
    def generation_config(self) -> GenerationConfig:
        """That of the whole model, unless this is a copy with another one."""
        return vars(self).get("own_generation_config") or self.whole.generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        vars(self)["own_generation_config"] = config

    def get_input_embeddings(self) -> torch.nn.Module:
        """Of the decoder."""
        return self.decoder.get_input_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        """The vocabulary head."""
        return self.whole.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        encoder_outputs: BaseModelOutput | None = None,
        source_mask: Tensor | None = None,
        **own: Any,
    ) -> Any:
        """HF's forward of the whole model behind its encoder.

        Args:
            input_ids: `[B, T]` of the decoder.
            attention_mask: over them.
            cache: HF's.
            encoder_outputs: with `last_hidden_state` `[B, S, E]`; `None` in a view that reads row
                inputs, or no source at all.
            source_mask: `[B, S]`, HF's `attention_mask`.
            own: what else HF takes.
        """
        if encoder_outputs is None:
            if "running" not in vars(self):
                raise ValueError(
                    f"expected encoder_outputs, which the decoder of {type(self).__name__} reads "
                    "in every step, got none; call generate of a generator, or the whole model"
                )
            shape = len(input_ids), 0, self.source_width
            nothing = torch.zeros(shape, dtype=self.dtype, device=input_ids.device)
            encoder_outputs = BaseModelOutput(last_hidden_state=nothing)
        if self.is_composite and "slot_window" in own:
            own["decoder_slot_window"] = own.pop("slot_window")
        return self.whole(
            encoder_outputs=encoder_outputs,
            attention_mask=source_mask,
            decoder_input_ids=input_ids,
            decoder_attention_mask=attention_mask,
            **{self.cache_name: cache},
            **own,
        )

    def trial_source(self, texts: Tensor) -> dict[str, Any]:
        """Arguments of `forward` for texts `[B, T]` of a self-test: states of a source that belongs
        to each text's first token, so that no two texts, and no two rows by their places, have the
        same. Sources have other lengths, and holes.
        """
        states: list[Tensor] = []
        lengths = [4 + first % 5 for first in texts[:, 0].tolist()]
        mask = torch.zeros(len(texts), 9, dtype=torch.long, device="cpu")
        for row, first in enumerate(texts[:, 0].tolist()):
            own = {"generator": torch.Generator().manual_seed(first), "device": "cpu"}
            states.append(torch.randn(9, self.source_width, **own))
            mask[row, : lengths[row]] = 1
            mask[row, first % 3] = 0
        states = torch.stack(states).to(texts.device, self.dtype)
        made = BaseModelOutput(last_hidden_state=states)
        return {"encoder_outputs": made, "source_mask": mask.to(texts.device)}
