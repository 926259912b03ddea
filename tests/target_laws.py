"""Laws of targets whose layers store or read in ways of their own: texts of ragged rows are HF's of
each row alone, rows may leave, and the self-test finds planted faults.
"""

import itertools

import pytest
import torch
from drafting import ragged_prompts
from fingerprint import fingerprint

from specdec import SpeculativeGenerator, Target
from specdec.graphs import rows as of_rows
from specdec.targets import discovery


class RaggedBatch:
    """Rows of several lengths, padded on the left.

    Args:
        num_ids: how many ids the texts must have at least; texts of few ids prove little.
    """

    def __init__(self, vocab_size, lengths, num_new, *, num_ids=16):
        self.lengths, self.num_ids, self._texts = lengths, num_ids, {}
        self.ids, self.mask = ragged_prompts(vocab_size, *lengths)
        self.options = {"max_new_tokens": num_new, "eos_token_id": None, "pad_token_id": 0}

    def row(self, row):
        """The ids of a row alone."""
        return self.ids[row : row + 1, -self.lengths[row] :]

    def texts(self, model):
        """HF's greedy continuation of each row alone."""
        if model not in self._texts:
            rows = [self.row(row) for row in range(len(self.lengths))]
            options = [{"attention_mask": torch.ones_like(row), **self.options} for row in rows]
            pairs = zip(rows, options, strict=True)
            found = [model.generate(row, do_sample=False, **own)[0] for row, own in pairs]
            pairs = zip(found, self.lengths, strict=True)
            self._texts[model] = [text[length:].tolist() for text, length in pairs]
        assert len({*itertools.chain(*self._texts[model])}) >= self.num_ids
        return self._texts[model]

    def check_greedy(self, model, drafter, chunk=2048):
        """All rows together and one alone, over chunks of a prompt; the model stays as it was."""
        before, expected = fingerprint(model), self.texts(model)
        generator = SpeculativeGenerator(model, drafter, prefill_chunk_size=chunk)
        result = generator.generate(self.ids, self.mask, **self.options)
        assert result.new_tokens.tolist() == expected
        alone = generator.generate(self.row(1), **self.options).new_tokens
        assert alone.tolist() == expected[1:2]
        assert fingerprint(model) == before
        return result

    def check_rows_leave(self, model, drafter, monkeypatch):
        """Each row ends at a token of its own, and what HF writes behind it does not matter."""
        whole, left, keep_rows = self.texts(model), [], of_rows.keep_rows
        ends = [whole[0][2], whole[2][5]]
        cut = [text[: min(map([*text, *ends].index, ends)) + 1] for text in whole]
        assert len(set(map(len, cut))) > 1
        monkeypatch.setattr(of_rows, "keep_rows", lambda *a: left.append(a[1]) or keep_rows(*a))
        generator = SpeculativeGenerator(model, drafter, steps_ahead=0)
        result = generator.generate(self.ids, self.mask, **self.options | {"eos_token_id": ends})
        assert result.texts == cut
        assert left


DIFFERS = "differs from its plain forward"


def check_found(model, monkeypatch, words=DIFFERS):
    """The self-test finds the fault that is planted, and takes the model without it."""
    with pytest.raises(ValueError, match=words):
        Target(model)
    monkeypatch.undo()
    Target(model)


def without_dense_masks(monkeypatch):
    """A model does not fall back to HF's own attention under a dense mask, which has no fault."""

    def fail(model):
        raise ValueError("not in this test")

    monkeypatch.setattr(discovery, "_with_dense_mask", fail)
