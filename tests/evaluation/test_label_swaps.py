"""`study.test`: label swaps against scipy's, its level, and the table of a paper that shows it."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import permutation_test

from specdec.lab.evaluation import Evaluation, Study, difference, sweep
from specdec.lab.evaluation.intervals import holm
from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow
from specdec.lab.evaluation.swaps import MOST_EXACT, swap_p_value
from specdec.row_step import RowStep


def scipys(totals: np.ndarray) -> float:
    """The same test, of scipy: samples are the places of a prompt's totals of each label."""
    flat = totals.reshape(-1, 2)

    def gap(first, second, axis=-1):
        sums = [flat[places.astype(int)].sum(axis=-2) for places in (first, second)]
        return sums[1][..., 0] / sums[1][..., 1] - sums[0][..., 0] / sums[0][..., 1]

    places = np.arange(len(flat)).reshape(-1, 2).T
    found = permutation_test(
        tuple(places), gap, permutation_type="samples", n_resamples=np.inf, vectorized=True
    )
    return found.pvalue


def test_exact_p_values_are_those_of_scipy():
    rng = np.random.default_rng(0)
    for index in range(200):
        totals = rng.integers(1, 7, (rng.integers(2, 11), 2, 2)).astype(float)
        if index % 2:  # of one number of steps each: more ties
            totals[..., 1] = 3
        totals[:, 1, 0] += index % 3
        assert swap_p_value(totals) == pytest.approx(scipys(totals), abs=1e-12)


def test_drawn_swaps_are_near_the_exact_ones(monkeypatch):
    rng = np.random.default_rng(1)
    for _ in range(5):
        totals = rng.integers(1, 7, (MOST_EXACT, 2, 2)).astype(float)
        exact = swap_p_value(totals)
        monkeypatch.setattr("specdec.lab.evaluation.swaps.MOST_EXACT", 0)
        drawn = swap_p_value(totals)
        monkeypatch.undo()
        assert drawn == pytest.approx(exact, abs=5 * (0.25 / 1e5) ** 0.5)
    apart = np.stack([[[1.0, 2.0]] * 40, [[2.0, 2.0]] * 40], axis=1)
    assert swap_p_value(apart) == pytest.approx(1e-5)  # never 0


@given(st.integers(0, 2**31), st.integers(1, 9))
def test_a_p_value_has_no_side_and_no_order(seed, n):
    rng = np.random.default_rng(seed)
    totals = rng.integers(0, 5, (n, 2, 2)) + np.array([0.0, 1.0])
    found = swap_p_value(totals)
    assert found == swap_p_value(totals[:, ::-1]) == swap_p_value(rng.permutation(totals))
    assert 2 / 2**n <= found <= 1 or n == 1


def test_what_is_not_known_is_not_said_to_differ():
    assert swap_p_value([[[1.0, 0.0], [1.0, 1.0]]] * 8) == 1.0
    assert swap_p_value([[[2.0, 1.0], [2.0, 1.0]]] * 8) == 1.0


def made(rng, ease) -> Evaluation:
    """A run of twelve steps of three draft tokens of each prompt, accepted as easily as this."""
    batches = []
    for i, own in enumerate(ease):
        accepted = (rng.random((12, 3)) < own).cumprod(axis=1).sum(axis=1).tolist()
        steps = [RowStep([1] * 3, n, [1] * n + [2]) for n in accepted]
        row = EvaluatedRow(f"p{i}", "", 0, 0, 3, False, "length", None, steps)
        batches.append(EvaluatedBatch(i, [1.0], [row]))
    return Evaluation(batches, 3)


def grid(rng, gain: float = 0.0, cells: int = 12, prompts: int = 10) -> Study:
    """Two drafters at so many K; the second one is better at the last K."""
    ease = rng.beta(4, 3, prompts)
    names, ks = "ab", range(1, cells + 1)
    keys = [{"drafter": n, "draft": k, "temperature": 0.0} for n in names for k in ks]
    better = [gain * (key["drafter"] == "b" and key["draft"] == cells) for key in keys]
    return Study(keys, [made(rng, np.clip(ease + more, 0, 1)) for more in better])


def test_the_level_holds_for_12_cells_together():
    """Of 300 studies of 12 equal pairs at most 5 % say that one differs: more than 24 would come
    once in 100 repetitions.
    """
    rng, said, alone = np.random.default_rng(2), 0, 0
    for _ in range(300):
        ease = rng.beta(4, 3, (11, 1, 1, 1, 1))  # of each prompt, in all cells and in both runs
        accepted = (rng.random((11, 12, 2, 9, 3)) < ease).cumprod(axis=-1).sum(axis=(-1, -2))
        totals = np.stack([9 + accepted, np.full_like(accepted, 9)], axis=-1)  # of 9 steps
        chances = [swap_p_value(totals[:, cell]) for cell in range(12)]
        said += holm(chances).min() <= 0.05
        alone += min(chances) <= 0.05
    print(f"level over 12 cells: {said / 300:.3f}; without Holm {alone / 300:.3f}")
    assert said <= 24
    assert alone > 90  # the negative control: of single tests some are false in many studies


def test_a_difference_that_is_there_is_found_in_its_cell_alone():
    study = grid(np.random.default_rng(3), gain=0.3)
    found = study.test({"drafter": "a"}, {"drafter": "b"})
    assert [t.cell["draft"] for t in found.tests if t.adjusted <= 0.05] == [12]
    last = found.tests[-1]
    assert last.difference == difference(study.runs[11], study.runs[23])
    assert last.p_value == pytest.approx(2 / 2**10)
    assert found.records()[-1]["adjusted"] == last.adjusted == pytest.approx(12 * 2 / 2**10)
    note = "p by all label swaps within 10 prompts, two-sided; Holm over 12 pairs."
    assert str(found).endswith(note) or note in " ".join(str(found).split())
    few = grid(np.random.default_rng(3), prompts=6).test({"drafter": "a"})
    assert few.note().endswith("show no difference: after Holm no p is below 0.38.")
    assert min(test.adjusted for test in few.tests) >= 12 * 2 / 2**6
    many = grid(np.random.default_rng(3), cells=1, prompts=MOST_EXACT + 1)
    assert "p by 100 000 random label swaps" in " ".join(str(many.test({"drafter": "a"})).split())


def test_a_cell_of_the_same_run_is_no_partner_and_pairs_of_runs_come_once():
    study = grid(np.random.default_rng(4), cells=2)
    cells = [{**cell, "sampler": s} for cell in study.cells for s in ("block", "rejection")]
    shared = Study(cells, list(itertools.chain(*zip(study.runs, study.runs, strict=True))))
    assert len(shared.test({"drafter": "a"}).tests) == 2
    with pytest.raises(ValueError, match="no cell has a partner"):
        shared.test({"sampler": "block"}, {"sampler": "rejection"})


def columns(line: str) -> list[str]:
    return [part.strip() for part in line.removesuffix(r"\\").split("&")]


def test_the_table_of_a_paper_has_differences_stars_and_a_note():
    pytest.importorskip("pandas")
    study = grid(np.random.default_rng(3), gain=0.3, cells=2)
    text = study.to_latex(minus={"drafter": "a"}, caption=r"Length, \emph{zoo}", label="tab:length")
    assert text.startswith("\\begin{table}\n\\centering\n\\caption{Length, \\emph{zoo}}\n")
    assert "\\label{tab:length}\n" in text
    lines = text.splitlines()
    (header,) = (columns(line) for line in lines if line.startswith("drafter &"))
    assert header == ["drafter", "K = 1", "minus a", "K = 2", "minus a"]
    (ours,) = (columns(line) for line in lines if line.startswith("b &"))
    last = study.test({"drafter": "a"}).tests[-1]
    assert ours[4] == f"{last.difference:+.2f}$^{{*}}$"
    assert 0.01 < last.adjusted <= 0.05
    (theirs,) = (columns(line) for line in lines if line.startswith("a &"))
    assert theirs[2] == theirs[4] == ""
    assert r"95 \% intervals over prompts." in text
    assert "Holm over 2 pairs. $^{*}$ p $\\le$ 0.05" in text
    no_stars = study.to_latex(minus={"drafter": "a"}, stars=())
    assert "*" not in no_stars
    assert re.search(r"\$-\$0\.\d\d \[\$-\$0", study.to_latex(minus={"drafter": "b"}))
    assert "table" not in no_stars.replace("tabular", "")


def test_the_note_names_prompts_seed_hardware_and_commit():
    pytest.importorskip("pandas")
    study = sweep(drafters=["lookup"], drafts=[2], limit=2, max_new_tokens=2, seed=7)
    note = study.to_latex(caption="x").splitlines()[-2]
    run = study.runs[0].about
    commit = (run["git_revision"] or "unknown")[:12]
    assert "2 prompts, 1 text of each, at most 2 tokens, seed 7, cpu" in note
    assert note.removesuffix("}").endswith(f"float32, commit {commit}.")


def test_a_run_with_several_partners_has_no_difference_of_its_own():
    """One rule, `argmax`, of two draft temperatures; of samples each is a rule of its own."""
    rng = np.random.default_rng(5)
    warm, cold, both = (made(rng, rng.beta(4, 3, 8)) for _ in range(3))
    axes = itertools.product(("sample", "argmax"), (1.0, 0.5))
    keys = [{"drafter": "a", "draft": 3, "temperature": 1.0} for _ in range(4)]
    cells = [
        key | {"proposal": p, "draft_temperature": t}
        for key, (p, t) in zip(keys, axes, strict=True)
    ]
    study = Study(cells, [warm, cold, both, both])
    assert len(study.test({"proposal": "sample"}).tests) == 2
    (table,) = study.tables("draft", minus={"proposal": "sample"})
    assert [row[-1] for row in table.rows] == ["", "", ""]
    (table,) = study.tables("draft", minus={"proposal": "sample", "draft_temperature": 0.5})
    assert [bool(row[-1]) for row in table.rows] == [True, False, True]


def test_of_times_the_labels_are_swapped_within_batches():
    found = grid(np.random.default_rng(6), cells=1).test({"drafter": "a"}, of="tokens_per_second")
    assert "within 10 separate batches, two-sided" in found.note()
