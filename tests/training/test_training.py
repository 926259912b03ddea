"""The training loop: it yields acceptance, and a run is the same in whatever way it is cut up."""

import math
import random

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from training_runs import (
    Bigrams,
    Counted,
    assert_same,
    objective_of,
    on_a_cpu,
    plan_of,
    random_text,
    run,
    weights_of,
)

from specdec import SpeculativeGenerator
from specdec.drafters import EagleDrafter
from specdec.evaluation import evaluate
from specdec.training import (
    FeatureAndToken,
    NextToken,
    PackedStream,
    TrainingTimeTest,
    new_head,
    train,
)

PERIOD = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:9].numpy()


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A target that has learned one short period by heart."""
    model, stream = build("llama"), PackedStream([np.tile(PERIOD, 60)], seed=0)
    with on_a_cpu():
        train(NextToken(model), stream, plan=plan_of(60), work_dir=tmp_path_factory.mktemp("run"))
    return model.eval()


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_head_that_learns_periodic_text_has_all_its_drafts_accepted(kind, parrot, tmp_path):
    num_draft_tokens = 4
    drafter = EagleDrafter(new_head(parrot, kind, seed=1), parrot, num_draft_tokens)
    objective = TrainingTimeTest if kind == "eagle3" else FeatureAndToken
    prompts = torch.from_numpy(np.stack([np.roll(PERIOD, -i) for i in range(4)]))

    def acceptance():
        generator = SpeculativeGenerator(parrot, drafter)
        options = {"max_new_tokens": 30}
        stats = {t: evaluate(generator, prompts, temperature=t, **options).stats for t in (0, 1)}
        return {f"T = {t}": s.acceptance_length for t, s in stats.items()}

    before = acceptance()
    progress = train(
        objective(drafter, parrot),
        PackedStream([np.tile(PERIOD, 60)], seed=0),
        plan=plan_of(100, evaluate_every=50),
        work_dir=tmp_path,
        evaluate=acceptance,
    )
    assert progress.history[1][1] < 0.7 * progress.history[0][1]
    assert [e["step"] for e in progress.evaluations] == [50, 100]
    assert before["T = 0"] < 2
    assert progress.evaluations[-1]["T = 0"] > 4.5
    assert progress.evaluations[-1]["T = 1"] > 4


@pytest.mark.parametrize("kind", ["eagle3", "bigrams"])
def test_accumulated_batches_are_one_batch_of_all_their_rows(kind, tmp_path):
    runs = [run(kind, tmp_path / str(n), plan_of(5, accumulation=n)) for n in (1, 2, 4)]
    assert [stream.num_taken for _, stream, _ in runs] == [5, 10, 20]
    for objective, stream, progress in runs[1:]:
        assert progress.num_tokens == runs[0][2].num_tokens == 5 * 64
        assert progress.loss == pytest.approx(runs[0][2].loss, rel=1e-5)
        assert stream.state_dict() == runs[0][1].state_dict()
        for key, weight in weights_of(objective).items():
            # Muon orthogonalises in bfloat16: an update of lr 0.02 may differ by a part in 100.
            torch.testing.assert_close(weight, weights_of(runs[0][0])[key], rtol=0, atol=1e-3)


def test_a_run_depends_on_its_seed_and_leaves_every_generator_as_it_was(tmp_path):
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    def noisy(name, *, state, seed=0, steps=2):
        objective = objective_of("eagle1")
        torch.manual_seed(state), np.random.seed(state), random.seed(state)
        before = states()
        train(objective, Counted(), plan=plan_of(steps, seed=seed), work_dir=tmp_path / name)
        assert states() == before
        return weights_of(objective)

    first = noisy("a", state=1)
    assert_same(noisy("b", state=2), first)
    other = noisy("c", state=1, seed=1)
    assert any((other[key] != first[key]).any() for key in first)
    noisy("a", state=2, steps=3)  # goes on from a checkpoint, which brings its own


def test_an_evaluation_disturbs_nothing(parrot):
    drafter = EagleDrafter(new_head(parrot, "eagle3"), parrot, 3)
    prompts = torch.from_numpy(PERIOD[None])
    drafter.head.layers[0].eval()
    modes = [m.training for m in drafter.modules()]
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(3).tolist(), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    generator = SpeculativeGenerator(parrot, drafter)
    first = [evaluate(generator, prompts, temperature=t).stats.to_json() for t in (0, 1)]
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == expected
    assert [m.training for m in drafter.modules()] == modes
    assert all(p.grad is None and p.requires_grad for p in drafter.parameters())
    assert first == [evaluate(generator, prompts, temperature=t).stats.to_json() for t in (0, 1)]


def test_training_is_in_training_mode_evaluation_in_eval_mode_and_modes_come_back(tmp_path):
    objective = objective_of("eagle3").eval()
    objective.drafter.head.fc.train()
    modes, seen = [m.training for m in objective.modules()], []
    objective.drafter.head.fc.register_forward_hook(lambda fc, *_: seen.append(fc.training))

    def evaluate():
        seen.append(any(m.training for m in objective.modules()))
        return {}

    options = {"plan": plan_of(2, evaluate_every=1), "work_dir": tmp_path}
    train(objective, Counted(), **options, evaluate=evaluate)
    assert seen == [True, False] * 2
    assert [m.training for m in objective.modules()] == modes
    with pytest.raises(KeyboardInterrupt):
        train(objective, Counted(at=0), **options | {"plan": plan_of(3)})
    assert [m.training for m in objective.modules()] == modes


def test_the_precision_of_one_run_says_nothing_about_the_next(tmp_path):
    weights = {}
    for name, precision in (("a", "no"), ("b", "bf16"), ("c", "no")):
        plan = plan_of(3, precision=precision)
        weights[name] = weights_of(run("eagle3", tmp_path / name, plan)[0])
    assert_same(weights["a"], weights["c"])
    assert (weights["a"]["drafter.head.fc.weight"] != weights["b"]["drafter.head.fc.weight"]).any()


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    objective = Bigrams()
    objective.embed_tokens.weight.data[random_text()[0][0]] = math.inf
    with pytest.raises(FloatingPointError, match=r"loss of step 1 is nan; .*lower learning rates"):
        train(objective, Counted(), plan=plan_of(2), work_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_too_little_text_or_nothing_to_train_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a batch takes 641 tokens and the text has 600"):
        train(Bigrams(), Counted(), plan=plan_of(1, tokens_per_step=640), work_dir=tmp_path)
    with pytest.raises(ValueError, match="not a row of 16 tokens for each of 1 processes and 5"):
        train(Bigrams(), Counted(), plan=plan_of(1, accumulation=5), work_dir=tmp_path)
    frozen = Bigrams().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        train(frozen, Counted(), plan=plan_of(1), work_dir=tmp_path)


def test_only_what_requires_a_gradient_is_trained(tmp_path):
    objective = Bigrams()
    objective.lm_head.requires_grad_(False)
    before = weights_of(objective)
    train(objective, Counted(), plan=plan_of(2), work_dir=tmp_path)
    changed = {
        key for key, tensor in weights_of(objective).items() if (tensor != before[key]).any()
    }
    assert changed == {"embed_tokens.weight", "proj.weight"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_compiled_loss_trains_alike(kind, tmp_path):
    """Slow: compiling takes half a minute on a CPU. Without noise: compiled programs draw other."""
    losses, weights = [], []
    for is_compiled in (False, True):
        objective = objective_of(kind)
        objective.noise, plan = 0.0, plan_of(3, compiled=is_compiled)
        progress = train(objective, Counted(), plan=plan, work_dir=tmp_path / str(is_compiled))
        losses.append(progress.loss)
        weights.append(weights_of(objective))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for key, weight in weights[1].items():
        torch.testing.assert_close(weight, weights[0][key], rtol=0, atol=1e-3)


IDS = np.arange(VOCAB + 1)


class Odd(Bigrams):
    """Returns what is no loss."""

    def __init__(self, loss):
        super().__init__()
        self._loss = loss

    def forward(self, ids):
        """As it was made."""
        return self._loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": None}, "objective must be a Module, got None"),
        ({"objective": Odd("x")}, "must return its mean loss, .* got str"),
        ({"objective": Odd(torch.tensor(1.0))}, r"got \[\], without a gradient"),
        ({"objective": Odd(torch.ones(2, requires_grad=True))}, r"of no dimensions .* got \[2\]"),
        ({"stream": [1, 2]}, r"stream must be a PackedStream, got \[1, 2\]"),
        (
            {"objective": NextToken(build("llama")), "stream": PackedStream([IDS], seed=0)},
            f"the text holds the id {VOCAB}, and LlamaForCausalLM has {VOCAB} embeddings",
        ),
        ({"plan": None}, "plan must be a TrainingPlan, got None"),
        ({"evaluate": 5}, "evaluate must be a function that returns figures, got 5"),
        ({"evaluate": lambda: "x"}, "what evaluate returns must be a dictionary, got 'x'"),
        ({"evaluate": lambda: {"a": "x"}}, "the figure 'a' of evaluate must be a number, got 'x'"),
        ({"work_dir": __file__}, "work_dir must be the path of a folder, but .* is a file"),
        ({"work_dir": ""}, "work_dir must be the path of a folder, got ''"),
    ],
)
def test_what_cannot_be_trained_is_refused(change, message, tmp_path):
    stream = PackedStream(random_text(), seed=0)
    options = {"objective": Bigrams(), "stream": stream, "plan": plan_of(1), "work_dir": tmp_path}
    options |= change
    with pytest.raises((ValueError, TypeError), match=message):
        train(options.pop("objective"), options.pop("stream"), **options)
