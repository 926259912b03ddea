"""`certify` on every kind of target, draft and setting, all of random models: sound generators
pass, and a wrong rule does not.
"""

import pytest
from architectures import build
from drafter_table import CORRECTED, MODEL, make
from drafting import perturbed
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specdec import (
    GrammarProcessor,
    ModelDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    certify,
    evaluate,
)
from specdec.lab.certificates import CertificateError

pytestmark = pytest.mark.slow
PROMPTS = [[7, 3, 9, 3, 9], [5], [2, 40, 11]]
HYBRIDS = ["qwen3_5", "olmo_hybrid", "falcon_h1", "bamba", "mamba", "mamba2"]


class Turns:
    """A matcher: odd and even ids in turn; rows begin apart."""

    def __init__(self, row):
        self.row, self.text = row, []

    def accept_token(self, token):
        is_allowed = (token + len(self.text) + self.row) % 2 == 0
        self.text += [token] * is_allowed
        return is_allowed

    def rollback(self, num_tokens):
        del self.text[-num_tokens:]

    def is_terminated(self):
        return False

    def fill_next_token_bitmask(self, bitmask, index):
        is_odd = (len(self.text) + self.row) % 2
        bitmask[index] = -0x55555556 if is_odd else 0x55555555


GRAMMAR = LogitsProcessorList([GrammarProcessor(Turns)])
PENALTY = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])


class Sharp(RejectionSampler):
    """The rule of a target that is surer of itself."""

    def accept(self, draft, target_logits, logits_filter, noise):
        return super().accept(draft, 1.5 * target_logits, logits_filter, noise)


def hybrid(name):
    """Of a target with recurrent layers, and a draft model of the same kind."""
    model = build(name)
    return lambda rule: SpeculativeGenerator(model, ModelDrafter(perturbed(model), 3), rule)


def of(name, **options):
    """Of a drafter of the table."""
    return lambda rule: SpeculativeGenerator(MODEL, make(name), rule, **options)


KINDS = {
    **{name: (hybrid(name), {}) for name in HYBRIDS},
    **{name: (of(name), {}) for name in CORRECTED},
    "draft_length": (of("model", draft_length="auto"), {}),
    "grammar": (of("model"), {"logits_processor": GRAMMAR}),
    "penalty": (of("eagle3"), {"logits_processor": PENALTY, "top_p": 0.95}),
    "grammar, tree": (of("model, tree"), {"logits_processor": GRAMMAR}),
}
QUICK = {"num_samples": 16, "max_new_tokens": 24, "audit_tokens": 12, "batch_size": 24}


@pytest.mark.parametrize("name", KINDS)
def test_a_sound_generator_of_every_kind_passes_and_a_wrong_rule_fails(name):
    make_generator, options = KINDS[name]
    report = certify(make_generator("rejection"), PROMPTS, settings=[options], **QUICK)
    assert report.passed, report
    assert report.text.num_tokens == 3 * 16 * 24
    assert report.text.loop_distance < 1e-5
    assert report.text.draft_distance > 0.01
    more = QUICK | {"num_samples": 64}
    wrong = certify(make_generator(Sharp()), PROMPTS, settings=[options], **more)
    assert not wrong.text.passed, wrong
    assert wrong.greedy.passed


def test_processes_that_share_prompts_judge_their_own_texts():
    options = {"samples": 8, "max_new_tokens": 16, "temperature": 1.0, "batch_size": 8}
    options |= {"share": True, "certify": True}
    sound = evaluate(of("model")("rejection"), PROMPTS, **options)
    assert len(sound.rows) == 24
    with pytest.raises(CertificateError):
        evaluate(of("model")(Sharp()), PROMPTS, **options | {"samples": 64})
