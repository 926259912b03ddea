"""An output is a record and a keyword: what a call keeps of every new token, by chains and trees,
eagerly and replayed, at any number of rows, and ended by criteria inside a block.
"""

import pytest
import torch

from specdec import PromptLookupDrafter, SpeculativeGenerator, zoo
from specdec.loop import outputs
from specdec.loop.outputs import Output
from specdec.request import keywords

PROMPTS = torch.tensor([[5, 6, 7], [9, 8, 7]])


def _entropies(state, draft, verdict, output, logits):
    rows = outputs._along(output.logits, draft, verdict).log_softmax(dim=-1)
    return -(rows.exp() * rows).sum(dim=-1)


def _largest(state, draft, verdict, output, logits):
    return outputs._along(output.logits, draft, verdict).topk(3, dim=-1).values


@pytest.fixture(autouse=True)
def _with_two_more(monkeypatch):
    """A number and a vector of each token, added as anybody would: two records and a keyword."""
    for record in (Output("entropies", _entropies, is_number=True), Output("largest", _largest)):
        monkeypatch.setitem(outputs.RECORDS, record.name, record)
    monkeypatch.setitem(keywords.OUTPUTS, "output_toy", ("entropies", "largest"))
    monkeypatch.setitem(keywords.GenerateOptions.__annotations__, "output_toy", bool)
    monkeypatch.setattr(keywords, "OURS", keywords.OURS)
    keywords.OURS.add("output_toy")
    yield
    keywords.OURS.discard("output_toy")


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["lookup", "eagle3", "tree"])
def test_a_new_output_is_that_of_a_forward_pass_over_the_text(name, graphs):
    target = zoo.load_target()
    if name == "lookup":
        drafter = PromptLookupDrafter(3)
    elif name == "eagle3":
        drafter = zoo.load_drafter("eagle3", target)
    else:
        drafter = zoo.load_drafter("eagle3", target, tree="6x3")
    generator = SpeculativeGenerator(target, drafter, graphs=graphs)

    def stop(ids, scores):
        return bool(ids.shape[1] > 12 and ids[0, -1] % 5 == 0)

    options = {"do_sample": True, "seed": [1, 2], "max_new_tokens": 20, "stopping_criteria": [stop]}
    result = generator.generate(PROMPTS, output_toy=True, output_logits=True, **options)
    plain = generator.generate(PROMPTS, **options)
    assert result.texts == plain.texts
    assert plain.outputs == {}
    assert plain.steps[0][0].outputs == {}
    assert list(result.outputs) == ["logits", "entropies", "largest"]
    for row, (prompt, text) in enumerate(zip(result.prompts, result.texts, strict=True)):
        with torch.no_grad():
            logits = generator.target.model(torch.tensor([prompt + text])).logits[0].float()
        logits, count = logits[len(prompt) - 1 : -1], len(text)
        own = logits.log_softmax(dim=-1)
        expected = -(own.exp() * own).sum(dim=-1)
        entropies = result.outputs["entropies"][row]
        torch.testing.assert_close(entropies[:count], expected, rtol=1e-3, atol=1e-3)
        assert not entropies[count:].any()
        told = [number for step in result.steps[row] for number in step.outputs["entropies"]]
        assert told == entropies[:count].tolist()
        largest = torch.stack(result.outputs["largest"], dim=1)[row]
        expected = logits.topk(3, dim=-1).values
        torch.testing.assert_close(largest[:count], expected, rtol=1e-3, atol=1e-2)
        assert largest[count:].isnan().all()
    assert set(result.to_dict()) == set(plain.to_dict()) | {"entropies", "largest"}
