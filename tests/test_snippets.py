"""Every page as a newcomer reads it: each snippet of Python runs alone, as it is written; tables
name what there is. `test_commands.py` runs the commands.
"""

import functools
import json
import os
import re
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from assistants import pair
from diagonal import case
from outputs import differences
from pages import PAGES, ROOT, blocks, languages

import specdec
from specdec import zoo
from specdec.hf.forward import CACHES
from specdec.request import GenerateOptions

PATHS = {
    name: str(zoo.WEIGHTS_DIR / folder)
    for name, folder in (("TARGET", "target"), ("DRAFT", "draft"), ("HEAD", "eagle3"))
}
OWN, RULE, PARTS = "docs/own-drafter.md", "docs/own-rule.md", "docs/parts.md"
"""The pages about parts of one's own, and about a part alone."""
QUICK_PAGES = {"README.md", OWN, RULE, "docs/own-head.md", "docs/own-layout.md", PARTS}
"""Whose snippets run by default, but for certificates; the other pages are a stage of `.ci/run`."""
LIBRARIES = "peft", "trl", "datasets", "lm_eval", "llguidance", "outlines"
"""Whose snippets run where they are installed."""
IN_TWO_PROCESSES = "# parallel.py"
"""Begins the snippet that `test_commands.py` runs."""


def param(page: str, index: int, block: str):
    is_slow = page not in QUICK_PAGES or "print(certify(" in block
    return pytest.param(page, index, marks=[pytest.mark.slow] * is_slow, id=f"{page}-{index}")


SNIPPETS = [
    param(page, i, block)
    for page in PAGES
    for i, block in enumerate(blocks(page))
    if not block.startswith(IN_TWO_PROCESSES)
]


@functools.cache
def gemma() -> dict[str, str]:
    """Folders of a small Gemma 4 and its assistant."""
    folder, (model, assistant) = tempfile.mkdtemp(), pair("E2B")
    paths = {"GEMMA": f"{folder}/target", "ASSISTANT": f"{folder}/assistant"}
    model.save_pretrained(paths["GEMMA"])
    assistant.save_pretrained(paths["ASSISTANT"])
    return paths


@functools.cache
def names_of(page: str, index: int) -> dict:
    """What a snippet defines, run in a folder with a file of prompts."""
    names, before = dict(PATHS), Path.cwd()
    if "(GEMMA" in blocks(page)[index]:
        names |= gemma()
    short = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", blocks(page)[index])
    short = short.replace("audit_tokens=32", "audit_tokens=4")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            lines = [json.dumps({"text": text}) for text in zoo.heldout_prompts(6)]
            Path("spec_bench.jsonl").write_text("\n".join(lines), encoding="utf-8")
            exec(compile(short, f"{page}, block {index}", "exec"), names)
        finally:
            os.chdir(before)
    return names


@pytest.mark.parametrize(("page", "index"), SNIPPETS)
def test_every_snippet_runs_alone(page, index):
    block = blocks(page)[index]
    for library in LIBRARIES:
        if re.search(
            rf"^(import|from) (specdec\.lab\.integrations\.)?{library}\b", block, re.MULTILINE
        ):
            pytest.importorskip(library)
    assert names_of(page, index).keys() > PATHS.keys()


def test_the_readme_is_short_and_has_a_snippet_for_each_use():
    assert len(PAGES["README.md"].split()) <= 900
    assert len(SNIPPETS) >= 15


def test_a_block_names_a_language_whose_blocks_are_run_or_held_against_a_run():
    """`bash` by test_commands.py; `text` is what a snippet prints, or a listing."""
    for page in PAGES:
        assert {*languages(page)} <= {"python", "bash", "toml", "text"}, page


def index_of(page: str, text: str) -> int:
    """Of the one snippet of a page that holds a text."""
    (index,) = (i for i, block in enumerate(blocks(page)) if text in block)
    return index


@pytest.mark.slow
def test_the_guide_shows_what_its_snippet_prints(capsys):
    (shown,) = (text for text in blocks(RULE, "text") if text.startswith("LOSSY"))
    names_of.__wrapped__(RULE, index_of(RULE, "class LenientSampler"))
    found = differences(shown, capsys.readouterr().out)
    assert not found, "\n".join(found)


def test_the_study_that_a_page_shows_is_the_file_that_its_command_runs():
    (shown,) = blocks("docs/which.md", "toml")
    assert shown == (ROOT / "docs/which.toml").read_text(encoding="utf-8")


def drafts_and_writes_plain_text(generator, tokenizer, at_least=0.05):
    """Inputs and result of three prompts, whose text is that of plain decoding."""
    inputs = tokenizer(zoo.heldout_prompts(3), return_tensors="pt", padding=True)
    greedy = {"max_new_tokens": 24, "do_sample": False}
    result = generator.generate(**inputs, **greedy)
    expected = specdec.SpeculativeGenerator(generator.target, None).generate(**inputs, **greedy)
    assert result.sequences.equal(expected.sequences)
    assert at_least <= result.stats.acceptance_rate < 1
    return inputs, result


@pytest.mark.slow
def test_a_drafter_of_the_guide_reads_hidden_states_drafts_and_is_lossless():
    session = names_of(OWN, index_of(OWN, "class LinearDrafter"))
    tokenizer, target, texts = session["tokenizer"], session["model"], session["texts"]
    matrix = session["fit"](target, texts)
    drafter = session["LinearDrafter"](target, matrix)
    assert drafter.feature_layers == ("final",)
    generator = specdec.SpeculativeGenerator(target, drafter)
    drafts_and_writes_plain_text(generator, tokenizer)
    prompts = [
        tokenizer("import os").input_ids,
        [5],
    ]  # of one token: no state before its first step
    assert specdec.certify(generator, prompts, num_samples=4, audit_tokens=8).passed
    width = len(matrix) // 2
    without_states = matrix.index_fill(0, torch.arange(width), 0)
    blind = specdec.SpeculativeGenerator(target, session["LinearDrafter"](target, without_states))
    _, seen = drafts_and_writes_plain_text(generator, tokenizer)
    _, unseen = drafts_and_writes_plain_text(blind, tokenizer, 0)
    assert seen.stats.acceptance_rate > unseen.stats.acceptance_rate
    drafter.head = torch.nn.Linear(width, 5)
    with pytest.raises(ValueError, match="the head must have 2048 tokens"):
        specdec.SpeculativeGenerator(target, drafter)


@pytest.mark.slow
def test_the_lengths_that_a_page_shows_are_those_of_its_snippet(capsys):
    """The comments of the page about acceptance lengths, run as it stands."""
    page = "docs/acceptance-length.md"
    (block,) = blocks(page)
    exec(compile(block, page, "exec"), {})
    printed = [f"{float(line):.2f}" for line in capsys.readouterr().out.splitlines()]
    assert printed == re.findall(r"^print.*  # (\d\.\d\d), ", block, re.MULTILINE)
    assert len(printed) == 4


LOOPS = [(name, i % 2 == 0) for i, name in enumerate(["none", "lookup", *sorted(zoo.DRAFTERS)])]


@pytest.mark.parametrize(
    ("name", "graphs"), [case([*each], each[0] in ("none", "eagle3")) for each in LOOPS]
)
def test_the_loop_of_the_readme_writes_what_generate_writes(name, graphs):
    (block,) = (block for block in blocks("README.md") if "commit(state" in block)
    imports, *_, loop = block.split("\n\n")  # the loop alone, over each drafter
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    drafter = zoo.load_drafter(name, target) if name in zoo.DRAFTERS else name
    generator = specdec.SpeculativeGenerator(target, drafter, graphs=graphs)
    inputs = tokenizer(["def f(x):", "import os, sys"], return_tensors="pt", padding=True)
    names = {"generator": generator, "inputs": inputs}
    exec(compile(f"{imports}\n{loop}", "README.md, the loop", "exec"), names)
    assert (names["generation"].lengths - inputs.attention_mask.sum(dim=1)).max() > 10
    result = generator.generate(**inputs, max_new_tokens=64, do_sample=True, seed=0)
    for row, length in enumerate(names["generation"].lengths.tolist()):
        prompt = inputs.input_ids[row][inputs.attention_mask[row].bool()]
        new = result.new_tokens[row, : result.lengths[row]]
        assert names["written"][row, :length].tolist() == [*prompt.tolist(), *new.tolist()]


@pytest.mark.parametrize(("lenience", "passes"), [(1.0, True), (1.5, False)])
def test_the_sampler_of_the_guide_is_lossless_at_1(lenience, passes):
    names = {}
    block = blocks(RULE)[index_of(RULE, "class LenientSampler")]
    exec(block.split("print(certify")[0], names)
    report = specdec.certify(names["LenientSampler"](lenience), sizes=((3, 2, 12),))
    assert report.is_exact
    assert report.passed is passes


def test_the_loop_of_the_page_takes_the_generators_steps_with_every_drafter():
    """A lossless rule hides what a drafter was not shown; steps and draft tokens do not."""
    session = names_of(PARTS, index_of(PARTS, "loop.definition"))
    hf, prompt = session["hf"], session["prompt"]
    parts = session["sampler"], prompt, session["logits_filter"]
    for drafter in (*session["drafters"], session["PromptLookupDrafter"](4)):
        generator = specdec.SpeculativeGenerator(hf, drafter, session["sampler"])
        for num in (8, 24):  # as the snippet was run here, and as it stands on the page
            _, steps = session["generate"](hf, drafter, *parts, max_new_tokens=num)
            expected = generator.generate(prompt, max_new_tokens=num, do_sample=False).steps[0]
            assert [vars(step) for step in steps] == [vars(step) for step in expected]
            assert num == 24 or session["counts"][type(drafter).__name__] == len(steps)


@pytest.mark.slow
def test_text_in_the_grammar_of_the_page_about_processors_is_that_of_outlines():
    pytest.importorskip("outlines")
    page = "docs/grammars.md"
    session = names_of(page, index_of(page, "import outlines"))
    prompts = ["    def ", "import os\n\ndef _", "class Writer:\n    def "]
    inputs = session["tokenizer"](prompts, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 64, "do_sample": False}
    processor = [session["processor"]]
    result = session["generator"].generate(**inputs, **options, logits_processor=processor)
    expected = session["target"].generate(**inputs, **options, logits_processor=[session["own"]])
    assert result.sequences.equal(expected)
    for text in session["tokenizer"].batch_decode(result.new_tokens, skip_special_tokens=True):
        assert re.fullmatch(session["regex"], text)
    assert 0 < result.stats.acceptance_rate < 1  # some drafts are rejected, so guides go back
    with pytest.raises(ValueError, match="OutlinesCoreLogitsProcessor may keep state"):
        session["generator"].generate(**inputs, **options, logits_processor=[session["own"]])


def test_the_table_of_options_names_every_option():
    section = PAGES["docs/generate.md"].split("\n## Options\n")[1]
    for name in [*GenerateOptions.__annotations__, "streamer", "attention_mask"]:
        assert f"`{name}`" in section, name
    known = transformers.GenerationConfig().to_dict().keys()
    own = {*GenerateOptions.__annotations__, "streamer", "attention_mask", "generation_config"}
    of_hf = {"custom_generate", "return_dict_in_generate", "feature_layers", "model"}
    inputs = {"position_ids", "inputs_embeds", "assistant_model", "synced_gpus", *CACHES}
    others = {"prefix_allowed_tokens_fn", "logits_to_keep", "cache_config", "dola_layers", "top_h"}
    others |= {"constraints", "force_words_ids", "penalty_alpha", "use_mtp", "assistant_early_exit"}
    others |= {"evaluate", "compare", "certify"}
    for name in re.findall(r"`(\w+)`", section.split("|---|---|")[1]):
        assert name in known | own | of_hf | inputs | others, name


def test_the_table_of_families_names_every_family_that_is_tested():
    section = re.sub(r"[\s-]", "", PAGES["docs/models.md"].lower())
    for name, (family, _) in ARCHITECTURES.items():
        short = re.sub(r"v3$", "", family.lower())
        assert short in section.replace("deepseekv3", "deepseek"), name
