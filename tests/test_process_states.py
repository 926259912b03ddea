"""States of the process that a user's script or another library has set: what is generated,
measured, certified and trained is the same under each of them.
"""

import ast
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import build
from diagonal import case, first
from drafter_table import MODEL, make
from transformers import GenerationConfig

import specdec
from examples.replay import every_position, replay
from specdec import (
    BlockSampler,
    CouplingSampler,
    SpeculativeGenerator,
    SuffixDrafter,
    Target,
    certify,
    zoo,
)
from specdec.lab.certificates import ForeignSampler, huggingface_rule
from specdec.lab.evaluation import compare, evaluate
from specdec.lab.training import MaskRollouts, TrainingTimeTest, eagle, mask_token

PROMPTS = torch.randint(5, 61, (3, 9), generator=torch.Generator().manual_seed(1))
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": [1, 2, 3]}
# Constructors of tensors that follow `torch.set_default_device`.
CONSTRUCTORS = (
    "arange as_tensor asarray complex empty eye full linspace logspace ones rand randint "
)
CONSTRUCTORS += "randn randperm scalar_tensor tensor tril_indices triu_indices zeros"


@contextmanager
def set_to(setter, value, before):
    """A setting of torch's for a while."""
    setter(value)
    try:
        yield
    finally:
        setter(before)


@contextmanager
def warnings_are_errors():
    """As `python -W error`."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


STATES = {
    # Nothing can be computed there, so that every tensor that follows the default is an error.
    "default device": lambda: set_to(torch.set_default_device, "meta", None),
    "default dtype float64": lambda: set_to(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype float16": lambda: set_to(torch.set_default_dtype, torch.float16, torch.float32),
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "deterministic": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "anomalies": torch.autograd.detect_anomaly,
    "denormals": lambda: set_to(torch.set_flush_denormal, True, False),
    "numpy's errors": lambda: np.errstate(all="raise"),
    "warnings": warnings_are_errors,
}
WITHOUT_TRAINING = "no gradients", "inference mode"


def text_of(result):
    """Tokens and numbers of a result."""
    floats = [result.logprobs, result.raw_logprobs, *(result.scores or ())]
    kept = [(x.dtype, x.tolist()) for x in floats if x is not None]
    return result.sequences.tolist(), result.stats.to_dict(), kept


def generated(drafter, target=MODEL):
    """What calls of every kind return."""
    generator = SpeculativeGenerator(target, drafter)
    outputs = {"output_logprobs": True, "output_scores": True}
    found = [text_of(generator.generate(PROMPTS, max_new_tokens=6, **outputs))]
    found.append(text_of(generator.generate(PROMPTS, max_new_tokens=6, **SAMPLED, **outputs)))
    traced = generator.generate(PROMPTS, max_new_tokens=6, trace=True, **SAMPLED)
    found.append([*traced.trace])
    options = {**SAMPLED, "num_return_sequences": 2, "row_inputs": {"position_offset": [0, 3, 7]}}
    records = generator.stream(PROMPTS, max_new_tokens=3, **options)
    return repr([*found, [record.rows for record in records]])


class Everything:
    """What a script does beside calls; models and heads are loaded before the state is set."""

    def __init__(self):
        self.target, self.tokenizer = zoo.load_target(), zoo.load_tokenizer()
        self.drafter = zoo.load_drafter("eagle3", self.target)
        texts = zoo.heldout_prompts(4)
        self.prompts = [self.tokenizer(text).input_ids[:20] for text in texts]
        self.small = build("llama")

    def names(self):
        """Drafters by their names, and a `Target` that is made in the state."""
        target = Target(self.target)
        for name in ("lookup", "suffix", "self:64"):
            ids = [self.prompts[0]]
            yield repr(
                evaluate(SpeculativeGenerator(target, name), ids, max_new_tokens=4).stats.to_dict()
            )
        drafter = SuffixDrafter(2, max_tokens=64)
        drafter.remember(self.prompts)
        yield drafter.memory.tolist()

    def captured(self):
        """Steps that are replayed, and compared with eager ones."""
        generator = SpeculativeGenerator(self.target, self.drafter, graphs=True)
        generator.warm_up(rows=1, tokens=40)
        ids = torch.tensor(self.prompts[:1], device="cpu")
        yield text_of(generator.generate(ids, max_new_tokens=8, check=True))

    def host_code(self):
        """HF's hook, its processors and criteria, stop strings."""
        generator = SpeculativeGenerator(self.target, self.drafter)
        ids = torch.tensor([self.prompts[0][:12], self.prompts[1][:12]], device="cpu")
        config = GenerationConfig(repetition_penalty=1.2, no_repeat_ngram_size=2, min_new_tokens=3)
        ends = {"stop_strings": ["e"], "tokenizer": self.tokenizer, "eos_token_id": 7}
        options = {"generation_config": config, "max_new_tokens": 8, **ends}
        yield text_of(generator.generate(ids, **options))
        hook = {"custom_generate": generator, "attention_mask": torch.ones_like(ids)}
        yield self.target.generate(ids, max_new_tokens=6, do_sample=False, **hook).tolist()

    def measured(self):
        """`evaluate`, `compare`, `replay` and a certificate of a generator."""
        generator = SpeculativeGenerator(self.target, self.drafter)
        options = {"max_new_tokens": 6, "temperature": 0.8, "certify": True}
        found = evaluate(generator, self.prompts[:2], batch_size=1, **options)
        yield found.stats.to_dict(), found.estimates["acceptance_length"]
        both = {"eagle3": generator, "lookup": SpeculativeGenerator(self.target, "lookup")}
        study = compare(both, self.prompts[:1], max_new_tokens=4, rounds=1)
        yield [run.stats.to_dict() for run in study.runs]
        ids = torch.tensor(self.prompts[:1], device="cpu")
        trace = generator.generate(ids, max_new_tokens=6, trace=True).trace
        roots = every_position(generator, trace)
        yield replay(roots, num_draft_tokens=2, sampler=BlockSampler()).totals.tolist()
        few = {"num_samples": 2, "max_new_tokens": 4, "audit_tokens": 2}
        yield certify(generator, self.prompts[:1], **few).passed

    def certified(self):
        """A rule, by enumeration: chains of every second kind, and a tree."""
        few = {"trees": ((-1, -1, 1),), "paths": (), "progress": lambda batches: batches[::2]}
        yield str(certify(BlockSampler(), sizes=((2, 1, 3),), **few))

    def certified_others(self):
        """A race, and a rule of another project."""
        few = {"trees": ((-1, -1, 1),), "paths": (), "progress": lambda batches: batches[::2]}
        yield str(certify(CouplingSampler(), sizes=((2, 1, 3),), **few))
        few = {"sizes": ((2, 1, 2),), "progress": lambda batches: batches[:1]}
        yield str(certify(ForeignSampler(huggingface_rule), **few))

    def trained(self):
        """A loss and its gradient for new heads, whose weights depend on a seed alone."""
        heads = eagle.new_head(self.small, "eagle3"), mask_token.new_head(self.small)
        kinds = zip(heads, (TrainingTimeTest, MaskRollouts), strict=True)
        for head, objective in kinds:
            drafter = specdec.EagleDrafter if objective is TrainingTimeTest else None
            drafter = (drafter or specdec.MaskTokenDrafter)(head, self.small, 2)
            torch.manual_seed(0)
            loss = objective(drafter, self.small, 2)(PROMPTS)
            loss.backward()
            weight = next(head.parameters())
            yield loss.dtype, weight.dtype, loss.item(), weight.sum().item()


@pytest.fixture(scope="module")
def everything():
    return Everything()


def assert_alike(function, states=STATES):
    usual = function()
    for name in states:
        with STATES[name]():
            assert function() == usual, name


@pytest.mark.parametrize(
    "name",
    first(
        ["model", "suffix", "eagle3", "dflash", "mtp, looped", "self, top", "p-eagle, tree"],
        ["suffix", "p-eagle, tree"],
    ),
)
def test_text_is_the_same_in_every_state_of_the_process(name):
    drafter = make(name)
    assert_alike(lambda: generated(drafter))


@pytest.mark.parametrize("name", first(["mamba", "qwen3_5", "gemma3", "mpt"], ["gemma3"]))
def test_models_are_read_alike_in_every_state_of_the_process(name):
    model = build(name)
    assert_alike(lambda: generated("lookup", model))


SOME = ["default device", "default dtype float64", "inference mode", "warnings"]
FEW = ["default device", "default dtype float64"]
"""Of states, by default, for what takes long."""
QUICK = {"names": SOME, "host_code": [*STATES], "captured": SOME, "measured": FEW}
QUICK |= {"certified": FEW, "certified_others": []}


@pytest.mark.parametrize(
    ("what", "states"),
    [
        case([what, states], states is quick)
        for what, quick in QUICK.items()
        for states in ([quick] if len(quick) == len(STATES) else [quick, [*STATES]])
        if states
    ],
)
def test_everything_else_is_the_same_in_every_state(everything, what, states):
    assert_alike(lambda: repr([*getattr(everything, what)()]), states)


def test_heads_are_made_and_trained_alike_in_every_state(everything):
    states = [name for name in STATES if name not in WITHOUT_TRAINING]
    assert_alike(lambda: repr([*everything.trained()]), states)


def _calls(tree, inside=()):
    """Calls of torch's constructors of tensors with the names of the functions around them."""
    for node in ast.iter_child_nodes(tree):
        name = (node.name,) if isinstance(node, ast.FunctionDef | ast.ClassDef) else ()
        yield from _calls(node, (*inside, *name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
            if is_of_torch and node.func.attr in CONSTRUCTORS.split():
                yield inside, node


def test_every_tensor_of_the_library_says_where_it_lives():
    """Weights of modules alone follow `torch.set_default_device`, as those of `nn.Linear` do."""
    root, missing, seen = Path(specdec.__file__).parent, [], 0
    for path in sorted(root.rglob("*.py")):
        for inside, call in _calls(ast.parse(path.read_text())):
            seen += 1
            given = {keyword.arg for keyword in call.keywords}
            is_weight = path.is_relative_to(root / "drafters") and inside[-1:] == ("__init__",)
            if not is_weight and not given & {"device", None}:
                missing.append(f"{path.relative_to(root)}:{call.lineno} {ast.unparse(call)[:60]}")
    on_meta = "torch.zeros(1, 1, self.hidden_size)"  # inside of `with torch.device("meta")`
    assert [each for each in missing if on_meta not in each] == []
    assert seen > 100
