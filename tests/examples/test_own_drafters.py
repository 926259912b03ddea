"""Drafters of the examples draft in batches, and leave greedy text as it is."""

import json

import pytest
import torch

from examples.grammar_drafter import GrammarDrafter
from examples.last_seen_drafter import LastSeenDrafter
from examples.layer_drafter import LayerDrafter
from examples.nested_drafter import NestedDrafter
from examples.query_drafter import QueryDrafter
from specdec import CouplingSampler, FirstMatch, SpeculativeGenerator, Target, certify, zoo
from specdec.lab.integrations.grammars import llguidance_processor

TARGET, TOKENIZER = zoo.load_target(), zoo.load_tokenizer()
VIEWS = Target(TARGET)


def nested(num_draft_tokens: int = 2) -> NestedDrafter:
    inner = SpeculativeGenerator(zoo.load_drafter("model", TARGET).model, "lookup")
    return NestedDrafter(inner, num_draft_tokens)


MADE = {
    "nested": nested,
    "query": lambda: QueryDrafter(TARGET),
    "layers": lambda: LayerDrafter(VIEWS, range(12)),
    "state": LastSeenDrafter,
}


@pytest.mark.parametrize("name", MADE)
def test_greedy_text_is_that_of_hf(name):
    prompts = [TOKENIZER(text).input_ids for text in ("def main(argv):", "import os")] + [[5]]
    generator = SpeculativeGenerator(VIEWS, MADE[name](), graphs=False)
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    options = {"max_new_tokens": 4, "do_sample": False}
    found = generator.generate(ids, attention_mask=mask, **options)
    for row, prompt in zip(found.texts, prompts, strict=True):
        expected = TARGET.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
        assert row == expected.tolist()


def test_the_nested_drafter_drafts_what_its_model_writes():
    model = zoo.load_drafter("model", TARGET, num_draft_tokens=2, proposal="argmax")
    ids = TOKENIZER("def main(argv):", return_tensors="pt").input_ids
    options = {"max_new_tokens": 8, "do_sample": False}
    steps = [
        SpeculativeGenerator(TARGET, drafter, graphs=False).generate(ids, **options).steps[0]
        for drafter in (nested(), model)
    ]
    assert [step.draft_tokens for step in steps[0]] == [step.draft_tokens for step in steps[1]]


def test_the_drafter_with_a_state_drafts_what_followed_last():
    generator = SpeculativeGenerator(VIEWS, LastSeenDrafter())
    inputs = TOKENIZER(zoo.heldout_prompts(2), return_tensors="pt", padding=True)
    result = generator.generate(**inputs, max_new_tokens=24, do_sample=False)
    assert 0.05 <= result.stats.acceptance_rate < 1
    for row, steps in enumerate(result.steps):
        text = list(result.prompts[row])
        for step in steps:
            places = [i for i, token in enumerate(text[:-1]) if token == text[-1]]
            if step.draft_tokens:
                assert step.draft_tokens[0] == (text[places[-1] + 1] if places else 0)
            text += step.new_tokens


@pytest.mark.slow
def test_the_drafter_with_a_state_repeats():
    generator = SpeculativeGenerator(VIEWS, LastSeenDrafter())
    prompts = [TOKENIZER("import os").input_ids]
    assert certify(generator, prompts, num_samples=8, audit_tokens=8).passed


def test_a_model_of_other_ids_is_named():
    drafter = nested()
    with pytest.raises(ValueError, match="at most the target's 5 ids, got 2048"):
        drafter.validate(vocab_size=5, device=torch.device("cpu"))


def test_the_drafter_of_a_grammar_writes_forced_text_in_few_steps():
    """Rows at different places of the grammar; the oracle decodes plainly under the grammar."""
    guidance = pytest.importorskip("llguidance")
    properties = {"name": {"enum": ["alpha", "beta"]}, "description": {"enum": ["large", "small"]}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    grammar = guidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    options = {"do_sample": True, "temperature": [0.0, 1.0, 2.0], "seed": [1, 2, 3]}
    options["logits_processor"] = [llguidance_processor(grammar, TOKENIZER, 2048)]
    inputs = TOKENIZER(["config = ", "x", "data: "], return_tensors="pt", padding=True)
    head, drafter = zoo.load_drafter("eagle3", TARGET), GrammarDrafter(grammar, TOKENIZER, 2048)
    plain, *found = (
        SpeculativeGenerator(VIEWS, each, CouplingSampler()).generate(
            **inputs, max_new_tokens=32, **options
        )
        for each in (None, drafter, FirstMatch(drafter, head))
    )
    for row in plain.texts:
        assert json.loads(TOKENIZER.decode(row, skip_special_tokens=True)).keys() == {*properties}
    for result in found:
        assert result.sequences.equal(plain.sequences)
        assert max(map(len, result.steps)) < 0.4 * max(plain.lengths)
    assert sum(found[0].stats.accepted) > 0.9 * sum(found[0].stats.drafted)
