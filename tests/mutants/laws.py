"""Mutants of the way from logits to probabilities, and of the probabilities of a draft."""

from mutation import Mutant

from mutants.rules import law_test

LAWS = [
    Mutant(
        name="greedy rows of a mixed batch take the last of equal logits",
        source="tpu-inference#3580, pytorch#22853 (row 81)",
        file="kernels/truncate/reference.py",
        old="best = logits.argmax(dim=-1, keepdim=True)",
        new="best = logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1, keepdim=True)",
        caught_by="test_warp.py::test_greedy_rows_take_the_lowest_id_among_the_largest_logits",
    ),
    Mutant(
        name="greedy rows of a mixed batch keep a soft law",
        source="romsto/Speculative-Decoding, jaymody/speculative-sampling#3 (rows 8, 19)",
        file="kernels/truncate/reference.py",
        old="return torch.where(per_row(is_greedy, logits), one_hot, probs)",
        new="return probs",
        caught_by="test_warp.py::test_greedy_rows_take_the_lowest_id_among_the_largest_logits",
    ),
    Mutant(
        name="top-p counts the tokens that top-k has removed",
        source="sglang test_eagle_sampling_filters.py (row 13)",
        file="kernels/truncate/reference.py",
        old="left = drop_below(scaled, cutoff)",
        new="left = scaled",
        caught_by="test_warp.py::"
        "test_warp_is_the_warpers_of_huggingface_with_one_value_per_row[dtype0-1e-07]",
    ),
    Mutant(
        name="wide rows: top-p counts the tokens that top-k has removed",
        source="sglang test_eagle_sampling_filters.py (row 13)",
        file="kernels/truncate/cpu.py",
        old="""\
            left = drop_below(row, *cutoff)
        if limit""",
        new="""\
            left = row
        if limit""",
        caught_by="kernels/test_kernels_truncate_cpu.py::"
        "test_rows_keep_what_the_definition_keeps_unless_a_mass_is_within_rounding_of_the_limit",
    ),
    Mutant(
        name="top-k keeps one token too many",
        source="tpu-inference#3580 (row 81)",
        file="kernels/truncate/reference.py",
        old=".clamp(1, largest.shape[-1]) - 1",
        new=".clamp(0, largest.shape[-1] - 1)",
        caught_by="test_warp.py::"
        "test_warp_is_the_warpers_of_huggingface_with_one_value_per_row[dtype0-1e-07]",
    ),
    Mutant(
        name="truncation reaches the bonus token's row only",
        source="vllm#42744, vllm#42802 (row 14)",
        file="samplers/rejection.py",
        old="params = warp.params(target_logits)",
        new="""\
params = warp.params(target_logits)
        if params.cutoff is not None:
            params.cutoff.logits[:, :-1] = -float("inf")""",
        caught_by=law_test("RejectionSampler", warp="min-p"),
    ),
    Mutant(
        name="the probabilities returned are those of the raw logits, not the ones drawn from",
        source="transformers#47932, transformers#47961 (row 3)",
        file="samplers/warp.py",
        old="return sample(logits, self.params(logits), uniforms, out)",
        new="return sample(logits, self.params(logits), uniforms)[0], logits.softmax(dim=-1)",
        caught_by="test_warp.py::test_warp_draws_from_the_probabilities_that_it_returns",
    ),
    Mutant(
        name="draft tokens are drawn in half precision, and their law told in float32",
        source="deepseek-ai/DeepSpec#31 (row 4)",
        file="samplers/warp.py",
        old="return sample(logits, self.params(logits), uniforms, out)",
        new="""\
half = logits.bfloat16()
        return sample(half, self.params(half), uniforms)[0], self(logits)""",
        caught_by="test_warp.py::"
        "test_the_probabilities_that_come_with_a_draw_are_those_of_the_draw",
    ),
    Mutant(
        name="the most likely token is proposed beside a soft law",
        source="transformers#32867, jaymody/speculative-sampling#3 (rows 1, 8)",
        file="samplers/drawing.py",
        old="return warp.draw(logits, uniforms, out)",
        new="return logits.argmax(dim=-1), warp.draw(logits, uniforms, out)[1]",
        caught_by="drafters/test_proposals.py::"
        "test_draft_tokens_are_draws_from_the_law_that_is_told[plain-None]",
    ),
    Mutant(
        name="an argmax proposal claims to be a draw",
        source="transformers#32867 (row 1)",
        file="drafters/proposal.py",
        old="tokens = logits.argmax(dim=-1)",
        new="""\
tokens = logits.argmax(dim=-1)
            self._probs = self._warp(logits).expand(-1, drawing.num_draft_tokens, -1)""",
        caught_by="drafters/test_proposals.py::"
        "test_an_argmax_proposal_is_a_point_mass_on_the_most_likely_tokens",
    ),
    Mutant(
        name="draft tokens are drawn at the draft temperature, their law told at the target's",
        source="transformers#47932 (row 3)",
        file="drafters/proposal.py",
        old="if probs is None:",
        new="""\
out.copy_(self._warp.at_temperature(1.0)(logits))
            if probs is None:""",
        caught_by="drafters/test_proposals.py::"
        "test_draft_tokens_are_draws_from_the_law_that_is_told[plain-0.4]",
    ),
    Mutant(
        name="each law is written over the one before it",
        source="the table that the laws of a draft share",
        file="drafters/proposal.py",
        old="return self._probs[:, index : index + logits.shape[1]]",
        new="return self._probs[:, : logits.shape[1]]",
        caught_by="drafters/test_proposals.py::test_each_law_is_written_where_the_draft_keeps_it[dtype0]",
    ),
]
