"""lm-eval's answers of an HF model do not change when its `generate` goes through specdec.

lm-eval lives in an environment of its own (CONTRIBUTING.md). Its stopping criteria keep a note for
every row of the batch that `generate` was called with, so they have to be shown that batch.
"""

import json
import os
import subprocess
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path

import pytest

from specdec import SpeculativeGenerator, zoo
from specdec.lab.integrations.lm_eval import NAME, model_type

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

pytestmark = pytest.mark.slow

PROMPTS = [text + "\n" for text in zoo.heldout_prompts(10)]
UNTIL = {
    "lines": ["\n"],  # met by all rows of a batch, after 1 to 21 tokens
    "several": ["\n\n", "return", "):"],
    "of many tokens": ['):\n    """\n'],
    "never": ["never written by this model"],
}
"""Stop sequences."""


class Recording(HFLM):
    """lm-eval's own class, which notes what `generate` returned."""

    def _model_generate(self, *args, **kwargs):
        out = super()._model_generate(*args, **kwargs)
        self.returned.append(out)
        return out


def answers(model, until, batch_size):
    """Of every prompt, and what `generate` returned for each batch."""
    lm = Recording(pretrained=model, tokenizer=zoo.load_tokenizer(), batch_size=batch_size)
    lm.returned = []
    options = {"until": until, "max_gen_toks": 32, "do_sample": False}
    requests = [
        Instance("generate_until", doc={}, arguments=(prompt, dict(options)), idx=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    return lm.generate_until(requests, disable_tqdm=True), lm.returned


@pytest.mark.parametrize("drafter", ["none", "lookup", "eagle3"])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("until", UNTIL)
def test_answers_are_those_without_specdec(until, batch_size, drafter):
    model = zoo.load_target()
    texts, expected = answers(model, UNTIL[until], batch_size)
    part = zoo.load_drafter(drafter, model) if drafter == "eagle3" else drafter
    generator = SpeculativeGenerator(model, part)
    model.generate = partial(model.generate, custom_generate=generator)
    found, returned = answers(model, UNTIL[until], batch_size)
    assert generator.last_result is not None
    assert found == texts
    assert len(returned) == len(expected) == -(-len(PROMPTS) // batch_size)
    assert all(a.equal(b) for a, b in zip(returned, expected, strict=True))


LOADED = {"pretrained": str(zoo.WEIGHTS_DIR / "target"), "dtype": "float32", "device": "cpu"}
TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def test_the_model_type_is_known_by_its_name():
    from lm_eval.api.registry import get_model

    assert model_type() is model_type() is get_model(NAME)
    assert issubclass(model_type(), HFLM)


@pytest.mark.parametrize("drafter", ["none", "zoo:eagle3"])
@pytest.mark.parametrize("batch_size", [1, 4, 16])
@pytest.mark.parametrize("until", UNTIL)
def test_answers_of_specdec_hf_are_those_of_hf(until, batch_size, drafter):
    def found(kind, **more):
        lm = kind(batch_size=batch_size, tokenizer=zoo.load_tokenizer(), **LOADED, **more)
        lm.tokenizer.chat_template = TEMPLATE
        options = {"until": UNTIL[until], "max_gen_toks": 32, "do_sample": False}
        texts = [*PROMPTS, *(lm.apply_chat_template([{"role": "user", "content": PROMPTS[0]}]),)]
        requests = [
            Instance("generate_until", doc={}, arguments=(text, dict(options)), idx=i)
            for i, text in enumerate(texts)
        ]
        return lm.generate_until(requests, disable_tqdm=True), lm

    (expected, _), (answered, lm) = found(HFLM), found(model_type(), drafter=drafter)
    assert answered == expected
    assert lm.generator.last_result.stats.acceptance_length >= 1
    request = [Instance("loglikelihood", doc={}, arguments=("def f", "(x):"), idx=0)]
    hf = HFLM(batch_size=1, **LOADED)
    assert lm.loglikelihood(request, disable_tqdm=True) == hf.loglikelihood(
        request, disable_tqdm=True
    )


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}\\n"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: {until}
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
NUM_DOCS = 18  # two batches of 16, the second of which is not full
TASKS = {"a_line": '["\\n"]', "a_block": '["\\n\\n", "return"]', "an_end": '["never written"]'}


@pytest.fixture(scope="module", name="tasks")
def _tasks(tmp_path_factory):
    """Three tasks of generation over a local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.dumps({"text": text, "answer": "pass"}) for text in zoo.heldout_prompts(NUM_DOCS)]
    (folder / "docs.jsonl").write_text("\n".join(rows), encoding="utf-8")
    for name, until in TASKS.items():
        text = TASK.format(name=name, file=folder / "docs.jsonl", until=until)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def answers_of_command(tasks, num_processes, batch_size, folder, drafter=None):
    """What a run of the command logs for every document of every task; without a drafter `hf`'s."""
    model, arguments = "hf", f"pretrained={LOADED['pretrained']},dtype=float32"
    if drafter is not None:
        model, arguments = NAME, f"{arguments},drafter={drafter}"
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_processes)]
    command += ["-m", "specdec.lab.integrations.lm_eval", "run", "--model", model]
    command += ["--model_args", arguments, "--device", "cpu", "--batch_size", str(batch_size)]
    command += ["--tasks", *TASKS, "--include_path", str(tasks), "--log_samples"]
    command += ["--output_path", str(folder)]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tasks / "cache")}
    options = {"capture_output": True, "text": True, "timeout": 500, "cwd": str(tasks)}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    own = NUM_DOCS * len(TASKS) // num_processes
    assert f" {own}/{own} " in done.stderr  # each process's progress: it answers its share alone
    found = {}
    for name in TASKS:
        (file,) = folder.rglob(f"samples_{name}_*.jsonl")
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        # The last request is repeated where processes would have unequal numbers of them.
        found[name] = {row["doc_id"]: row["resps"][0][0] for row in rows}
    return found


@pytest.fixture(scope="module", name="answers_of_hf")
def _answers_of_hf(tasks, tmp_path_factory):
    """Those of `hf` in one process, by batch size, each run once."""

    @cache
    def found(batch_size):
        answers = answers_of_command(tasks, 1, batch_size, tmp_path_factory.mktemp("hf"))
        assert [len(of_task) for of_task in answers.values()] == [NUM_DOCS] * len(TASKS)
        return answers

    return found


# lm-eval's command reads drafter=none as Python's None.
CELLS = [*product([1, 4, 16], [1, 2], ["zoo:eagle3"]), (4, 2, "none")]


@pytest.mark.parametrize(("batch_size", "num_processes", "drafter"), CELLS)
def test_the_command_gives_the_answers_of_hf(
    batch_size, num_processes, drafter, tasks, answers_of_hf, tmp_path
):
    found = answers_of_command(tasks, num_processes, batch_size, tmp_path, drafter)
    assert found == answers_of_hf(batch_size)
