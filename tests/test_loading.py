"""Names become parts, those of a user's file among them; each mistake is a sentence of its own."""

import re
import sys

import pytest

from specdec import PromptLookupDrafter, SpeculativeGenerator, SuffixDrafter, Tree, zoo
from specdec.drafters.visible import draft_cache
from specdec.loading import load_drafter, load_sampler, load_target
from specdec.samplers import BlockSampler, EnsembleSampler

MINE = """
from dataclasses import dataclass
from specdec import PromptLookupDrafter, RejectionSampler
import beside

@dataclass
class Sizes:
    longest: "int" = beside.LONGEST

def make(target, num_draft_tokens):
    return PromptLookupDrafter(num_draft_tokens, max_ngram=Sizes().longest)

def trees(target, k=4, *, tree=None):
    return PromptLookupDrafter(k, num_continuations=1 if tree is None else tree.nodes // tree.depth)

def no_drafter(target, k):
    return target

def broken(target, k):
    return target.nothing

class Rule(RejectionSampler):
    pass

rule = Rule()
"""
TREE = Tree(6, 3)


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside.py").write_text("LONGEST = 7")
    (tmp_path / "torn.py").write_text("def make(:")
    (tmp_path / "bare.py").write_text("import nothing_here")
    return tmp_path


def test_a_draft_cache_has_a_name():
    target = zoo.load_target()
    assert load_drafter("self:20", target, 3).visible == draft_cache(20)
    with pytest.raises(ValueError, match="the draft cache must be an integer >= 5"):
        load_drafter("self:4", target)
    for name, options in (("self", {}), ("self:all", {}), ("self:20", {"tree": "4x2"})):
        with pytest.raises(ValueError, match="self:1024 for instance"):
            load_drafter(name, target, **options)


def test_a_file_makes_drafters_and_samplers(mine, monkeypatch):
    path = list(sys.path)
    drafter = load_drafter(f"{mine}/mine.py:make", None, 5)
    assert (drafter.num_draft_tokens, drafter.max_ngram) == (5, 7)
    assert load_drafter(f"{mine}/mine.py:trees", None).num_draft_tokens == 4
    assert load_drafter(f"{mine}/mine.py:trees", None, tree=TREE).num_continuations == 2
    rule = load_sampler(f"{mine}/mine.py:Rule")
    assert type(load_sampler(f"{mine}/mine.py:rule")) is type(rule)  # the file runs once
    monkeypatch.chdir(mine)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert load_drafter("mine:make", None, 5).max_ngram == 7
    assert sys.path == path


def test_an_edited_file_is_read_again(mine):
    file = mine / "mine.py"
    load_drafter(f"{file}:make", None, 5)
    file.write_text(MINE.replace("beside.LONGEST", "9"))
    assert load_drafter(f"{file}:make", None, 5).max_ngram == 9


def test_names_become_drafters():
    target, tokenizer = load_target("zoo")
    assert load_drafter("none", target) is None
    assert type(load_drafter("lookup", target)) is PromptLookupDrafter
    assert type(load_drafter("suffix", target, 3)) is SuffixDrafter
    ahead = load_drafter("lookahead:5,4,3", target)
    assert (ahead.window, ahead.ngram, ahead.guesses) == (5, 4, 3)
    assert load_drafter("lookahead", target).window == 15
    for name in zoo.DRAFTERS:
        assert load_drafter(f"zoo:{name}", target, 3).num_draft_tokens == 3
        one = zoo.WEIGHTS_DIR / zoo.DRAFTERS[name]
        prefix = "mtp:" if name == "mtp" else ""  # the others are recognised
        drafter = load_drafter(f"{prefix}{one}", target, 3, tokenizer=tokenizer, proposal="argmax")
        assert type(drafter) is type(load_drafter(f"zoo:{name}", target))
        assert drafter.proposal.kind == "argmax"
    generator = SpeculativeGenerator(target, "zoo:eagle3", "ensemble")
    assert generator.drafter.settings() == zoo.load_drafter("eagle3", target).settings()
    assert generator.sampler.target_weight == 0.9


def test_names_become_samplers():
    assert type(load_sampler("auto")) is BlockSampler
    assert type(load_sampler("ensemble", target_weight=0.5)) is EnsembleSampler


REFUSED = {
    "eagle3": "write eagle:PATH, or zoo:eagle3",
    "hydra:head": "write mine.py:make",
    "medusa": "write medusa:PATH",
    "ngram": "write lookup",
    "zoo:eagle": "the zoo's drafter must be 'model', 'eagle3', 'mask-token' or 'mtp', got 'eagle'",
    "./none": "there is no such folder; a drafter is none, lookup, .*mine.py:make",
    ".": "must be a folder with a config.json or a Hugging Face id, and there is none in it",
    "adapter": "it holds a PEFT adapter; merge it into its model",
    "none.py:make": "there is no file none.py to take make from",
    "no_module:make": "no_module:make: ModuleNotFoundError: No module named 'no_module'",
    "torn.py:make": r"torn.py:make: SyntaxError: invalid syntax \(torn.py, line 1\)",
    "bare.py:make": "bare.py, line 1: ModuleNotFoundError: No module named 'nothing_here'",
    "mine.py:other": "mine.py has no other; it has Sizes, make, trees, no_drafter, broken, Rule$",
    "mine.py:Sizes": r"must be a function or class of \(target, num_draft_tokens\): too many",
    "mine.py:no_drafter": "mine.py:no_drafter must return a specdec Drafter, got 0",
    "mine.py:broken": "mine.py, line 20: AttributeError: 'int' object has no attribute 'nothing'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_names_nothing_is_told(name, mine, monkeypatch):
    monkeypatch.chdir(mine)
    (mine / "adapter").mkdir(exist_ok=True)
    (mine / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=REFUSED[name]) as caught:
        load_drafter(name, 0, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none", {"num_draft_tokens": 4}, "num_draft_tokens belongs to a drafter; there is none"),
        ("lookup", {"proposal": "argmax"}, "proposal belongs to drafters with weights"),
        ("lookup", {"visible": "4+508"}, "visible belongs to drafters with weights"),
        ("self:64", {"visible": "4+508"}, "self:1024 for instance; leave out tree and visible"),
        ("zoo:eagle3", {"visible": "4x508"}, 'visible must be like "4+508", the first 4 and'),
        ("lookup", {"tree": Tree(7, 3)}, "pass a multiple of 3 nodes, 6x3 for instance"),
        ("suffix", {"tree": TREE}, "suffix drafts chains"),
        ("lookahead:5", {}, "lookahead is lookahead:W,N,G, lookahead:5,4,5 for instance, got '5'"),
        ("lookahead", {"num_draft_tokens": 4}, "num_draft_tokens does not go with lookahead"),
        ("zoo:eagle3", {"tree": TREE, "num_draft_tokens": 4}, "num_draft_tokens belongs to chains"),
        ("mine.py:make", {}, "missing a required argument: 'num_draft_tokens'"),
        ("mine.py:make", {"tree": TREE}, "unexpected keyword argument 'tree'"),
    ],
)
def test_what_a_drafter_does_not_take_is_told(name, options, message, mine, monkeypatch):
    monkeypatch.chdir(mine)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_drafter(name, 0, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best", "'typical' or 'ensemble', got 'best'; or your own as mine.py:Rule"),
        ("mine.py:make", "mine.py:make must be a specdec Sampler or its class, got a function"),
        ("mine.py:broken2", "mine.py has no broken2"),
    ],
)
def test_what_is_no_sampler_is_told(name, message, mine, monkeypatch):
    monkeypatch.chdir(mine)
    with pytest.raises(ValueError, match=re.escape(message)):
        load_sampler(name)
    with pytest.raises(ValueError, match="target_weight belongs to the sampler ensemble"):
        load_sampler("block", target_weight=0.5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lookp", "no drafter 'lookp'; did you mean 'lookup'"),
        ("sufix", "did you mean 'suffix'"),
        ("eagl", "did you mean 'eagle'"),
        ("lookahed:5,4,5", "did you mean 'lookahead'"),
        (
            "eagle:" + "x" * 6000,
            r"the path of a folder, or a Hugging Face id, got 'x{70,80} \.\.\.",
        ),
        ("medusa:" + "y/" * 3000, "the path of a folder, or a Hugging Face id, got 'y/"),
        ("z" * 6000, "the path of a folder, or a Hugging Face id, got 'zz"),
        ("sys:exit", "sys:exit: SystemExit: a LlamaForCausalLM"),
    ],
    ids=lambda value: value[:12],
)
def test_a_mistyped_name_is_told_before_a_hub_is_asked(name, words, monkeypatch):
    def ask(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("specdec.checkpoints.hub.check_reachable", ask)
    with pytest.raises(ValueError, match=words):
        load_drafter(name, zoo.load_target())
