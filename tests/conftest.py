"""Shared settings of the tests."""

import gc
import os
import sys
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import hypothesis
import pytest
import torch
import transformers

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read where a kernel is defined, on import

from tried_models import tried_once

from specdec.targets import discovery

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny tensors: a second thread only adds waiting

hypothesis.settings.register_profile("gate", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500)
hypothesis.settings.load_profile("gate")


def _dear_cases():
    """The cases in `dear.txt` by function; none where all of a function are dear. Examples of
    docstrings stand there with the folder `specdec/`.
    """
    cases, function = {}, ""
    for line in (Path(__file__).parent / "dear.txt").read_text().splitlines():
        if line.startswith("    "):
            cases[function].add(f"{line[4:]}]")
        elif line and not line.startswith("#"):
            function = line if line.startswith("specdec/") else f"tests/{line}"
            cases[function] = set()
    return cases


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Dear cases are `swept`. `-m smoke` runs of a table what runs by default."""
    dear = _dear_cases()
    for item in items:
        function, _, name = item.nodeid.partition("[")
        if function in dear and (not dear[function] or name in dear[function]):
            item.add_marker("swept")
        if any(map(item.get_closest_marker, ("swept", "slow", "gpu"))):
            item.own_markers = [mark for mark in item.own_markers if mark.name != "smoke"]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay until the end, so the garbage collector need not look at them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_configure(config):
    """Triton is there on Linux only; elsewhere modules that need it have no examples to try."""
    if find_spec("triton") is None:
        config.option.doctest_ignore_import_errors = True


def _filled(allocate):
    """An allocation that kernels get with every number set to NaN, or to -1 if it is an integer: a
    number that a kernel reads without having written it shows.
    """

    def allocate_filled(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not f"{caller}.".startswith("specdec.kernels."):
            return tensor
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1)

    return allocate_filled


@pytest.fixture(autouse=True)
def _fresh_memory_of_kernels_is_filled(monkeypatch):
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _filled(getattr(owner, name)))


@pytest.fixture
def exact_float32():
    """For tests on a GPU: products without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(autouse=True)
def _commands_certify_over_few_problems(request, monkeypatch):
    """`tests/certificates` is about certificates."""
    if request.path.parent.name == "cli":
        from specdec.lab.certificates.sampler import exact

        monkeypatch.setattr(exact, "SIZES", ((2, 1, 2),))


@pytest.fixture(autouse=True)
def _only_the_first_wider_problems_are_tried(request, monkeypatch):
    """A rule that passes is tried in larger vocabularies and with logits of other types, too. This
    takes longer than all before it, and `test_certify_wider.py` and others are about it.
    """
    files = "test_certify.py", "test_certify_foreign.py", "test_draft_law.py", "test_own_numbers.py"
    others = "test_path_laws.py", "test_snippets.py", "test_certify_doors.py"
    if request.path.name in (*files, *others) or request.path.parent.name in ("cli", "examples"):
        from specdec.lab.certificates.sampler import exact

        wider = exact.wider_problems
        monkeypatch.setattr(exact, "wider_problems", lambda *a, **kw: islice(wider(*a, **kw), 1))


@pytest.fixture(scope="session")
def _draft_laws():
    """Found in this session, of the library's own ways to draw drafts."""
    return {}


@pytest.fixture(autouse=True)
def _ways_to_draw_are_examined_once(request, monkeypatch, _draft_laws):
    """A certificate of a rule begins with the way its drafts are drawn. That of the library, which
    nearly all rules have, is examined once in a session; where it is the subject, each time.
    """
    files = (
        "test_certify.py",
        "test_certify_doors.py",
        "test_certify_foreign.py",
        "test_path_laws.py",
    )
    if request.path.name not in files and request.path.parent.name != "cli":
        return
    from specdec.lab.certificates.sampler import exact
    from specdec.samplers import draw_by_inversion

    examine = exact.examine_draft_law

    def once(sampler, vocab, **options):
        if sampler.draw_draft is not draw_by_inversion:
            return examine(sampler, vocab, **options)
        case = vocab, sampler.uses_draft_probs, *map(str, options.items())
        if case not in _draft_laws:
            _draft_laws[case] = examine(sampler, vocab, **options)
        return _draft_laws[case]

    monkeypatch.setattr(exact, "examine_draft_law", once)


SELF_TEST = discovery.compare
discovery.compare = tried_once(SELF_TEST, {})
"""Of models that are alike the first is tried, in whichever file it stands; see `tried_models`."""


@pytest.fixture(autouse=True)
def _each_model_is_tried(request, monkeypatch):
    """In rooms that are about the self-test."""
    if request.path.parent.name in ("targets", "census", "capabilities", "foreign", "pictures"):
        monkeypatch.setattr(discovery, "compare", SELF_TEST)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> str:
    """A folder of a small model with the zoo's tokenizer."""
    from architectures import build

    from specdec import zoo

    folder, tokenizer = tmp_path_factory.mktemp("small"), zoo.load_tokenizer()
    model = build("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
