"""Pictures on the command line: what is written is HF's own text after the same pictures."""

import importlib.util
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from pictured_models import build, text_of_hf
from pictured_processors import NAMES, asked_of_hf, paint, save, shown
from PIL import Image
from transformers import AutoProcessor

from examples.chat import main as chat
from specdec import zoo
from specdec.lab.cli import main


@pytest.fixture(name="folders", scope="module")
def _folders(tmp_path_factory):
    return {name: save(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@pytest.fixture(name="pictures", scope="module")
def _pictures(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(name="run")
def _run(capsys):
    """Runs a command; its exit code, output and errors."""

    def run(*arguments):
        code = main([*map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, [line for line in shown.err.splitlines() if "specdec: " in line]

    return run


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2])
def test_generate_writes_what_hf_writes(name, count, folders, pictures, run):
    given = [word for path in pictures[:count] for word in ("--image", path)]
    command = ["generate", "--target", folders[name], "--prompt", "what is it?", *given]
    code, out, errors = run(*command, "--max-new-tokens", 12, "--dtype", "float32")
    assert (code, errors) == (0, [])
    written = out.split("what is it?\n", 1)[1].split("\n\ntokens: ")[0]
    wanted = asked_of_hf(folders[name], [shown("what is it?", pictures[:count])], 12)
    assert unmarked(written) == unmarked(wanted)
    assert f"picture {pictures[0]}, 17 x 25" in out
    other = asked_of_hf(folders[name], [shown("what is it?", pictures[1:])], 12)
    assert unmarked(written) != unmarked(other)  # the text hangs on the pictures


def unmarked(text):
    """Without the markers of kinds, which may be characters of tokens, too."""
    return re.sub(r"[][<>]", "", text)


def test_what_is_wrong_with_pictures_is_said_before_weights_are_loaded(
    folders, pictures, run, monkeypatch, tmp_path
):
    def load(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr("specdec.loading.load_target", load)

    def said(target, *paths):
        given = [word for path in paths for word in ("--image", path)]
        code, _, (error,) = run("generate", "--target", target, "--prompt", "a", *given)
        assert code == 2
        return error

    llava, text = folders["llava"], zoo.WEIGHTS_DIR / "target"
    assert "there is no picture none.png" in said(llava, "none.png")
    assert said(llava, "https://a.org/b.png").endswith("; download it first, pictures are files")
    assert "test_pictures_in_commands.py is no picture that can be read" in said(llava, __file__)
    assert "(llama) is a model of text and reads no pictures; name one" in said(text, *pictures)
    assert "the zoo's target reads text alone" in said("zoo", *pictures)
    config = {"model_type": "mllama", "architectures": ["MllamaForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "(mllama) can be given no pictures: its layers look at pictures by" in said(
        tmp_path, *pictures
    )
    for file in llava.iterdir():
        if not file.name.startswith("processor"):
            shutil.copy(file, tmp_path / file.name)
    assert "has no processor among its files" in said(tmp_path, *pictures)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "PIL" and found(name))
    assert said(llava, *pictures).endswith("pictures need Pillow: pip install pillow")


@pytest.mark.skipif(importlib.util.find_spec("torchvision"), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_says_so(folders, pictures, run, tmp_path):
    for file in folders["qwen2_5_vl"].iterdir():
        text = "PicturesOfQwen", "Qwen2_5_VLProcessor"
        is_config = file.name == "processor_config.json"
        if is_config:
            (tmp_path / file.name).write_text(file.read_text().replace(*text))
        else:
            shutil.copy(file, tmp_path / file.name)
    given = ["--prompt", "a", "--image", pictures[0]]
    code, _, (error,) = run("generate", "--target", tmp_path, *given)
    assert code == 2
    assert "cannot be loaded without torchvision: pip install torchvision" in error


def test_a_processors_own_refusal_is_one_line(folders, pictures, run, tmp_path):
    shutil.copytree(folders["llava"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no pictures today') }}")
    given = ["--prompt", "a", "--image", pictures[0]]
    code, _, (error,) = run("generate", "--target", tmp_path, *given)
    assert (code, "processor raises an error: no pictures today" in error) == (2, True)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_template_a_picture_stands_before_the_text(
    name, folders, pictures, run, tmp_path
):
    shutil.copytree(folders[name], tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink()
    options = ["--max-new-tokens", 8, "--dtype", "float32", "--image", pictures[0]]
    code, out, errors = run("generate", "--target", tmp_path, "--prompt", "what is it?", *options)
    assert (code, errors) == (0, [])
    processor = AutoProcessor.from_pretrained(tmp_path)
    mark = "<begin>" if name == "gemma3" else processor.image_token
    inputs = processor(text=[mark + "what is it?"], images=[Image.open(pictures[0])])
    inputs = inputs.convert_to_tensors("pt")
    new = text_of_hf(build(name), inputs, 8)[0]
    written = out.split("what is it?\n", 1)[1].split("\n\ntokens: ")[0]
    assert unmarked(written) == unmarked(processor.decode(new))


def test_a_draft_model_that_reads_pictures_is_loaded_whole(folders, pictures, run):
    command = ["generate", "--target", folders["llava"], "--drafter", folders["llava"]]
    command += ["--prompt", "what is it?", "--image", pictures[0], "--max-new-tokens", 9]
    code, out, errors = run(*command, "--dtype", "float32")
    assert (code, errors) == (0, [])
    assert "acceptance rate 1.00" in out


NUMBERS = re.compile(r"\n\d+ tokens, .* tokens/s, .*\n")
TEXT_ALONE = "specdec: the zoo's target reads text alone: --target names a model with pictures"


@pytest.fixture(name="talk")
def _talk(capsys, monkeypatch):
    """Sends lines to `examples/chat.py`; what it wrote between its help and its end, and errors."""

    def talk(target, *lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        chat(["--target", str(target), "--max-new-tokens", "8", "--dtype", "float32"])
        seen = capsys.readouterr()
        errors = [line for line in seen.err.splitlines() if "specdec: " in line]
        return seen.out.split("ends an answer\n", 1)[1], errors

    return talk


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_keeps_its_pictures(name, folders, pictures, talk):
    """Each answer is HF's own after all that was said and shown."""
    red, blue = pictures
    lines = [f"/image {red}", "what is it?", "sure?", f"/image '{red}'", f'/image "{blue}"', "hm?"]
    out, errors = talk(folders[name], *lines, "/reset", "sure?")
    assert errors == []
    assert out.startswith(f"picture {red}, 17 x 25, goes into the next message\n")
    history = []
    for text, own in (("what is it?", [red]), ("sure?", []), ("hm?", [red, blue])):
        history.append(shown(text, own))
        answer = asked_of_hf(folders[name], history, 8, skip_special_tokens=True)
        history.append(shown(answer, [], "assistant"))
    again = asked_of_hf(folders[name], [shown("sure?", [])], 8, skip_special_tokens=True)
    wanted = [turn["content"][0]["text"] for turn in history[1::2]] + [again]
    out = re.sub(r"picture \S+, .* goes into the next message\n", "", out)
    answers = NUMBERS.sub("\0", out).split("\0")[:-1]
    assert [unmarked(text) for text in answers] == [unmarked(text) for text in wanted]


def test_what_cannot_be_shown_is_one_line_and_the_conversation_goes_on(folders, pictures, talk):
    lines = ["/image none.png", "/image", f"/image {__file__}", "/image ~/none.png", "a"]
    out, errors = talk(folders["llava"], *lines)
    assert len(NUMBERS.findall(out)) == 1
    assert errors[:2] == [
        "specdec: there is no picture none.png",
        "specdec: /image PATH needs the path of a picture",
    ]
    assert "no picture that can be read" in errors[2]
    assert errors[3].endswith(f"there is no picture {Path.home()}/none.png")
    out, errors = talk("zoo", f"/image {pictures[0]}", "a")
    assert errors == [TEXT_ALONE]
    assert len(NUMBERS.findall(out)) == 1


def test_the_page_of_a_trace_shows_the_pictures(folders, pictures, run, tmp_path):
    given = [word for path in pictures for word in ("--image", path)]
    command = ["generate", "--target", folders["gemma3"], "--prompt", "what is it?", *given]
    assert run(*command, "--max-new-tokens", 4, "--trace", tmp_path / "trace.html")[0] == 0
    page = (tmp_path / "trace.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 2
    assert r"\u003cimage>" not in page
    assert '"picture 2, 4 tokens"' in page
