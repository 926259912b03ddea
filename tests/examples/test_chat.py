"""A chat in the terminal: each answer is what `generate` gives after what was said, in the form
that the tokenizer has for it, and mistakes and interrupts end no more than they should.
"""

import io
import os
import pty
import re
import signal
import sys

import pytest
from transformers import GenerationConfig

from examples.chat import main
from specdec import SpeculativeGenerator, zoo

TOKENIZER, TARGET = zoo.load_tokenizer(), zoo.load_target()
GENERATOR = SpeculativeGenerator(TARGET, zoo.load_drafter("model", TARGET))
NUMBERS = re.compile(
    r"^(\d+) tokens, [\d.]+ tokens/s, acceptance length ([\d.]+), ([\d.]+) tokens per step, "
    r"rate ([\d.]+)(?:, seed (\d+))?$",
    re.MULTILINE,
)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(name="talk")
def _talk(monkeypatch, capsys):
    """Sends lines to the command; returns its answers without markers, and the whole output.
    `talk.read` are the prompts that the target has read.
    """
    stream = SpeculativeGenerator.stream

    def spy(self, **options):
        talk.read.append(TOKENIZER.decode(options["input_ids"][0]))
        return stream(self, **options)

    monkeypatch.setattr(SpeculativeGenerator, "stream", spy)

    def talk(*lines: str, target: str = "zoo", options: tuple[str, ...] = ()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        drafter = () if target == "zoo" else ("--drafter", "lookup", "--dtype", "float32")
        main(["--target", target, "--max-new-tokens", "12", *drafter, *options])
        shown = capsys.readouterr()
        said = "\n" + shown.out.split("ends an answer\n", 1)[1].removeprefix(RUNNING)
        return [re.sub(r"[][<>]", "", part[1:]) for part in NUMBERS.split(said)[:-1:6]], shown

    talk.read = []
    return talk


RUNNING = "the tokenizer has no chat template: what is said is one running text\n"


def answer_to(prompt: str, **options) -> str:
    """What `generate` gives, without the markers' characters."""
    return TOKENIZER.decode(tokens_of(prompt, **options), skip_special_tokens=True)


def tokens_of(prompt: str, **options) -> list[int]:
    """What `generate` gives."""
    inputs = TOKENIZER(prompt, return_tensors="pt")
    result = GENERATOR.generate(**inputs, max_new_tokens=12, neutral=True, **options)
    return result.new_tokens[0].tolist()


def bare(answer: str) -> str:
    return re.sub(r"[][<>]", "", answer) + "\n"


def test_without_a_template_it_is_one_running_text_and_reset_and_system_change_it(talk):
    first, then = "def main():", "    x ="
    answers, shown = talk(first, "", then, "/reset", first, "/system # A.", then, "/quit", first)
    running = f"{first}{answer_to(first)}\n{then}"
    again = f"# A.\n{running}"
    expected = [first, running, first, again]
    assert answers == [bare(answer_to(prompt)) for prompt in expected]
    assert talk.read == expected
    assert shown.out.count(RUNNING) == 1
    assert shown.err == ""


def test_a_template_gets_the_turns_by_their_roles(talk, tmp_path):
    tokenizer = zoo.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    TARGET.save_pretrained(tmp_path)
    answers, shown = talk("a", "b", target=str(tmp_path), options=("--system", "s"))
    first = "<system>s\n<user>a\n<assistant>"
    then = f"{first}{answer_to(first)}\n<user>b\n<assistant>"
    assert answers == [bare(answer_to(first)), bare(answer_to(then))]
    assert talk.read == [first, then]
    assert RUNNING not in shown.out
    tokenizer.chat_template = "{{ raise_exception('no system') }}"
    tokenizer.save_pretrained(tmp_path)
    assert "the chat template raises an error: no system" in talk("a", target=str(tmp_path))[1].err


def test_a_template_gets_special_tokens_of_an_answer_and_not_its_end(talk, tmp_path):
    tokenizer, first = zoo.load_tokenizer(), "<user>print\n<assistant>"
    tokens = tokens_of(first)
    special, end = (tokenizer.convert_ids_to_tokens(tokens[i]) for i in (2, 5))
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    TARGET.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    answers, _ = talk("print", "b", target=str(tmp_path))
    then = f"{first}{answer_to(first)}\n<user>b\n<assistant>"
    assert answers[1] == bare(tokenizer.decode(tokens_of(then), skip_special_tokens=True))
    assert answers[0] != bare(answer_to(first))
    tokenizer = zoo.load_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, end
    tokenizer.save_pretrained(tmp_path)
    config = GenerationConfig(eos_token_id=tokens[5])
    config.save_pretrained(tmp_path)
    said = TOKENIZER.decode(tokens[: tokens.index(tokens[5])])
    then = f"{first}{said}\n<user>b\n<assistant>"
    answers, _ = talk("print", "b", target=str(tmp_path))
    own = tokens_of(then, eos_token_id=tokens[5])
    assert answers[1] == bare(TOKENIZER.decode(own[:-1] if own[-1] == tokens[5] else own))


def test_numbers_are_those_of_the_answer_and_a_seed_repeats_it(talk):
    options = ("--temperature", "0.9", "--tree", "8x2", "--drafter", "zoo:eagle3")
    answers, shown = talk("import", options=options)
    count, length, per_step, rate, seed = NUMBERS.search(shown.out).groups()
    assert int(count) == 12
    assert 1 <= float(per_step) <= float(length) <= 3
    assert 0 <= float(rate) <= 1
    assert talk("import", options=(*options, "--seed", seed))[0] == answers
    inputs = TOKENIZER("import", return_tensors="pt")
    stats = GENERATOR.generate(**inputs, max_new_tokens=12, neutral=True).stats
    rates = (stats.acceptance_length, stats.block_efficiency, stats.acceptance_rate)
    found = NUMBERS.search(talk("import")[1].out).groups()
    assert found == ("12", *(f"{rate:.2f}" for rate in rates), None)


def test_what_cannot_be_said_is_one_line_and_the_conversation_goes_on(talk):
    answers, shown = talk("/help me", "x " * 5000, "import")
    assert answers == [bare(answer_to("import"))]
    unknown, too_long = shown.err.splitlines()
    assert unknown.startswith("there is no /help; /reset begins again")
    assert too_long.startswith("specdec: ")
    assert "/reset begins again" in too_long


def test_an_interrupt_ends_an_answer_and_what_came_is_part_of_the_conversation(talk, monkeypatch):
    stream = SpeculativeGenerator.stream

    def interrupted(*arguments, **options):
        yield next(stream(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeculativeGenerator, "stream", interrupted)
    (first, _), shown = talk("import", "os")
    assert bare(answer_to("import")).startswith(first.removesuffix("\n"))
    assert len(NUMBERS.findall(shown.out)) == 2


def test_what_cannot_be_loaded_is_one_line():
    with pytest.raises(SystemExit, match=r"specdec: .*there is no such folder"):
        main(["--target", "none/none/none"])


@pytest.mark.slow
def test_a_terminal_gets_colours_and_ctrl_c_ends_an_answer_and_then_the_program():
    command = [sys.executable, "-m", "examples.chat", "--target", "zoo"]
    process, ours = pty.fork()  # the command's own terminal, whose Ctrl-C is a signal to it
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which jobs in the background ignore
        os.execve(command[0], [*command, "--max-new-tokens", "1500"], os.environ)
    seen = ""

    def wait_for(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(ours, 4096).decode(errors="replace")
        seen = seen.split(text, 1)[1]

    wait_for("> ")
    os.write(ours, b"def main():\n")
    wait_for("\x1b[32m")
    os.write(ours, b"\x03")
    wait_for("tokens/s")
    wait_for("> ")
    os.write(ours, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    os.close(ours)


@pytest.fixture(name="small", scope="module")
def _small(tmp_path_factory):
    """A folder with a target of 512 positions, as many as the usual answer has tokens."""
    folder = tmp_path_factory.mktemp("small")
    model = zoo.load_target()
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


@pytest.fixture(name="say")
def _say(monkeypatch, capsys, small):
    """Sends lines to a target of 512 positions; returns tokens of each answer, and the errors."""

    def say(*lines: str, options: tuple[str, ...] = ()) -> tuple[list[int], list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        greedy = ["--drafter", "lookup", "--dtype", "float32", "--temperature", "0"]
        main(["--target", small, *greedy, *options])
        shown = capsys.readouterr()
        errors = [line for line in shown.err.splitlines() if line.startswith("specdec: ")]
        return [int(found[0]) for found in NUMBERS.findall(shown.out)], errors

    return say


def num_tokens(text: str) -> int:
    return TOKENIZER(text, return_tensors="pt").input_ids.shape[1]


def test_a_target_of_few_positions_has_room_for_a_next_turn(say):
    """Each answer takes at most half of what is left, as these do that end nowhere."""
    lines = "def main():", "x = 1", "import os"
    counts, errors = say(*lines)
    assert errors == []
    used = num_tokens(lines[0])
    assert counts[0] == (512 - used) // 2
    assert len(counts) == 3
    assert sum(counts) + used < 512


def test_an_answer_as_long_as_was_asked_takes_the_room_that_is_left(say):
    first = "def main():"
    counts, errors = say(first, "x = 1", "/reset", first, options=("--max-new-tokens", "512"))
    assert counts == [512 - num_tokens(first)] * 2  # the second turn has no room, until /reset
    (error,) = errors
    assert re.search(r"the conversation has 5\d\d tokens.*512 positions: .*no room for", error)
    assert "/reset begins again" in error


def test_a_line_that_is_longer_than_the_target_is_refused_alone(say):
    counts, errors = say("def main():", "x = 1 # " * 200, "import os")
    assert len(counts) == 2  # the line is no part of the conversation
    assert len(errors) == 1
    assert "no room for an answer; /reset begins again" in errors[0]
