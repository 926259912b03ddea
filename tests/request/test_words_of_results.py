"""A result that is taken for a tensor, and one that is saved and loaded."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts

from specdec import SpeculativeGenerator

IDS, MASK = ragged_prompts(VOCAB, 4, 4)
GENERATOR = SpeculativeGenerator(build("llama"), "lookup")
OPTIONS = {"max_new_tokens": 5, "do_sample": True, "seed": [1, 2], "top_k": 9}
KEPT = {"output_scores": True, "output_logprobs": True, "row_inputs": {"position_offset": [0, 3]}}
RESULT = GENERATOR.generate(IDS, MASK, **OPTIONS, **KEPT)
TAKEN_FOR = [
    (TypeError, r"no tensor and no list, got \[0\]; result.sequences\[0\] ", lambda r: r[0]),
    (TypeError, r"result.texts\[row\] those of a row's new tokens", list),
    (TypeError, r"len\(result.lengths\) counts rows, and result.lengths", len),
    (AttributeError, r"no 'shape'; result.sequences.shape is that of the ids", lambda r: r.shape),
    (AttributeError, "result.sequences.tolist is", lambda r: r.tolist()),
    (AttributeError, "no 'attentions'; it has sequences, lengths", lambda r: r.attentions),
]


@pytest.mark.parametrize(("kind", "words", "use"), TAKEN_FOR)
def test_a_result_taken_for_something_else_says_what_to_write(kind, words, use):
    with pytest.raises(kind, match=words):
        use(RESULT)


def test_a_result_is_true_and_can_be_copied():
    assert RESULT
    assert not hasattr(RESULT, "attentions")
    for other in (copy.deepcopy(RESULT), pickle.loads(pickle.dumps(RESULT)), replace(RESULT)):
        assert other.sequences.equal(RESULT.sequences)


NOT_SAVED = {"tokenizer", "trace", "outputs", "num_draft_tokens", "depth", "wall_s"}


def test_a_dictionary_of_a_result_is_loaded_as_weights_are(tmp_path):
    torch.save(RESULT.to_dict(), tmp_path / "result.pt")
    found = torch.load(tmp_path / "result.pt", weights_only=True)
    outputs = {"scores", "logits", "logprobs", "raw_logprobs"}
    assert found.keys() == vars(RESULT).keys() - NOT_SAVED | outputs | {"stats", "origins"}
    assert found["sequences"].equal(RESULT.sequences)
    assert torch.stack(found["scores"]).equal(torch.stack(RESULT.scores))
    assert found["logprobs"].equal(RESULT.logprobs)
    assert found["stats"] == RESULT.stats.to_dict()
    assert found["steps"][1][0][2] == RESULT.steps[1][0].new_tokens
    assert (found["seeds"], found["sampling"]["top_k"]) == ([1, 2], 9)
    assert found["row_inputs"]["position_offset"].tolist() == [0, 3]
