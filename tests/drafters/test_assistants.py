"""Assistants of Gemma 4 against transformers' own candidate generator; laws by the numbers of
`tests/README.md`, those that hold for every drafter in `test_laws.py`.
"""

import copy
from collections import Counter
from functools import cache
from itertools import cycle, pairwise, product

import pytest
import torch
import transformers.generation.utils as hf_generation
from assistants import SHAPES, VOCAB, assistant_of, drafter_of, inform, pair, target_of
from diagonal import case, diagonal, first
from drafting import ragged_prompts
from text_laws import ALPHA, p_value
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from specdec import SpeculativeGenerator
from specdec.drafters.assistant import AssistantDrafter, AssistantHead
from specdec.hf.forward import cache_argument

K, NUM_NEW = 4, 30
PROMPT = torch.tensor([[7, 3, 21, 40, 11, 8, 2]])
GREEDY = {"do_sample": False, "max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0}


# Transformers' own candidates.


def recorded(generator_class, drafts):
    """Transformers' candidate generator, which notes (tokens known, drafted ones) of each call."""

    class Recorded(generator_class):
        def get_candidates(self, input_ids, **options):
            ids, logits = super().get_candidates(input_ids, **options)
            if logits is not None:
                drafts.append((input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist()))
            return ids, logits

    return Recorded


class Committed(SinglePositionMultiTokenCandidateGenerator):
    """Transformers' own over the keys and values of the tokens that the target has read, all of
    which were accepted: its cut is one too long, by what came from a rejected token. Some versions
    begin with the target's state of the first token of the prompt; here it is that of the last.
    """

    def get_candidates(self, input_ids, model_outputs, is_first_iteration, **options):
        if not is_first_iteration:
            model_outputs, read = copy.copy(model_outputs), input_ids.shape[1] - 1
            stored, states = model_outputs.shared_kv_states, model_outputs.hidden_states[-1]
            cut = {kind: tuple(x[:, :, :read] for x in kept) for kind, kept in stored.items()}
            model_outputs.shared_kv_states = cut
            if states.shape[1] == read:  # the prompt
                model_outputs.hidden_states = (states[:, -1:],)
        options |= {"model_outputs": model_outputs, "is_first_iteration": is_first_iteration}
        return super().get_candidates(input_ids, **options)


def drafts_of_hf(monkeypatch, model, assistant, generator_class=Committed):
    """The text, and what transformers drafted in its course. No layer of its cache forgets."""
    assistant, drafts = copy.copy(assistant), []
    assistant.generation_config = copy.deepcopy(assistant.generation_config)
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    name = "SinglePositionMultiTokenCandidateGenerator"
    monkeypatch.setattr(hf_generation, name, recorded(generator_class, drafts))
    options = {"attention_mask": torch.ones_like(PROMPT), "assistant_model": assistant}
    options[cache_argument(model)] = DynamicCache()
    return model.generate(PROMPT, **GREEDY, **options), drafts


def drafts_of_ours(model, assistant, text, graphs):
    """The same of this library. Transformers drafts from the first token after the prompt on."""
    drafter = AssistantDrafter(AssistantHead.of(assistant), model, K)
    generator, start = SpeculativeGenerator(model, drafter, graphs=graphs), PROMPT.shape[1] + 1
    options = GREEDY | {"max_new_tokens": NUM_NEW - 1}
    result = generator.generate(text[:, :start], **options, trace=True)
    known, drafts = start, []
    for step in result.trace[0]:
        drafts.append((known, step.draft_tokens))
        known += len(step.new_tokens)
    return result, drafts


@cache
def by_heart(shape):
    """A target, and an assistant that is fitted to its text after the prompt."""
    model, assistant = target_of(shape), assistant_of(shape, target_of(shape))
    text = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)
    return model, inform(assistant, model, text)


def check_same_drafts(ours, theirs):
    """Equal calls and tokens; where the text ends, transformers drafts fewer."""
    for (known, tokens), (expected_known, expected) in zip(ours, theirs, strict=False):
        assert known == expected_known
        assert tokens[: len(expected)] == expected
    assert len(theirs) > 3
    assert 0 <= len(ours) - len(theirs) <= 1  # a last token is left to the target alone


OF_HF = [
    case([shape, fit], index < 3)
    for index, (shape, fit) in enumerate(zip(SHAPES, cycle([by_heart, pair]), strict=False))
]


@pytest.mark.parametrize(("shape", "fit"), OF_HF)
def test_drafts_are_those_of_transformers_over_a_whole_generation(monkeypatch, shape, fit):
    model, assistant = fit(shape)
    text, theirs = drafts_of_hf(monkeypatch, model, assistant)
    for graphs in (False, True)[: 1 if "experts" in str(SHAPES[shape]) else 2]:
        result, ours = drafts_of_ours(model, assistant, text, graphs)
        assert result.sequences.tolist() == text.tolist()
        check_same_drafts(ours, theirs)


def test_transformers_own_reads_what_came_from_a_rejected_token(monkeypatch):
    """The negative control of `Committed`: as it is, its drafts are ours only where nothing was
    rejected before.
    """
    model, assistant = by_heart("E2B")
    own = SinglePositionMultiTokenCandidateGenerator
    text, theirs = drafts_of_hf(monkeypatch, model, assistant, own)
    ours = dict(drafts_of_ours(model, assistant, text, graphs=False)[1])
    is_same = {}
    for before, (known, drafted) in pairwise([None, *theirs]):
        is_clean = before is None or known == before[0] + K + 1  # nothing was rejected
        same = is_same.setdefault(is_clean, [])
        if known in ours:
            same.append(ours[known][: len(drafted)] == drafted)
    assert all(is_same[True][1:])  # the first one of some versions begins elsewhere
    assert not all(is_same[False])


@pytest.mark.parametrize("shape", ["E2B", "31B"])
@torch.no_grad()
def test_logits_are_those_of_transformers_row_by_row(shape):
    """With centroids HF takes the least logit of all rows, here each row has its own."""
    assistant, out = (
        pair(shape)[1],
        torch.randn(3, 2, 96, generator=torch.Generator().manual_seed(0)),
    )
    found = AssistantHead.of(assistant).logits(out)
    for row, index in product(range(3), range(2)):
        one, weight = out[row, index][None, None], assistant.lm_head.weight
        centroids = assistant.masked_embedding
        expected = assistant.lm_head(one) if centroids is None else centroids(one, weight)
        torch.testing.assert_close(found[row, index], expected[0, 0], rtol=0, atol=1e-5)
        assert centroids is None or int((expected == expected.min()).sum()) == 40


# Rows of a batch, trees.

LENGTHS = (1, 4, 6, 9)
BATCH, MASK = ragged_prompts(VOCAB, *LENGTHS)
SAMPLED = {"do_sample": True, "max_new_tokens": 24, "temperature": 0.8, "eos_token_id": None}


OF_ROWS = [("E2B", False, None), ("31B", True, None), ("short window", False, "6x3")]


@pytest.mark.parametrize(
    ("shape", "graphs", "tree"),
    [
        case([*each], each in OF_ROWS)
        for each in product(["E2B", "31B", "short window"], [False, True], [None, "6x3"])
    ],
)
def test_ragged_rows_are_those_rows_alone_and_greedy_text_is_that_of_hf(shape, graphs, tree):
    model, drafter = pair(shape)[0], drafter_of(shape, tree=tree)
    generator = SpeculativeGenerator(model, drafter, graphs=graphs, prefill_chunk_size=3)
    found = generator.generate(BATCH, MASK, **SAMPLED, seed=[1, 2, 3, 4], trace=True)
    for row, length in enumerate(LENGTHS):
        ids = BATCH[row : row + 1, -length:]
        alone = generator.generate(ids, **SAMPLED, seed=[row + 1], trace=True)
        assert [*map(vars, alone.trace[0])] == [*map(vars, found.trace[row])]
    assert 0 < sum(found.stats.accepted) < sum(found.stats.drafted)
    greedy = generator.generate(BATCH, MASK, **GREEDY)
    assert (
        greedy.sequences.tolist() == model.generate(BATCH, attention_mask=MASK, **GREEDY).tolist()
    )


@pytest.mark.parametrize("shape", first(["E2B", "unified", "31B"], ["31B"]))
def test_a_target_of_texts_and_images_drafts_as_its_text_model(shape):
    """As `AutoModelForCausalLM` loads a published Gemma 4. Tokens of images see each other in the
    larger ones.
    """
    text, assistant = pair(shape)
    kept = text.config.to_dict()
    kept["use_bidirectional_attention"] = None if shape == "E2B" else "vision"
    kept = {"text_config": kept, "vision_config": None, "audio_config": None}
    config = AutoConfig.for_model(SHAPES[shape][0], tie_word_embeddings=False, **kept)
    whole = AutoModelForCausalLM.from_config(config).eval()
    names = {name: name.replace("model.language_model.", "model.") for name in whole.state_dict()}
    whole.load_state_dict({name: text.state_dict()[own] for name, own in names.items()})
    assert type(whole) is not type(text)
    traces = []
    for model in (text, whole):
        drafter = AssistantDrafter(AssistantHead.of(assistant), model, K)
        result = SpeculativeGenerator(model, drafter).generate(
            BATCH, MASK, **SAMPLED, seed=[1, 2, 3, 4], trace=True
        )
        traces.append([[*map(vars, row)] for row in result.trace])
    assert traces[0] == traces[1]


@pytest.mark.parametrize("shape", ["E2B", "short window"])
@torch.inference_mode()
def test_slots_behind_the_text_change_nothing(shape):
    """Law 13: what the target's storage holds of rejected tokens is not read."""
    generator = SpeculativeGenerator(pair(shape)[0], drafter_of(shape), graphs=True)
    options = SAMPLED | {"seed": [1, 2, 3, 4]}
    clean = generator.generate(BATCH, MASK, **options)
    generation = generator.start(BATCH, MASK, **options)
    while not generation.has_ended.all():
        lengths = (generation.lengths - 1).tolist()
        for store in generation.state.cache.stores:
            for row, length in enumerate(lengths):
                store[row, :, max(length, 1) :] = 1e4
        generator.step(generation)
    rows = zip(generation.tokens, clean.new_tokens, LENGTHS, strict=True)
    assert all(text[n : n + 24].equal(new) for text, new, n in rows)


def test_positions_follow_the_offset_of_a_row():
    """Rotary positions are relative, so that a row that stands further on drafts the same."""
    generator = SpeculativeGenerator(pair("E2B")[0], drafter_of("E2B"))
    ids = BATCH[3:].expand(2, -1)
    offsets = {"row_inputs": {"position_offset": torch.tensor([0, 90])}}
    found = generator.generate(ids, **SAMPLED, seed=[5, 5], **offsets, trace=True)
    assert [*map(vars, found.trace[0])] == [*map(vars, found.trace[1])]


# The distribution of sampled texts.

FEW, NUM_DRAWN, TEXTS = 6, 3, 2500
START = [1, 4, 2, 1, 4]
OF_FEW = {
    "31B": {},
    "E2B": {"use_ordered_embeddings": True, "num_centroids": 3, "centroid_intermediate_top_k": 2},
}


@cache
def few_ids(shape):
    """A target of six ids, its assistant, and the distribution of its texts."""
    per_layer = {"vocab_size_per_layer_input": FEW} if shape == "E2B" else {}
    model = target_of(shape, vocab_size=FEW, **per_layer)
    assistant = assistant_of(shape, model, flags=OF_FEW[shape], vocab_size=FEW)
    laws = {(): 1.0}
    for _ in range(NUM_DRAWN):
        ids = torch.tensor([[*START, *text] for text in laws])
        with torch.no_grad():
            probs = model(ids).logits[:, -1].double().softmax(-1).tolist()
        each = zip(laws.items(), probs, strict=True)
        laws = {(*text, x): p * row[x] for (text, p), row in each for x in range(FEW)}
    return model, assistant, laws


def of_few(shape, kind=AssistantDrafter, **options):
    model, assistant, _ = few_ids(shape)
    return kind(AssistantHead.of(assistant), model, **options)


@pytest.mark.parametrize(
    ("shape", "options"), diagonal(OF_FEW, [{"num_draft_tokens": 2}, {"tree": "4x2"}])
)
def test_texts_have_the_targets_distribution(shape, options):
    """Law 2; false-alarm rate 1e-9."""
    model, _, laws = few_ids(shape)
    generator = SpeculativeGenerator(model, of_few(shape, **options))
    ids = torch.tensor([START]).expand(TEXTS, -1)
    sampled = {"do_sample": True, "max_new_tokens": NUM_DRAWN, "seed": [*range(TEXTS)]}
    result = generator.generate(ids, **sampled, temperature=1.0, top_k=0)
    assert p_value(Counter(map(tuple, result.new_tokens.tolist())), laws) > ALPHA
    assert 0.1 < result.stats.acceptance_rate < 0.95


@pytest.mark.swept
def test_texts_of_transformers_own_do_not():
    """The negative control, of a tenth of the texts, whose second token is drafted."""
    model, assistant, laws = few_ids("31B")
    assistant = copy.copy(assistant)
    assistant.generation_config = copy.deepcopy(assistant.generation_config)
    assistant.generation_config.num_assistant_tokens = 2
    ids, texts = torch.tensor([START]), []
    options = {"attention_mask": torch.ones_like(ids), "assistant_model": assistant}
    options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(TEXTS // 10):
            text = model.generate(ids, **options, max_new_tokens=NUM_DRAWN, eos_token_id=None)
            texts.append(int(text[0, len(START) + 1]))
    seconds = {x: sum(p for text, p in laws.items() if text[1] == x) for x in range(FEW)}
    assert p_value(Counter(texts), seconds) < ALPHA
