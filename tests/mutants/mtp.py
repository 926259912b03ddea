"""Mutants of multi-token prediction: the window, the depths, and their checkpoints."""

from mutation import Mutant


def repair_test(name: str) -> str:
    """Caches and proposals against a recomputation without a cache."""
    test = "test_caches_and_proposals_are_those_of_a_recomputation"
    return f"drafters/test_mtp_repair.py::{test}[{name}]"


_SHIFT = "kernels/mtp_shift/reference.py"
WINDOW = "kernels/test_kernels_mtp_shift.py::test_a_window_is_the_end_of_the_rows_of_a_text"
HF = "drafters/test_mtp_hf.py::test_drafts_are_those_of_hf"
_READ = "test_a_head_computes_what_its_producer_means"

MTP = [
    Mutant(
        name="stale entries of later depths are never computed again",
        source="vllm#33561, vllm#48892 (row 90)",
        file=_SHIFT,
        old="slots = torch.where(is_row & (count > 0), slots, trash)",
        new="slots = torch.where((index >= 0) & (count > 0), slots, trash)",
        caught_by=repair_test("chain-3"),
    ),
    Mutant(
        name="the shift of the slots is taken before the clamp, that of the rows after it",
        source="vllm#33561, seen in its code (row 90)",
        file=_SHIFT,
        old="slots = context.start[:, None] + index",
        new="slots = (context.start + context.num_new)[:, None] + offsets",
        caught_by=WINDOW,
    ),
    Mutant(
        name="rows before a text's start are read",
        source="vllm#33561: fewer rows cached than rejected (row 90)",
        file=_SHIFT,
        old="is_row = (index >= -num_past) & (slots >= 0)",
        new="is_row = index >= -num_past",
        caught_by=WINDOW,
    ),
    Mutant(
        name="a text that has ended forgets its rows",
        source="vllm#41841: stale state in padded rows (row 83)",
        file=_SHIFT,
        old="tokens=torch.where(is_row, tokens.gather(1, source), 0),",
        new="tokens=torch.where(is_row & (count > 0), tokens.gather(1, source), 0),",
        caught_by=WINDOW,
    ),
    Mutant(
        name="one row less than needed is remembered",
        source="vllm#33561 (row 90)",
        file="drafters/mtp.py",
        old="num_past = max(self.num_depths - 1, 0)",
        new="num_past = max(self.num_depths - 2, 0)",
        caught_by=repair_test("chain-3"),
    ),
    Mutant(
        name="a chunk of the prompt does not look back at the chunk before",
        source="vllm#55055: module m needs the tokens of the next chunk (row 90)",
        file="drafters/mtp.py",
        old="width = context.tokens.shape[1] - 1 + state.num_depths - 1",
        new="width = max(context.tokens.shape[1] - 1, state.num_depths - 1)",
        caught_by=repair_test("five depths-5"),
    ),
    Mutant(
        name="every depth reads the token of the first",
        source="sglang#28492 (row 90)",
        file="drafters/mtp.py",
        old="tokens = torch.cat([tokens[:, 1:], drafted], dim=1)",
        new="tokens = torch.cat([tokens[:, :-1], drafted], dim=1)",
        caught_by=repair_test("target-3"),
    ),
    Mutant(
        name="depths that were trained as a chain read the target's state",
        source="sgl-project/sglang-jax#1256 (row 90)",
        file="drafters/mtp.py",
        old='if self.config.semantics == "chain":',
        new="if False:",
        caught_by=repair_test("chain-3"),
    ),
    Mutant(
        name="a looped depth is fed its first output again",
        source="vllm#36531 (row 91)",
        file="drafters/mtp.py",
        old="out = head(last, embeds, hidden, plan.open(1 + m))",
        new="_ = head(last, embeds, hidden, plan.open(1 + m))",
        caught_by=repair_test("one depth-4"),
    ),
    Mutant(
        name="the raw state is passed on where the normalised one was trained",
        source="vllm#47448, LightLLM#1402, ROCm/ATOM#1764 (row 47)",
        file="heads/mtp.py",
        old="return self.layers[depth].norm(out) if self.config.feedback_norm else out",
        new="return out",
        caught_by=f"{HF}[Glm4Moe-3-2]",
    ),
    Mutant(
        name="embedding and hidden state go into the projection the other way round",
        source="MiMo has [hidden, embedding], all others [embedding, hidden]",
        file="heads/mtp.py",
        old="inputs[::-1] if self.hidden_first else inputs",
        new="inputs[::-1]",
        caught_by=f"{HF}[DeepseekV3-2-2]",
    ),
    Mutant(
        name="gate and up projections of the experts change places",
        source="transformers 5 fuses what checkpoints store per expert",
        file="checkpoints/hf_layers.py",
        old='("gate_up_proj", ("gate", "up"))',
        new='("gate_up_proj", ("up", "gate"))',
        caught_by=f"{HF}[DeepseekV3-2-2]",
    ),
    Mutant(
        name="norms that are stored centred are taken for plain ones",
        source="jundot/omlx#1507, #3750",
        file="heads/mtp.py",
        old="scale = 1 + self.weight.to(dtype)",
        new="scale = self.weight.to(dtype)",
        caught_by=f"checkpoints/test_mtp_checkpoints.py::{_READ}[Qwen-True]",
    ),
    Mutant(
        name="the bias that chooses experts is rounded with the weights",
        source="a reader that casts every tensor to the target's data type",
        file="checkpoints/survey.py",
        old="for name in tensors.keys() - self.exact:",
        new="for name in list(tensors):",
        caught_by="checkpoints/test_mtp_checkpoints.py::"
        "test_the_bias_that_chooses_experts_stays_float32",
    ),
    Mutant(
        name="depths are trained on the labels of the first",
        source="depth d has labels of its own, arXiv:2412.19437, eq. 24",
        file="training/mtp.py",
        old="labels.at(1 + depth, out.shape[1])",
        new="labels.at(1, out.shape[1])",
        caught_by="training/test_mtp_training.py::"
        "test_the_loss_is_the_cross_entropy_to_the_target_at_every_depth",
    ),
]
