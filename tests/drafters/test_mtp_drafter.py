"""What is special to `MTPDrafter` in the loop: modules that are mixtures of experts, and no draft
tokens at all. What heads compute is checked by
`test_mtp_repair.py` against a recomputation, and the laws of all drafters by `test_laws.py`.
"""

from architectures import VOCAB, build
from drafting import ragged_prompts
from mtp_checkpoints import write_numbered
from mtp_heads import head_for

from specdec import MTPDrafter, SpeculativeGenerator
from specdec.graphs import no_host_sync

LLAMA = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 1, 4, 6, 9)


def test_a_step_of_modules_that_are_mixtures_of_experts_runs_without_waiting(tmp_path):
    model, _ = write_numbered(tmp_path, "DeepseekV3", num_depths=2)
    model.set_experts_implementation("batched_mm")
    drafter = MTPDrafter.from_pretrained(tmp_path, model, 3)
    generator = SpeculativeGenerator(model, drafter)
    state = generator.start(IDS, MASK, max_new_tokens=40, eos_token_id=None)
    steps = []
    for _ in range(3):
        state.state.buffer.note_longest(10**9)
        with no_host_sync() as seen:
            generator.step(state)
        steps.append(seen.shapes)
    assert steps[0] == steps[1] == steps[2]


def test_no_draft_tokens_decode_plainly():
    text = SpeculativeGenerator(LLAMA, None).generate(IDS, MASK, max_new_tokens=8).sequences
    generator = SpeculativeGenerator(LLAMA, MTPDrafter(head_for(LLAMA), LLAMA, 0))
    assert generator.generate(IDS, MASK, max_new_tokens=8).sequences.equal(text)
