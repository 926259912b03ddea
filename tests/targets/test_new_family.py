"""An attention type is a row of `targets.families` and a file: here of a Llama whose queries are
multiplied by numbers that its own code looks up on the host, so that no step could be captured.
"""

import sys
from types import ModuleType

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from transformers.models.llama.modeling_llama import LlamaAttention

from specdec import SpeculativeGenerator
from specdec.graphs.capture import CaptureError
from specdec.targets import families


class GainedAttention(LlamaAttention):
    """HF's, with a gain of the hidden states."""

    def gained(self, hidden):
        """The host reads the gain."""
        return hidden * self.gain.item()

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(self.gained(hidden_states), *args, **kwargs)


def gained_llama():
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = GainedAttention
        layer.self_attn.register_buffer("gain", torch.tensor(0.7))
    return model


def edit(view, attention=None):
    """The gain is multiplied where it is."""
    for module in view.modules():
        if isinstance(module, GainedAttention):
            module.gained = lambda hidden, gain=module.gain: hidden * gain


@pytest.fixture(name="family")
def _family(monkeypatch):
    file = ModuleType("specdec.targets.edits.gained")
    file.edit = edit
    monkeypatch.setitem(sys.modules, file.__name__, file)
    monkeypatch.setitem(families.FAMILIES, "gained", lambda module: hasattr(module, "gain"))


OPTIONS = {"max_new_tokens": 9, "eos_token_id": [], "pad_token_id": 0}


def test_a_row_and_a_file_make_its_steps_captured(family):
    ids, mask = ragged_prompts(VOCAB, 7, 3)
    model = gained_llama()
    found = SpeculativeGenerator(model, "lookup", graphs=True).generate(ids, mask, **OPTIONS)
    for row, length in enumerate((7, 3)):
        alone = model.generate(ids[row : row + 1, -length:], do_sample=False, **OPTIONS)
        assert found.new_tokens[row].equal(alone[0, length:])


def test_without_them_they_are_not():
    ids, mask = ragged_prompts(VOCAB, 7, 3)
    with pytest.raises(CaptureError, match="copies a tensor to the host"):
        SpeculativeGenerator(gained_llama(), None, graphs=True).generate(ids, mask, **OPTIONS)
