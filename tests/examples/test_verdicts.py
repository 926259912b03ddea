"""Rules of other projects get the verdicts of docs/verdicts.md; adapters let faults show."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from examples import eagle_trees, verdicts
from specdec.lab.certificates import RuleNoise, certify
from specdec.types import Draft

PAGE = (Path(__file__).parents[2] / "docs/verdicts.md").read_text()
ROWS = {
    line.split("`")[1]: [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.findall(r"^\| `.*", PAGE, flags=re.MULTILINE)
}


def sampler_of(name: str):
    """The adapter, if its project is here in the version of the page."""
    try:
        sampler = verdicts.CASES[name].make()
    except verdicts.MissingError as why:
        pytest.skip(str(why))
    here = verdicts.version_of(verdicts.CASES[name])
    if here not in ("checkout", ROWS[name][1]):
        pytest.skip(f"the page has {ROWS[name][1]}, here is {here}")
    return sampler


def test_the_page_and_the_script_have_the_same_rules():
    assert list(ROWS) == list(verdicts.CASES)
    assert [cells[2] for cells in ROWS.values()] == [f"`{c.rule}`" for c in verdicts.CASES.values()]


@pytest.mark.parametrize("name", [name for name in verdicts.CASES if name not in ("eagle", "fly")])
def test_a_draft_that_is_not_the_drafts_own_fails(name):
    """Its distributions are shifted by one token, so that no rule can be right."""
    sampler = sampler_of(name)
    rule = sampler.rule
    sampler.rule = lambda ids, draft, target, noise: rule(ids, draft.roll(1, -1), target, noise)
    report = certify(sampler, sizes=((3, 1, 2),), progress=lambda batches: batches[:1])
    assert "law" in {failure.kind for failure in report.failures}


def test_a_target_that_is_not_the_targets_own_fails_eagles_rule():
    """Which looks at no draft probabilities: its target is shifted by one token, on trees too."""
    sampler = sampler_of("eagle")
    rule = sampler.rule
    sampler.rule = lambda logits, ids, processor: rule(logits.roll(1, -1), ids, processor)
    report = certify(sampler, sizes=((3, 1, 2),), trees=((-1, -1),))
    assert {failure.kind for failure in report.failures} >= {"law"}
    assert len(report.failures) > 6  # of twelve batches


def test_candidates_are_the_paths_to_the_leaves_without_tokens_drafted_twice():
    """Nodes 0 and 1 draft the same token, so node 1 and what follows it, node 3, is left out."""
    parents = torch.tensor([[-1, -1, 0, 1, -1]])
    draft = Draft(torch.tensor([[7, 7, 5, 6, 8]]), parents=parents, depth=2)
    assert eagle_trees.candidates_of(draft, 0).tolist() == [[0, 1, 3], [0, 5, -1]]


@pytest.mark.parametrize("name", [n for n in verdicts.CASES if n.startswith(("vllm", "sglang"))])
def test_a_kernel_of_all_programs_at_once_is_that_of_tritons_own_interpreter(name, monkeypatch):
    sampler_of(name)
    rows, width, vocab = 24, 3, 5
    generator = torch.Generator().manual_seed(0)
    draft, target = torch.rand(2, rows, width + 1, vocab, generator=generator).double()
    target[:, :, 0] = 0.0
    draft, target = draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    ids = torch.randint(1, vocab, (rows, width), generator=generator)
    uniforms = torch.rand(rows, width + 1, generator=generator).double()
    noise = RuleNoise(
        uniforms[:, :width], uniforms[:, width], torch.rand(rows, vocab, generator=generator) + 0.1
    )
    inputs = ids, draft[:, :width], target, noise
    at_once = verdicts.CASES[name].make().rule(*inputs)
    monkeypatch.setattr(verdicts, "triton_rows", lambda block: nullcontext)
    one_by_one = verdicts.CASES[name].make().rule(*inputs)
    assert at_once.tolist() == one_by_one.tolist()
    assert len({(row != -1).sum().item() for row in at_once}) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", verdicts.CASES)
def test_the_verdict_is_that_of_the_page(name):
    report = certify(sampler_of(name), **verdicts.CASES[name].options)
    assert verdicts.verdict(report) == ROWS[name][3]
    assert report.is_exact == (ROWS[name][4] != "-")
    if report.is_exact:
        assert report.deviation == pytest.approx(float(ROWS[name][4]), rel=0.5, abs=1e-15)


def test_without_its_window_fly_draws_as_the_target(monkeypatch):
    """The adapter lets the fault show and adds none."""
    sampler_of("fly")
    settings = verdicts.SimpleNamespace
    monkeypatch.setattr(
        verdicts, "SimpleNamespace", lambda **own: settings(**own | {"enable_fly": False})
    )
    assert certify(verdicts.fly(), sizes=((3, 3, 1),)).passed
