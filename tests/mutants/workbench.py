"""Mutants of the workbench: traces, replays, intervals, runs that go on."""

from mutation import Mutant

_TRACE = "trace/test_trace.py::"
_REPLAY = "evaluation/test_replay.py::"
_RUNS = "evaluation/test_runs.py::"

WORKBENCH = [
    Mutant(
        name="a trace shows the draws of the next step",
        source="the position of a step's anchor is overwritten when it commits",
        file="loop/tracer.py",
        old="state.noise.at(state.buffer.start, width + 1)",
        new="state.noise.at(state.buffer.lengths, width + 1)",
        caught_by=_TRACE
        + "test_probabilities_draws_and_entropies_are_those_of_plain_forwards_and_of_the_noise",
    ),
    Mutant(
        name="a replayed block forgets its shorter prefixes",
        source="Sun et al., arXiv:2403.10444: P_i is at most P_{i-1} times the ratio",
        file="evaluation/replay.py",
        old="np.minimum(np.minimum.accumulate(ratios.cumprod()), 1.0)",
        new="np.minimum(ratios.cumprod(), 1.0)",
        caught_by=_REPLAY
        + "test_the_formulas_are_the_exact_conditional_law_of_the_rules[BlockSampler]",
    ),
    Mutant(
        name="a replay weighs every token of the text alike",
        source="anchors after rejections are more frequent than others",
        file="evaluation/replay.py",
        old="visits, k = _visits(at_least), at_least.shape[1] - 1",
        new="visits, k = np.ones(len(at_least)), at_least.shape[1] - 1",
        caught_by=_REPLAY + "test_a_greedy_replay_is_the_run_itself[model-2]",
    ),
    Mutant(
        name="two turns of a prompt count as independent",
        source="no peer clusters its intervals",
        file="evaluation/evaluation.py",
        old="clusters.setdefault(row.prompt, []).append(row.steps)",
        new="clusters.setdefault((row.prompt, len(clusters)), []).append(row.steps)",
        caught_by="evaluation/test_definitions.py::test_both_turns_of_a_prompt_are_one_cluster",
    ),
    Mutant(
        name="contenders without an interval are told apart",
        source="NaN covers no value, and so a ratio of five batches differed from 1",
        file="evaluation/compare.py",
        old="if r.has_interval and not r.covers(1.0)",
        new="if not r.covers(1.0)",
        caught_by="evaluation/test_tables.py::test_contenders_without_intervals_are_not_told_apart",
    ),
    Mutant(
        name="a line that was cut off is kept, and the next batch is written behind it",
        source="a run that is killed while it writes",
        file="evaluation/run_file.py",
        old="if whole < self.path.stat().st_size:",
        new="if False:",
        caught_by=_RUNS
        + "test_an_interrupted_run_goes_on_without_losing_or_repeating_a_prompt[40-3]",
    ),
    Mutant(
        name="seeds of a resumed run begin anew",
        source="vllm#17498: unseeded rows differ between processes",
        file="evaluation/evaluate.py",
        old="_Row(prompt, sample, plan.seed + index + sample * len(prompts))",
        new="_Row(prompt, sample, plan.seed + sample)",
        caught_by=_RUNS + "test_rows_do_not_depend_on_their_batch[2]",
    ),
]
