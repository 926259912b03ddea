"""A step never waits for its device: `generator.step` runs under `no_host_sync`, and twice alike.

The guard itself is tested first, on one-line programs that wait and on ordinary ones that do not.
"""

import io
import pickle

import pytest
import torch
from architectures import VOCAB, build
from diagonal import first
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.graphs import no_host_sync
from specdec.graphs.sync import HostSyncError

X = torch.tensor([3.0, 0.0, 1.0])
WAITING = [
    lambda: X[0].item(),
    lambda: 1 if X[0] > 0 else 2,
    lambda: range(torch.tensor(3)),
    lambda: X[: torch.tensor(2)],
    lambda: X.tolist(),
    lambda: X.numpy(),
    lambda: X.cpu(),
    lambda: X.nonzero(),
    lambda: torch.where(X > 0),
    lambda: X[X > 0],
    lambda: X.clone().__setitem__(X > 0, X[:2]),
    lambda: X.clone().index_put_((X > 0,), torch.tensor(1.0), accumulate=True),
    lambda: X.expand(3, 3).clone().__setitem__((X > 0, X > 0), 1.0),
    lambda: X.masked_select(X > 0),
    lambda: X.unique(),
    lambda: X.unique_consecutive(),
    lambda: torch.equal(X, X + 1),
    lambda: X.long().bincount(),
    lambda: X.repeat_interleave(X.long()),
    lambda: 3.0 in X,
    lambda: torch.allclose(X, X + 1),
    lambda: torch.histc(X),
    lambda: torch.multinomial(X, 1),
    lambda: str(X),
    lambda: f"{X}",
    lambda: torch.save(X, io.BytesIO()),
    lambda: pickle.dumps(X),
    lambda: X.untyped_storage().tolist(),
]
A = torch.tensor([[3.0, 1.0, 0.0], [1.0, 4.0, 1.0], [0.0, 1.0, 5.0]])
DOCUMENTED = {
    "inv": lambda a: torch.linalg.inv(a),
    "inverse": lambda a: a.inverse(),
    "inv, out": lambda a: torch.linalg.inv(a, out=torch.empty_like(a)),
    "inv_ex, checked": lambda a: torch.linalg.inv_ex(a, check_errors=True),
    "power": lambda a: torch.linalg.matrix_power(a, -1),
    "solve": lambda a: torch.linalg.solve(a, a[0]),
    "solve_ex, checked": lambda a: torch.linalg.solve_ex(a, a[0], check_errors=True),
    "cholesky": lambda a: torch.linalg.cholesky(a),
    "cholesky_ex, checked": lambda a: torch.linalg.cholesky_ex(a, check_errors=True),
    "lu_factor": lambda a: torch.linalg.lu_factor(a),
    "lu_factor_ex, checked": lambda a: torch.linalg.lu_factor_ex(a, check_errors=True),
    "ldl_factor": lambda a: torch.linalg.ldl_factor(a),
    "eig": lambda a: torch.linalg.eig(a),
    "eigvals": lambda a: torch.linalg.eigvals(a),
    "eigh": lambda a: torch.linalg.eigh(a),
    "eigvalsh": lambda a: torch.linalg.eigvalsh(a),
    "svd": lambda a: torch.linalg.svd(a),
    "svdvals": lambda a: torch.linalg.svdvals(a),
    "norm": lambda a: torch.linalg.norm(a, ord="nuc"),
    "cond": lambda a: torch.linalg.cond(a),
    "matrix_rank": lambda a: torch.linalg.matrix_rank(a),
    "pinv": lambda a: torch.linalg.pinv(a),
    "normal": lambda a: torch.normal(0.0, a),
    "normal of both": lambda a: torch.normal(a, a),
    "linspace": lambda a: torch.linspace(a[0, 0], 7.0, 3),
    "logspace": lambda a: torch.logspace(0.0, a[0, 0], 3),
    "to_sparse": lambda a: a.to_sparse(),
    "argwhere": lambda a: a.argwhere(),
    "one_hot": lambda a: torch.nn.functional.one_hot(a.long()),
}
"""Programs over a matrix that torch documents to wait on a GPU, or that read or count numbers."""
WAITING += [lambda waits=waits: waits(A) for waits in DOCUMENTED.values()]
MODES = torch.enable_grad, torch.no_grad, torch.inference_mode


@pytest.mark.parametrize("waits", WAITING)
def test_an_operation_that_waits_is_refused(waits):
    for mode in MODES:
        with mode():
            waits()  # a valid program, and allowed again behind a guard
            with pytest.raises(HostSyncError), no_host_sync():
                waits()
        with pytest.raises(HostSyncError), no_host_sync(), mode():
            waits()


@pytest.mark.gpu
@pytest.mark.parametrize("name", DOCUMENTED)
def test_what_is_refused_on_a_cpu_waits_on_a_gpu(name):
    """By CUDA's own check; the program has run before, so that its libraries are loaded."""
    matrix = A.cuda()
    DOCUMENTED[name](matrix)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            DOCUMENTED[name](matrix)
    finally:
        torch.cuda.set_sync_debug_mode("default")


ORDINARY = [
    lambda: (X * 2 + 1).cumsum(0).softmax(-1).argmax(),
    lambda: X[torch.tensor([0, 2])],
    lambda: X.clone().__setitem__(torch.tensor([0, 2]), X[:2]),
    lambda: X.scatter(0, torch.tensor([1]), X.gather(0, torch.tensor([2]))),
    lambda: torch.histc(X, bins=3, min=0, max=2),  # as HF counts the tokens of experts
    lambda: torch.where(X > 0, X, -X),
    lambda: X.masked_fill(X > 0, 0.0),
    lambda: X.clone().__setitem__(X > 0, 0.0),
    lambda: X.expand(3, 3).clone().__setitem__((X > 0, slice(None)), 1),
    lambda: X[: len(X) - 1].view(X.numel() - 1, 1).shape,
    lambda: (X.sort(), X.topk(2), torch.searchsorted(X, X)),
    lambda: X.clone().add_(1).mul_(2),
    lambda: (torch.linalg.inv_ex(A), torch.linalg.solve_ex(A, X), torch.linalg.cholesky_ex(A)),
    lambda: (torch.linalg.lu_factor_ex(A), torch.linalg.det(A), torch.linalg.matrix_power(A, 3)),
    lambda: (torch.linalg.solve_triangular(A, A, upper=True), torch.linalg.qr(A)),
    lambda: (torch.linspace(0, 1, 3), torch.logspace(0, 1, 3), torch.linalg.norm(A)),
]


@pytest.mark.parametrize("operation", ORDINARY)
def test_an_ordinary_operation_is_allowed_and_gives_what_it_gives_outside(operation):
    outside = operation()
    for mode in MODES:
        with no_host_sync(), mode():
            inside = operation()
        assert str(inside) == str(outside)


def test_everything_is_allowed_again_behind_the_guard_after_any_exception():
    with pytest.raises(ZeroDivisionError), no_host_sync():
        raise ZeroDivisionError
    assert X.nonzero().tolist() == [[0], [2]]


def test_the_guard_records_operations_and_shapes_in_order():
    for mode in MODES[1:]:
        with no_host_sync() as seen, mode():
            X.view(1, 3).expand(2, 3).sum(dim=1)
        assert [shape for _, shape in seen.shapes] == [(1, 3), (2, 3), (2,)]


MIXTURES = {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}
GATES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "seed": 1},
    "truncated": {"do_sample": True, "top_k": 9, "top_p": 0.8, "min_p": 0.02, "seed": 2},
    "mixed": {"do_sample": True, "temperature": [0.0, 1.0, 0.7], "top_k": [0, 5, 3], "seed": 3},
}


def prepared(name, drafter, gate):
    """A generation a few steps in, and its generator; experts of a mixture run without waiting."""
    model = build(name)
    if name in MIXTURES:
        model.set_experts_implementation("batched_mm")
    part = ModelDrafter(perturbed(model), 3) if drafter == "model" else drafter
    generator = SpeculativeGenerator(model, part)
    ids, mask = ragged_prompts(VOCAB, 5, 2, 9)
    state = generator.start(ids, mask, max_new_tokens=40, eos_token_id=None, **GATES[gate])
    generator.step(state)
    generator.step(state)
    return generator, state


def check_steps(generator, state):
    """Two steps under the guard; with the host's bound pinned they allocate the same tensors."""
    steps = []
    for _ in range(2):
        state.state.buffer.note_longest(10**9)
        before = state.lengths
        with no_host_sync() as seen:
            generator.step(state)
        assert bool((state.lengths > before).all())
        steps.append(seen.shapes)
    assert len(steps[0]) > 50
    assert steps[0] == steps[1]


FAMILIES = MIXTURES | {"gemma2", "gemma3", "gptj", "gpt2", "opt", "mpt", "falcon_gqa", "cohere2"}
CASES = [*(("llama", "model", gate) for gate in GATES), ("llama", "none", "truncated")]
CASES += [(name, "model", "truncated") for name in sorted(FAMILIES)]
"""Every drafter and sampler: `graphs/test_captured_steps.py`."""


QUICK = [case for case in CASES if case[0] in ("llama", "gemma3", "mpt", "gpt_oss", "deepseek_v3")]


@pytest.mark.parametrize("case", first(CASES, QUICK), ids=str)
def test_a_step_runs_without_waiting_and_always_in_the_same_shapes(case):
    check_steps(*prepared(*case))


def test_gpt2_with_a_padding_id_runs_without_waiting():
    """HF's GPT-2 looks for padding in each forward's ids, to warn, where its config has an id."""
    generator, state = prepared("gpt2", "lookup", "sampled")
    generator.target.model.config.pad_token_id = 0
    check_steps(generator, state)


def test_reading_an_outcome_waits_so_the_guard_would_see_a_step_that_did():
    generator, state = prepared("llama", "model", "sampled")
    with pytest.raises(HostSyncError), no_host_sync():
        generator.step(state).fetch().read()


def test_the_bound_of_the_host_holds_and_stops_growing_at_the_room_of_the_call():
    generator, generation = prepared("llama", "lookup", "sampled")
    cap = 9 + 40 + generator.drafter.num_draft_tokens
    for _ in range(40):
        generator.step(generation)
        window_end = generation.lengths + generator.drafter.num_draft_tokens
        assert int(window_end.max()) <= generation.state.num_in_use <= cap
    assert generation.state.num_in_use == cap
    generator, generation = prepared("llama", "lookup", "sampled")
    loose = generation.state.num_in_use
    generation.synchronize()  # whoever reads the lengths makes it exact
    longest = int(generation.lengths.max())
    assert generation.state.num_in_use == longest + generator.drafter.num_draft_tokens < loose
