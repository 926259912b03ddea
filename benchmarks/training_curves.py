"""Acceptance length over training, for each kind of head, on the zoo's target and its text.

    PYTHONPATH=. python benchmarks/training_curves.py --minutes 4 --output curves
    python benchmarks/training_curves.py --plot-only curves/curves.json

Minutes are of training each head, evaluations aside. An interrupted command goes on where it
stopped. The file has for each kind rows of [step, tokens, seconds, acceptance length at T = 0, at
T = 1]; the picture beside it (solid: T = 0, dashed: T = 1) needs matplotlib.
"""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

import torch

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter, SpeculativeGenerator, training, zoo
from specdec.lab.training import eagle, mask_token, mtp
from specdec.lab.zoo import corpus

HAS_GPU, K = torch.cuda.is_available(), 4
SIZES = {"use_cpu": not HAS_GPU, "bf16": HAS_GPU, "tokens_per_step": 16384 if HAS_GPU else 1024}
KINDS = {  # an untrained head, its drafter, and what trains it
    "eagle1": (lambda m: eagle.new_head(m, "eagle1"), EagleDrafter, eagle.FeatureAndToken),
    "eagle3": (lambda m: eagle.new_head(m, "eagle3"), EagleDrafter, eagle.TrainingTimeTest),
    "mask-token": (mask_token.new_head, MaskTokenDrafter, mask_token.MaskRollouts),
    "mtp": (mtp.new_head, MTPDrafter, mtp.MultiTokenPrediction),
}


class Curve(training.AcceptanceCallback):
    def figures(self):
        return {"seconds": self._trainer.clock.wall_s, **super().figures()}


def curve(kind: str, stream: training.PackedStream, options: argparse.Namespace) -> list[list]:
    """The rows of one head, which is trained for them as far as it is not yet."""
    target = zoo.load_target().to("cuda" if HAS_GPU else "cpu")
    new_head, make_drafter, objective = KINDS[kind]
    drafter = make_drafter(new_head(target), target, K)
    folder, every = options.output / f"{kind}, {options.minutes:g} minutes", options.every
    sizes = {"minutes": options.minutes, "save_steps": every, "disable_tqdm": True, **SIZES}
    arguments = training.ObjectiveArguments(str(folder), **sizes)
    trainer = training.ObjectiveTrainer(objective(drafter, target), arguments, stream)
    parts = trainer, SpeculativeGenerator(target, drafter), zoo.heldout_prompts(32)
    trainer.add_callback(Curve(*parts, every=every, tokenizer=zoo.load_tokenizer(), batch_size=8))
    logs = [log for log in trainer.train_or_resume().log_history if "seconds" in log]
    names = ("seconds", "acceptance_length (T = 0)", "acceptance_length (T = 1)")
    tokens = SIZES["tokens_per_step"]
    return [[log["step"], tokens * log["step"], *map(log.get, names)] for log in logs]


def plot(path: Path) -> None:
    from matplotlib import pyplot as plt

    _, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, (kind, rows) in enumerate(json.loads(path.read_text()).items()):
        _, tokens, _, greedy, sampled = zip(*rows, strict=True)
        axis.semilogx(tokens, greedy, f"C{number}.-", label=kind)
        axis.semilogx(tokens, sampled, f"C{number}.--")
    axis.set(xlabel="tokens of training", ylabel=f"acceptance length, K = {K}")
    axis.legend(frameon=False)
    plt.savefig(path.with_suffix(".png"), dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--output", type=Path, default=Path("curves"))
    parser.add_argument("--plot-only", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    path = options.plot_only or options.output / "curves.json"
    if not options.plot_only:
        texts = map(corpus.read_source, corpus.library_files())
        stream = training.PackedStream(training.encode_texts(texts, zoo.load_tokenizer()), seed=0)
        curves = {}
        for kind in KINDS:
            curves[kind] = curve(kind, stream, options)
            path.write_text(json.dumps(curves))
    if find_spec("matplotlib"):
        plot(path)
