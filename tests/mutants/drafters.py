"""Mutants of the drafters that have no head of their own: a draft model, and lookup."""

from mutation import Mutant

DRAFTERS = [
    Mutant(
        name="a shorter draft model drafts past its last position",
        source="vllm#57941, vllm#22935 (row 57)",
        file="drafters/model.py",
        old="return (limit - last[:, 0]).clamp(0, num_draft_tokens)",
        new="return (limit + 1 - last[:, 0]).clamp(0, num_draft_tokens)",
        caught_by="drafters/test_model_drafter.py::"
        "test_fewer_tokens_are_valid_where_the_positions_of_the_draft_model_end[llama]",
    ),
    Mutant(
        name="the draft model never reads the token before a bonus token",
        source="vllm#4212, vllm#5765 (row 30)",
        file="drafters/model.py",
        old="pair = (context.num_new[:, None] + state.offsets).clamp(min=0)",
        new="pair = (context.num_new[:, None] + state.offsets[1:].expand(2)).clamp(min=0)",
        caught_by="drafters/test_model_drafter.py::"
        "test_a_block_that_was_accepted_whole_is_read_to_its_end[1]",
    ),
    Mutant(
        name="the draft model re-reads the right two tokens for K = 1 only",
        source="vllm#9730 (row 31)",
        file="drafters/model.py",
        old="pair = (context.num_new[:, None] + state.offsets).clamp(min=0)",
        new="""\
pair = (context.num_new[:, None] + state.offsets).clamp(min=0)
        pair[:, 0].clamp_(max=1)""",
        caught_by="drafters/test_model_drafter.py::"
        "test_a_block_that_was_accepted_whole_is_read_to_its_end[3]",
    ),
    Mutant(
        name="the draft model writes each draft token over the one before",
        source="lablup/mlxcel#994 (row 37)",
        file="drafters/model.py",
        old="last + i if i else positions",
        new="last + i - 1 if i else positions",
        caught_by="generator/test_greedy_equality.py::"
        "test_a_target_that_drafts_for_itself_is_never_rejected[llama-greedy]",
    ),
    Mutant(
        name="the draft model's forwards do not reach the tokens just drafted",
        source="vllm#41162, vllm#46849 (row 87)",
        file="drafters/model.py",
        old="slots = self._slots(state.cache, last + i if i else positions)",
        new="""\
slots = self._slots(state.cache, last + i if i else positions)
            context = __import__("dataclasses").replace(context, num_attended=1)""",
        caught_by="generator/test_greedy_equality.py::"
        "test_a_target_that_drafts_for_itself_is_never_rejected[llama-greedy]",
    ),
    Mutant(
        name="token ids that the draft model lacks get probability of their own",
        source="llama.cpp#3812, vllm#10913 (row 88)",
        file="drafters/model.py",
        old='value=float("-inf"))  # a negative pad cuts',
        new="value=0.0)",
        caught_by="drafters/test_model_drafter.py::test_laws_are_over_the_vocabulary_of_the_target[plain-67]",
    ),
    Mutant(
        name="lookup takes matches in stale tokens behind a row's end",
        source="vllm#46899, vllm#28558 (row 55)",
        file="drafters/lookup.py",
        old="follow = (length - 1 - ends)",
        new="follow = (text.shape[1] - 1 - ends).expand(text.shape)",
        caught_by="drafters/test_lookup_drafter.py::"
        "test_what_lies_behind_the_text_of_a_row_is_never_looked_at",
    ),
    Mutant(
        name="lookup does not remember the last committed token",
        source="vllm#4212 (row 30)",
        file="drafters/lookup.py",
        old="is_real = offsets <= context.num_new[:, None]",
        new="is_real = offsets < context.num_new[:, None]",
        caught_by="drafters/test_lookup_drafter.py::test_a_proposal_is_what_a_search_through_the_text_finds",
    ),
]
