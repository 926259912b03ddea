"""Natively, logits processors and stopping criteria see a row as it would stand alone; through HF's
hook they see what HF shows them.

The oracle is HF's own `generate`: of each row by itself for the native call, of the padded batch
for the hook. The padding id is the one that the texts emit most, so whoever sees padding errs.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts, to_right_padding
from letters import LETTERS, letter_tokenizer
from transformers import GenerationConfig, LogitsProcessorList

from specdec import ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
IDS, MASK = ragged_prompts(VOCAB, 3, 9, 6)
NUM_NEW = 14
ROWS = [ids[mask.bool()][None] for ids, mask in zip(IDS, MASK, strict=True)]


def alone(row: int, **options) -> list[int]:
    """HF's new tokens of one prompt without padding."""
    ids = ROWS[row]
    options = {"max_new_tokens": NUM_NEW, "do_sample": False} | options
    text = MODEL.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return text[0, ids.shape[1] :].tolist()


PLAIN = [alone(row, pad_token_id=0) for row in range(len(ROWS))]
TOKENS = torch.tensor(PLAIN).flatten().bincount(minlength=VOCAB).argsort(descending=True).tolist()
PAD, EOS = TOKENS[:2]


def fewer_repetitions(ids, scores):
    return scores - torch.nn.functional.one_hot(ids, scores.shape[1]).sum(dim=1)


def by_the_sum(ids, scores):
    return ids.sum(dim=1) % 5 == 0


CASES = {
    "penalty": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[PAD, PAD], [PAD, EOS], [ROWS[1][0, -1].item(), PLAIN[1][0]]]},
    "bias": {"sequence_bias": [[[PAD, PAD], -9.0], [[ROWS[0][0, -1].item(), PLAIN[0][0]], -9.0]]},
    "minimum": {"min_new_tokens": 9},
    "minimal length": {"min_length": 13},
    "decay": {"exponential_decay_length_penalty": (3, 1.5)},
    "forced end": {"forced_eos_token_id": TOKENS[-1]},
    "first token": {"begin_suppress_tokens": [text[0] for text in PLAIN]},
    "of the prompt": {"encoder_repetition_penalty": 1.8, "encoder_no_repeat_ngram_size": 1},
    "own": {"logits_processor": LogitsProcessorList([fewer_repetitions])},
    "criterion": {"stopping_criteria": [by_the_sum]},
    "stop string": {  # whose first letter is the last one of a prompt
        "stop_strings": [LETTERS[ROWS[0][0, -1]] + LETTERS[PLAIN[0][0]], LETTERS[TOKENS[3]]],
        "tokenizer": letter_tokenizer(),
    },
}
ENDS = {"pad": {"pad_token_id": PAD, "eos_token_id": EOS}, "eos": {"pad_token_id": EOS}}
ENDS["eos"]["eos_token_id"] = EOS
OF_THE_CALL = "logits_processor", "stopping_criteria", "stop_strings", "tokenizer"


def options_of(name: str, ends: str) -> tuple[dict, GenerationConfig]:
    """Arguments of the call, and a configuration with the rest."""
    options = CASES[name] | ENDS[ends]
    given = {key: options.pop(key) for key in OF_THE_CALL if key in options}
    return given, GenerationConfig(max_new_tokens=NUM_NEW, **options)


@pytest.mark.parametrize(
    ("name", "ends", "side"),
    [
        *((name, "pad", "left") for name in CASES),
        *((name, "eos", "left") for name in ("penalty", "minimum", "stop string")),
        *((name, "pad", "right") for name in ("penalty", "of the prompt", "own")),
    ],
)
def test_a_row_of_a_batch_gets_the_text_that_hf_gives_it_alone(name, ends, side):
    expected = [alone(row, **CASES[name], **ENDS[ends]) for row in range(len(ROWS))]
    assert expected != [alone(row, **ENDS[ends]) for row in range(len(ROWS))]  # it does something
    given, config = options_of(name, ends)
    ids, mask = IDS.masked_fill(MASK == 0, config.pad_token_id), MASK
    if side == "right":
        ids, mask = to_right_padding(ids, mask)
        ids = ids.masked_fill(mask == 0, config.pad_token_id)
    result = GENERATOR.generate(ids, mask, generation_config=config, **given)
    found = zip(result.new_tokens.tolist(), result.lengths, strict=True)
    assert [tokens[:length] for tokens, length in found] == expected


@pytest.mark.parametrize(
    ("name", "ends"), [*((name, "pad") for name in CASES), ("penalty", "eos"), ("minimum", "eos")]
)
def test_through_the_hook_a_batch_gets_the_text_that_hf_gives_the_batch(name, ends):
    given, config = options_of(name, ends)
    ids = IDS.masked_fill(MASK == 0, config.pad_token_id)
    options = {"attention_mask": MASK, "generation_config": config, **given}
    expected = MODEL.generate(ids, **options)
    assert torch.equal(MODEL.generate(ids, **options, custom_generate=GENERATOR), expected)


@pytest.mark.parametrize("drafter", [None, GENERATOR.drafter], ids=["none", "model"])
def test_through_the_hook_a_constraint_is_told_the_rows_of_the_batch(drafter):
    """Rows of unequal progress must not trade places."""

    def own_third(row, ids):
        return list(range(row, VOCAB, 3))

    own_third.is_stateless = True  # it reads VOCAB
    options = {"attention_mask": MASK, "max_new_tokens": NUM_NEW, "do_sample": False}
    options |= {"prefix_allowed_tokens_fn": own_third, "pad_token_id": 0}
    expected = MODEL.generate(IDS, **options)
    thirds = expected[:, IDS.shape[1] :] % 3
    assert thirds.equal(torch.arange(3)[:, None].expand_as(thirds))
    generator = SpeculativeGenerator(MODEL, drafter)
    assert MODEL.generate(IDS, **options, custom_generate=generator).equal(expected)


def test_rows_of_one_prompt_see_processors_alone_too():
    config = GenerationConfig(repetition_penalty=1.5, max_new_tokens=NUM_NEW, pad_token_id=PAD)
    options = {"generation_config": config, "do_sample": True, "top_k": 5, "seed": 3}
    whole = GENERATOR.generate(IDS, MASK, num_return_sequences=2, **options)
    for row, ids in enumerate(ROWS):
        single = GENERATOR.generate(ids, num_return_sequences=2, **options)
        assert whole.new_tokens[2 * row : 2 * row + 2].tolist() == single.new_tokens.tolist()
