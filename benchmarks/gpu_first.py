"""The README's first table: a step of an 8B shape on one GPU, beside what Hugging Face users run.

    PYTHONPATH=. python benchmarks/gpu_first.py     # writes figures/gpu_first.md, into $OUT if set

All lines decode the same prompt greedily with the same model object, in one process, by turns. A
time is the median over rounds, and `x` the median ratio within a round to plain steps of specdec.
Weights are random, so almost no draft token is accepted. A step takes the same time whatever is
accepted; how many tokens it writes is a question to trained heads. Without a GPU shapes are small,
and nothing is written but where `--output` says.
"""

import argparse
import os
import subprocess
from pathlib import Path

from gpu import ROUNDS, Steps, compiled_loop, hf_generate, roof, target_of
from models import block_head, eagle3, prompt, shape
from timing import DEVICE, Turns, about

from specdec.drafters.mask_token.correction import MarkovConfig
from specdec.lab.show.table import Table

PLAIN = "specdec, no drafter"
HEADER = ["", "ms per step", "spread", "x plain", "tokens per step, at most", "captured in, s"]


def page() -> str:
    """The table in Markdown, and what was run where."""
    target, draft_model = target_of("8B"), shape("8B", num_hidden_layers=1)
    model, ids = target.model, prompt(target.model, 512)
    dspark = block_head(model, MarkovConfig(256 if DEVICE == "cuda" else 16))
    assisted = hf_generate(model, ids, draft_model, 3)
    compiled = compiled_loop(model, draft_model, ids, 0)
    sides = {  # and the most tokens that a step of each can write
        PLAIN: (Steps(target, None, ids), 1),
        "specdec, EAGLE-3, K = 3": (Steps(target, eagle3(model), ids), 4),
        "specdec, DSpark's shape, K = 7": (Steps(target, dspark, ids), 8),
        "HF `generate`": (hf_generate(model, ids), 1),
        "HF assisted, draft model of one layer, K = 3": (assisted, 4),
        'loop over `torch.compile(mode="reduce-overhead")`, static cache': (compiled, 1),
    }
    limit = roof(model)
    times = Turns().run({name: side for name, (side, _) in sides.items()}, ROUNDS)
    rows = []
    for name, (side, most) in sides.items():
        found = times.ms(name), max(times[name]) - min(times[name]), times.ratio(name, PLAIN)
        captured = side.about()[1] if isinstance(side, Steps) else ""
        rows.append([name, *(f"{value:.2f}" for value in found), str(most), captured])
    what = "8B Llama shape" if DEVICE == "cuda" else "a small shape in place of 8B"
    what += f", random weights, bfloat16, one row, a prompt of {ids.shape[1]} tokens, greedy"
    lines = [f"{about()}, commit {commit()}", "`python benchmarks/gpu_first.py`", what, limit]
    return "\n\n".join([*lines, Table(HEADER, rows).markdown()])


def commit() -> str:
    """Of the code; a copy without a history has none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def main() -> None:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="a Markdown file")
    output = parser.parse_args().output
    if output is None and DEVICE == "cuda":
        folder = os.environ.get("OUT") or Path(__file__).parent / "figures"
        output = Path(folder, "gpu_first.md")
    text = page()
    if output is not None:
        output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
