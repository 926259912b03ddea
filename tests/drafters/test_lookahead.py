"""`LookaheadDrafter`: texts are the target's, and its steps are those of lookahead decoding as the
paper describes it, written here in plain Python over forwards without a cache.
"""

import random
from collections import defaultdict

import pytest
import torch
from architectures import VOCAB
from diagonal import case, diagonal, first
from drafter_table import MODEL
from drafting import ragged_prompts
from refusals import refused
from text_laws import ALPHA, p_values_of_texts, sample

from specdec import (
    BlockSampler,
    CouplingSampler,
    LookaheadDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    zoo,
)

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9, 12)
SIZES = [(5, 4, 5), (1, 2, 1), (4, 2, 3), (3, 5, 1), (1, 4, 6)]


def first_guesses(prompt, count):
    """The prompt's last tokens, that of position p as guess p modulo their number; the root, the
    last token of all, where there are not so many.
    """
    guesses = [prompt[-1]] * count
    for position, token in enumerate(prompt[:-1]):
        guesses[position % count] = token
    return guesses


class Reference:
    """Lookahead decoding (Fu et al., arXiv:2402.02057, algorithm 2; the pool as the authors'
    program keeps it), greedy and one row.

    Args:
        model: HF's.
        prompt: ids.
        count: tokens to write.
        window, ngram, guesses: W, N, G.
        rng: of the first guesses; `None` for those of the drafter.
    """

    def __init__(self, model, prompt, count, window, ngram, guesses, *, rng=None):
        self.model, self.text, self.ngram, self.guesses = model, list(prompt), ngram, guesses
        ids = torch.tensor([prompt])
        sizes = {"max_new_tokens": count + ngram, "min_new_tokens": count + ngram}
        self.greedy = model.generate(ids, do_sample=False, **sizes)[0].tolist()
        size = (ngram - 1) * window
        start = [rng.choice(prompt) for _ in range(size)] if rng else first_guesses(prompt, size)
        self.levels = [start[i : i + window] for i in range(0, size, window)]
        self.pool: dict[int, list[tuple]] = defaultdict(list)  # by first token, the latest last
        self.end, self.accepted = len(prompt) + count, []

    def run(self):
        """Numbers of accepted tokens, by step."""
        while len(self.text) < self.end:
            known = len(self.text)
            true = self.greedy[known : known + self.ngram - 1]
            accepted = max((_common(g, true) for g in self.pool[self.text[-1]]), default=0)
            self.iterate()
            self.text += self.greedy[known : known + accepted + 1]
            self.accepted.append(accepted)
        return self.accepted

    def iterate(self):
        """The lookahead branch: one more level, and a new n-gram for each column."""
        self.levels[0][0] = self.text[-1]
        columns = range(len(self.levels[0]))
        branches = [
            self.text[:-1] + self.levels[0][: j + 1] + [level[j] for level in self.levels[1:]]
            for j in columns
        ]
        width = max(map(len, branches))
        padded = torch.tensor([branch + [0] * (width - len(branch)) for branch in branches])
        with torch.no_grad():
            logits = self.model(padded).logits  # causal: what is padded behind changes nothing
        new = [int(logits[j, len(branch) - 1].argmax()) for j, branch in enumerate(branches)]
        for j in columns:
            first, *gram = [level[j] for level in self.levels] + [new[j]]
            known = self.pool[first]
            if tuple(gram) in known:
                known.remove(tuple(gram))
            known.append(tuple(gram))
            del known[: -self.guesses]
        self.levels = [*(list(level) for level in self.levels[1:]), new]


def _common(gram, text):
    count = 0
    while count < min(len(gram), len(text)) and gram[count] == text[count]:
        count += 1
    return count


def accepted_by(generator, ids, mask, count):
    result = generator.generate(ids, mask, max_new_tokens=count, eos_token_id=None)
    return [[step.num_accepted for step in row] for row in result.steps], result


def prompts_of(ids, mask):
    return [row[own > 0].tolist() for row, own in zip(ids, mask, strict=True)]


@pytest.mark.parametrize(("sizes", "graphs"), diagonal(SIZES, [False, True]), ids=str)
def test_each_step_accepts_what_a_reference_from_the_paper_accepts(sizes, graphs):
    """A ragged batch, of a target whose greedy text repeats itself."""
    generator = SpeculativeGenerator(MODEL, LookaheadDrafter(*sizes), graphs=graphs)
    found, result = accepted_by(generator, IDS, MASK, 24)
    for row, prompt in enumerate(prompts_of(IDS, MASK)):
        reference = Reference(MODEL, prompt, 24, *sizes)
        assert found[row] == reference.run()
        new = result.sequences[row, IDS.shape[1] :].tolist()
        assert new == reference.greedy[len(prompt) : len(prompt) + 24]
    assert sum(map(sum, found)) > 4


@pytest.mark.parametrize("graphs", first([False, True], [False]))
def test_greedy_text_of_a_ragged_batch_of_the_zoo_is_that_of_hf(graphs):
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    texts = ["def main(argv):\n", "import os\n", *zoo.heldout_prompts(2)]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    plain = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    generator = SpeculativeGenerator(model, LookaheadDrafter(5, 4, 5), graphs=graphs)
    result = generator.generate(**inputs, max_new_tokens=40, check=graphs)
    assert result.sequences.equal(plain)
    assert result.stats.acceptance_length > 1.3


@pytest.mark.slow
def test_tokens_per_step_are_those_of_the_reference_on_the_zoo():
    """The reference begins with guesses of its own, random tokens of the prompt as in the authors'
    program. Within 3 %, over 16 prompts.
    """
    model, tokenizer, sizes, count = zoo.load_target(), zoo.load_tokenizer(), (5, 4, 5), 96
    rng, steps, reference_steps = random.Random(0), 0, 0
    generator = SpeculativeGenerator(model, LookaheadDrafter(*sizes))
    for text in zoo.heldout_prompts(16):
        prompt = tokenizer(text).input_ids
        ids = torch.tensor([prompt])
        found, _ = accepted_by(generator, ids, torch.ones_like(ids), count)
        steps += len(found[0])
        reference_steps += len(Reference(model, prompt, count, *sizes, rng=rng).run())
    tokens = 16 * count
    print(f"tokens per step {tokens / steps:.3f}, of the reference {tokens / reference_steps:.3f}")
    assert abs(reference_steps / steps - 1) < 0.03


def test_a_step_is_one_forward_of_the_target():
    generator = SpeculativeGenerator(MODEL, LookaheadDrafter(5, 4, 5))
    calls, forward = [], type(generator.target).forward

    def counted(target, *args, **options):
        calls.append(target)
        return forward(target, *args, **options)

    generation = generator.start(IDS, MASK, max_new_tokens=24, eos_token_id=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(generator.target), "forward", counted)
        for _ in range(5):
            generator.step(generation)
    assert len(calls) == 5


@pytest.mark.parametrize(
    "sampler",
    [case([BlockSampler()], False), RejectionSampler(), case([CouplingSampler()], False)],
    ids=str,
)
def test_sampled_texts_have_the_targets_distribution(sampler):
    """Law 2, on a target of six tokens."""
    drafter = LookaheadDrafter(3, 3, 4)
    result = sample(drafter, sampler, "truncated", 2500)
    for length, p in p_values_of_texts(result, "truncated").items():
        assert p > ALPHA, f"texts of {length} tokens"


def test_a_captured_step_is_the_eager_one_and_a_row_in_a_batch_is_the_row_alone():
    options = {"max_new_tokens": 20, "do_sample": True, "eos_token_id": None}
    steps = []
    for graphs in (False, True):
        generator = SpeculativeGenerator(MODEL, LookaheadDrafter(4, 3, 3), graphs=graphs)
        result = generator.generate(IDS, MASK, seed=[1, 2, 3, 4], check=graphs, **options)
        steps.append([[vars(step) for step in row] for row in result.steps])
    assert steps[0] == steps[1]
    for row, prompt in enumerate(prompts_of(IDS, MASK)):
        alone = SpeculativeGenerator(MODEL, LookaheadDrafter(4, 3, 3), prefill_chunk_size=3)
        result = alone.generate(torch.tensor([prompt]), seed=[row + 1], **options)
        assert [vars(step) for step in result.steps[0]] == steps[0][row]


@pytest.mark.parametrize("lengths", [(17, 0, 3, 29, 1, 29, 29, 14), (0, 0, 29)])
def test_any_sequence_of_draft_lengths_writes_the_same_text(lengths):
    plain = SpeculativeGenerator(MODEL, None).generate(
        IDS, MASK, max_new_tokens=24, eos_token_id=None
    )
    for graphs in (False, True):
        generator = SpeculativeGenerator(MODEL, LookaheadDrafter(5, 4, 5), graphs=graphs)
        generation = generator.start(IDS, MASK, max_new_tokens=24, eos_token_id=None)
        number = 0
        while not generation.has_ended.all():
            generation.num_draft_tokens = lengths[number % len(lengths)]
            number += 1
            assert not any(row.faults for row in generator.step(generation).fetch().read())
        rows = zip(generation.tokens, plain.sequences, generation.lengths, strict=True)
        assert all(row[: int(n)].equal(text[-int(n) :]) for row, text, n in rows)


def test_a_full_pool_forgets_the_oldest_and_has_each_ngram_once():
    drafter = LookaheadDrafter(2, 2, 3, pool_size=4)
    state = drafter.init_state(1, 99, vocab_size=50, device=torch.device("cpu"))
    assert state.pool.shape == (1, 4, 2)

    def remembered(*grams):
        drafter._remember(state, torch.tensor([grams]) + 1)
        tokens, is_found = drafter._found(state, torch.tensor([[7]]))
        return tokens[0, is_found[0], 0].tolist()

    assert remembered((7, 1), (7, 2)) == [2, 1]
    assert remembered((7, 1), (8, 9)) == [1, 2]
    assert remembered((7, 3), (7, 3)) == [3, 1]
    assert remembered((7, 4), (7, 5)) == [5, 4, 3]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0,), {}, "window must be an integer >= 1"),
        ((3, 1), {}, "ngram must be an integer >= 2"),
        ((3, 2, 0), {}, "guesses must be an integer >= 1"),
        ((9, 2, 3), {"pool_size": 8}, "pool_size must be an integer >= 9 .. a step adds W"),
    ],
)
def test_sizes_that_are_too_small_are_refused(sizes, options, message):
    with refused(message):
        LookaheadDrafter(*sizes, **options)


def test_the_number_of_nodes_follows_from_the_window_and_cannot_be_set():
    drafter = LookaheadDrafter(window=4, ngram=3, guesses=2)
    with refused("follows from window, .. and is 11, got 5"):
        drafter.num_draft_tokens = 5
    assert drafter.num_draft_tokens == 11
