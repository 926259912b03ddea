"""The loop as a drafter over the target's keys and values sees it: both are computed anew, from the
plain texts, for each context.
"""

from dataclasses import replace

import torch
from eagle_heads import FeatureLoop
from plain_loop import PlainLoop

from specdec.targets.text import TargetText

GARBAGE = 1e4


class TargetLoop(PlainLoop):
    """A `PlainLoop` whose contexts bring the target's text, and features where they are wanted.

    Args:
        prompts, num_draft_tokens, others: as `PlainLoop`.
        target: with the features of the drafter.
    """

    garbage_feature = torch.nan

    def __init__(self, prompts, num_draft_tokens, target, **others):
        super().__init__(prompts, num_draft_tokens, **others)
        self.target = target

    def context(self):
        """As `PlainLoop`; slots behind the text hold garbage, another one in each context."""
        context, lengths = super().context(), [len(row) - 1 for row in self.rows]
        cache = self.target.init_cache(len(lengths), self.num_in_use)
        for store in cache.stores:
            store.fill_(GARBAGE if self.garbage == -1 else -GARBAGE)
        texts = [torch.tensor(row) for row in self.rows]
        tokens, lengths = torch.nn.utils.rnn.pad_sequence(texts, True), torch.tensor(lengths)
        self.table = self.target.prefill(cache, tokens, lengths, offset=0)
        text = TargetText(self.target, cache, lengths)
        context = replace(context, target=text)
        return context if self.table is None else FeatureLoop.with_features(self, context)
