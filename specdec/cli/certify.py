"""`specdec certify`: tries to show that a sampler and a pair of models are not lossless."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from functools import partial

from specdec.cli.loading import load_model, load_pretrained, make_drafter

SAMPLERS = ("auto", "rejection", "block", "coupling", "typical", "ensemble")
DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "certify",
        help="enumerate a sampler's exact law, audit and test a pair of models",
        description="Enumerates the sampler's exact law on small worlds. Then runs the pair: "
        "greedy text against plain decoding, no random number used twice, and a chi-square test of "
        "sampled text against the target's exact law. Exits 1 if anything fails.",
    )
    parser.add_argument("--target", help="folder or Hugging Face id (default: the zoo's target)")
    parser.add_argument(
        "--drafter",
        help="folder or id of a draft model, 'eagle:', 'mask-token:' or 'mtp:' and that of a head, "
        "'lookup' or 'none' (default: the zoo's draft model for the zoo's target, 'lookup' for "
        "others)",
    )
    parser.add_argument("--sampler", choices=SAMPLERS, default="auto")
    parser.add_argument(
        "--target-weight", type=float, default=0.9, help="of the ensemble sampler (default 0.9)"
    )
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K (default 4)")
    parser.add_argument("--prompts", type=int, default=2, help="number of prompts (default 2)")
    parser.add_argument("--prompt-tokens", type=int, default=8, help="of each (default 8)")
    parser.add_argument("--samples", type=int, default=4096, help="per prompt (default 4096)")
    parser.add_argument("--audit-tokens", type=int, default=64, help="of audits (default 64)")
    parser.add_argument("--top-k", type=int, default=4, help="while sampling (default 4)")
    parser.add_argument("--temperature", type=float, default=1.0, help="likewise (default 1)")
    parser.add_argument("--false-alarm", type=float, default=1e-6, help="in total (default 1e-6)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the models")
    parser.add_argument("--device", default="cpu")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if nothing was found, else 1."""
    from specdec.certify import certify

    for name in ("prompts", "prompt_tokens", "samples", "audit_tokens", "top_k"):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least 1, got {getattr(arguments, name)}")
    if not arguments.temperature > 0:
        raise ValueError(f"--temperature must be above 0, got {arguments.temperature}")
    generator, tokenizer = _load(arguments)
    prompts = _prompts(tokenizer, arguments.prompts, arguments.prompt_tokens)
    bar = partial(_bar, "exact law")
    exact = certify(generator.sampler, device=arguments.device, progress=bar)
    print(exact, flush=True)
    runs = certify(
        generator,
        prompts,
        num_samples=arguments.samples,
        audit_tokens=arguments.audit_tokens,
        top_k=arguments.top_k,
        temperature=arguments.temperature,
        false_alarm=arguments.false_alarm,
        progress=partial(_bar, "samples"),
    )
    print(runs)
    return 0 if exact.passed and runs.passed else 1


def _load(arguments: argparse.Namespace):
    """The generator, and the tokenizer of its target."""
    import torch
    from transformers import AutoTokenizer

    from specdec import SpeculativeGenerator, zoo

    place = {"dtype": arguments.dtype, "device": arguments.device}
    k, sampler = arguments.num_draft_tokens, make_sampler(arguments)
    if arguments.target is None:
        tokenizer = zoo.load_tokenizer()
        target = zoo.load_target(dtype=getattr(torch, arguments.dtype)).to(arguments.device)
    else:
        tokenizer = load_pretrained(AutoTokenizer, arguments.target)
        target = load_model(arguments.target, **place)
    if arguments.drafter is None and arguments.target is None:
        drafter = zoo.load_drafter("model", target, num_draft_tokens=k)
    else:
        drafter = make_drafter(arguments.drafter or "lookup", target, k, **place)
    return SpeculativeGenerator(target, drafter, sampler), tokenizer


def make_sampler(arguments: argparse.Namespace):
    """The sampler that `--sampler` names."""
    import specdec

    made = {
        "auto": lambda: "auto",
        "rejection": specdec.RejectionSampler,
        "block": specdec.BlockSampler,
        "coupling": specdec.CouplingSampler,
        "typical": specdec.TypicalSampler,
        "ensemble": lambda: specdec.EnsembleSampler(arguments.target_weight),
    }
    return made[arguments.sampler]()


def _prompts(tokenizer, count: int, length: int) -> list[list[int]]:
    """Beginnings of source texts that the zoo's models have not seen."""
    from specdec import zoo

    return [tokenizer(text).input_ids[:length] for text in zoo.heldout_prompts(count)]


def _bar(name: str, batches: list) -> Iterable:
    """A progress bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    return tqdm(batches, desc=name, file=sys.stderr, disable=not is_terminal, leave=False)
