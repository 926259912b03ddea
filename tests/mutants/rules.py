"""Mutants of the rules that decide on a draft."""

from mutation import Mutant


def law_test(sampler: str, kind: str = "soft", warp: str = "none", size: str = "2-4") -> str:
    """The exact law of one round, of K-V tables."""
    name = "test_a_round_has_the_law_of_the_target_behind_each_filter"
    return f"test_sampler_laws.py::{name}[{size}-{warp}-{kind}-{sampler}]"


RULES = [
    Mutant(
        name="a draft token is accepted at exactly its ratio",
        source="sglang#35771 (row 7)",
        file="kernels/verify/reference.py",
        old="uniforms.accept * draft_of_draft < target_of_draft",
        new="uniforms.accept * draft_of_draft <= target_of_draft",
        caught_by="test_rejection_zero.py::test_a_token_is_accepted_strictly_below_its_ratio",
    ),
    Mutant(
        name="an index of weight 0 is drawn at a uniform of 0",
        source="sglang#35771 (row 7)",
        file="kernels/sample/reference.py",
        old="torch.searchsorted(cumulative, threshold, right=True)[..., 0]",
        new="torch.searchsorted(cumulative, threshold, right=False)[..., 0]",
        caught_by="kernels/test_kernels_sample.py::"
        "test_draw_is_exact_at_every_breakpoint_where_breakpoints_are_floats",
    ),
    Mutant(
        name="NaN weights draw an id beyond the vocabulary",
        source="sglang#27883 (row 76)",
        file="kernels/sample/reference.py",
        old="return index.clamp(max=weights.shape[-1] - 1)",
        new="return index",
        caught_by="test_rejection_zero.py::"
        "test_target_logits_that_are_nan_give_a_token_of_the_vocabulary",
    ),
    Mutant(
        name="the recovered token is drawn from the target, nothing is subtracted",
        source="transformers#28166 (row 2)",
        file="kernels/verify/reference.py",
        old="residual = torch.where(is_left[:, None], residual, target_row)",
        new="residual = target_row",
        caught_by=law_test("RejectionSampler"),
    ),
    Mutant(
        name="the residual is the absolute difference",
        source="transformers#28166 (row 2)",
        file="kernels/verify/reference.py",
        old="residual = residual.clamp_(min=0)",
        new="residual = residual.abs()",
        caught_by=law_test("RejectionSampler"),
    ),
    Mutant(
        name="an empty residual is drawn from as it is",
        source="jaymody/speculative-sampling#5 (row 9)",
        file="kernels/verify/reference.py",
        old="is_left = is_short & (residual.sum(dim=-1) > 0)",
        new="is_left = is_short",
        caught_by="test_rejection_zero.py::"
        "test_a_rejection_that_leaves_nothing_draws_from_the_target",
    ),
    Mutant(
        name="the extra token is drawn from the row of the draft token before",
        source="transformers#28166, TensorRT-LLM#15098 (rows 2, 12)",
        file="kernels/verify/reference.py",
        old="target_row = _row(target_probs, num_accepted)",
        new="target_row = _row(target_probs, (num_accepted - 1).clamp(min=0))",
        caught_by=law_test("RejectionSampler"),
    ),
    Mutant(
        name="the draft law of the token before is subtracted",
        source="transformers#28166, TensorRT-LLM#15098 (rows 2, 12)",
        file="kernels/verify/reference.py",
        old="- _row(draft.probs, index)",
        new="- _row(draft.probs, (index - 1).clamp(min=0))",
        caught_by=law_test("RejectionSampler"),
    ),
    Mutant(
        name="the last draft law is subtracted from the bonus token's as well",
        source="transformers#28166 (row 2)",
        file="kernels/verify/reference.py",
        old="is_short = num_accepted < (width if draft.num_valid is None else draft.num_valid)",
        new="is_short = num_accepted <= (width if draft.num_valid is None else draft.num_valid)",
        caught_by=law_test("RejectionSampler"),
    ),
    Mutant(
        name="a short row's extra token loses what was never drafted for it",
        source="vllm#44869, vllm#26498 (rows 15, 51)",
        file="kernels/verify/reference.py",
        old="is_short = num_accepted < (width if draft.num_valid is None else draft.num_valid)",
        new="is_short = num_accepted < width",
        caught_by="test_sampler_laws.py::"
        "test_a_short_row_is_decided_as_a_draft_of_so_many_tokens[RejectionSampler-soft]",
    ),
    Mutant(
        name="tokens behind the valid ones of a short row are accepted",
        source="vllm#44869, vllm#26498 (rows 15, 51)",
        file="kernels/verify/reference.py",
        old="""\
        is_accepted = is_accepted & _is_valid(draft)
    num_accepted""",
        new="""\
        pass
    num_accepted""",
        caught_by="test_sampler_laws.py::"
        "test_a_short_row_is_decided_as_a_draft_of_so_many_tokens[RejectionSampler-soft]",
    ),
    Mutant(
        name="a short draft of point masses loses a token that was never drafted",
        source="vllm#46899, vllm#26498 (rows 51, 55)",
        file="kernels/verify/reference.py",
        old="is_left = is_short & (residual.sum(dim=-1) > 0)",
        new="is_left = (is_short | (draft.num_valid is not None)) & (residual.sum(dim=-1) > 0)",
        caught_by="test_sampler_laws.py::"
        "test_a_short_row_is_decided_as_a_draft_of_so_many_tokens[RejectionSampler-point-mass]",
    ),
    Mutant(
        name="a rejected point mass may be drawn again",
        source="apple/ml-recurrent-drafter#6 (row 10)",
        file="kernels/verify/reference.py",
        old="residual = target_row.scatter(-1, rejected, 0.0)",
        new="residual = target_row",
        caught_by=law_test("RejectionSampler", "point-mass"),
    ),
    Mutant(
        name="tokens are accepted behind a rejected one",
        source="transformers#28166 (row 2)",
        file="kernels/verify/reference.py",
        old="num_accepted = is_accepted.cumprod(dim=-1, dtype=torch.long).sum(dim=-1)  # [B]",
        new="num_accepted = is_accepted.sum(dim=-1)",
        caught_by=law_test("RejectionSampler"),
    ),
    Mutant(
        name="block verification: what a prefix is worth may exceed 1",
        source="a misreading of Sun et al., Alg. 2",
        file="kernels/verify/reference.py",
        old="path.append((path[-1] * ratio[:, i]).clamp(max=1))",
        new="path.append(path[-1] * ratio[:, i])",
        caught_by=law_test("BlockSampler"),
    ),
    Mutant(
        name="block verification: masses are those of the row before",
        source="TensorRT-LLM#15098 (row 12)",
        file="kernels/verify/reference.py",
        old="dtype=torch.float64)[:, 1:]",
        new="dtype=torch.float64)[:, :-1]",
        caught_by=law_test("BlockSampler"),
    ),
    Mutant(
        name="block verification: the first prefix that is not accepted ends the block",
        source="a misreading of Sun et al., Alg. 2",
        file="kernels/verify/reference.py",
        old="num_accepted = (is_accepted * lengths).amax(dim=-1)",
        new="num_accepted = is_accepted.long().cumprod(dim=-1).sum(dim=-1)",
        caught_by=law_test("BlockSampler"),
    ),
    Mutant(
        name="block verification: the residual is the token-wise one",
        source="a misreading of Sun et al., Alg. 2",
        file="kernels/verify/reference.py",
        old="factor = path.gather(1, num_accepted[:, None])",
        new="factor = None",
        caught_by=law_test("BlockSampler", size="3-3"),
    ),
    Mutant(
        name="block verification: a short draft is judged as the prefix of a longer one",
        source="vllm#44869 (row 15)",
        file="kernels/verify/reference.py",
        old="torch.where(lengths == draft.num_valid[:, None], is_whole, is_accepted)",
        new="is_accepted",
        caught_by="test_sampler_laws.py::"
        "test_a_short_row_is_decided_as_a_draft_of_so_many_tokens[BlockSampler-soft]",
    ),
    Mutant(
        name="the first draft token is committed unverified",
        source="ohdearquant/lattice#243 (row 16)",
        file="kernels/verify/reference.py",
        old="is_accepted = draft.tokens == target_tokens[:, :-1]",
        new="""\
is_accepted = draft.tokens == target_tokens[:, :-1]
    is_accepted[:, :1] = True""",
        caught_by="generator/test_greedy_equality.py::"
        "test_greedy_text_of_a_padded_batch_is_that_of_hf[llama-wrong]",
    ),
    Mutant(
        name="a greedy batch takes the last of equal logits",
        source="ohdearquant/lattice#280, vllm#7627 (rows 79, 80)",
        file="samplers/base.py",
        old="largest, tokens = target_logits.max(dim=-1)",
        new="""\
largest, tokens = target_logits.flip(-1).max(dim=-1)
        tokens = target_logits.shape[-1] - 1 - tokens""",
        caught_by="test_rejection_zero.py::"
        "test_a_greedy_batch_decides_as_the_rule_does_with_one_hot_laws",
    ),
    Mutant(
        name="a lossy rule takes what is stale behind a short draft into its mixture",
        source="vllm#46899, vllm#44869 (rows 15, 55)",
        file="samplers/ensemble.py",
        old="mixed = torch.where(is_drafted, mixed, probs)",
        new="mixed = torch.where(mixed.isnan(), probs, mixed)",
        caught_by="test_sampler_laws.py::"
        "test_a_short_row_is_decided_as_a_draft_of_so_many_tokens[EnsembleSampler-soft]",
    ),
]
