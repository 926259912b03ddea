"""In a `Trainer` run the acceptance that is logged is that of the weights at that step."""

import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import Trainer, TrainingArguments

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.lab.evaluation import evaluate
from specdec.lab.training.callbacks import AcceptanceCallback, in_evaluation

IDS, MASK = ragged_prompts(VOCAB, *[4] * 8)
PROMPTS = IDS.tolist()
OPTIONS = {"max_new_tokens": 8, "batch_size": 8}


class OwnText(torch.utils.data.Dataset):
    """The target's own greedy text, from which a draft model learns."""

    def __init__(self, target):
        self.rows = SpeculativeGenerator(target, None).generate(IDS, max_new_tokens=24).sequences

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def run(tmp_path, *, every: int, steps: int, **options):
    target = build("llama")
    draft = perturbed(target, scale=0.6)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        learning_rate=2e-3,
        per_device_train_batch_size=8,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(model=draft, args=arguments, train_dataset=OwnText(target))
    generator = SpeculativeGenerator(target, ModelDrafter(draft, 3))
    options = {**OPTIONS, **options}
    trainer.add_callback(AcceptanceCallback(trainer, generator, PROMPTS, every=every, **options))
    trainer.train()
    return trainer, generator


def test_acceptance_is_logged_with_intervals_and_rises_while_the_draft_learns(tmp_path):
    trainer, generator = run(tmp_path, every=20, steps=50)
    name = "acceptance_length (T = 0)"
    logged = {entry["step"]: entry for entry in trainer.state.log_history if name in entry}
    assert list(logged) == [20, 40, 50]
    figures = logged[50]
    assert figures[f"{name}, low"] <= figures[name] <= figures[f"{name}, high"]
    trainer.model.eval()
    for temperature in (0.0, 1.0):
        fresh = SpeculativeGenerator(generator.target, ModelDrafter(trainer.model, 3))
        again = evaluate(fresh, PROMPTS, temperature=temperature, **OPTIONS)
        length = figures[f"acceptance_length (T = {temperature:g})"]
        assert length == again.stats.acceptance_length
    before = SpeculativeGenerator(
        generator.target, ModelDrafter(perturbed(build("llama"), scale=0.6), 3)
    )
    assert figures[name] > evaluate(before, PROMPTS, **OPTIONS).stats.acceptance_length + 0.3


def test_measuring_changes_neither_the_run_nor_the_mode_of_the_model(tmp_path):
    often, _ = run(tmp_path / "a", every=1, steps=4, temperatures=(1.0,))
    seldom, _ = run(tmp_path / "b", every=100, steps=4, temperatures=(1.0,))
    for a, b in zip(often.model.parameters(), seldom.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert often.model.training == seldom.model.training
    steps = [e["step"] for e in often.state.log_history if "acceptance_length (T = 1)" in e]
    assert steps == [1, 2, 3, 4]  # the end was measured already


def test_what_is_measured_has_no_dropout_and_each_module_is_then_as_it_was():
    frozen, trained = torch.nn.Dropout(0.9).eval(), torch.nn.Dropout(0.9)
    both, ones = torch.nn.ModuleList([frozen, trained]), torch.ones(64)
    with in_evaluation(both):
        assert trained(ones).equal(ones)
        assert not any(module.training for module in both.modules())
    assert [both.training, frozen.training, trained.training] == [True, False, True]
    assert not trained(ones).equal(ones)


class Modes(AcceptanceCallback):
    """Notes in which modes target and drafter are measured."""

    def figures(self):
        parts = self.generator.target.model, self.generator.drafter
        self.seen = {module.training for part in parts for module in part.modules()}
        return super().figures()


def test_a_run_measures_target_and_drafter_in_evaluation_mode(tmp_path):
    target = build("llama").train()
    draft = perturbed(target, scale=0.6).train()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    trainer = Trainer(model=draft, args=arguments, train_dataset=[])
    generator = SpeculativeGenerator(target.eval(), ModelDrafter(draft.eval(), 3))
    callback = Modes(trainer, generator, PROMPTS, every=1, **OPTIONS)
    for part in (target, draft):
        part.train()
    callback.on_train_end(arguments, trainer.state, trainer.control)
    assert callback.seen == {False}
    assert target.training
    assert draft.training
