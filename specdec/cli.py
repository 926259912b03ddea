"""The command line: `specdec demo` and `specdec generate`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from specdec.display import colour_key, coloured_text

EXIT_BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        Exit code: 0, or 2 for input that cannot be right (with one line on standard error), or 1
        when the demo's outputs differ.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"specdec: {_one_line(error)}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specdec", description="Lossless speculative decoding over Hugging Face models."
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="complete prompts plainly and speculatively, compare")
    demo.add_argument("--prompts", type=int, default=3, help="number of prompts (default 3)")
    demo.add_argument("--new-tokens", type=int, default=96, help="tokens each (default 96)")
    demo.add_argument("--num-draft-tokens", type=int, default=4, help="K (default 4)")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser("generate", help="complete a prompt with models of your own")
    generate.add_argument("--target", required=True, help="folder or Hugging Face id")
    generate.add_argument(
        "--drafter",
        default="lookup",
        help="folder or id of a draft model, 'lookup' (prompt lookup, default) or 'none'",
    )
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--max-new-tokens", type=int, default=128)
    generate.add_argument("--num-draft-tokens", type=int, default=4)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--min-p", type=float)
    generate.add_argument("--seed", type=int)
    generate.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16")
    generate.add_argument("--device", default="cpu")
    generate.set_defaults(run=_generate)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    import torch

    from specdec import SpeculativeGenerator, zoo
    from specdec.results import SpeculationStats

    if arguments.prompts < 1:
        raise ValueError(f"--prompts must be at least 1, got {arguments.prompts}")
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    drafter = zoo.load_drafter("model", target, num_draft_tokens=arguments.num_draft_tokens)
    plain = SpeculativeGenerator(target, None)
    speculative = SpeculativeGenerator(target, drafter)
    print(
        f"target: {target.config.num_hidden_layers} layers, "
        f"{target.num_parameters() / 1e6:.1f} M parameters;  "
        f"drafter: {drafter.model.config.num_hidden_layers} layer, "
        f"{drafter.model.num_parameters() / 1e6:.1f} M;  K = {arguments.num_draft_tokens};  greedy"
    )
    print(colour_key(sys.stdout))

    options = dict(max_new_tokens=arguments.new_tokens, do_sample=False)
    warm_up = tokenizer("import", return_tensors="pt").input_ids
    for generator in (plain, speculative):
        generator.generate(warm_up, max_new_tokens=8, do_sample=False)
    seconds, steps, num_tokens, is_equal = [0.0, 0.0], [], 0, True
    for prompt in zoo.heldout_prompts(arguments.prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected, plain_s = _timed(lambda: plain.generate(ids, **options))  # noqa: B023
        result, fast_s = _timed(lambda: speculative.generate(ids, **options, trace=True))  # noqa: B023
        seconds = [seconds[0] + plain_s, seconds[1] + fast_s]
        steps.append(result.trace[0])
        num_tokens += result.lengths[0]
        is_equal &= torch.equal(expected.sequences, result.sequences)
        print("\n" + "-" * 80)
        print(coloured_text(tokenizer, prompt, result.trace[0], sys.stdout))

    print("\n" + "-" * 80)
    print(
        "outputs of plain and speculative decoding are "
        + ("identical" if is_equal else "DIFFERENT")
    )
    for name, total in zip(("plain decoding", "speculative"), seconds, strict=True):
        print(f"{name:<16}{num_tokens / total:>7.0f} tokens/s")
    print(f"{'speed-up':<16}{seconds[0] / seconds[1]:>7.2f} x\n")
    print(SpeculationStats(steps, arguments.num_draft_tokens))
    return 0 if is_equal else 1


def _generate(arguments: argparse.Namespace) -> int:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator

    def load(auto_class: type, path: str, **options):
        try:
            return auto_class.from_pretrained(path, **options)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"cannot load {path!r}: it must be a folder or a Hugging Face id of a causal LM "
                f"with its tokenizer ({error})"
            ) from error

    def load_model(path: str):
        model = load(AutoModelForCausalLM, path, dtype=arguments.dtype)
        return model.to(arguments.device).eval()

    tokenizer = load(AutoTokenizer, arguments.target)
    k = arguments.num_draft_tokens
    if arguments.drafter == "none":
        drafter = None
    elif arguments.drafter == "lookup":
        drafter = PromptLookupDrafter(k)
    else:
        drafter = ModelDrafter(load_model(arguments.drafter), k)
    generator = SpeculativeGenerator(load_model(arguments.target), drafter)
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    sampling = {name: getattr(arguments, name) for name in names}
    sampling = {name: value for name, value in sampling.items() if value is not None}
    inputs = tokenizer(arguments.prompt, return_tensors="pt").to(arguments.device)
    result, seconds = _timed(
        lambda: generator.generate(
            inputs.input_ids,
            inputs.get("attention_mask"),
            max_new_tokens=arguments.max_new_tokens,
            do_sample=arguments.temperature != 0,
            trace=True,
            **sampling,
        )
    )
    print(coloured_text(tokenizer, arguments.prompt, result.trace[0], sys.stdout))
    print("\n" + colour_key(sys.stdout))
    seed = f"   seed {result.seeds[0]}" if result.seeds else ""
    print(f"{result.lengths[0] / seconds:.1f} tokens/s (prompt included){seed}")
    print(result.stats)
    return 0


def _timed(run: Callable):
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:397] + "..."


if __name__ == "__main__":
    sys.exit(main())
