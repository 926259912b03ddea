"""Files of prompts with pictures: read line by line, and answered as HF answers them."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from pictured_processors import NAMES, asked_of_hf, paint, save, shown
from transformers import AutoModelForImageTextToText, AutoProcessor

from specdec import SpeculativeGenerator
from specdec.lab.cli import main
from specdec.lab.evaluation import Prompt, evaluate, read_prompts, sweep

LINES = [
    {"id": "a", "prompt": "what is it?", "images": ["red.png"]},
    {"id": "b", "prompt": "a text."},
    {"id": "c", "turns": ["which is red?", "sure?"], "images": ["red.png", "in/blue.png"]},
    {
        "id": "d",
        "images": ["in/blue.png"],
        "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and it?"}]}
        ],
    },
]


@pytest.fixture(name="file", scope="module")
def _file(tmp_path_factory):
    """Prompts in a folder with pictures."""
    folder = tmp_path_factory.mktemp("prompts")
    _, blue = paint(folder)
    (folder / "in").mkdir()
    shutil.move(blue, folder / "in")
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


@pytest.fixture(name="folders", scope="module")
def _folders(tmp_path_factory):
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in NAMES}


def test_paths_are_seen_from_the_file(file):
    prompts = read_prompts(file)
    red, blue = str(file.parent / "red.png"), str(file.parent / "in/blue.png")
    assert [prompt.images for prompt in prompts] == [(red,), (), (red, blue), (blue,)]
    assert prompts[3].turns == ("and it?",)


TEXT, IMAGE = {"type": "text", "text": "a"}, {"type": "image"}
WRONG = [
    ("there is no picture .*none.png", {"prompt": "a", "images": ["red.png", "none.png"]}),
    ("images must be a list of paths", {"prompt": "a", "images": "red.png"}),
    ("images must be a list of paths", {"prompt": "a", "images": [{"bytes": 1}]}),
    (
        "have 2 parts of type image, and images has 1",
        {"images": ["red.png"], "messages": [{"role": "user", "content": [IMAGE, IMAGE, TEXT]}]},
    ),
    (
        "none of them empty, pictures before the text of the first message, got",
        {"images": ["red.png"], "messages": [{"role": "user", "content": [TEXT, IMAGE]}]},
    ),
    (
        "pictures before the text of the first message",
        {
            "images": ["red.png"],
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "user", "content": [IMAGE, TEXT]},
            ],
        },
    ),
]


@pytest.mark.parametrize(("words", "line"), WRONG)
def test_an_error_names_the_line(words, line, file):
    wrong = file.parent / "wrong.jsonl"
    wrong.write_text(json.dumps(LINES[1]) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=rf"wrong.jsonl, line 2.*{words}"):
        read_prompts(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_those_of_hf_turn_by_turn(name, file, folders):
    prompts, folder = read_prompts(file), folders[name]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor, generator = (
        AutoProcessor.from_pretrained(folder),
        SpeculativeGenerator(model, "lookup"),
    )
    run = evaluate(generator, prompts, tokenizer=processor, max_new_tokens=6)
    for prompt in prompts:
        rows, history = [row for row in run.rows if row.prompt == prompt.id], []
        for number, (row, turn) in enumerate(zip(rows, prompt.turns, strict=True)):
            history.append(shown(turn, prompt.images if number == 0 else []))
            assert processor.decode(row.new_tokens) == asked_of_hf(folder, history, 6)
            answer = processor.decode(row.new_tokens, skip_special_tokens=True)
            history.append(shown(answer, [], "assistant"))
    with pytest.raises(ValueError, match="prompt 'a' has pictures, which the target's processor"):
        evaluate(generator, prompts, tokenizer=processor.tokenizer, max_new_tokens=6)


def test_a_run_over_another_picture_is_another_run(file, folders, tmp_path):
    """Also where the path is the same."""
    shutil.copytree(file.parent, tmp_path, dirs_exist_ok=True)
    model = AutoModelForImageTextToText.from_pretrained(folders["llava"])
    processor = AutoProcessor.from_pretrained(folders["llava"])
    options = {"tokenizer": processor, "max_new_tokens": 2, "output": tmp_path / "run.jsonl"}
    prompts = read_prompts(tmp_path / "prompts.jsonl")[:1]
    evaluate(generator := SpeculativeGenerator(model, None), prompts, **options)
    evaluate(generator, prompts, **options)
    shutil.copy(tmp_path / "in/blue.png", tmp_path / "red.png")
    with pytest.raises(ValueError, match="prompts"):
        evaluate(generator, prompts, **options)


def test_prompts_refuse_pictures_that_they_cannot_show():
    for images, turns in (("a.png", ("a",)), (("a.png",), ((5, 6),))):
        with pytest.raises(ValueError, match="images must be a tuple of paths, beside turns that"):
            Prompt("a", turns, images=images)


def test_a_study_of_a_name_loads_its_processor(file, folders):
    options = {"drafters": ["none", "lookup"], "max_new_tokens": 4, "dtype": "float32"}
    study = sweep(str(folders["qwen2_5_vl"]), file, **options)
    assert [len(each.rows) for each in study.runs] == [5, 5]
    with pytest.raises(ValueError, match="the zoo's target reads text alone"):
        sweep("zoo", file, **options)


def test_commands_read_them(file, folders, capsys, tmp_path):
    given = ["--target", str(folders["gemma3"]), "--dtype", "float32", "--max-new-tokens", "4"]
    assert main(["evaluate", *given, "--prompts", str(file), "--warmup", "0"]) == 0
    assert "acceptance length" in capsys.readouterr().out
    both = ["--prompt-file", str(file), "--prompt", "a"]
    assert main(["certify", *given, *both]) == 2
    assert "both say what prompts are" in capsys.readouterr().err
    study = tmp_path / "study.toml"
    study.write_text(
        f'target = "{folders["llava"]}"\nprompts = "{file}"\ndrafters = ["lookup"]\n'
        "max_new_tokens = 4\n"
    )
    assert main(["ablate", str(study)]) == 0
    assert main(["evaluate", "--prompts", str(file)]) == 2
    assert "the zoo's target reads text alone" in capsys.readouterr().err


def certified(folders, file):
    """A command with few samples."""
    few = ["--max-new-tokens", "4", "--samples", "2", "--audit-tokens", "3", "--drafter", "lookup"]
    return ["certify", "--target", str(folders["gemma3"]), "--prompt-file", str(file), *few]


def test_certificates_get_what_the_processor_makes(file, folders, monkeypatch):
    asked, passed = [], SimpleNamespace(passed=True)
    monkeypatch.setattr(
        "specdec.lab.certificates.certify", lambda *a, **_: asked.append(a) or passed
    )
    assert main(certified(folders, file)) == 0
    (_, prompts) = asked[1]
    processor = AutoProcessor.from_pretrained(folders["gemma3"])
    form = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    for prompt, own in zip(read_prompts(file), prompts, strict=True):
        messages = [shown(prompt.turns[0], prompt.images)]
        wanted = processor.apply_chat_template(messages, return_tensors="pt", **form)
        assert own.keys() == wanted.keys()
        assert all(torch.equal(own[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_a_certificate_over_them_passes(file, folders, capsys):
    assert main(certified(folders, file)) == 0
    assert "4 prompts" in capsys.readouterr().out
