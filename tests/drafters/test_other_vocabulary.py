"""A draft model with a tokenizer of its own: what is common, what is read in place of the rest, and
drafts restricted to the common tokens.

Tokenizers are trained here, on texts that differ. The oracle of drafts is the draft model's forward
without any cache over the ids that the text is read as.
"""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from architectures import VOCAB, build
from diagonal import case
from drafter_table import TREE, drive
from drafting import ragged_prompts
from refusals import refused
from text_laws import ALPHA, DRAFT, ROWS, p_values_of_texts, sample, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec import ModelDrafter, RejectionSampler, SpeculativeGenerator, zoo
from specdec.drafters import CommonVocabulary
from specdec.samplers import LogitsFilter

CODE = ["def walk(path): return [name for name in listing(path) if name]"] * 4
PROSE = ["the cat sat on the mat and the other cat, in café or naïve, sat there\n\n"] * 4


def trained(tokenizer, texts, size, names, **trainer):
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=names, show_progress=False, **trainer
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def byte_level(texts, size, **special):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names, alphabet = list(dict.fromkeys(special.values())), pre_tokenizers.ByteLevel.alphabet()
    tokenizer = trained(tokenizer, texts, size, names, initial_alphabet=alphabet)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def sentence_piece(texts, size, **special):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(pieces)
    names = [*special.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    fields = json.loads(trained(tokenizer, texts, size, names).to_str())
    # Bytes are no added tokens in files of SentencePiece.
    fields["added_tokens"] = fields["added_tokens"][: len(special)]
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@cache
def tokenizers():
    end, pad = "<|end|>", {"pad_token": "<|pad|>"}
    code, ends = [*CODE, *PROSE, *["   x"] * 9], {"unk_token": "<unk>", "eos_token": "</s>"}
    maltese = sentence_piece([*PROSE, "Ġgantija"], 320, **ends)  # as Llama 2 and Gemma have this Ġ
    maltese.add_tokens(["▁▁", "\n\n"])  # as Gemma's, which are no special tokens
    return {
        "maltese": maltese,
        "code": byte_level(code, 320, bos_token=end, eos_token=end, **pad),
        "prose": byte_level(PROSE, 300, eos_token="</s>", bos_token="<s>", **pad),
        "pieces": sentence_piece(PROSE, 320, **ends),
    }


def common_of(target, draft):
    """Two tokenizers, their common vocabulary, and its pairs of ids."""
    target, draft = tokenizers()[target], tokenizers()[draft]
    common = CommonVocabulary.of(target, draft)
    pairs = zip(common.target_ids.tolist(), common.draft_ids.tolist(), strict=True)
    return target, draft, common, dict(pairs)


PAIRS = [
    ("code", "prose"),
    ("prose", "code"),
    ("code", "pieces"),
    ("pieces", "prose"),
    ("maltese", "code"),
    ("code", "maltese"),
]


def text_of(tokenizer, token):
    """What an id adds to a text, as the tokenizer itself decodes it; `None` for parts of characters
    and for special tokens.
    """
    ahead = tokenizer.encode("o", add_special_tokens=False)
    text = tokenizer.decode([*ahead, token], clean_up_tokenization_spaces=False)
    special = token in tokenizer.all_special_ids
    return None if "\ufffd" in text or special else text[1:]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_common_tokens_are_those_of_the_same_text(target, draft):
    target, draft, common, pairs = common_of(target, draft)
    assert len(pairs) == len(set(pairs.values())) == len(common.target_ids)
    own = {text_of(draft, i): i for i in range(len(draft))}
    seen = set()
    for i in range(len(target)):
        text = text_of(target, i)
        read = int(common.readable[i])
        if text is None:
            continue
        if text in own:
            assert text_of(draft, read) == text
            seen.add(text)
        else:
            end = text_of(draft, read)
            assert i not in pairs
            if end is not None:  # the end may be a part of a character
                assert text.endswith(end)
                assert all(text[n:] not in own for n in range(1, len(text) - len(end)))
        if i in pairs:
            assert text_of(draft, pairs[i]) == text
    assert seen == {text_of(target, i) for i in pairs} - {None}
    assert {"t", " ", "\n", "é"} & seen >= {"t", " "}
    assert pairs[target.eos_token_id] == draft.eos_token_id
    assert 0 < len(seen) < len(target)


def test_characters_and_words_with_spaces_are_common_across_kinds():
    target, draft, _, pairs = common_of("code", "maltese")
    for text in (" the", " cat", "é", "  ", "\n\n"):
        (i,) = target.encode(text, add_special_tokens=False)
        assert pairs[i] == draft.convert_tokens_to_ids(text.replace(" ", "▁"))


def test_the_end_of_a_token_says_more_than_one_token_for_all():
    """The zoo's draft model without the last thousand tokens of its vocabulary."""
    target, tokenizer, draft = zoo.load_target(), zoo.load_tokenizer(), zoo.load_tokenizer()
    few = {token: i for token, i in tokenizer.get_vocab().items() if i < 1000}
    draft.get_vocab = lambda: few
    common = CommonVocabulary.of(tokenizer, draft)
    is_missing = torch.ones(len(tokenizer), dtype=torch.bool)
    is_missing[common.target_ids] = False
    assert int(is_missing.sum()) == len(tokenizer) - 1000
    end_of_text = replace(common, readable=common.readable.masked_fill(is_missing, 0))
    model, lengths = zoo.load_drafter("model").model, []
    options = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    inputs = tokenizer(list(zoo.heldout_prompts(3)), **options)
    ids, mask = inputs.input_ids[:, -150:], inputs.attention_mask[:, -150:]
    for vocabulary in (common, end_of_text):
        generator = SpeculativeGenerator(target, ModelDrafter(model, vocabulary=vocabulary))
        result = generator.generate(ids, mask, max_new_tokens=48, eos_token_id=None)
        lengths.append(result.stats.acceptance_length)
    assert lengths[0] > lengths[1] + 0.3


def test_what_is_hardly_common_and_tables_that_cannot_be_right_are_refused():
    few = byte_level(PROSE, 300, eos_token="</s>")
    vocab = {t if len(t) == 1 and i < 100 else f"Ġ{t}x": i for t, i in few.get_vocab().items()}
    for other, message in (
        ({"Ġ": 999, **vocab}, "tokens, less than half of the"),
        ({"the": 0, "##ing": 1}, "the draft model's tokenizer is neither byte-level nor"),
    ):
        few.get_vocab = lambda other=other: other
        with refused(message):
            CommonVocabulary.of(tokenizers()["code"], few)
    model, common = reordered()
    with refused("vocabulary.draft_ids"):
        replace(common, draft_ids=common.draft_ids[1:])
    with refused("vocabulary.readable .. int64"):
        replace(common, readable=common.readable.float())
    for change in ({"draft_ids": common.draft_ids + SIZE}, {"readable": common.readable - SIZE}):
        with refused(f"ids that the draft model of {SIZE} ids has not; pa"):
            ModelDrafter(model, vocabulary=replace(common, **change))
    other = replace(common, target_ids=common.target_ids + 1)
    with refused(f"ids that the target of {VOCAB} ids has not; pass Comm"):
        SpeculativeGenerator(build("llama"), ModelDrafter(model, vocabulary=other))
    with refused("or pass vocabulary=CommonVocabulary.of(target_token"):
        SpeculativeGenerator(build("llama"), ModelDrafter(model))


def test_settings_tell_vocabularies_apart():
    model, common = reordered()
    drafters = (ModelDrafter(model, vocabulary=v) for v in (None, common, reordered("llama", 9)[1]))
    found = [json.dumps(drafter.settings()) for drafter in drafters]
    assert len(set(found)) == 3


# Draft models whose ids are in another order, some of which the target has not.

SIZE = VOCAB + 30
IDS, MASK = ragged_prompts(VOCAB, 8, 1, 5, 3)


@cache
def reordered(name="llama", num_missing=0):
    """A model with the target's tokens under other ids, and 30 ids of its own that are likely; and
    the common vocabulary, without some of the target's, which are read as their neighbours.
    """
    model, order = build(name, vocab_size=SIZE), torch.randperm(SIZE)[:VOCAB]
    right = build(name)
    with torch.no_grad():
        state = {**right.state_dict()}
        for key, weight in model.state_dict().items():
            if weight.shape != state[key].shape:
                weight[order] = state[key]
            else:
                weight.copy_(state[key])
        others = torch.ones(SIZE, dtype=torch.bool)
        others[order] = False
        model.get_output_embeddings().weight[others] *= 20
    read, kept = order.clone(), torch.arange(VOCAB - num_missing)
    read[len(kept) :] = order[: VOCAB - len(kept)]
    return model, CommonVocabulary(kept, order[: len(kept)], read)


SAMPLED = {"do_sample": True, "seed": [1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("name", "graphs", "options"),
    [
        ("llama", False, SAMPLED),
        ("llama", True, {}),
        case(["qwen3_5", True, SAMPLED], False),
    ],
)
def test_the_target_under_other_ids_is_never_rejected(name, graphs, options):
    (model, common), options = reordered(name), options | {"max_new_tokens": 20}
    wrong = replace(common, readable=common.readable.roll(1))
    for vocabulary, is_right in ((common, True), (wrong, False)):
        drafter = ModelDrafter(model, 3, vocabulary=vocabulary)
        generator = SpeculativeGenerator(build(name), drafter, graphs=graphs, prefill_chunk_size=3)
        rate = generator.generate(IDS, MASK, eos_token_id=None, **options).stats.acceptance_rate
        assert rate == 1 if is_right else rate < 0.7


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_greedy_text_is_hfs_and_no_token_that_is_not_common_is_drafted(tree):
    model, common = reordered(num_missing=20)
    target = build("llama")
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    text = target.generate(IDS, attention_mask=MASK, **options)
    drafter = ModelDrafter(model, 4, tree=tree, vocabulary=common)
    result = SpeculativeGenerator(target, drafter).generate(IDS, MASK, max_new_tokens=24)
    assert result.sequences.tolist() == text.tolist()
    assert 1.2 < result.stats.acceptance_length < 4
    drafted = [t for row in result.steps for step in row for t in step.draft_tokens]
    assert max(drafted) < VOCAB - 20
    assert int(text.max()) >= VOCAB - 20


@pytest.mark.parametrize(
    "logits_filter", [{}, {"temperature": 0.7, "top_k": 12, "top_p": 0.9}], ids=str
)
@torch.no_grad()
def test_probabilities_are_renormalised_over_the_common_tokens(logits_filter):
    model, common = reordered(num_missing=20)
    drafter = ModelDrafter(model, 3, vocabulary=common)
    for loop, draft, _ in drive(drafter, 5, vocab_size=VOCAB, logits_filter=logits_filter):
        for row, text in enumerate(loop.rows):
            tokens = common.readable[torch.tensor([*text, *draft.tokens[row, :-1].tolist()])]
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, len(text) - 1 :]
            wide = logits.new_full((3, VOCAB), -torch.inf)
            for i, j in zip(common.target_ids.tolist(), common.draft_ids.tolist(), strict=True):
                wide[:, i] = logits[:, j]
            expected = LogitsFilter(1, **logits_filter)(wide[None])[0]
            torch.testing.assert_close(draft.probs[row], expected, rtol=0, atol=1e-5)
            assert draft.probs[row].sum(-1).sub(1).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [2500, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_texts_have_the_targets_distribution(rows):
    """Chi-square, as in `test_laws`; the draft model lacks two of the six tokens."""
    order, read = torch.tensor([3, 0, 5, 1]), torch.tensor([3, 0, 5, 1, 3, 0])
    common = CommonVocabulary(torch.tensor([0, 2, 3, 5]), order, read)
    drafter = ModelDrafter(tiny(DRAFT), 2, vocabulary=common)
    result = sample(drafter, RejectionSampler(), "plain", rows)
    for length, p in p_values_of_texts(result, "plain").items():
        assert p > ALPHA, f"texts of {length} tokens"
    assert 0.1 < result.stats.acceptance_rate < 0.95
