"""What HF users write works natively and through `model.generate(custom_generate=generator)`:
streamers, stop strings, several sequences of a prompt, scores, minimal lengths, masks left out.

The oracle is HF's own `generate` on the same model. What is refused is in `test_bad_input.py`.
"""

import re
import threading
from functools import partial

import pytest
import torch
from architectures import VOCAB, build
from drafter_table import MODEL as TABLE_MODEL
from drafter_table import make
from drafting import perturbed, ragged_prompts
from letters import LETTERS, letter_tokenizer
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from specdec import CouplingSampler, ModelDrafter, SpeculativeGenerator
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.request import GenerateOptions

MODEL, TOKENIZER = build("llama"), letter_tokenizer(pad_token=LETTERS[0])
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
INPUTS = TOKENIZER(["ABCABDE1", "X1Y"], return_tensors="pt", padding=True, padding_side="left")
ONE = TOKENIZER("ABCABDE1", return_tensors="pt")
WIDTH = ONE.input_ids.shape[1]
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20}
SCORES = {"output_scores": True, "output_logits": True}
TEXTS = MODEL.generate(**INPUTS, **GREEDY)[:, WIDTH:]


def native(inputs, **options):
    return GENERATOR.generate(inputs.input_ids, inputs.attention_mask, **options)


def hooked(inputs, generator=GENERATOR, **options):
    return MODEL.generate(**inputs, custom_generate=generator, **options)


both_ways = pytest.mark.parametrize("run", [native, hooked])


class Recorder(BaseStreamer):
    """Writes down what it is given."""

    def __init__(self):
        self.events: list = []

    def put(self, value):
        self.events.append((value.device.type, value.tolist()))

    def end(self):
        self.events.append("end")


@both_ways
@pytest.mark.parametrize("inputs", [ONE, INPUTS], ids=["one", "batch"])
def test_a_streamer_gets_what_hf_would_put(run, inputs):
    """In the batch one row ends early."""
    expected, found = Recorder(), Recorder()
    options = GREEDY | {"eos_token_id": TEXTS[1, -9].item()}
    text = MODEL.generate(**inputs, **options, streamer=expected)
    run(inputs, **options, streamer=found)
    assert found.events == expected.events
    columns = [tokens for _, tokens in found.events[1:-1]]
    assert columns == text[:, inputs.input_ids.shape[1] :].T.tolist()


def test_the_consumer_of_an_iterator_behind_the_hook_gets_the_whole_text():
    streamer = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60)
    options = {**GREEDY, "streamer": streamer, "custom_generate": GENERATOR}
    worker = threading.Thread(target=MODEL.generate, kwargs={**ONE, **options})
    worker.start()
    text = "".join(streamer)
    worker.join()
    assert text == TOKENIZER.decode(TEXTS[0]) != ""


def fails_after(calls: int):
    def criterion(ids, scores, **kwargs):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise RuntimeError("in the middle")
        return torch.zeros(len(ids), dtype=torch.bool)

    return StoppingCriteriaList([criterion])


@both_ways
@pytest.mark.parametrize("options", [{"stopping_criteria": fails_after(5)}, {"num_beams": 2}])
def test_an_error_ends_the_stream_so_that_nobody_waits(run, options):
    """One in the middle, and one before the start."""
    streamer = Recorder()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        run(ONE, **GREEDY, **options, streamer=streamer)
    assert streamer.events[-1] == "end"
    assert streamer.events.count("end") == 1


STOP = TOKENIZER.decode(TEXTS[0])[5:8]
"""Three letters from the middle of the text."""


@both_ways
@pytest.mark.parametrize("stop", [STOP, ["never in a text", STOP]])
def test_stop_strings_end_the_text_where_hf_ends_it(run, stop):
    options = {**GREEDY, "stop_strings": stop, "tokenizer": TOKENIZER}
    expected = MODEL.generate(**ONE, **options)
    run(ONE, **options)
    result = GENERATOR.last_result
    assert result.sequences.equal(expected)
    assert expected.shape[1] < WIDTH + 24
    assert result.finish_reasons == ["stop"]


def test_stop_strings_of_a_configuration_and_a_criterion_of_them_count(monkeypatch):
    config = GenerationConfig(**GREEDY, stop_strings=[STOP])
    found = [native(ONE, generation_config=config, tokenizer=TOKENIZER)]
    criteria = StoppingCriteriaList([StopStringCriteria(TOKENIZER, [STOP])])
    hooked(ONE, **GREEDY, stopping_criteria=criteria)
    found.append(GENERATOR.last_result)
    monkeypatch.setattr(MODEL, "generation_config", config)
    found.append(native(ONE, **GREEDY, tokenizer=TOKENIZER))
    assert [result.finish_reasons for result in found] == [["stop"]] * 3
    assert config.stop_strings == [STOP]


@both_ways
def test_several_sequences_of_a_prompt_have_a_seed_each(run):
    """Of the prompt, of each of them, or at random."""
    options = {**SAMPLED, "num_return_sequences": 3}
    run(INPUTS, **options, seed=[5, 2**64 - 1])
    result = GENERATOR.last_result
    assert result.seeds == [5, 6, 7, 2**64 - 1, 0, 1]
    repeated = {name: table.repeat_interleave(3, dim=0) for name, table in INPUTS.items()}
    alone = GENERATOR.generate(**repeated, **SAMPLED, seed=result.seeds)
    assert result.sequences.equal(alone.sequences)
    assert len({tuple(row) for row in result.sequences[:3].tolist()}) == 3
    options |= {"num_return_sequences": 2, "max_new_tokens": 3}
    for seed, seeds in ((9, [9, 10, 9, 10]), ([4, 3, 2, 1], [4, 3, 2, 1])):
        run(INPUTS, **options, seed=seed)
        assert GENERATOR.last_result.seeds == seeds
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)  # has no effect
        run(INPUTS, generation_config=GenerationConfig(**options))
        drawn += GENERATOR.last_result.seeds
    assert len(set(drawn)) == 8


def test_a_value_per_prompt_counts_for_all_of_its_sequences():
    options = {**SAMPLED, "num_return_sequences": 2, "seed": [1, 2]}
    found = native(INPUTS, **options | {"temperature": [0.0, 0.9]})
    every = native(INPUTS, **options | {"temperature": [0.0, 0.0, 0.9, 0.9]})
    assert found.sequences.equal(every.sequences)
    assert found.sequences[0].equal(found.sequences[1])
    assert not found.sequences[2].equal(found.sequences[3])


def assert_same_scores(found, expected):
    """Equal to rounding where the row has a token, and in what is impossible."""
    for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-4)


PROCESSORS = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])


@pytest.mark.parametrize(
    ("processors", "steps_ahead"), [(None, 0), (PROCESSORS, 2)], ids=["plain", "processed"]
)
def test_scores_and_logits_of_emitted_tokens_are_hfs(processors, steps_ahead):
    options = {**INPUTS, **GREEDY, **SCORES, "logits_processor": processors}
    expected = MODEL.generate(**options, return_dict_in_generate=True)
    generator = SpeculativeGenerator(MODEL, GENERATOR.drafter, steps_ahead=steps_ahead)
    result = generator.generate(**options)
    assert result.sequences.equal(expected.sequences)
    assert 0 < result.stats.acceptance_rate < 1
    assert_same_scores(result, expected)


@pytest.mark.parametrize("name", ["model, tree", "lookup, tree", "eagle3, fewer ids, tree"])
def test_every_node_of_a_tree_is_processed_as_the_end_of_its_own_path(name):
    """The oracle reads each prompt alone: HF would punish a batch for its padding."""
    options = {"max_new_tokens": 16, "do_sample": False, **SCORES}
    options["logits_processor"] = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    ids, mask = ragged_prompts(VOCAB, 1, 4, 6, 9)
    result = SpeculativeGenerator(TABLE_MODEL, make(name)).generate(ids, mask, **options)
    assert any(step.parents for row in result.steps for step in row)
    options["return_dict_in_generate"] = True
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        alone = TABLE_MODEL.generate(ids[row : row + 1, -length:], **options)
        assert result.sequences[row, -length - 16 :].tolist() == alone.sequences[0].tolist()
        for ours, theirs in ((result.scores, alone.scores), (result.logits, alone.logits)):
            found, expected = torch.stack(ours)[:, row], torch.stack(theirs)[:, 0]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_scores_of_replayed_steps_are_those_of_eager_ones():
    """The batch is filled up to a bucket, and a replay overwrites the logits of the step before."""
    inputs = {name: table[[0, 1, 0]] for name, table in INPUTS.items()}
    options = {**SAMPLED, "seed": [1, 2, 3], "temperature": [0.5, 1.0, 0.0], "top_p": 0.9}
    eager, replayed = (
        SpeculativeGenerator(MODEL, GENERATOR.drafter, graphs=graphs, steps_ahead=1)
        for graphs in (False, True)
    )
    results = [g.generate(**inputs, **options, **SCORES) for g in (eager, replayed)]
    assert "replays" in replayed.explain()
    assert results[0].sequences.equal(results[1].sequences)
    assert_same_scores(*results)


def test_the_hooks_record_holds_scores_where_hf_would():
    names = SCORES | {"return_dict_in_generate": True}
    expected, found = MODEL.generate(**INPUTS, **GREEDY, **names), hooked(INPUTS, **GREEDY, **names)
    assert_same_scores(found, expected)
    generator = SpeculativeGenerator(MODEL, GENERATOR.drafter)
    assert generator.last_result is None
    found = hooked(INPUTS, generator, **GREEDY, return_dict_in_generate=True)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert found.sequences.equal(expected.sequences)
    assert found.sequences is generator.last_result.sequences
    assert found.scores is found.logits is None


def test_scores_of_sampled_text_are_what_hfs_warpers_leave():
    filters = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    result = native(INPUTS, **filters, **SCORES, max_new_tokens=12, seed=[3, 4])
    warpers = MODEL._get_logits_processor(GenerationConfig(**filters), 0)
    expected = [warpers(None, logits.clone()) for logits in result.logits]
    scores = torch.stack(result.scores, dim=1)
    torch.testing.assert_close(scores, torch.stack(expected, dim=1), rtol=1e-4, atol=1e-4)
    assert scores.isfinite().gather(2, result.new_tokens[..., None]).all()


def test_scores_after_the_end_of_a_row_are_nan():
    result = native(INPUTS, **GREEDY, eos_token_id=TEXTS[1, 4].item(), output_logits=True)
    table = torch.stack(result.logits, dim=1)
    for row, length in enumerate(result.lengths):
        assert table[row, :length].isfinite().all()
        assert table[row, length:].isnan().all()
    assert min(result.lengths) < max(result.lengths)


@both_ways
def test_a_minimal_length_is_honoured(run):
    """As an option, and as HF's processor."""
    eos = TEXTS[0, 2].item()
    options = {**GREEDY, "eos_token_id": eos}
    expected = MODEL.generate(**ONE, **options, min_new_tokens=10)
    processor = MinNewTokensLengthLogitsProcessor(WIDTH, 10, torch.tensor([eos]))
    for more in (
        {"min_new_tokens": 10},
        {"logits_processor": LogitsProcessorList([processor])},
    ):
        run(ONE, **options, **more)
        assert GENERATOR.last_result.sequences.equal(expected)
        assert GENERATOR.last_result.lengths[0] >= 10


def test_a_tokenizers_output_is_a_prompt():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoded = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "ab"}],
        chat_template=template,
        return_tensors="pt",
        return_dict=True,
    )
    assert isinstance(encoded, BatchEncoding)
    expected = GENERATOR.generate(**encoded, **GREEDY).sequences
    assert GENERATOR.generate(encoded, **GREEDY).sequences.equal(expected)
    assert next(GENERATOR.stream(encoded, **GREEDY)).index == 0
    assert GENERATOR.generate(INPUTS, **GREEDY).new_tokens.equal(TEXTS)


# What the hook reads of HF's call.

IDS, MASK = ragged_prompts(VOCAB, 3, 6)


def of_hf_and_hook(ids, **options):
    call = GREEDY | {"inputs": ids, "max_new_tokens": 8} | options
    return MODEL.generate(**call), MODEL.generate(**call, custom_generate=GENERATOR)


@pytest.mark.parametrize("column", [0, 2, -1])
def test_a_mask_of_ones_says_that_the_padding_id_is_a_token(column):
    ids = torch.tensor([[5, 9, 2, 7], [4, 8, 3, 6]])
    ids[0, column] = 0
    assert torch.equal(*of_hf_and_hook(ids, attention_mask=torch.ones_like(ids)))


POSITIONS = (MASK.cumsum(dim=1) - 1).clamp(min=0)
NO_REQUESTS = [
    {"attention_mask": None},  # padding is told by its id, as HF tells it
    {"position_ids": POSITIONS},
    {"synced_gpus": False},
    # HF's own defaults of assisted generation.
    {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant"},
]


@pytest.mark.parametrize("options", NO_REQUESTS, ids=str)
def test_what_asks_for_nothing_else_is_accepted(options):
    assert torch.equal(*of_hf_and_hook(IDS, **{"attention_mask": MASK} | options))


def test_every_option_has_its_line_in_the_docstring():
    arguments = GenerateOptions.__doc__.split("    Args:\n")[1]
    named = re.findall(r"^        (\w+): ", arguments, flags=re.MULTILINE)
    assert named == list(GenerateOptions.__annotations__)


def test_options_count_where_the_models_generate_goes_through_a_generator():
    """HF resolves options on a copy of the model, whose `generate` must not be the model's."""
    model = build("llama")
    generator = SpeculativeGenerator(model, ModelDrafter(perturbed(model), 3))
    options = {**SAMPLED, "seed": [3, 4], "eos_token_id": []}
    expected = generator.generate(**INPUTS, **options)
    plain = HFGenerate(model).generate(**ONE, **GREEDY).steps[0]
    model.generate = partial(model.generate, custom_generate=generator)
    other = SpeculativeGenerator(model, None, CouplingSampler())
    assert generator.generate(**INPUTS, **options).sequences.equal(expected.sequences)
    assert other.generate(**INPUTS, **options).new_tokens.shape == (2, 12)
    generator.last_result = None
    again = HFGenerate(model).generate(**ONE, **GREEDY).steps[0]
    assert [step.new_tokens for step in again] == [step.new_tokens for step in plain]
    assert generator.last_result is None
