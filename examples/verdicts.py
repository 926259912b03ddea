"""Verdicts on the verification rules of other projects: their own code, certified.

    python examples/verdicts.py                  # all that is installed here, as a table
    python examples/verdicts.py vllm-block       # one of them, with its whole report

Nothing of them is copied here: rules are imported from installed packages or from checkouts.
docs/verdicts.md says how to get them, and what the verdicts mean. A rule is read from its own file
alone; other modules of its project that the file imports are mocks.

Triton kernels run without a GPU, in Triton's interpreter (see triton_rows.py). Random numbers of
all rules are those of the certificate; all else is theirs.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import NamedTuple, Optional
from unittest.mock import MagicMock, patch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from torch import Tensor

from specdec import Sampler, certify
from specdec.lab.certificates import (
    AnswerFrom,
    ForeignBatchSampler,
    ForeignSampler,
    RuleNoise,
    SamplerReport,
    huggingface_rule,
)
from specdec.lab.certificates.sampler.exact import FOREIGN_SIZES
from specdec.samplers import LogitsFilter
from specdec.types import PAD_TOKEN

FLOAT32 = {"bits": 24, "tolerance": 1e-6}
"""The rule computes in float32, whose unit of rounding is 2**-24 = 6e-8: a text's probability is a
product of a few such numbers. `torch.rand` gives multiples of 2**-24."""


class MissingError(Exception):
    """A rule cannot run here, and why."""


# Getting at the code of others.


def folder(package: str, variable: str | None = None) -> Path:
    """Where an installed package lies, or a checkout that an environment variable names."""
    if variable is not None:
        if not os.environ.get(variable):
            raise MissingError(f"set {variable} to a checkout of {package}")
        return Path(os.environ[variable])
    spec = find_spec(package)
    if spec is None:
        raise MissingError(f"pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0])


class _Mocks(MetaPathFinder, Loader):
    """Mocks for whatever is imported from a package."""

    def __init__(self, package: str):
        self.package = package

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_ours = name.split(".")[0] == self.package
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> MagicMock:
        return MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module: ModuleType) -> None:
        pass


def load(file: Path, package: str, **real: ModuleType) -> ModuleType:
    """One file as a module.

    Args:
        file: of the package.
        package: what is imported from it is a mock.
        real: modules of the package that are none, by their names with `_` for `.`.
    """
    spec = spec_from_file_location(f"verdict_{file.stem}", file)
    module = module_from_spec(spec)
    known = {f"{package}.{name.replace('__', '.')}": found for name, found in real.items()}
    mocks = patch.object(sys, "meta_path", [_Mocks(package), *sys.meta_path])
    with mocks, patch.dict(sys.modules, known):
        spec.loader.exec_module(module)
    return module


def functions(file: Path, *names: str, **known: object) -> SimpleNamespace:
    """Some functions or classes of a file, without running the rest of it. Tabs are read as four
    spaces.
    """
    body = ast.parse(file.read_text().expandtabs(4)).body
    kinds = ast.FunctionDef, ast.ClassDef
    picked = [node for node in body if isinstance(node, kinds) and node.name in names]
    space = {"torch": torch, "F": torch.nn.functional, **known}
    exec(compile(ast.Module(picked, []), str(file), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def triton_rows(block: int) -> Callable:
    """Runs interpreted kernels fast enough, in blocks of so many elements; see there."""
    if find_spec("triton") is None:
        raise MissingError("pip install triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise MissingError("set TRITON_INTERPRET=1")
    sys.path.insert(0, str(Path(__file__).parent))
    import triton_rows

    return partial(triton_rows.all_programs_at_once, block=block)


# The rules. Each function makes the sampler that is certified.


def huggingface() -> Sampler:
    return ForeignSampler(huggingface_rule)


def deepspec() -> Sampler:
    sys.path.insert(0, str(folder("deepspec", "DEEPSPEC_CHECKOUT")))
    from deepspec.eval.base_evaluator import DraftProposal, verify_draft_tokens

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        ids = torch.cat([drafted.new_zeros(1), drafted])[None]
        with AnswerFrom(noise):
            return verify_draft_tokens(
                target_model=lambda **_: SimpleNamespace(logits=target.log()[None]),
                proposal=DraftProposal(len(drafted), ids, draft.float()[None]),
                position_ids=torch.arange(len(drafted) + 1)[None],
                start=0,
                past_key_values_target=None,
                temperature=1.0,
                max_proposal_tokens=len(drafted),
            ).committed_tokens[0]

    return ForeignSampler(rule, "DeepSpec", **FLOAT32)


def tensorrt() -> Sampler:
    root = folder("TensorRT-LLM", "TENSORRT_LLM_CHECKOUT")
    file = root / "tensorrt_llm/_torch/pyexecutor/sampler/two_model_spec_dec.py"
    known = {"cast": lambda _, value: value, "prefer_pinned": lambda: False}
    theirs = functions(file, "get_rejected_indices", "sample_rejected", **known)
    generator = torch.Generator()

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        draft, target, ids = draft.float(), target.float(), drafted.tolist()
        with AnswerFrom(noise):
            rejected = theirs.get_rejected_indices(draft, target, generator, ids)
            if not len(rejected):  # its caller takes a token that was drawn from the target
                return torch.cat([drafted, noise.draw(target[-1])[None]])
            count = int(rejected[0])
            return [*ids[:count], theirs.sample_rejected(draft, target, generator, count)]

    return ForeignSampler(rule, "TensorRT-LLM", **FLOAT32)


def hsd() -> Sampler:
    file = folder("HSD", "HSD_CHECKOUT") / "transformers/generation/utils.py"
    theirs = functions(file, "_speculative_sampling")

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        largest, accept = 1 - 2.0**-52, noise.accept
        steps = torch.cat([accept.new_tensor([largest]), largest - accept[:-1]])  # of going back
        in_turn = iter((steps, accept))

        class Noise(RuleNoise):
            accept = property(lambda self: next(in_turn), lambda self, _: None)

        with AnswerFrom(Noise(accept, noise.resample)):
            tokens, _, _ = theirs._speculative_sampling(
                candidate_input_ids=drafted[None],
                candidate_logits=draft.log()[None],
                candidate_length=len(drafted),
                new_logits=target.log()[None],
                is_done_candidate=torch.tensor([False]),
                backward=True,
                clever=True,
                stop=lambda ids, scores: False,
            )
        return tokens[0]

    return ForeignSampler(rule, "HSD")


def gpt_fast() -> Sampler:
    names = "speculative_decode", "logits_to_probs", "multinomial_sample_one_no_sync"
    shown = SimpleNamespace()  # what its two models return
    theirs = functions(
        folder("gpt-fast", "GPT_FAST_CHECKOUT") / "generate.py",
        *names,
        Transformer=None,
        Optional=Optional,
        decode_n_tokens=lambda *_: (list(shown.drafted[:, None]), list(shown.draft)),
        model_forward=lambda *_: shown.target.log()[None],
    )

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        shown.drafted, shown.draft, shown.target = drafted, draft, target
        with AnswerFrom(noise):
            return theirs.speculative_decode(None, None, drafted.new_zeros(1), 0, len(drafted))

    return ForeignSampler(rule, "gpt-fast", races=True)


def spec_rl() -> Sampler:
    file = folder("Spec-RL", "SPEC_RL_CHECKOUT") / "verl/utils/speculative_decoding.py"
    theirs = functions(file, "spec_cut", "_rand_like_compat", math=math)

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        ids = drafted[..., None]
        old, new = (law[:, : ids.shape[1]].gather(2, ids)[..., 0].log() for law in (draft, target))
        with AnswerFrom(noise):
            kept = theirs.spec_cut(old, new, torch.ones_like(drafted))["cut_idx"]
        extra = noise.draw(target[torch.arange(len(kept)), kept])  # generation goes on there
        tokens = torch.nn.functional.pad(drafted, (0, 1)).scatter(1, kept[:, None], extra[:, None])
        return tokens.masked_fill(torch.arange(tokens.shape[1]) > kept[:, None], PAD_TOKEN)

    return ForeignBatchSampler(rule, "SPEC-RL")


def eagle() -> Sampler:
    file = folder("EAGLE", "EAGLE_CHECKOUT") / "eagle/model/utils.py"
    sys.path.insert(0, str(Path(__file__).parent))
    from eagle_trees import EagleSampler

    name = "evaluate_posterior"
    return EagleSampler(lambda source: vars(functions(file, name, random=source))[name])


def recurrent_drafter() -> Sampler:
    """A beam of one sequence, chosen as its drafter chooses: the most likely tokens."""
    root = folder("recurrent-drafter", "RECURRENT_DRAFTER_CHECKOUT")
    names = "_select_one_per_row", "_choose_from_candidates", "_prepare_next_input"
    categorical = partial(torch.distributions.Categorical, validate_args=False)  # as the file sets
    known = {"dist": SimpleNamespace(Categorical=categorical), "Tuple": tuple}
    theirs = functions(root / "recurrent_drafting/recurrent_drafting.py", *names, **known)

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        beams = torch.nn.functional.pad(drafted, (1, 0))[None, None]  # the root is not read
        by_drafter, by_llm = draft.log()[None, None], target.log()[None, None]
        states = torch.zeros(1, 1, len(target), 1)
        with AnswerFrom(noise):
            count, beam = theirs._choose_from_candidates(beams, by_llm, by_drafter)
            extra = theirs._prepare_next_input(by_drafter, by_llm, states, beam, count)[1]
        return torch.cat([drafted[: int(count)], extra])

    def beam_of_one(logits: Tensor, logits_filter: LogitsFilter, *_: object, **__: object):
        probs = logits_filter(logits)
        return probs.argmax(dim=-1), probs

    sampler = ForeignSampler(rule, "recurrent-drafter", **FLOAT32)
    sampler.draw_draft = beam_of_one
    return sampler


def fly() -> Sampler:
    """Of windows of two tokens: a token that is not the target's stands if the next one is."""
    file = folder("FLy", "FLY_CHECKOUT") / "fly/models/FLy.py"
    theirs = functions(file, "SPDGenerate", cached_property=property).SPDGenerate

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        nodes, settings = list(range(len(drafted))), SimpleNamespace(enable_fly=True, win_len=2)
        chain = {
            "selected_list": nodes,
            "parent_idx_list": [node - 1 for node in nodes],
            "token_id_list": drafted.tolist(),
        }
        drawn = RuleNoise(noise.accept, noise.accept)  # of the target, one for each draft token
        with AnswerFrom(drawn):
            found = theirs.verify_tree_paths(settings, chain, target.log()[None], 1.0)
        kept = found[0][0]
        extra = [*drawn.draw(target[:-1]), noise.draw(target[-1])]  # what it was compared with
        return torch.cat([kept, extra[len(kept)][None]])

    return ForeignSampler(rule, "FLy")


def sglang(block: bool) -> Sampler:
    file = folder("sglang") / "kernels/ops/speculative/reject_sampling.py"
    at_once, theirs = triton_rows(block=2), load(file, "sglang")

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        rows, width = len(drafted), drafted.shape[1] + 1
        tokens = torch.full((rows * width,), PAD_TOKEN, dtype=torch.int32)
        path, count = torch.zeros(rows, width).int(), torch.zeros(rows).int()
        ids = torch.nn.functional.pad(drafted, (1, 0))  # the root is not read
        place = torch.arange(rows * width).view(rows, width)
        coins = noise.accept.float(), noise.resample.float()
        of_chain = tokens, path, count, ids, place, None, None, *coins
        with at_once():
            theirs.chain_speculative_sampling_triton(
                *of_chain, target.float(), draft.float(), 1.0, 1.0, True, block_verification=block
            )
        return tokens.view(rows, width)

    return ForeignBatchSampler(rule, f"SGLang, {'block' if block else 'rejection'}", **FLOAT32)


def vllm_v1() -> Sampler:
    at_once, file = triton_rows(block=2), folder("vllm") / "v1/sample/rejection_sampler.py"
    helper = ModuleType("helper")
    helper.triton_kernel_dispatcher_with_warmup = _dispatcher
    helper.TritonWarmupTensor = helper.DispatchSpec = None
    real = {"model_executor__warmup__jit_warmup_triton_helper": helper}
    theirs = load(file, "vllm", triton_utils=_triton_utils(), **real)

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        rows, width = drafted.shape
        is_point_mass = bool((draft.amax(-1) == 1).all())
        settings = {"all_greedy": False, "all_random": True, "generators": {}}
        with at_once(), AnswerFrom(noise):
            return theirs.rejection_sample(
                drafted.flatten().int(),
                [width] * rows,
                width,
                torch.arange(width, rows * width + 1, width).int(),
                None if is_point_mass else draft.float().flatten(0, 1).contiguous(),
                target[:, :-1].flatten(0, 1).log().float(),
                noise.draw(target[:, -1])[:, None].int(),  # the bonus token is an argument
                SimpleNamespace(temperature=torch.ones(rows), **settings),
            )

    return ForeignBatchSampler(rule, "vLLM V1", races=True, tolerance=1e-6)


def vllm(block: bool) -> Sampler:
    at_once, root = triton_rows(block=16), folder("vllm") / "v1/worker/gpu"  # of one block only
    gumbel = load(root / "sample/gumbel.py", "vllm", triton_utils=_triton_utils())
    real = {"triton_utils": _triton_utils(), "v1__worker__gpu__sample__gumbel": gumbel}
    theirs = load(root / "spec_decode/rejection_sampler_utils.py", "vllm", **real)

    def rule(drafted: Tensor, draft: Tensor, target: Tensor, noise: RuleNoise) -> Tensor:
        rows, width = drafted.shape
        is_point_mass = bool((draft.amax(-1) == 1).all())
        every, logits = torch.arange(rows), torch.arange(rows * (width + 1))
        with at_once(), _tables(gumbel, noise):
            tokens, count = theirs.rejection_sample(
                target.flatten(0, 1).log().float(),
                None if is_point_mass else draft.log().float().contiguous(),
                torch.nn.functional.pad(drafted, (1, 0)).flatten(),
                torch.arange(0, len(logits) + 1, width + 1),
                logits,
                every,
                every.repeat_interleave(width + 1),
                logits % (width + 1),
                torch.ones(rows),
                torch.zeros(rows).long(),
                width,
                use_block_verification=block,
            )
        return tokens.masked_fill(torch.arange(width + 1) >= count[:, None], PAD_TOKEN)

    name = f"vLLM, {'block' if block else 'strict'}"
    return ForeignBatchSampler(rule, name, races=True, **FLOAT32 | {"tolerance": 1e-5})


# What the kernels of vLLM import, and where their random numbers come from.


def _triton_utils() -> ModuleType:
    """`vllm.triton_utils`; the interpreter lacks `log1p`."""
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def log1p(x: tl.tensor) -> tl.tensor:
        return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.dtype), x.type)

    module = ModuleType("triton_utils")
    module.tl, module.triton, module.HAS_TRITON = tl, triton, True
    module.tldevice = SimpleNamespace(log1p=log1p)
    return module


def _dispatcher(kernel: object, warmup_inputs: object) -> Callable:
    """Launches a kernel with the arguments of the function that chooses its grid."""

    def decorate(choose: Callable) -> Callable:
        def launch(*args, **kwargs) -> None:
            grid, constants = choose(*args, **kwargs)
            given = inspect.signature(choose).bind(*args, **kwargs).arguments
            named = given | {f"{name}_ptr": value for name, value in given.items()} | constants
            kernel[grid](**{name: named[name] for name in kernel.arg_names})

        launch.register_warmup = lambda **_: None
        return launch

    return decorate


@contextmanager
def _tables(gumbel: ModuleType, noise: RuleNoise) -> Iterator[None]:
    """Random numbers by position: `tl.rand` are the accepting uniforms, and `murmur3_uniform32`, of
    which vLLM makes E = -log(1 - u), gives the exponentials of the row.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    accept = torch.nn.functional.pad(noise.accept, (0, 1)).numpy().astype(np.float32)
    uniform = (-torch.expm1(-noise.exponentials)).numpy().astype(np.float32)

    def rand(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
        found = accept.flat[position.handle.data]
        return tl.tensor(TensorHandle(found, tl.float32), tl.float32)

    def murmur(seed: tl.tensor, position: tl.tensor, keys: tl.tensor) -> tl.tensor:
        row, key = position.handle.data // accept.shape[1], keys.handle.data
        found = uniform[row, key.clip(max=uniform.shape[1] - 1)]
        return tl.tensor(TensorHandle(found, tl.float32), tl.block_type(tl.float32, keys.shape))

    with patch.object(tl, "rand", rand), patch.object(gumbel, "murmur3_uniform32", murmur):
        yield


# The table.


class Case(NamedTuple):
    """A rule: its project, as the package is called, its file and function, and the sampler."""

    project: str
    rule: str
    make: Callable[[], Sampler]
    options: Mapping[str, object] = MappingProxyType({})
    """Arguments of `certify`."""


OF_TREES = {"sizes": FOREIGN_SIZES, "trees": ((-1, -1, -1), (-1, -1, 0))}
"""Chains; three candidates for the next token; two, of which the first has one after it."""
VLLM_RULE = "v1/worker/gpu/spec_decode/rejection_sampler_utils.py::rejection_sample"
SGLANG_RULE = "kernels/ops/speculative/reject_sampling.py::chain_speculative_sampling_triton"
CASES = {
    "transformers": Case("transformers", "generation/utils.py::_speculative_sampling", huggingface),
    "deepspec": Case("DeepSpec", "eval/base_evaluator.py::verify_draft_tokens", deepspec),
    "tensorrt-llm": Case(
        "TensorRT-LLM", "_torch/pyexecutor/sampler/two_model_spec_dec.py", tensorrt
    ),
    "hsd": Case("HSD", "generation/utils.py::_speculative_sampling", hsd),
    "gpt-fast": Case("gpt-fast", "generate.py::speculative_decode", gpt_fast),
    "spec-rl": Case("Spec-RL", "verl/utils/speculative_decoding.py::spec_cut", spec_rl),
    "eagle": Case("EAGLE", "eagle/model/utils.py::evaluate_posterior", eagle, OF_TREES),
    "vllm-v1": Case("vllm", "v1/sample/rejection_sampler.py::rejection_sample", vllm_v1),
    "vllm-strict": Case("vllm", VLLM_RULE, lambda: vllm(False)),
    "vllm-block": Case("vllm", VLLM_RULE, lambda: vllm(True)),
    "sglang-rejection": Case("sglang", SGLANG_RULE, lambda: sglang(False)),
    "sglang-block": Case("sglang", SGLANG_RULE, lambda: sglang(True)),
    "recurrent-drafter": Case(
        "recurrent-drafter",
        "recurrent_drafting.py::_choose_from_candidates",
        recurrent_drafter,
    ),
    "fly": Case("FLy", "fly/models/FLy.py::verify_tree_paths", fly, {"sizes": ((3, 3, 4),)}),
}


def version_of(case: Case) -> str:
    """Of an installed package."""
    try:
        return version(case.project)
    except PackageNotFoundError:
        return "checkout"


def verdict(report: SamplerReport) -> str:
    """PASS, or the kinds of what failed: `law`, `zero`."""
    kinds = ", ".join(sorted({failure.kind for failure in report.failures}))
    return f"FAIL: {kinds}" if kinds else "PASS"


def row(name: str) -> tuple[str, SamplerReport | None]:
    """A line of the table, and the report."""
    case, start = CASES[name], time.perf_counter()
    cells = [f"`{name}`", version_of(case), f"`{case.rule}`"]
    try:
        report = certify(case.make(), **case.options)
    except MissingError as why:
        return f"| {' | '.join(cells)} | not run: {why} | | | |", None
    seconds = time.perf_counter() - start
    how = "exact" if report.is_exact else "by draws"
    sizes = (f"{report.deviation:.1e}", f"{report.tolerance:.0e}") if report.is_exact else "--"
    cells += [verdict(report), *sizes]
    return f"| {' | '.join(cells)} | {how}, {report.num_problems}, {seconds:.0f} s |", report


def main() -> None:
    """Prints the table, or whole reports of those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    names = parser.parse_args().names
    print("| name | version | rule | verdict | deviation | tolerance | how, problems, time |")
    print("|---|---|---|---|---|---|---|")
    for name in names or CASES:
        line, report = row(name)
        print(line, flush=True)
        if names:
            print(f"\n{report}\n")


if __name__ == "__main__":
    main()
