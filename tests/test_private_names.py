"""Private names of torch and transformers: where they may stand, and that the installed versions
have them.
"""

import ast
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from architectures import build
from torch import nn
from transformers import (
    PrefixConstrainedLogitsProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.models.falcon import modeling_falcon
from transformers.models.gemma3n import modeling_gemma3n
from transformers.models.gpt_neo import modeling_gpt_neo

import specdec
from specdec import torch_names
from specdec.hf import foreign, generation, layers, lookups
from specdec.targets.view import private_view
from specdec.targets.watch import is_hooked

PACKAGE = Path(specdec.__file__).parent
HOMES = {PACKAGE / "torch_names.py", *(PACKAGE / "hf").glob("*.py")}


def private(name: str) -> bool:
    """Whether a name begins as private ones do."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


OVERRIDDEN = {"lab/training/trainer.py": ["_save"], "checkpoints/keys.py": ["_attn_implementation"]}
"""A method of HF's `Trainer` that a subclass of ours extends, and a key of configuration files."""
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
IN_FILES = {"_codebook", "_torchspec_version", "_norm_eps", "_0"}
"""Keys that other programs write."""
PARTS_OF_NAMES = {"_rate_", "_low", "_high", "_SPECDEC_COMPLETE"}
BUFFERS = {"_newest", "_parents", "_sorted_prompts"}
"""Which no assignment makes."""
LIBRARIES = nn.Linear(1, 1), PreTrainedModel, PreTrainedConfig(), Trainer
OF_LIBRARIES = {name for one in LIBRARIES for name in dir(one) if private(name)}
"""Private names that objects of torch and transformers have."""


@cache
def own_names() -> set[str]:
    """Private names that files of the package define, or have a reason for, and no library has."""
    found = OF_NAMED_TUPLES | IN_FILES | PARTS_OF_NAMES | BUFFERS
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                is_of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
                found |= {node.attr} if is_of_self else set()
    return found - OF_LIBRARIES


def foreign_names(tree: ast.AST, own: set[str]) -> list[str]:
    """Private names of libraries in a file: imported, looked up, or by strings."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "") != "__future__":
            parts = (node.module or "").split(".") + [alias.name for alias in node.names]
            is_ours = parts[0] == "specdec"
            found += [] if is_ours else [part for part in parts if private(part)]
        elif isinstance(node, ast.Attribute) and private(node.attr):
            found += [] if node.attr in own else [node.attr]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = node.value.isidentifier() and private(node.value)
            found += [node.value] if is_name and node.value not in own else []
    return found


def test_private_names_of_libraries_stand_in_their_homes():
    own = own_names()
    for file in sorted({*PACKAGE.rglob("*.py")} - HOMES):
        expected = OVERRIDDEN.get(str(file.relative_to(PACKAGE)), [])
        found = foreign_names(ast.parse(file.read_text()), own)
        assert found == expected, file


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from torch.nn.modules.module import _global_forward_hooks", "_global_forward_hooks"),
        ("from torch._subclasses import FakeTensorMode", "_subclasses"),
        ("module._forward_hooks", "_forward_hooks"),
        ("hasattr(model, '_orig_mod')", "_orig_mod"),
        ("torch._C.clear()", "_C"),
    ],
)
def test_a_private_name_elsewhere_would_be_seen(code, name):
    assert foreign_names(ast.parse(code), own_names()) == [name]


WITHOUT = """
import importlib, pkgutil, sys
import torch.distributed.fsdp, torch.distributed.tensor, transformers, transformers.trainer
import torch.utils._python_dispatch
for home, name in [
    (torch.nn.modules.module, "_global_forward_hooks"),
    (torch.nn.modules.module, "_global_forward_pre_hooks"),
    (torch.utils._python_dispatch, "TorchDispatchMode"),
    (torch._C, "_cuda_clearCublasWorkspaces"),
    (torch._C, "_cuda_endAllocateToPool"),
    (torch._C, "_len_torch_dispatch_stack"),
    (transformers.generation.utils, "_speculative_sampling"),
]:
    delattr(home, name) if hasattr(home, name) else None
import specdec
for found in pkgutil.walk_packages(specdec.__path__, "specdec."):
    room = found.name.removeprefix("specdec.").removeprefix("lab.").split(".")[0]
    if room in ("targets", "hf", "graphs", "loop", "certificates", "training"):
        importlib.import_module(found.name)
from specdec import torch_names
try:
    torch_names.TorchDispatchMode()
except ImportError as error:
    print(error)
"""


def test_a_name_that_a_release_has_renamed_ends_no_import_and_says_so_where_it_is_needed():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = "has no torch.utils._python_dispatch.TorchDispatchMode, by which operations of a call"
    assert words in done.stdout


def test_dictionaries_and_hooks_of_a_module_are_found():
    module = nn.Sequential(nn.BatchNorm1d(1))
    part = module[0]
    assert [*torch_names.children_of(module).values()] == [part]
    assert [*torch_names.parameters_of(part).values()] == [*part.parameters()]
    assert [*torch_names.buffers_of(part).values()] == [*part.buffers()]
    assert {*vars(module)} >= torch_names.SHARED
    assert [n for n in vars(module) if torch_names.is_hook_table(n)] > ["_backward_hooks"]
    assert not is_hooked(part)
    for number, add in enumerate((part.register_forward_hook, part.register_forward_pre_hook)):
        handle = add(print)
        assert is_hooked(part)
        assert [*map(len, torch_names.hooks_of(part))] == [number, 1 - number]
        assert len(torch_names.pre_hooks_of(part)) == number
        handle.remove()


def test_hooks_of_all_modules_are_found():
    home = nn.modules.module
    for add in (home.register_module_forward_hook, home.register_module_forward_pre_hook):
        handle = add(lambda module, *args: None)
        assert any(torch_names.HOOKS_OF_ALL_MODULES)
        handle.remove()
    assert not any(torch_names.HOOKS_OF_ALL_MODULES)


def test_what_is_compiled_leads_to_what_it_was_compiled_of():
    plain = nn.Linear(1, 1)
    assert torch_names.compiled_from(torch.compile(plain)) is plain
    assert torch_names.compiled_from(plain) is None
    compiled = torch.compile(private, backend="eager")
    assert getattr(compiled, torch_names.COMPILED_FROM) is private
    plain.compile(backend="eager")
    assert vars(plain)[torch_names.COMPILED_CALL] is not None
    assert vars(private_view(plain))[torch_names.COMPILED_CALL] is None
    assert torch_names.uncompiled(plain) == plain._call_impl


def test_other_private_names_of_torch_are_there():
    tensor, histc = torch.zeros(2, 2), torch.ops.aten.histc.default
    before = torch_names.version_of(tensor)
    tensor.add_(1)
    assert torch_names.version_of(tensor) == before + 1
    assert torch_names.arguments_of(histc) == ["self", "bins", "min", "max"]
    assert torch_names.communicators() is torch.distributed.distributed_c10d._world.comms
    torch_names.mark_dynamic(tensor, [0])
    assert torch_names.num_dispatch_modes() == 0
    with torch_names.TorchDispatchMode():
        assert torch_names.num_dispatch_modes() == 1
    if torch.backends.cuda.is_built():
        assert torch_names.clear_workspaces is torch._C._cuda_clearCublasWorkspaces
        assert torch_names.end_allocation is torch._C._cuda_endAllocateToPool


def test_private_names_of_hf_are_there(tmp_path):
    model = build("llama")
    assert lookups.attention_of(model.config) == model.config._attn_implementation
    layers.set_implementation(model.config, lookups.ATTENTION_FIELD, "eager")
    assert model.config._attn_implementation == "eager"
    assert [layers.is_stateful(build(kind)) for kind in ("llama", "mamba2")] == [False, True]
    assert hasattr(modeling_gpt_neo.GPTNeoSelfAttention, layers.OWN_ATTENTION)
    assert hasattr(modeling_falcon.FalconAttention, layers.SPLIT_HEADS)
    assert hasattr(modeling_gemma3n.Gemma3nTextMLP, layers.SPARSE)
    assert all(hasattr(model, name) for name in (*foreign.GENERATING, generation.PREFILL))
    function = dict.fromkeys
    processor = PrefixConstrainedLogitsProcessor(function, 1)
    assert generation.prefix_function(processor) is function
    assert "logits_processor" in inspect.signature(model._get_logits_processor).parameters
    names = inspect.signature(generation.speculative_sampling()).parameters
    assert {"candidate_input_ids", "candidate_logits", "new_logits"} <= {*names}
    assert hasattr(Trainer, "_save")
    assert "_n_gpu" in vars(TrainingArguments(output_dir=tmp_path, use_cpu=True))
