"""What a type checker says of users' programs: nothing of those on the pages, and something of a
wrong one. (`pip install 'pyright[nodejs]'`; pyright is what editors complete by.)
"""

import json
import re
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, blocks
from typed_programs import PROGRAMS

pytest.importorskip("pyright")
pytestmark = pytest.mark.slow

NAMES = "TARGET", "DRAFT", "HEAD", "GEMMA", "ASSISTANT"
"""Folders that snippets name; `test_snippets.py` gives them."""
TRAINING = r"^(?:import|from) (?:trl|datasets)\b"
"""Snippets with these are not looked at: TRL exports no name that it documents."""
OF_OTHERS = (
    r"GenerativePreTrainedModel|DistributedConfig|parameter \"self\"|ProcessorMixin|train_dataset"
)
"""In what is wrong in transformers' declarations: its `generate` asks for attributes that its
models do not declare, `to` is wrapped as a function without an object, a documented class is not
exported, a `Trainer` takes lists, too; and of outlines, which knows no tokenizers of this version.
"""
PROGRAM = """
import specdec
from specdec import BlockSampler, GenerateOptions, RejectionSampler, SpeculativeGenerator
from specdec import FirstMatch, PromptLookupDrafter, SuffixDrafter, Target, certify, evaluate, zoo

target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
ids = tokenizer("def main(argv):", return_tensors="pt").input_ids
generator = SpeculativeGenerator(Target(target, fuse=True), zoo.load_drafter("eagle3", target))
result = generator.generate(ids, max_new_tokens=8, seed=[0], output_logprobs=True, trace=True)
print(result.stats.acceptance_length, result.logprobs.sum(), result.seeds, result.texts[0])
result.trace.to_html("trace.html")
for record in generator.stream(ids, max_new_tokens=8, logits_processor=[]):
    print(record.rows[0].new_tokens)
generation = generator.start(ids, generation_config=target.generation_config)
while not generation.has_ended.all():
    print(generator.step(generation).verdict.num_accepted)
print(generator.last_result.stats.acceptance_rate)
assert certify(RejectionSampler(), sizes=((3, 1, 4),)).is_exact
assert certify(generator, [[1, 2, 3]], num_samples=4, max_new_tokens=8).passed
print(specdec.certify(BlockSampler()).failures, evaluate(generator, ["x"], tokenizer=tokenizer))
options: GenerateOptions = {"max_new_tokens": 4}
first = FirstMatch(SuffixDrafter(8), PromptLookupDrafter(3))
SpeculativeGenerator(target, first, "block").generate(ids, **options)
"""
WRONG = {
    "generator.generate(ids, max_tokens=3)": "generate",
    "generator.generate(ids, temperature='hot')": "temperature",
    "certify(generator, sizes=((3, 1, 4),))": "certify",
    "certify(RejectionSampler(), num_samples=4)": "certify",
    "generator.generate(ids).stats.acceptance_lenght": "acceptance_lenght",
    "SpeculativeGenerator(target, 3)": "drafter",
}


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory) -> dict[str, list[str]]:
    """What pyright says in its mode `standard`, by program."""
    folder = tmp_path_factory.mktemp("programs")
    programs = {"program": PROGRAM, "wrong": PROGRAM + "\n".join(WRONG), **PROGRAMS}
    given = "".join(f'{name} = "folder"\n' for name in NAMES)
    for page in PAGES:
        for i, block in enumerate(blocks(page)):
            if re.search(TRAINING, block, re.MULTILINE):
                continue
            programs[f"{re.sub(r'[^A-Za-z]', '_', page)}{i}"] = given + block
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    settings = {"typeCheckingMode": "standard", "reportMissingImports": False}
    settings |= {"pythonVersion": "3.11", "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", str(folder)], capture_output=True, text=True)
    said = {name: [] for name in programs}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        (name,) = (name for name in programs if each["file"].endswith(f"/{name}.py"))
        line = each["range"]["start"]["line"] + 1
        said[name].append(f"{line}: {each['message']}")
    return said


@pytest.mark.parametrize("name", ["program", *PROGRAMS])
def test_a_program_of_documented_calls_has_no_error(name, found):
    assert found[name] == []


def test_no_snippet_of_a_page_has_one(found):
    said = [
        (name, message)
        for name, messages in found.items()
        for message in messages
        if name != "wrong" and not re.search(OF_OTHERS, message)
    ]
    assert said == []


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_call_has_one(line, found):
    place = (PROGRAM + "\n".join(WRONG)).splitlines().index(line) + 1
    assert any(one.startswith(f"{place}: ") and WRONG[line] in one for one in found["wrong"])
