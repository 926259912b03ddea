"""The commands of every page: each is one of this package, and runs over few tokens, on the zoo's
folders in the place of the reader's. What does not run here has its reason in `NOT_RUN`.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pages import PAGES, ROOT, blocks
from pictured_processors import paint, save
from scipy.io import wavfile
from small_whisper import extractor, signal, tokenizer, whisper

from specdec import zoo
from specdec.lab.cli import app

OWN_FOLDER = (
    "makes an environment or another program's checkout: a step of .ci/run, or before a release"
)
TEST_SUITE = "is the suite, which cannot run itself: a step of .ci/run"
BY_THE_HUB = "needs the hub"
BENCHMARK = "takes long or needs a GPU: tests/examples/test_benchmarks.py runs it over small shapes"
PROCESSES = "needs many GPUs or SLURM: tests/evaluation/test_many_processes.py imitates it"
NOT_RUN = {
    "python3 -m venv": OWN_FOLDER,
    ".venv-": OWN_FOLDER,
    "pip install": OWN_FOLDER,
    "git clone": OWN_FOLDER,
    ".venv/bin/ruff": TEST_SUITE,
    ".venv/bin/python -m pytest": TEST_SUITE,
    "VLLM_PYTHON=": "needs vLLM",
    "EAGLE_CHECKOUT=": "needs another program's checkout",
    "export ": "names the reader's folders",
    "python examples/verdicts.py": "needs other projects' files: tests/examples/test_verdicts.py",
    "vllm serve": "needs vLLM: tests/foreign/test_vllm.py",
    "hf download": BY_THE_HUB,
    "specdec evaluate --target Qwen/": BY_THE_HUB,
    "PYTHONPATH=. python examples/reproduce.py": BY_THE_HUB,
    "python -m specdec.lab.integrations.lm_eval": BY_THE_HUB,
    "torchrun --nproc-per-node 2 -m specdec.lab.integrations.lm_eval": BY_THE_HUB,
    "torchrun --nproc-per-node 2 -m specdec train": "tests/parallel/test_spread_training.py does",
    "torchrun --nproc-per-node 8 -m specdec ablate": PROCESSES,
    "specdec ablate study ": PROCESSES,
    "#!/bin/bash": PROCESSES,
    "#SBATCH": PROCESSES,
    "srun ": PROCESSES,
    "accelerate launch -m specdec train": "tests/training/test_training_cli.py does on CPUs",
    "PYTHONPATH=. ": BENCHMARK,
}
"""The beginning of a command, and why no test runs it."""
DEMO = re.compile(
    r"python3 -m venv \.venv && \.venv/bin/pip install \S+ -c \S+ -e \. && \.venv/bin/"
)
"""Before a command of the README in an environment of its own."""
READERS = {
    r"eagle:(PATH_OR_ID|HEAD)": f"eagle:{zoo.WEIGHTS_DIR}/eagle3",
    r"inspect PATH": f"inspect {zoo.WEIGHTS_DIR}/eagle3",
    r"--drafter (PATH_OR_ID|PATH)\b": f"--drafter {zoo.WEIGHTS_DIR}/draft",
    r"--target (PATH_OR_ID|PATH)\b": f"--target {zoo.WEIGHTS_DIR}/target",
    r"--prompts FILE": "--prompts prompts.jsonl",
    r"--draft-vocab-size 32000": "--draft-vocab-size 1024",  # of 2048 tokens
}
"""What stands in the place of the reader's files."""
SHORT = {
    "generate": "--max-new-tokens 8",
    "demo": "--max-new-tokens 8",
    "evaluate": "--limit 2 --max-new-tokens 8",
    "certify": "--samples 2 --max-new-tokens 8 --audit-tokens 4",
    "answers": "--max-new-tokens 8",
    "train": "--steps 2 --tokens-per-step 64 --length 32 --evaluation-prompts 2",
}
"""Options that come after a command's own."""


def commands_of(page: str) -> list[str]:
    """One by one, whole where a line goes on."""
    lines = "".join(blocks(page, "bash")).replace("\\\n", "").splitlines()
    return [line for line in lines if line.strip()]


COMMANDS = {page: found for page in PAGES if (found := commands_of(page))}
ALL = [DEMO.sub("", line) for found in COMMANDS.values() for line in found]


def reason(line: str) -> str | None:
    """Why a command is not run."""
    return next((why for start, why in NOT_RUN.items() if line.startswith(start)), None)


@pytest.mark.parametrize("line", [line for line in ALL if line.startswith("specdec ")])
def test_every_command_is_one(line):
    _, name, *arguments = shlex.split(line, comments=True)
    command = typer.main.get_command(app()).commands[name]
    assert command.make_context(name, arguments).args == []


def test_no_reason_is_left_over():
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in ALL)] == []


def short(line: str) -> list[str]:
    """The program and its arguments, of this environment."""
    for name, path in READERS.items():
        line = re.sub(name, path, line)
    program, *arguments = shlex.split(line, comments=True)
    if program == "specdec":
        arguments += SHORT.get(arguments[0], "").split()
        return [sys.executable, "-m", "specdec", *arguments]
    assert program == "torchrun", f"say how {line!r} is run, or why not in NOT_RUN"
    return [sys.executable, "-m", "torch.distributed.run", *arguments]


def write_files(page: str, folder: Path) -> None:
    """What the page's commands read: texts, a study of few cells, the page's own snippets. The rule
    that a page writes is lossless at 1, and its certificate exits with 1 above.
    """
    texts = "\n".join(json.dumps({"text": text}) for text in zoo.heldout_prompts(4))
    for name in ("texts.jsonl", "prompts.jsonl"):
        (folder / name).write_text(texts)
    study = (ROOT / "docs/which.toml").read_text()
    for name, few in [("drafters", '["lookup"]'), ("drafts", "[2]"), ("max_new_tokens", "8")]:
        study = re.sub(rf"^{name} = .*$", f"{name} = {few}", study, flags=re.MULTILINE)
    (folder / "docs").mkdir()
    (folder / "docs/which.toml").write_text(study)
    if page == "docs/pictures.md":
        save("llava", folder / "VLM")
        paint(folder)[0].rename(folder / "cat.png")
        line = {"prompt": "What is it?", "images": ["cat.png"]}
        (folder / "pictures.jsonl").write_text(json.dumps(line))
    if page == "docs/encoders.md":
        for part in (whisper(), tokenizer(), extractor()):
            part.save_pretrained(folder / "WHISPER")
        wavfile.write(folder / "talk.wav", 16000, signal(0, 1.3))
    snippets = blocks(page)
    if page == "docs/gpu.md":
        (whole,) = (block for block in snippets if block.startswith("# parallel.py"))
        whole = whole.replace("TARGET", repr(f"{zoo.WEIGHTS_DIR}/target"))
        whole = whole.replace("HEAD", repr(f"{zoo.WEIGHTS_DIR}/eagle3"))
        (folder / "parallel.py").write_text(whole.replace("max_new_tokens=128", "max_new_tokens=4"))
    elif page == "docs/own-drafter.md":
        (made,) = (text for text in blocks(page, "text") if text.startswith("def "))
        (linear,) = (block for block in snippets if "class LinearDrafter" in block)
        (folder / "mine.py").write_text(linear.split("print(")[0] + made)
    elif page == "docs/own-head.md":
        (hydra,) = (block for block in snippets if "HYDRA = " in block)
        (folder / "hydra.py").write_text(hydra)
    elif page == "docs/own-rule.md":
        (rule,) = (block for block in snippets if "class LenientSampler" in block)
        rule = rule.split("print(")[0].replace("lenience: float = 1.5", "lenience: float = 1")
        (folder / "rule.py").write_text(rule)
    elif page == "docs/own-layout.md":
        (whole,) = (block for block in snippets if "ACME = Layout(" in block)
        record, names = whole.split("target = ")[0], {}
        (folder / "acme.py").write_text(record)
        exec(record, names)
        drafter = zoo.load_drafter("eagle3", zoo.load_target())
        drafter.save_pretrained(folder / "HEAD", names["ACME"])


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMANDS)
def test_the_commands_of_a_page_run_one_after_the_other(page, tmp_path):
    write_files(page, tmp_path)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    options = {
        "cwd": tmp_path,
        "env": env,
        "capture_output": True,
        "text": True,
        "input": "Hello\n",
    }
    for line in (DEMO.sub("", line) for line in COMMANDS[page]):
        if reason(line) is None:
            done = subprocess.run(short(line), **options)
            assert done.returncode == 0, line + done.stdout[-2000:] + done.stderr[-2000:]
