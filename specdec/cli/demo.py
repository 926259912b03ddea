"""`specdec demo`: completes prompts plainly and with every drafter of the zoo, and compares."""

from __future__ import annotations

import argparse
import sys
from statistics import median

from specdec.cli.parser import TREE_HELP, positive, tree_size

DRAFTERS = {
    "lookup": "prompt lookup",
    "model": "draft LM",
    "eagle3": "EAGLE-3 head",
    "mask-token": "mask-token head",
    "mtp": "MTP modules",
}


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser("demo", help="complete prompts plainly and speculatively, compare")
    parser.add_argument("--prompts", type=positive, default=3, help="number of prompts (default 3)")
    parser.add_argument("--new-tokens", type=int, default=96, help="tokens each (default 96)")
    parser.add_argument("--num-draft-tokens", type=int, help="K (default 4)")
    parser.add_argument("--tree", type=tree_size, metavar="NODESxDEPTH", help=TREE_HELP)
    parser.add_argument(
        "--drafter",
        choices=tuple(DRAFTERS),
        default="eagle3",
        help="whose text is shown (default eagle3); all are compared",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if the outputs are equal, else 1."""
    from specdec import PromptLookupDrafter, SpeculativeGenerator, Tree, zoo
    from specdec.evaluation import evaluate
    from specdec.show.tokens import colour_key, coloured_text

    tree = None if arguments.tree is None else Tree(*arguments.tree)
    k = 4 if arguments.num_draft_tokens is None else arguments.num_draft_tokens
    lookup = PromptLookupDrafter(k)
    if tree is not None:
        paths = tree.nodes // tree.depth
        lookup = PromptLookupDrafter(paths * tree.depth, num_continuations=paths)
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    drafters = {"plain decoding": None, DRAFTERS["lookup"]: lookup}
    for name in zoo.DRAFTERS:
        shape = {"num_draft_tokens": k, "tree": None if name == "mtp" else tree}
        drafters[DRAFTERS[name]] = zoo.load_drafter(name, target, **shape)
    generators = {name: SpeculativeGenerator(target, d) for name, d in drafters.items()}
    shown = DRAFTERS[arguments.drafter]
    print(
        f"target: {target.config.num_hidden_layers} layers, "
        f"{target.num_parameters() / 1e6:.1f} M parameters;  greedy;  shown: {shown}"
    )
    print(colour_key(sys.stdout))

    warm_up = tokenizer("import", return_tensors="pt").input_ids
    for generator in generators.values():
        generator.generate(warm_up, max_new_tokens=8, do_sample=False)
    seconds: dict[str, list[float]] = {name: [] for name in generators}
    steps: dict[str, list] = {name: [] for name in generators}
    is_equal = True
    for prompt in zoo.heldout_prompts(arguments.prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        texts = []
        for name, generator in generators.items():
            done = evaluate(generator, ids, max_new_tokens=arguments.new_tokens)
            seconds[name].append(done.seconds)
            steps[name].append(done.rows[0].steps)
            texts.append(done.rows[0].new_tokens)
        is_equal &= all(text == texts[0] for text in texts[1:])
        print("\n" + "-" * 80)
        print(coloured_text(tokenizer, prompt, steps[shown][-1], sys.stdout))

    print("\n" + "-" * 80)
    print("outputs of all ways of decoding are " + ("identical" if is_equal else "DIFFERENT"))
    _print_comparison(generators, steps, seconds, shown)
    return 0 if is_equal else 1


def _print_comparison(
    generators: dict, steps: dict[str, list], seconds: dict[str, list[float]], shown: str
) -> None:
    """Medians over the prompts, so that one moment in which the machine was busy does not count."""
    from specdec.results import SpeculationStats
    from specdec.show.text import draft_size

    drafters = {name: generator.drafter for name, generator in generators.items()}
    stats = {n: SpeculationStats(rows, drafters[n].num_draft_tokens) for n, rows in steps.items()}
    print(f"\n{'':<16}{'draft':<11}{'tokens/s':>10}{'speed-up':>10}{'acceptance length':>19}")
    for name, taken_s in seconds.items():
        rate = median(n / s for n, s in zip(stats[name].emitted, taken_s, strict=True))
        ratio = median(p / s for p, s in zip(seconds["plain decoding"], taken_s, strict=True))
        length = stats[name].acceptance_length
        size = draft_size(drafters[name].num_draft_tokens, drafters[name].tree_depth)
        print(f"{name:<16}{size:<11}{rate:>10.0f}{ratio:>8.2f} x{length:>19.2f}")
    print("x: median over the prompts of the ratio to plain decoding of the same prompt")
    print(f"\n{shown}:")
    print(stats[shown])
