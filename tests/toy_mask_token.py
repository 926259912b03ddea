"""A toy family of heads: all K draft tokens in one pass, over masks after the last known token.

It is written on the rooms alone: configuration, head, drafter, family and objective, as a user's
own family would be. Run as a program it loads, inspects, drafts and trains such a head in a folder,
and fails if a module of another family has been imported on the way.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from architectures import build
from torch import Tensor, nn

from specdec import SpeculativeGenerator
from specdec.checkpoints import Family, Source, Translation, load, survey_checkpoint
from specdec.checkpoints.export import write_checkpoint
from specdec.checkpoints.layer_ids import check_layers
from specdec.checkpoints.layers import layer_keys, read_layer
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.head.decoder_layer import DecoderLayer
from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.layers import apply_lm_head
from specdec.drafters.head.sharing import check_target
from specdec.drafters.head.window import WindowPlan
from specdec.lab.evaluation import evaluate
from specdec.lab.inspection import alternatives, describe, table, try_readings
from specdec.lab.training import ObjectiveArguments, ObjectiveTrainer, PackedStream
from specdec.lab.training.heads import layer_like, untrained
from specdec.lab.training.losses import HeadObjective, losses_of
from specdec.types import Draft

NUM_DRAFT_TOKENS = 3


@dataclass(frozen=True)
class ToyConfig:
    """A head that shares both tables with its target."""

    layer: LayerConfig
    vocab_size: int
    feature_layers: tuple
    mask_token_id: int
    has_embed_tokens: bool = False
    has_lm_head: bool = False
    num_layers: int = 1

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    target_hidden_size = hidden_size

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size


class ToyHead(nn.Module):
    """Token and feature through `fc`, then one decoder layer; a learned feature for masks."""

    def __init__(self, config: ToyConfig, target_ids: Tensor | None = None):
        super().__init__()
        self.config, width = config, config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config.layer, 0)])
        self.mask_hidden = nn.Parameter(torch.zeros(width))

    @property
    def dtype(self):
        return self.fc.weight.dtype

    @property
    def device(self):
        return self.fc.weight.device

    def forward(self, embeds, features, angles, attend):
        hidden = self.fc(torch.cat([embeds, features.to(embeds.dtype)], dim=-1))
        return self.layers[0](hidden, angles, attend)

    def with_masks(self, tokens, features, count):
        """Tokens and features, and so many masks after them."""
        rows = len(tokens)
        masks = tokens.new_full((rows, count), self.config.mask_token_id)
        hidden = self.mask_hidden.expand(rows, count, -1).to(features.dtype)
        return torch.cat([tokens, masks], dim=1), torch.cat([features, hidden], dim=1)

    def logits(self, out, lm_head):
        return apply_lm_head(lm_head, out)


def detect(folder) -> Source | None:
    if folder.fields.get("toy_mask_token_id") is None:
        return None
    return Source("toys", "toy", "config.json has toy_mask_token_id")


def translate(folder, source, target, options) -> Translation:
    fields = folder.fields
    layer = read_layer(fields)
    vocab_size = fields.integer("vocab_size")
    config = ToyConfig(
        layer,
        vocab_size,
        check_layers("feature_layers", options.get("feature_layers", fields.get("features"))),
        fields.integer("toy_mask_token_id", low=0, high=vocab_size - 1),
    )
    if target is not None:
        check_target(target, layer.hidden_size, vocab_size, what=fields.origin)
    return Translation(config, folder.tensors(), fields)


class ToyDrafter(HeadDrafter):
    """One pass per step."""

    def prefill(self, context, state):
        self._read(context, state, 0)

    def propose(self, context, state, drawing):
        num_draft_tokens = drawing.num_draft_tokens
        if num_draft_tokens == 0:
            return Draft(context.tokens[:, :0])
        rows, out = self._read(context, state, num_draft_tokens - 1)
        count = rows.tokens.shape[1]
        out = torch.cat([rows.last(out[:, :count]), out[:, count:]], dim=1)  # [B, K, H]
        logits = self.logits(out)
        drafting = self.proposal.begin(drawing)
        for i in range(num_draft_tokens):
            drafting.draw(logits[:, i : i + 1])
        return drafting.end(context.num_new.clamp(max=1) * num_draft_tokens)

    def _read(self, context, state, num_masks) -> tuple:
        rows = self.read(context, state)
        tokens, features = self.head.with_masks(rows.tokens, rows.features, num_masks)
        slots = rows.slots_with(num_masks)
        plan = WindowPlan(state.cache, slots, table=state.angles)
        step = plan.open(0)
        return rows, self.head(self.embed(tokens), features, step.angles, step.attend)


TOY = Family(
    name="toy",
    marks="key toy_mask_token_id",
    detect=detect,
    translate=translate,
    drafter=ToyDrafter,
    head=ToyHead,
    options={"feature_layers": ()},
)


class ToyObjective(HeadObjective):
    """The target's distribution at every position; the last tokens of a row are masks."""

    def forward(self, ids: Tensor) -> Tensor:
        head, num_masks = self.drafter.head, self.drafter.num_draft_tokens - 1
        labels, features = self.read(ids, 1, "tokens")
        known = ids[:, 1 : ids.shape[1] - num_masks]
        tokens, features = head.with_masks(known, features[:, : known.shape[1]], num_masks)
        angles = self.angles(tokens.shape[1])
        out = head(self.drafter.embed(tokens), features, angles, attend_causally)
        due = labels.at(1, out.shape[1])
        return losses_of(out, self.drafter.logits, due, self.loss)[0].mean()


def new_head(target) -> ToyHead:
    """An untrained head."""
    config = ToyConfig(layer_like(target), target.config.vocab_size, (2,), 0)
    return untrained(lambda: ToyHead(config), target, seed=3)


def save(head: ToyHead, folder: Path) -> None:
    """Writes a folder of the family's own layout."""
    config = head.config
    keys = layer_keys(config.layer, 1, config.vocab_size)
    del keys["num_hidden_layers"], keys["tie_word_embeddings"]
    keys |= {"toy_mask_token_id": config.mask_token_id, "features": list(config.feature_layers)}
    write_checkpoint(folder, keys, dict(head.state_dict()))


def main(folder: Path) -> None:
    """From an untrained head to a trained one, through files."""
    target = build("llama")
    save(new_head(target), folder / "new")
    survey = survey_checkpoint(folder / "new", target, families=(TOY,))
    checkpoint = survey.load(target)
    print(describe(survey, checkpoint))
    prompts = torch.tensor([[5, 9, 2, 7], [1, 3, 8, 4]])
    readings = alternatives(survey, checkpoint, target)
    print(table(try_readings(readings, ToyDrafter, target, prompts, max_new_tokens=8)))

    drafter = ToyDrafter(checkpoint.build(), target, NUM_DRAFT_TOKENS)
    text = SpeculativeGenerator(target, None).generate(prompts, max_new_tokens=24, do_sample=False)
    generator = SpeculativeGenerator(target, drafter)
    before = evaluate(generator, prompts, max_new_tokens=24)
    sizes = {"max_steps": 150, "tokens_per_step": 48, "row_lengths": ((1.0, 24),)}
    args = ObjectiveArguments(str(folder / "run"), learning_rate=0.03, use_cpu=True, **sizes)
    stream = PackedStream([row.numpy() for row in text.sequences for _ in range(4)], seed=0)
    ObjectiveTrainer(ToyObjective(drafter, target), args, stream).train()
    after = evaluate(generator, prompts, max_new_tokens=24)
    again = generator.generate(prompts, max_new_tokens=24, do_sample=False)
    assert again.sequences.equal(text.sequences)
    assert before.stats.acceptance_length < 1.5 < 2 < after.stats.acceptance_length, (
        before.stats.acceptance_length,
        after.stats.acceptance_length,
    )
    save(drafter.head, folder / "trained")
    loaded = load(folder / "trained", target, NUM_DRAFT_TOKENS, families=(TOY,))
    for name, tensor in drafter.head.state_dict().items():
        assert loaded.head.state_dict()[name].equal(tensor), name


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    others = [name for name in sys.modules if "eagle" in name.lower()]
    assert not others, others
