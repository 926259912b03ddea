"""What HF users write works natively and through `model.generate(custom_generate=generator)`, or
fails at once: streamers, stop strings, several sequences of a prompt, scores, minimal lengths.

The oracle is HF's own `generate` on the same model.
"""

import re
import threading

import pytest
import torch
from architectures import VOCAB, build
from drafter_table import MODEL as TABLE_MODEL
from drafter_table import TREES, make
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

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.request import GenerateOptions

MODEL, TOKENIZER = build("llama"), letter_tokenizer(pad_token=LETTERS[0])
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
INPUTS = TOKENIZER(["ABCABDE1", "X1Y"], return_tensors="pt", padding=True, padding_side="left")
ONE = TOKENIZER("ABCABDE1", return_tensors="pt")
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "temperature": 0.8, "top_k": 20}


def native(inputs, **options):
    return GENERATOR.generate(inputs.input_ids, inputs.attention_mask, **options)


def hooked(inputs, **options):
    ids, mask = inputs.input_ids, inputs.attention_mask
    return MODEL.generate(ids, attention_mask=mask, custom_generate=GENERATOR, **options)


class Recorder(BaseStreamer):
    """Writes down what it is given."""

    def __init__(self):
        self.events: list = []

    def put(self, value):
        """One tensor."""
        self.events.append((value.device.type, value.tolist()))

    def end(self):
        """The end."""
        self.events.append("end")


@pytest.mark.parametrize("run", [native, hooked])
@pytest.mark.parametrize("inputs", [ONE, INPUTS], ids=["one", "batch"])
def test_a_streamer_gets_what_hf_would_put(run, inputs):
    """In the batch one row ends early."""
    expected, found = Recorder(), Recorder()
    ends = {"eos_token_id": MODEL.generate(**INPUTS, **GREEDY)[1, -9].item(), "pad_token_id": 0}
    text = MODEL.generate(**inputs, **GREEDY, **ends, streamer=expected)
    run(inputs, **GREEDY, **ends, streamer=found)
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
    width = ONE.input_ids.shape[1]
    expected = MODEL.generate(**ONE, **GREEDY)[0, width:]
    assert text == TOKENIZER.decode(expected) != ""


def fails_after(calls: int):
    def criterion(ids, scores, **kwargs):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise RuntimeError("in the middle")
        return torch.zeros(len(ids), dtype=torch.bool)

    return StoppingCriteriaList([criterion])


@pytest.mark.parametrize("run", [native, hooked])
@pytest.mark.parametrize(
    ("options", "error"),
    [({"stopping_criteria": fails_after(5)}, RuntimeError), ({"num_beams": 2}, Exception)],
    ids=["in the middle", "before the start"],
)
def test_an_error_ends_the_stream_so_that_nobody_waits(run, options, error):
    streamer = Recorder()
    with pytest.raises(error):
        run(ONE, **GREEDY, **options, streamer=streamer)
    assert streamer.events[-1] == "end"
    assert streamer.events.count("end") == 1


def test_what_is_no_streamer_is_refused():
    with pytest.raises(TypeError, match=r"put\(tokens\) and end\(\), got"):
        native(ONE, **GREEDY, streamer=[])


WORDS = TOKENIZER.decode(MODEL.generate(**ONE, **GREEDY)[0, ONE.input_ids.shape[1] :])
STOP = WORDS[5:8]
"""Three letters from the middle of the text."""


@pytest.mark.parametrize("run", [native, hooked])
@pytest.mark.parametrize("stop", [STOP, ["never in a text", STOP]])
def test_stop_strings_end_the_text_where_hf_ends_it(run, stop):
    options = {**GREEDY, "stop_strings": stop, "tokenizer": TOKENIZER}
    expected = MODEL.generate(**ONE, **options)
    run(ONE, **options)
    result = GENERATOR.last_result
    assert result.sequences.equal(expected)
    assert expected.shape[1] < ONE.input_ids.shape[1] + 24
    assert result.finish_reasons == ["stop"]


@pytest.mark.parametrize("whose", ["call's", "model's"])
def test_stop_strings_of_a_configuration_count(whose):
    config = GenerationConfig(**GREEDY, stop_strings=[STOP])
    if whose == "call's":
        found = native(ONE, generation_config=config, tokenizer=TOKENIZER)
    else:
        own, MODEL.generation_config = MODEL.generation_config, config
        try:
            found = native(ONE, **GREEDY, tokenizer=TOKENIZER)
            with pytest.raises(ValueError, match="stop_strings need the target's tokenizer"):
                native(ONE, **GREEDY)
        finally:
            MODEL.generation_config = own
    assert config.stop_strings == [STOP]
    assert found.finish_reasons == ["stop"]


def test_stop_strings_behind_the_hook_without_a_tokenizer_say_what_works():
    with pytest.raises(ValueError, match=r"StoppingCriteriaList\(\[StopStringCriteria\("):
        hooked(ONE, **GREEDY, stop_strings=[STOP])
    criteria = StoppingCriteriaList([StopStringCriteria(TOKENIZER, [STOP])])
    hooked(ONE, **GREEDY, stopping_criteria=criteria)
    assert GENERATOR.last_result.finish_reasons == ["stop"]


@pytest.mark.parametrize("run", [native, hooked])
def test_several_sequences_of_a_prompt_have_a_seed_each(run):
    """Of the prompt, of each of them, or at random."""
    options = {**SAMPLED, "num_return_sequences": 3}
    run(INPUTS, **options, seed=[5, 2**64 - 1])
    result = GENERATOR.last_result
    assert result.seeds == [5, 6, 7, 2**64 - 1, 0, 1]
    rows = [row for row in (0, 1) for _ in range(3)]
    alone = GENERATOR.generate(
        INPUTS.input_ids[rows], INPUTS.attention_mask[rows], **SAMPLED, seed=result.seeds
    )
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


def kept_by_hf(inputs, **options):
    names = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    return MODEL.generate(**inputs, **options, **names)


def same(found, expected):
    """Equal to rounding where the row has a token, and in what is impossible."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


PROCESSORS = LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])


@pytest.mark.parametrize(
    ("processors", "steps_ahead"),
    [(None, 0), (PROCESSORS, 2)],
    ids=["plain", "processed, steps ahead"],
)
def test_scores_and_logits_of_emitted_tokens_are_hfs(processors, steps_ahead):
    options = {**GREEDY, "logits_processor": processors}
    expected = kept_by_hf(INPUTS, **options)
    generator = SpeculativeGenerator(MODEL, GENERATOR.drafter, steps_ahead=steps_ahead)
    result = generator.generate(**INPUTS, **options, output_scores=True, output_logits=True)
    assert result.sequences.equal(expected.sequences)
    assert 0 < result.stats.acceptance_rate < 1
    same(result.scores, expected.scores)
    same(result.logits, expected.logits)


@pytest.mark.parametrize("name", TREES)
def test_every_node_of_a_tree_is_processed_as_the_end_of_its_own_path(name):
    """The oracle reads each prompt alone: HF would punish a batch for its padding."""
    options = {"max_new_tokens": 16, "do_sample": False}
    options["logits_processor"] = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])
    ids, mask = ragged_prompts(VOCAB, 1, 4, 6, 9)
    generator = SpeculativeGenerator(TABLE_MODEL, make(name))
    result = generator.generate(ids, mask, **options, output_scores=True, output_logits=True)
    assert any(step.parents for row in result.steps for step in row)
    names = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        alone = TABLE_MODEL.generate(ids[row : row + 1, -length:], **options, **names)
        assert result.sequences[row, -length - 16 :].tolist() == alone.sequences[0].tolist()
        same([scores[row : row + 1] for scores in result.scores], alone.scores)
        same([logits[row : row + 1] for logits in result.logits], alone.logits)


def test_scores_of_replayed_steps_are_those_of_eager_ones():
    """The batch is filled up to a bucket, and a replay overwrites the logits of the step before."""
    ids, mask = INPUTS.input_ids[[0, 1, 0]], INPUTS.attention_mask[[0, 1, 0]]
    options = {**SAMPLED, "seed": [1, 2, 3], "temperature": [0.5, 1.0, 0.0], "top_p": 0.9}
    options |= {"max_new_tokens": 24, "output_scores": True, "output_logits": True}
    results = []
    for graphs in (False, True):
        generator = SpeculativeGenerator(MODEL, GENERATOR.drafter, graphs=graphs, steps_ahead=1)
        results.append(generator.generate(ids, mask, **options))
    assert "replays" in generator.explain()
    eager, replayed = results
    assert replayed.sequences.equal(eager.sequences)
    same(replayed.scores, eager.scores)
    same(replayed.logits, eager.logits)


def test_the_hooks_record_holds_scores_where_hf_would():
    names = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
    expected, found = kept_by_hf(INPUTS, **GREEDY), hooked(INPUTS, **GREEDY, **names)
    same(found.scores, expected.scores)
    same(found.logits, expected.logits)
    generator = SpeculativeGenerator(MODEL, GENERATOR.drafter)
    assert generator.last_result is None
    options = {**INPUTS, **GREEDY, "custom_generate": generator}
    found = MODEL.generate(**options, return_dict_in_generate=True)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert found.sequences.equal(expected.sequences)
    assert found.sequences is generator.last_result.sequences
    assert found.scores is None
    assert found.logits is None


def test_scores_of_sampled_text_are_what_hfs_warpers_leave():
    plain = {**SAMPLED, "top_p": 0.9, "min_p": 0.02, "seed": [3, 4]}
    result = native(INPUTS, **plain, output_scores=True, output_logits=True)
    warpers = MODEL._get_logits_processor(
        GenerationConfig(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.02), 0
    )
    same(result.scores, [warpers(None, logits.clone()) for logits in result.logits])
    kept = torch.stack(result.scores, dim=1).isfinite()
    assert kept.gather(2, result.new_tokens[..., None]).all()


def test_scores_after_the_end_of_a_row_are_nan():
    eos = MODEL.generate(**INPUTS, **GREEDY)[1, INPUTS.input_ids.shape[1] + 4].item()
    result = native(INPUTS, **GREEDY, eos_token_id=eos, pad_token_id=0, output_logits=True)
    table = torch.stack(result.logits, dim=1)
    for row, length in enumerate(result.lengths):
        assert table[row, :length].isfinite().all()
        assert table[row, length:].isnan().all()
    assert min(result.lengths) < max(result.lengths)


@pytest.mark.parametrize("run", [native, hooked])
def test_a_minimal_length_is_honoured(run):
    eos = MODEL.generate(**ONE, **GREEDY)[0, ONE.input_ids.shape[1] + 2].item()
    options = {**GREEDY, "eos_token_id": eos, "pad_token_id": 0, "min_new_tokens": 10}
    expected = MODEL.generate(**ONE, **options)
    run(ONE, **options)
    assert GENERATOR.last_result.sequences.equal(expected)
    assert GENERATOR.last_result.lengths[0] >= 10
    processor = MinNewTokensLengthLogitsProcessor(ONE.input_ids.shape[1], 10, torch.tensor([eos]))
    options = {**GREEDY, "eos_token_id": eos, "pad_token_id": 0}
    given = run(ONE, **options, logits_processor=LogitsProcessorList([processor]))
    assert given is not None
    assert GENERATOR.last_result.sequences.equal(expected)


def test_a_tokenizers_output_is_a_prompt():
    messages = [{"role": "user", "content": "ab"}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    encoded = TOKENIZER.apply_chat_template(
        messages, chat_template=template, return_tensors="pt", return_dict=True
    )
    assert isinstance(encoded, BatchEncoding)
    expected = GENERATOR.generate(**encoded, **GREEDY).sequences
    assert GENERATOR.generate(encoded, **GREEDY).sequences.equal(expected)
    assert next(GENERATOR.stream(encoded, **GREEDY)).index == 0
    both = GENERATOR.generate(INPUTS, **GREEDY).sequences
    assert both.equal(native(INPUTS, **GREEDY).sequences)
    with pytest.raises(TypeError, match="with input_ids, attention_mask and an attention_mask"):
        GENERATOR.generate(INPUTS, INPUTS.attention_mask, **GREEDY)
    with pytest.raises(TypeError, match=r"a tokenizer.s output .*got one with pixel_values"):
        GENERATOR.generate({"pixel_values": 1}, **GREEDY)


def test_every_option_has_its_line_in_the_docstring():
    arguments = GenerateOptions.__doc__.split("    Args:\n")[1]
    named = re.findall(r"^        (\w+): ", arguments, flags=re.MULTILINE)
    assert named == list(GenerateOptions.__annotations__)
