"""`StringDrafter`: a draft model of any tokenizer, whose text becomes the target's tokens.

Tokenizers of three other kinds are trained here. The oracles are HF's own `generate`, the target's
own encoding of the whole text, and a draft model that reads everything again in each step.
"""

import copy
from functools import cache

import pytest
import torch
from architectures import build
from drafting import perturbed
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import PlainLoop
from refusals import refused
from test_other_vocabulary import CODE, PROSE, byte_level, sentence_piece
from text_laws import ALPHA, DRAFT, ROWS, p_values_of_texts, sample, tiny
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import BertProcessing
from transformers import PreTrainedTokenizerFast

from specdec import (
    ExtendedDrafter,
    FirstMatch,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    StringDrafter,
    zoo,
)
from specdec.drafters import strings
from specdec.graphs.capture import CaptureError
from specdec.samplers import Drawing

TEXTS = [*CODE, *PROSE, "“naïve” 猫が 🙂 sat — 12345 x=3\n\tend"]
SIZE = 512


def trained(tokenizer, trainer, **special):
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def unigram():
    """As SentencePiece's: a space before every text, and bytes that no piece covers."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    names = ["<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return trained(tokenizer, trainer, **special)


def word_piece():
    """As BERT's: no case, no spaces of its own, and tokens around every text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=names, show_progress=False)
    found = trained(tokenizer, trainer, unk_token="[UNK]", sep_token="[SEP]")
    ids = [(name, found.convert_tokens_to_ids(name)) for name in ("[SEP]", "[CLS]")]
    found.backend_tokenizer.post_processor = BertProcessing(*ids)
    return found


@cache
def tokenizers():
    end = "<|end|>"
    return {
        "target": byte_level(TEXTS, 330, bos_token=end, eos_token=end),
        "byte-level": byte_level(PROSE, 280, eos_token="</s>", bos_token="<s>"),
        "pieces": sentence_piece(TEXTS, 340, unk_token="<unk>", eos_token="</s>"),
        "unigram": unigram(),
        "word-piece": word_piece(),
    }


FOREIGN = ["byte-level", "pieces", "unigram", "word-piece"]


@cache
def models_():
    target = build("llama", vocab_size=SIZE)
    return target, perturbed(target)


def drafter_of(name, num_draft_tokens=4, target="target", model=None, **options):
    both = tokenizers()[target], tokenizers()[name]
    return StringDrafter(model or models_()[1], *both, num_draft_tokens, **options)


def ids_of(text, name="target"):
    return tokenizers()[name](text, add_special_tokens=False).input_ids


@cache
def batch():
    rows = [ids_of(text) for text in ("def walk(path):", "the cat", "x", "猫が sat on")]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


@pytest.mark.parametrize("name", FOREIGN)
def test_greedy_text_is_hfs_in_ragged_batches_and_alone(name):
    (target, _), (ids, mask) = models_(), batch()
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    text = target.generate(ids, attention_mask=mask, **options)
    generator = SpeculativeGenerator(target, drafter_of(name))
    result = generator.generate(ids, mask, max_new_tokens=16)
    assert result.sequences.tolist() == text.tolist()
    assert all(any(step.draft_tokens for step in row) for row in result.steps)
    alone = generator.generate(ids[1:2, mask[1] > 0], max_new_tokens=16)
    steps = [[vars(step) for step in r] for r in (alone.steps[0], result.steps[1])]
    assert steps[0] == steps[1]


def test_the_target_itself_is_accepted_wherever_its_tokens_are_those_of_its_text():
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    ids = tokenizer(zoo.heldout_prompts(1)[0], return_tensors="pt").input_ids[:, :30]
    own = StringDrafter(target, tokenizer, tokenizer, 4)
    result = SpeculativeGenerator(target, own).generate(ids, max_new_tokens=16)
    plain = SpeculativeGenerator(target, None).generate(ids, max_new_tokens=16)
    assert result.sequences.equal(plain.sequences)
    assert result.stats.acceptance_rate > 0.95


class Knowing(StringDrafter):
    """Writes the text that it was told, as tokens of the draft model: all, or the next few."""

    whole, size = "", None

    def _continued(self, rows, state, count):
        own = self._own
        texts = [own.decode(row) for row in rows]
        return [own.encode_after(t, self.whole[len(t) :])[: self.size] for t in texts]


def proposal_of(drafter, rows, state=None):
    state = state or drafter.init_state(len(rows), 90, vocab_size=SIZE, device=torch.device("cpu"))
    loop, count = PlainLoop(rows, drafter.num_draft_tokens), drafter.num_draft_tokens
    context = loop.context_from_scratch()
    draft = drafter.propose(context, state, Drawing(count, None, None, None))
    pairs = zip(draft.tokens.tolist(), draft.num_valid.tolist(), strict=True)
    return [tokens[:size] for tokens, size in pairs]


PAIRS = [
    ("target", "byte-level"),
    ("target", "pieces"),
    ("target", "unigram"),
    ("pieces", "target"),
]


@pytest.mark.parametrize(("target", "name"), [*PAIRS, ("unigram", "target")])
def test_the_right_text_is_drafted_as_the_targets_own_tokens(target, name):
    """At every cut of a text, also inside of a character; no token is there twice or missing."""
    drafter = drafter_of(name, 6, target)
    drafter.__class__ = Knowing
    text = "the naïve café 猫が cat (x) sat on 12345 walks — and the other, naïve mat"
    if name == "byte-level":
        text += ", </s> and <s>"  # names of its special tokens, which are text here
    ids = ids_of(text, target)
    cuts = range(1, len(ids) - 1)
    Knowing.whole = text
    drafts = proposal_of(drafter, [ids[:n] for n in cuts])
    expected = [ids[n : n + 6] for n in cuts]
    right = [draft == other for draft, other in zip(drafts, expected, strict=True)]
    assert sum(right) >= 0.9 * len(right)
    if (target, name) == ("target", "byte-level"):
        assert all(right)
        decoded = [tokenizers()["target"].decode(ids[:n]) for n in cuts]
        inside = [d for d, draft in zip(decoded, drafts, strict=True) if d.endswith("�") and draft]
        assert inside


@pytest.mark.parametrize(("target", "name"), [("target", "pieces"), ("pieces", "target")])
def test_bytes_in_place_of_characters_are_decoded_from_the_beginning_of_one(target, name):
    """Such a decoder knows no byte of a run that begins or ends inside of a character."""
    drafter = drafter_of(name, 9, target)
    drafter.__class__ = Knowing
    text = "the cat" + "กขฃ🙃" * 5
    ends = range(20, len(text) - 2)
    drafter.whole, drafter.size = text, 7  # one character or two
    rows = [ids_of(text[:n], target) for n in ends]
    for n, draft in zip(ends, proposal_of(drafter, rows), strict=True):
        assert draft in [ids_of(text[n : n + size], target)[:9] for size in (1, 2)]


def test_no_space_is_drafted_inside_of_a_word():
    """The prompt ends inside of what its tokenizer takes for one token."""
    drafter = drafter_of("target", 9, "unigram")
    drafter.__class__ = Knowing
    drafter.whole = "the cat sat"
    row = ids_of("the ca", "unigram")
    assert ids_of("the cat", "unigram")[: len(row)] != row
    (draft,) = proposal_of(drafter, [row])
    assert tokenizers()["unigram"].decode(row + draft) == "the cat sat"


def test_what_begins_a_text_is_read_and_what_ends_one_is_not():
    drafter, read = drafter_of("word-piece"), []
    drafter._continued = lambda rows, state, count: read.extend(rows) or [[] for _ in rows]
    end = tokenizers()["target"].eos_token_id
    assert proposal_of(drafter, [[*ids_of("the "), end, *ids_of("cat")], [end]]) == [[], []]
    marked = tokenizers()["word-piece"]("the cat").input_ids
    assert tokenizers()["word-piece"].decode(marked) == "[CLS] the cat [SEP]"
    assert read == [marked[:-1], marked[:1]]


def test_a_draft_ends_before_a_part_of_a_character_and_with_the_end_of_the_text():
    drafter = drafter_of("byte-level", 9)
    own, target = tokenizers()["byte-level"], tokenizers()["target"]
    (row,), new = [ids_of("the ")], ids_of("猫", "byte-level")
    assert len(new) == 3
    for cut, drafted in ((3, "猫"), (2, ""), (1, "")):
        drafter._continued = lambda rows, state, count, cut=cut: [new[:cut]]
        assert target.decode(proposal_of(drafter, [row])[0]) == drafted
    drafter._continued = lambda rows, state, count: [
        [*ids_of("cat", "byte-level"), own.eos_token_id, 5]
    ]
    assert proposal_of(drafter, [row])[0] == [*ids_of("cat"), target.eos_token_id]


@pytest.mark.parametrize("name", FOREIGN)
@settings(max_examples=4)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
@torch.no_grad()
def test_a_cache_that_is_kept_drafts_as_one_that_is_read_again_and_reads_less(name, seed, chunk):
    """Over random tokens, whose text is often encoded otherwise once it goes on, and drafts that
    are accepted in part.
    """
    drafter, generator = drafter_of(name), torch.Generator().manual_seed(seed)
    read, forward = [0, 0], drafter._slot_model.forward

    def counted(tokens, *args, **options):
        read[is_fresh] += tokens.numel()
        return forward(tokens, *args, **options)

    def integer(most):
        return int(torch.randint(most, (), generator=generator))

    drafter._slot_model = copy.copy(drafter._slot_model)
    drafter._slot_model.forward = counted
    loop = PlainLoop([ids_of(text) for text in ("the cat sat on the mat", "x", "def walk(")], 4)
    sizes = {"vocab_size": SIZE, "device": torch.device("cpu")}
    state = drafter.init_state(3, 90, **sizes)
    loop.prefill(drafter, state, chunk)
    for step in range(5):
        drafts = []
        for is_fresh in (False, True):
            used = drafter.init_state(3, 90, **sizes) if is_fresh else state
            used.text.copy_(state.text)
            told = Drawing(1 + (seed + step) % 4, None, None, None)
            drafts.append(drafter.propose(loop.context(), used, told))
        assert drafts[0].tokens.equal(drafts[1].tokens)
        valid = drafts[0].num_valid.tolist()
        accepted = [
            t[: integer(n + 1)] for t, n in zip(drafts[0].tokens.tolist(), valid, strict=True)
        ]
        loop.commit([[*a, integer(len(tokenizers()["target"]))] for a in accepted])
    assert read[0] < 0.75 * read[1]


def test_few_tokens_of_a_long_text_are_read_in_a_step(monkeypatch):
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    model, read = zoo.load_drafter("model", target).model, []
    drafter = StringDrafter(model, tokenizer, tokenizer, 4)
    forward = type(drafter._slot_model).forward

    def counted(self, tokens, *args, **options):
        if self is drafter._slot_model:
            read.append(tokens.shape[1])
        return forward(self, tokens, *args, **options)

    monkeypatch.setattr(type(drafter._slot_model), "forward", counted)
    monkeypatch.setattr(strings, "CHUNK_SIZE", 50)
    ids = tokenizer(zoo.heldout_prompts(1)[0], return_tensors="pt").input_ids[:, :120]
    result = SpeculativeGenerator(target, drafter).generate(ids, max_new_tokens=30)
    steps = len(result.steps[0])
    assert read[:2] == [50, 50]
    assert len(read) == 2 + 4 * steps
    assert sum(read[3:]) < 8 * steps


def letters(order):
    """One token for each of six letters."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(order)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("rows", [800, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_texts_have_the_targets_distribution(rows):
    """Chi-square, as in `test_laws`; the draft model has the letters under other ids."""
    drafter = StringDrafter(tiny(DRAFT), letters("obcdef"), letters("bcdefo"), 2)
    result = sample(drafter, RejectionSampler(), "plain", rows)
    for length, p in p_values_of_texts(result, "plain").items():
        assert p > ALPHA, f"texts of {length} tokens"
    assert 0.1 < result.stats.acceptance_rate < 0.95


def test_a_text_without_room_is_not_drafted_for_and_stays_right():
    (target, _), (ids, mask) = models_(), batch()
    plain = SpeculativeGenerator(target, None).generate(ids, mask, max_new_tokens=40)
    drafter = drafter_of("byte-level", expansion=0.4)
    result = SpeculativeGenerator(target, drafter).generate(ids, mask, max_new_tokens=40)
    assert result.sequences.equal(plain.sequences)
    drafted = [[len(step.draft_tokens) for step in row] for row in result.steps]
    assert any(sum(row[-8:]) == 0 for row in drafted)
    assert max(map(max, drafted)) > 0


def test_steps_that_were_to_be_captured_go_on_eagerly_and_draft_the_same():
    """As with `graphs="auto"` on a GPU: a step is interrupted, and run again."""
    (target, _), (ids, mask), results = models_(), batch(), []
    for graphs in (False, True):
        generator = SpeculativeGenerator(target, drafter_of("pieces"), graphs=graphs)
        generator._storages.must_capture = False
        results.append(generator.generate(ids, mask, max_new_tokens=30))
    assert "eager, because" in generator.explain()
    assert results[0].sequences.equal(results[1].sequences)
    steps = [[[vars(step) for step in row] for row in result.steps] for result in results]
    assert steps[0] == steps[1]


def captured():
    ids, mask = batch()
    generator = SpeculativeGenerator(models_()[0], drafter_of("pieces"), graphs=True)
    generator.generate(ids, mask, max_new_tokens=30)


def test_settings_tell_tokenizers_apart():
    names = "byte-level", "pieces", "pieces"
    one, other, same = (drafter_of(name).settings() for name in names)
    assert one != other == same


def test_what_cannot_draft_strings_is_refused_by_name():
    target, draft = tokenizers()["target"], tokenizers()["pieces"]
    small = build("llama", vocab_size=335)
    with refused("without recurrent layers .. MambaForCausalLM; use ModelDrafter(vocabulary="):
        StringDrafter(build("mamba", vocab_size=SIZE), target, draft)
    with refused("draft_tokenizer of at most the 335 ids .. got one of 340; pass StringDrafter("):
        StringDrafter(small, target, draft)
    with refused("target_tokenizer of at most the 335 ids .. got one of 340"):
        SpeculativeGenerator(small, StringDrafter(models_()[1], draft, target))
    with refused("expansion must be"):
        drafter_of("pieces", expansion=0)
    with pytest.raises(CaptureError, match="graphs=True; 'auto' goes on eagerly"):
        captured()


def test_it_drafts_beside_others():
    (target, _), (ids, mask) = models_(), batch()
    plain = SpeculativeGenerator(target, None).generate(ids, mask, max_new_tokens=20)
    lookup = PromptLookupDrafter(3)
    for joined in (FirstMatch, lambda a, b: ExtendedDrafter(b, a)):
        drafter = joined(lookup, drafter_of("pieces", 2))
        result = SpeculativeGenerator(target, drafter).generate(ids, mask, max_new_tokens=20)
        assert result.sequences.equal(plain.sequences)
