"""lm-eval's answers of an HF model do not change when its `generate` goes through specdec.

lm-eval lives in an environment of its own (CONTRIBUTING.md). Its stopping criteria keep a note for
every row of the batch that `generate` was called with, so they have to be shown that batch.
"""

from functools import partial

import pytest

from specdec import SpeculativeGenerator, zoo

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

pytestmark = pytest.mark.slow

PROMPTS = [text + "\n" for text in zoo.heldout_prompts(10)]
UNTIL = {
    "lines": ["\n"],  # met by all rows of a batch, after 1 to 21 tokens
    "several": ["\n\n", "return", "):"],
    "of many tokens": ['):\n    """\n'],
    "never": ["never written by this model"],
}
"""Stop sequences."""


class Recording(HFLM):
    """lm-eval's own class, which notes what `generate` returned."""

    def _model_generate(self, *args, **kwargs):
        out = super()._model_generate(*args, **kwargs)
        self.returned.append(out)
        return out


def answers(model, until, batch_size):
    """Of every prompt, and what `generate` returned for each batch."""
    lm = Recording(pretrained=model, tokenizer=zoo.load_tokenizer(), batch_size=batch_size)
    lm.returned = []
    options = {"until": until, "max_gen_toks": 32, "do_sample": False}
    requests = [
        Instance("generate_until", doc={}, arguments=(prompt, dict(options)), idx=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    return lm.generate_until(requests, disable_tqdm=True), lm.returned


@pytest.mark.parametrize("drafter", ["none", "lookup", "eagle3"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("until", UNTIL)
def test_answers_are_those_without_specdec(until, batch_size, drafter):
    model = zoo.load_target()
    texts, expected = answers(model, UNTIL[until], batch_size)
    part = zoo.load_drafter(drafter, model) if drafter == "eagle3" else drafter
    generator = SpeculativeGenerator(model, part)
    model.generate = partial(model.generate, custom_generate=generator)
    found, returned = answers(model, UNTIL[until], batch_size)
    assert generator.last_result is not None
    assert found == texts
    assert len(returned) == len(expected) == -(-len(PROMPTS) // batch_size)
    assert all(a.equal(b) for a, b in zip(returned, expected, strict=True))
