"""What the tests of captured steps on a CPU and on a GPU share."""

import torch


def account(result) -> tuple:
    """All that the steps of a call decide."""
    return result.sequences.tolist(), result.finish_reasons, result.stats.to_dict()


def texts_by_many_lengths(generator, prompts, num_steps: int, **options) -> list[list[int]]:
    """New tokens of each row after steps of every draft length, each of which is captured once."""
    most = generator.drafter.num_draft_tokens
    generation = generator.start(*prompts, **options)
    assert generation.num_draft_tokens == most
    texts = [[] for _ in prompts[0]]
    for index in range(num_steps):
        length = generation.num_draft_tokens = (index * 5) % (most + 1)
        for text, row in zip(texts, generator.step(generation).fetch().read(), strict=True):
            assert row.num_accepted <= len(row.draft_tokens) <= length
            assert row.faults == 0
            text += row.new_tokens
    assert sorted(generation.storage.replay.graphs) == list(range(most + 1))
    return texts


def texts_beside_poison(generator, prompts, **options) -> list[list[int]]:
    """New tokens of each row; keys, values and features of rows that fill a bucket are NaN."""
    generation, count = generator.start(*prompts, **options), len(prompts[0])
    state = generation.storage.state
    caches = state.cache, state.drafter_state.cache
    slots = [x for cache in caches for x in (*cache.keys.values(), *cache.values.values())]
    with torch.inference_mode():
        for table in (*slots, state.features):
            table[count:] = torch.nan
    rows = [[] for _ in range(count)]
    while not generation.has_ended.all():
        outcome = generator.step(generation)
        assert len(outcome.num_new) == len(outcome.draft.tokens) == len(outcome.logits) == count
        for row, of_row in zip(rows, outcome.fetch().read(), strict=True):
            row += of_row.new_tokens
        assert not state.buffer.num_new[count:].any()
        assert not state.buffer.root_position[count:].any()
    assert generation.tokens.shape[0] == len(generation.lengths) == count
    return rows
