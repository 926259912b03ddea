"""Randomness is an argument: Philox as published, no draw used twice, rows on their own seeds.

That streams, indices, positions and seeds are independent is Philox's own property: the numbers are
compared with it bit by bit.
"""

import math
import zlib

import pytest
import torch
from architectures import build
from drafting import perturbed
from hypothesis import given
from hypothesis import strategies as st

from specdec import BlockSampler, ModelDrafter, Proposal, RejectionSampler, SpeculativeGenerator
from specdec.graphs.rows import keep_rows
from specdec.graphs.tree import copy_into
from specdec.kernels.philox.reference import philox, philox_of_tensors
from specdec.samplers import (
    Drawing,
    LogitsFilter,
    Noise,
    ScriptedNoise,
    Stream,
    draw_by_inversion,
)

WORD = 2**32
words = st.integers(0, WORD - 1)
row_seeds = st.one_of(
    st.integers(0, 2**64 - 1), st.sampled_from([0, WORD - 1, WORD, 2**63, 2**64 - 1])
)


def draws(seeds, start, width):
    """`[B, streams, width]` uniforms of one step; `start` may differ by row."""
    starts = torch.as_tensor(start).expand(len(seeds))
    step = Noise(seeds).at(starts, width)
    return torch.stack([step.uniform(stream) for stream in Stream], dim=1)


USED = {Stream.PROPOSE: [0, 1, 2], Stream.ACCEPT: [0, 1, 2], Stream.RESAMPLE: [0]}
"""Numbers that a step of K = 3 uses, as the docstring of `Stream` says."""


def decided(uniforms, sampler):
    """What drafter and sampler make of scripted numbers `[B, streams, 4]`."""
    rows, table = len(uniforms), torch.Generator().manual_seed(0)
    logits = torch.randn(2, rows, 4, 7, generator=table)
    noise, logits_filter = ScriptedNoise(uniforms), LogitsFilter(rows)
    drafting = Proposal().begin(Drawing(3, logits_filter, noise, draw_by_inversion))
    drafting.draw(logits[0, :, :3])
    draft = drafting.end()
    verdict = sampler(draft, logits[1], logits_filter, noise)
    return [*draft.tokens.flatten().tolist(), *verdict.tokens.flatten().tolist()]


@pytest.mark.parametrize("sampler", [RejectionSampler(), BlockSampler()])
def test_each_number_of_a_step_is_used_for_what_its_stream_says(sampler):
    uniforms = draws(range(500), 5, 4)
    expected = decided(uniforms, sampler)
    for stream in Stream:
        for index in range(4):
            changed = uniforms.clone()
            changed[:, stream, index] = 1 - changed[:, stream, index]
            assert (decided(changed, sampler) != expected) is (index in USED[stream])


def test_a_step_of_k_draft_tokens_has_k_plus_1_numbers_of_each_stream():
    seen = set()

    class Looks(ModelDrafter):
        def propose(self, context, state, drawing):
            widths = {drawing.noise.uniform(stream).shape[1] for stream in Stream}
            seen.add((drawing.num_draft_tokens, *widths))
            return super().propose(context, state, drawing)

    model = build("llama")
    generator = SpeculativeGenerator(model, Looks(perturbed(model), 3))
    generation = generator.start(torch.tensor([[1, 2]]), max_new_tokens=9, do_sample=True, seed=0)
    generator.step(generation)
    generation.num_draft_tokens = 1
    generator.step(generation)
    assert seen == {(3, 4), (1, 2)}


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([WORD - 1] * 4, [WORD - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
@pytest.mark.parametrize("function", [philox, philox_of_tensors])
def test_philox_gives_the_published_answers(function, counter, key, expected):
    """Random123's `kat_vectors`, philox4x32 with 10 rounds."""
    words = function(torch.tensor(counter), torch.tensor(key)).tolist()
    assert [f"{word:08x}" for word in words] == expected.split()


def plain_philox(counter, key):
    """Salmon et al., section 3.3, in Python integers."""
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            second // WORD ^ b ^ left,
            second % WORD,
            first // WORD ^ d ^ right,
            first % WORD,
        )
        left, right = (left + 0x9E3779B9) % WORD, (right + 0xBB67AE85) % WORD
    return [a, b, c, d]


@given(st.lists(st.tuples(*[words] * 6), min_size=1, max_size=5))
def test_philox_is_integer_arithmetic_in_every_row(numbers):
    table = torch.tensor(numbers)
    expected = [plain_philox(row[:4], row[4:]) for row in numbers]
    assert philox(table[:, :4], table[:, 4:]).tolist() == expected
    assert philox_of_tensors(table[:, :4], table[:, 4:]).tolist() == expected


@given(
    st.lists(st.tuples(row_seeds, st.integers(0, WORD - 1)), min_size=1, max_size=4),
    st.sampled_from(list(Stream)),
    st.integers(1, 6),
)
def test_a_uniform_is_52_bits_of_philox_keyed_by_seed_position_stream_and_index(
    rows, stream, width
):
    """So it does not depend on the other rows, their order, or how many numbers are made."""
    seeds, starts = zip(*rows, strict=True)
    drawn = Noise(seeds).at(torch.tensor(starts), width).uniform(stream)
    assert drawn.dtype == torch.float64
    for (seed, start), row in zip(rows, drawn.tolist(), strict=True):
        for index in range(width):
            high, low, _, _ = plain_philox((start, index, stream, 0), (seed % WORD, seed // WORD))
            assert row[index] == (high * 2**20 + low // 2**12) / 2**52


@given(st.lists(st.tuples(row_seeds, st.integers(0, WORD - 1)), min_size=1, max_size=4))
def test_exponentials_for_a_foreign_rule_are_made_of_a_stream_of_their_own(rows):
    seeds, starts = zip(*rows, strict=True)
    drawn = Noise(seeds).at(torch.tensor(starts), 2).exponentials(3)
    for (seed, start), row in zip(rows, drawn.tolist(), strict=True):
        words = [plain_philox((start, i, 4, 0), (seed % WORD, seed // WORD)) for i in (0, 1)]
        pairs = [words[0][:2], words[0][2:], words[1][:2]]
        uniforms = [(high * 2**20 + low // 2**12) / 2**52 for high, low in pairs]
        assert row == pytest.approx([-math.log1p(-u) for u in uniforms], rel=1e-12)


@given(
    st.lists(st.tuples(row_seeds, st.integers(0, WORD - 1)), min_size=1, max_size=4),
    st.text(max_size=9),
    st.integers(0, 6),
)
def test_named_uniforms_have_counters_of_their_own(rows, name, num):
    seeds, starts = zip(*rows, strict=True)
    drawn = Noise(seeds).at(torch.tensor(starts), 3).uniform(name, num)
    assert drawn.shape == (len(rows), num)
    word = zlib.crc32(name.encode())
    for (seed, start), row in zip(rows, drawn.tolist(), strict=True):
        for index, found in enumerate(row):
            counter = start, index, word, 1  # the last word of all others is 0
            high, low, _, _ = plain_philox(counter, (seed % WORD, seed // WORD))
            assert found == (high * 2**20 + low // 2**12) / 2**52


def test_names_have_as_many_numbers_as_the_step_unless_one_says_how_many():
    step = Noise([7]).at(torch.tensor([3]), 5)
    assert step.uniform("mine").equal(step.uniform("mine", 9)[:, :5])
    assert not step.uniform("mine").equal(step.uniform("others"))
    with pytest.raises(ValueError, match="has 5 numbers; leave num out"):
        step.uniform(Stream.ACCEPT, 2)


@given(
    st.lists(st.tuples(row_seeds, st.integers(0, WORD - 9)), min_size=1, max_size=3),
    st.integers(0, 9),
)
def test_races_of_other_paths_have_streams_of_their_own(rows, path):
    seeds, starts = zip(*rows, strict=True)
    step, logits = Noise(seeds).at(torch.tensor(starts), 4), torch.zeros(len(rows), 2, 3)
    drawn = step.arrivals(logits, 1, path=path)
    stream = 256 + path if path else 3
    for (seed, start), row in zip(rows, drawn.tolist(), strict=True):
        for index, found in enumerate(row):
            key = seed % WORD, seed // WORD
            words = [plain_philox((start + 2 + index, i, stream, 0), key) for i in (0, 1)]
            pairs = [words[0][:2], words[0][2:], words[1][:2]]
            uniforms = [(high * 2**20 + low // 2**12) / 2**52 for high, low in pairs]
            assert found == pytest.approx([-math.log1p(-u) for u in uniforms], rel=1e-12)
    both = step.arrivals(logits, 1, path=torch.tensor([path, path + 1]))
    assert both[:, 0].equal(drawn[:, 0])
    assert both[:, 1].equal(step.arrivals(logits, 1, path=path + 1)[:, 1])


@pytest.mark.parametrize("depths", [None, torch.tensor([2, 0])])
def test_the_least_arrival_wins_a_race_and_scripted_numbers_race_alike(depths):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 2, 7, generator=generator)
    logits_filter = LogitsFilter(40, top_k=5)
    step = Noise(range(40)).at(torch.arange(40), 4)
    every = [step.at_depths(d) for d in range(3)]
    script = [[each.arrivals(logits[:, :1], 0, path=k)[:, 0] for each in every] for k in (0, 1, 2)]
    script = torch.stack([torch.stack(each, dim=1) for each in script], dim=1)  # [B, P, W, V]
    scripted = ScriptedNoise(None, script)
    if depths is not None:
        step, scripted = step.at_depths(depths), scripted.at_depths(depths)
    for path in (0, 2, torch.tensor([1, 0])):
        arrivals = step.arrivals(logits, 0, path=path)
        probs = logits_filter(logits)
        winners = (arrivals / probs).masked_fill(probs <= 0, torch.inf).argmin(-1)
        assert step.race(logits, logits_filter, 0, path=path).equal(winners)
        assert scripted.race(logits, logits_filter, 0, path=path).equal(winners)
        assert scripted.arrivals(logits, 0, path=path).equal(arrivals)


def test_numbers_that_were_not_scripted_are_refused_by_name():
    named = {"mine": torch.zeros(1, 2, dtype=torch.float64)}
    noise = ScriptedNoise(None, torch.ones(1, 3, 5), named)
    assert noise.uniform("mine", 1).shape == (1, 1)
    assert noise.uniform("mine").shape == (1, 2)
    for ask, what in (
        (lambda: noise.uniform("mine", 3), r"uniform\('mine', 3\)"),
        (lambda: noise.uniform("other"), r"uniform\('other', None\)"),
        (lambda: noise.arrivals(torch.zeros(1, 1, 5), 0, path=1), "a race of path 1"),
    ):
        with pytest.raises(ValueError, match=f"no numbers were given for {what}"):
            ask()


@pytest.mark.smoke
def test_no_uniform_of_many_rows_and_steps_repeats():
    seeds = [0, 1, 2, 7, WORD - 1, WORD, WORD + 1, 2**63, 2**64 - 1]
    starts = torch.arange(300).repeat_interleave(len(seeds))
    drawn = draws(seeds * 300, starts, 8).flatten()
    assert len(drawn) == 300 * len(seeds) * len(Stream) * 8
    # 64 800 draws of 52 random bits repeat with probability 5e-7.
    assert len(drawn.unique()) == len(drawn)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused_with_its_row(seed):
    with pytest.raises(ValueError, match=f"seed of row 1 is {seed}"):
        Noise([0, seed])


def test_kept_rows_keep_their_draws():
    starts, rows = torch.tensor([5, 9, 2, 7]), [3, 1]
    noise = Noise([0] * 4)
    copy_into(noise, Noise([11, 2**64 - 1, 0, 8]))  # takes over their numbers
    expected = Noise([11, 2**64 - 1, 0, 8]).at(starts, 3)
    assert all(noise.at(starts, 3).uniform(s).equal(expected.uniform(s)) for s in Stream)
    whole = [noise.at(starts, 3).uniform(stream)[rows] for stream in Stream]
    step = keep_rows(noise, rows).at(starts[rows], 3)
    for stream, expected in zip(Stream, whole, strict=True):
        assert torch.equal(step.uniform(stream), expected)


def test_all_depths_of_a_step_share_one_table_of_uniforms():
    step = Noise([7, 8]).at(torch.tensor([3, 5]), width=4)
    depths = [step.at_depths(depth).uniform(Stream.PROPOSE) for depth in (0, 1)]
    assert depths[0] is depths[1] is step.uniform(Stream.PROPOSE)  # made once, not for each pass
