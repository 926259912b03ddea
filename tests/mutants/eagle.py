"""Mutants of EAGLE heads and of the drafter that runs them."""

from mutation import Mutant


def wiring_test(name: str) -> str:
    """Every draft step against a recomputation without cache."""
    test = "test_every_draft_step_is_that_of_the_wiring_recomputed_without_cache"
    return f"test_eagle_parity.py::{test}[{name}]"


ORACLE = "test_eagle_drafter.py::test_a_head_that_knows_the_target_is_never_rejected[eagle3-{}-4-3]"

EAGLE = [
    Mutant(
        name="accepted draft tokens keep the keys that the head guessed",
        source="vllm#14649, vllm#33561 (rows 43, 90)",
        file="drafters/eagle.py",
        old="slots = torch.where(is_new, start + offsets[:count], cache.trash)",
        new="is_read = is_new & ((offsets[:count] == num_new - 1) | (num_later == 0))\n"
        "        slots = torch.where(is_read, start + offsets[:count], cache.trash)",
        caught_by=wiring_test("eagle3"),
    ),
    Mutant(
        name="the head drafts behind the token before the bonus token",
        source="vllm#4212, vllm#5765 (row 30)",
        file="drafters/eagle.py",
        old="last = (context.num_new - 1).clamp(min=0)[:, None, None]",
        new="last = (context.num_new - 2).clamp(min=0)[:, None, None]",
        caught_by=ORACLE,
    ),
    Mutant(
        name="the head drafts behind the right token for K = 1 only",
        source="vllm#9730 (row 31)",
        file="drafters/eagle.py",
        old="last = (context.num_new - 1).clamp(min=0)[:, None, None]",
        new="last = (context.num_new - 1).clamp(0, 1)[:, None, None]",
        caught_by=ORACLE,
    ),
    Mutant(
        name="draft tokens lie one slot behind their positions",
        source="lablup/mlxcel#994 (row 37)",
        file="drafters/eagle.py",
        old="start + num_new + offsets[:num_later]",
        new="start + num_new + 1 + offsets[:num_later]",
        caught_by=wiring_test("eagle3"),
    ),
    Mutant(
        name="tokens stand beside their own features, not those that produced them",
        source="vllm#15901, mlc-llm#2664 (rows 41, 42)",
        file="drafters/eagle.py",
        old="tokens = torch.where(is_new, context.tokens[:, 1:], 0)",
        new="tokens = torch.where(is_new, context.tokens[:, :-1], 0)",
        caught_by=ORACLE,
    ),
    Mutant(
        name="every later pass is fed the hidden state of the first",
        source="vllm#36531 (row 91)",
        file="drafters/eagle.py",
        old="out = self.head(self.embed(drafting.tokens[-1]), hidden, angles, attend)",
        new="""\
first = hidden if i == 1 else first
                out = self.head(self.embed(drafting.tokens[-1]), first, angles, attend)""",
        caught_by=wiring_test("eagle1"),
    ),
    Mutant(
        name="the normalised state is fed to the next pass",
        source="ROCm/ATOM#882 (row 47)",
        file="drafters/eagle_head.py",
        old="return self.norm(out) if self.config.feedback_norm else out",
        new="return self.norm(out) if self.config.output_norm else out",
        caught_by=wiring_test("eagle3"),
    ),
    Mutant(
        name="the last decoder layer of a head never runs",
        source="mlx-lm#1485 (row 91)",
        file="drafters/eagle_head.py",
        old="for layer in later:",
        new="for layer in later[:-1]:",
        caught_by=wiring_test("three layers"),
    ),
    Mutant(
        name="the ids of a reduced vocabulary are taken for the target's first",
        source="NeMo Automodel#2447, SpecForge#534 (row 89)",
        file="drafters/eagle_head.py",
        old="wide.index_copy(-1, self.target_ids, logits)",
        new="wide.index_copy(-1, torch.arange(len(self.target_ids)), logits)",
        caught_by=wiring_test("fewer ids"),
    ),
    Mutant(
        name="d2t is read as absolute ids",
        source="verl-SpeCo#67, SpecForge#534 (row 89)",
        file="drafters/checkpoints/vocab_maps.py",
        old="ids = own + d2t.long()",
        new="ids = d2t.long()",
        caught_by="test_eagle_checkpoints.py::"
        "test_a_checkpoint_is_read_as_its_producer_means_it[SpecForge, ids]",
    ),
    Mutant(
        name="a map into ids beyond the vocabulary is believed",
        source="verl-SpeCo#67 (row 89)",
        file="drafters/eagle_head.py",
        old="if low < 0 or high >= vocab or distinct != count:",
        new="if distinct != count:",
        caught_by="test_eagle_head.py::test_a_map_of_ids_that_cannot_be_right_is_refused",
    ),
    Mutant(
        name="a head is given features of another width than it was made for",
        source="sglang#21272 (row 44)",
        file="drafters/eagle_head.py",
        old="if features.shape[-1] != config.feature_width:",
        new="if False:",
        caught_by="test_eagle_head.py::test_a_context_without_features_or_with_others_is_refused",
    ),
]
