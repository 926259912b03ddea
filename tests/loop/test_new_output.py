"""An output is a record of `loop.outputs` and an option of `request.keywords`, nothing else."""

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts

from specdec import SpeculativeGenerator
from specdec.loop.outputs import RECORDS, Output
from specdec.request import keywords, options


def entropies(state, draft, verdict, output, logits):
    """Of the target after each token, in nats; of chains."""
    logprobs = output.logits.double().log_softmax(dim=-1)
    return -(logprobs.exp() * logprobs).sum(dim=-1).float()


@pytest.fixture(name="asked")
def _asked(monkeypatch):
    name = "output_entropies"
    monkeypatch.setitem(RECORDS, "entropies", Output("entropies", entropies, is_number=True))
    monkeypatch.setitem(keywords.OUTPUTS, name, ("entropies",))
    monkeypatch.setitem(keywords.GenerateOptions.__annotations__, name, bool)
    monkeypatch.setattr(keywords, "OURS", keywords.OURS | {name})
    monkeypatch.setattr("specdec.request.call.OURS", keywords.OURS | {name})
    monkeypatch.setattr(options, "_FLAGS", options._FLAGS | {name})
    return {name: True}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_new_output_is_kept_of_every_new_token_and_of_no_other_call(asked, graphs):
    model, (ids, mask) = build("llama"), ragged_prompts(VOCAB, 7, 3)
    generator = SpeculativeGenerator(model, "lookup", graphs=graphs)
    result = generator.generate(ids, mask, max_new_tokens=9, eos_token_id=[], **asked)
    for row, length in enumerate((7, 3)):
        text = torch.cat([ids[row, -length:], result.new_tokens[row]])[None]
        with torch.no_grad():
            logits = model(text).logits[0, length - 1 : -1].double()
        expected = torch.distributions.Categorical(logits=logits).entropy().float()
        found = result.outputs["entropies"][row]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert "entropies" not in generator.generate(ids, mask, max_new_tokens=9).outputs
