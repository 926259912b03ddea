"""Mutants of EAGLE heads and of the drafter that runs them."""

from mutation import Mutant


def wiring_test(name: str) -> str:
    """Every draft step against a recomputation without cache."""
    test = "test_every_draft_step_is_that_of_the_wiring_recomputed_without_cache"
    return f"drafters/test_eagle_parity.py::{test}[{name}]"


_NEVER = "test_a_head_that_knows_the_target_is_never_rejected"
ORACLE = f"drafters/test_eagle_drafter.py::{_NEVER}[eagle3-{{}}-4-3]"

EAGLE = [
    Mutant(
        name="accepted draft tokens keep the keys that the head guessed",
        source="vllm#14649, vllm#33561 (rows 43, 90)",
        file="heads/context.py",
        old="return torch.cat([self.slots, later], dim=1)",
        new="""\
is_last = self.cache.offsets[: self.slots.shape[1]] == self.counts[:, None] - 1
        read = torch.where(is_last, self.slots, self.cache.trash)
        return torch.cat([read, later], dim=1)""",
        caught_by=wiring_test("eagle3"),
    ),
    Mutant(
        name="the head drafts behind the token before the bonus token",
        source="vllm#4212, vllm#5765 (row 30)",
        file="heads/context.py",
        old="index = (self.counts - 1).clamp(min=0)[:, None, None]",
        new="index = (self.counts - 2).clamp(min=0)[:, None, None]",
        caught_by=ORACLE,
    ),
    Mutant(
        name="the head drafts behind the right token for K = 1 only",
        source="vllm#9730 (row 31)",
        file="heads/context.py",
        old="index = (self.counts - 1).clamp(min=0)[:, None, None]",
        new="index = (self.counts - 1).clamp(0, 1)[:, None, None]",
        caught_by=ORACLE,
    ),
    Mutant(
        name="draft tokens lie one slot behind their positions",
        source="lablup/mlxcel#994 (row 37)",
        file="heads/context.py",
        old="next_slots=context.start + counts,",
        new="next_slots=context.start + counts + 1,",
        caught_by=wiring_test("eagle3"),
    ),
    Mutant(
        name="tokens stand beside their own features, not those that produced them",
        source="vllm#15901, mlc-llm#2664 (rows 41, 42)",
        file="heads/context.py",
        old="tokens=torch.where(is_real, tokens, 0),",
        new="tokens=torch.where(is_real, context.tokens[:, :-1], 0),",
        caught_by=ORACLE,
    ),
    Mutant(
        name="every later pass is fed the hidden state of the first",
        source="vllm#36531 (row 91)",
        file="drafters/eagle.py",
        old="step, hidden = plan.open(i), self.head.feedback(out)",
        new="step, hidden = plan.open(i), hidden if i > 1 else self.head.feedback(out)",
        caught_by=wiring_test("eagle1"),
    ),
    Mutant(
        name="the normalised state is fed to the next pass",
        source="ROCm/ATOM#882 (row 47)",
        file="heads/eagle.py",
        old="return self.norm(out) if self.config.feedback_norm else out",
        new="return self.norm(out) if self.config.output_norm else out",
        caught_by=wiring_test("eagle3"),
    ),
    Mutant(
        name="the last decoder layer of a head never runs",
        source="mlx-lm#1485 (row 91)",
        file="heads/eagle.py",
        old="for layer in later:",
        new="for layer in later[:-1]:",
        caught_by=wiring_test("three layers"),
    ),
    Mutant(
        name="the ids of a reduced vocabulary are taken for the target's first",
        source="NeMo Automodel#2447, SpecForge#534 (row 89)",
        file="heads/sharing.py",
        old="wide.index_copy(-1, target_ids, logits)",
        new="wide.index_copy(-1, torch.arange(len(target_ids)), logits)",
        caught_by=wiring_test("fewer ids"),
    ),
    Mutant(
        name="d2t is read as absolute ids",
        source="verl-SpeCo#67, SpecForge#534 (row 89)",
        file="checkpoints/vocab_map.py",
        old="ids = own + d2t.long()",
        new="ids = d2t.long()",
        caught_by="checkpoints/test_eagle_checkpoints.py::"
        "test_a_checkpoint_is_read_as_its_producer_means_it[SpecForge, ids]",
    ),
    Mutant(
        name="a map into ids beyond the vocabulary is believed",
        source="verl-SpeCo#67 (row 89)",
        file="heads/sharing.py",
        old="if low < 0 or high >= vocab_size or distinct != count:",
        new="if distinct != count:",
        caught_by="heads/test_eagle_head.py::test_a_map_of_ids_that_cannot_be_right_is_refused",
    ),
    Mutant(
        name="a head is given features of another width than it was made for",
        source="sglang#21272 (row 44)",
        file="heads/features.py",
        old="if features.shape[-1] != config.feature_width:",
        new="if False:",
        caught_by="heads/test_eagle_head.py::test_a_context_without_features_or_with_others_is_refused",
    ),
]
