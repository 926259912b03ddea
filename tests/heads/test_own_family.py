"""The family of the page "A head of your own": trained, saved, inspected and used by
commands that know it as a file alone.
"""

import re
from pathlib import Path

import pytest
import torch

from specdec import SpeculativeGenerator, zoo
from specdec.lab.cli import main
from specdec.loading import load_drafter

PAGE = Path(__file__).parents[2] / "docs" / "own-head.md"


@pytest.fixture(scope="module")
def hydra(tmp_path_factory):
    """The page's code as a file, and a head that a command trained for two steps."""
    page = PAGE.read_text(encoding="utf-8")
    folder = tmp_path_factory.mktemp("hydra")
    (folder / "hydra.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    (folder / "text.txt").write_text("def main(argv):\n    return len(argv)\n" * 60)
    sizes = ["--steps", "2", "--tokens-per-step", "64", "--length", "64"]
    sizes += ["--evaluation-prompts", "0"]
    data = ["--target", "zoo", "--data", str(folder / "text.txt"), *sizes]
    command = ["train", f"{folder}/hydra.py:loss", *data, "--output", str(folder / "head")]
    assert main(command) == 0
    return folder


def test_a_family_in_one_file_is_trained_inspected_and_drafts(hydra, capsys):
    name, target = f"{hydra}/hydra.py:HYDRA:{hydra}/head", zoo.load_target()
    assert main(["inspect", name]) == 0
    assert "Hydra, no decoder layers, width 128" in capsys.readouterr().out
    drafter = load_drafter(name, target, 3)
    assert type(drafter).__name__ == "HydraDrafter"
    ids = zoo.load_tokenizer()("def main(argv):", return_tensors="pt").input_ids
    options = {"max_new_tokens": 24, "do_sample": False}
    found = SpeculativeGenerator(target, drafter).generate(ids, **options).sequences
    assert found.equal(target.generate(ids, **options))
    again = type(drafter).from_pretrained(hydra / "head", target)
    assert again.config == drafter.config
    assert all(map(torch.equal, again.head.parameters(), drafter.head.parameters()))


def test_its_head_reads_the_last_token_and_those_drafted_before(hydra):
    """The loss and the drafter read the same inputs: with a head that copies the newest token that
    it reads, each draft token is the one before, and the loss that of copying.
    """
    target = zoo.load_target()
    drafter = load_drafter(f"{hydra}/hydra.py:HYDRA:{hydra}/head", target, 4)
    head, table = drafter.head, target.get_input_embeddings().weight.detach()
    with torch.no_grad():
        for j, matrix in enumerate(head.inputs):
            matrix.weight.zero_()
            matrix.weight[:, (1 + j) * 128 :] = torch.eye(128)  # embedding j of 1 + j
            for part in head.blocks[j].parameters():
                part.zero_()
            head.lm_heads[j].weight.copy_(20 * torch.nn.functional.normalize(table))
    generator = SpeculativeGenerator(target, drafter)
    ids = torch.tensor([[11, 12, 13]])
    result = generator.generate(ids, max_new_tokens=8, do_sample=False, trace=True)
    text = ids[0].tolist()
    for step in result.trace[0]:
        assert step.draft_tokens == [text[-1]] * len(step.draft_tokens)
        text += step.new_tokens


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hydra.py:sizes:x", "must be a specdec.checkpoints.Layout or Family"),
        ("hydra.py:nothing:x", "has no nothing"),
    ],
)
def test_names_of_what_is_no_family_are_refused(hydra, name, words, capsys):
    assert main(["inspect", f"{hydra}/{name}"]) == 2
    assert words in capsys.readouterr().err


def test_heads_of_no_kind_are_refused(tmp_path, capsys):
    folders = ["--target", "zoo", "--data", "zoo", "--output", str(tmp_path / "x")]
    assert main(["train", "eagle4", *folders]) == 2
    assert "or your own as mine.py:make" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("def make(target, num_draft_tokens):\n    return 3\n")
    (tmp_path / "text.txt").write_text("def main(argv):\n" * 400)
    folders[3] = str(tmp_path / "text.txt")
    steps = ["--steps", "1", "--tokens-per-step", "64", "--length", "64"]
    assert main(["train", f"{tmp_path}/mine.py:make", *folders, *steps]) == 2
    assert (
        "must return a specdec.lab.training.losses.HeadObjective, got 3" in capsys.readouterr().err
    )
