"""Heads of every wiring, and a loop that brings features, shared by the tests of EAGLE drafters."""

from dataclasses import fields, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from eagle_reference import draft_outputs
from plain_loop import PlainLoop
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec.drafters import EagleConfig, EagleDrafter, EagleHead
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.head.layer_config import LayerConfig
from specdec.types import Context

VOCAB, WIDTH = 23, 16

LAYER_FLAGS = {field.name for field in fields(LayerConfig)}


def flagged(config: EagleConfig, **flags) -> EagleConfig:
    """The config with some flags changed, its own or those of its layers."""
    of_layer = {name: flags.pop(name) for name in LAYER_FLAGS & flags.keys()}
    return replace(config, layer=replace(config.layer, **of_layer), **flags)


EAGLE3 = EagleConfig(
    fusion="attention",
    layer=LayerConfig(WIDTH, 24, num_heads=4, num_kv_heads=2, head_dim=6),
    vocab_size=VOCAB,
    draft_vocab_size=VOCAB,
    feature_layers=(1, 2, 3),
    target_hidden_size=WIDTH,
)
EAGLE1 = flagged(
    EAGLE3, fusion="input", feature_layers=("final",), output_norm=False, has_lm_head=False
)
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 20.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
WIRINGS = {
    "eagle1": EAGLE1,
    "eagle1, fc bias": flagged(EAGLE1, fc_bias=True),
    "eagle1, two layers": flagged(EAGLE1, num_layers=2),
    "eagle1, own vocabulary head": flagged(EAGLE1, has_lm_head=True, output_norm=True),
    "eagle3": EAGLE3,
    "fc bias": flagged(EAGLE3, fc_bias=True),
    "attention bias": flagged(EAGLE3, attention_bias=True),
    "attention and output bias": flagged(EAGLE3, attention_bias=True, attention_output_bias=True),
    "qk norm": flagged(EAGLE3, has_qk_norm=True),
    "norm before fc": flagged(EAGLE3, norm_before_fc=True),
    "norm per feature": flagged(EAGLE3, fc_norm=True),
    "norm before residual": flagged(EAGLE3, norm_before_residual=True),
    "no output norm": flagged(EAGLE3, output_norm=False),
    "feedback norm": flagged(EAGLE3, feedback_norm=True),
    "feedback norm only": flagged(EAGLE3, output_norm=False, feedback_norm=True),
    "three layers": flagged(EAGLE3, num_layers=3, has_qk_norm=True),
    "five features": flagged(EAGLE3, feature_layers=(0, 1, 3, 5, "final")),
    "one feature": flagged(EAGLE3, feature_layers=(2,)),
    "no fc": flagged(EAGLE3, feature_layers=("final",), has_fc=False),
    "wider target": flagged(EAGLE3, target_hidden_size=20, has_embed_tokens=True),
    "own embeddings": flagged(EAGLE3, has_embed_tokens=True),
    "target's vocabulary head": flagged(EAGLE3, has_lm_head=False),
    "logit scale": flagged(EAGLE3, logit_scale=0.3),
    "fewer ids": flagged(EAGLE3, draft_vocab_size=9),
    "sliding window": flagged(EAGLE3, windows=(3, None), num_layers=2),
    "one head": flagged(EAGLE3, num_heads=1, num_kv_heads=1),
    "large eps": flagged(EAGLE3, rms_norm_eps=0.1),
    "rope base": flagged(EAGLE3, rope={"rope_type": "default", "rope_theta": 5.0}),
    "rope partial": flagged(
        EAGLE3,
        rope={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.7},
    ),
    "rope linear": flagged(EAGLE3, rope={"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}),
    "rope llama3": flagged(EAGLE3, rope=_LLAMA3),
}


def random_head(config: EagleConfig, *, seed: int = 0, dtype=torch.float64) -> EagleHead:
    """Weights large enough for every part to show; ids of a small vocabulary in no order."""
    return random_weights(EagleHead, config, seed=seed, dtype=dtype)


def random_weights(head_class, config, *, seed: int = 0, dtype=torch.float64):
    """A head of any family, see `random_head`."""
    generator = torch.Generator().manual_seed(seed)
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size]
    return redrawn(head_class(config, ids).to(dtype).eval(), generator)


@torch.no_grad()
def redrawn(head: nn.Module, generator: torch.Generator) -> nn.Module:
    """The head with every parameter drawn anew."""
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
        scale = {1: 0.3, 3: 1.0}.get(parameter.dim(), parameter.shape[-1] ** -0.5)
        parameter.copy_(noise * scale + is_norm)
    return head


def stand_in(config: EagleConfig, *, dtype=torch.float64) -> PreTrainedModel:
    """A model with the tables that the head shares; nothing else of it is used."""
    sizes = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    shape = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, **sizes)
    torch.manual_seed(1)
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.normal_(0.0, 0.5)
    return model.to(dtype).eval()


def random_drafter(name: str, num_draft_tokens: int = 3, **options) -> EagleDrafter:
    """A random head of a wiring behind a stand-in."""
    config = WIRINGS[name]
    return EagleDrafter(random_head(config), stand_in(config), num_draft_tokens, **options)


def features_for(config: EagleConfig, rows: int, length: int, seed: int) -> Tensor:
    """Random features `[B, T, F]`."""
    generator = torch.Generator().manual_seed(seed)
    shape = rows, length, config.feature_width
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tables_of(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Embeddings and vocabulary head."""
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def head_for(
    model: PreTrainedModel,
    *,
    kind: str = "attention",
    seed: int = 0,
    **flags,
) -> EagleHead:
    """A random head for a model, in float32."""
    text = model.config.get_text_config()
    sizes = {
        "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size,
        "vocab_size": text.vocab_size,
        "draft_vocab_size": text.vocab_size,
    }
    layers = (0, 1, 2) if kind == "attention" else ("final",)
    base = EAGLE3 if kind == "attention" else EAGLE1
    config = flagged(base, **({"feature_layers": layers} | sizes | flags))
    return random_head(config, seed=seed, dtype=torch.float32)


@torch.no_grad()
def informed(model: PreTrainedModel, head: EagleHead, *, seed: int = 5) -> EagleHead:
    """The same random head with a vocabulary head fitted (ridge regression) to the target's logits
    over random texts: right often enough, and wrong often enough.
    """
    config, text = head.config, model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, text.vocab_size, (256, 24), generator=generator)
    features, logits = features_and_logits(model, ids, config.feature_layers)
    drafter = EagleDrafter(head, model, 1)
    angles = config.layer.rotary_table(23, dtype=head.dtype)[None, None]
    hidden = head.fuse(features[:, :-1])
    out = head(drafter.embed(ids[:, 1:]), hidden, angles, attend_causally)
    x = (head.norm(out) if config.output_norm else out).flatten(0, 1).double()
    y = logits[:, 1:].flatten(0, 1).double()
    if head.target_ids is not None:
        y = y[:, head.target_ids]
    head.lm_head.weight.copy_(fitted(x, y))
    return head


@torch.no_grad()
def learned(model: PreTrainedModel, head: EagleHead, text: Tensor, count: int = 2) -> EagleHead:
    """The same random wide head with a vocabulary head that is solved for: at every place of a text
    it predicts the tokens that follow, and hardly any of them when it is wired otherwise.
    """
    config, xs, labels = head.config, [], []
    exact = {name: tensor.double() for name, tensor in head.state_dict().items()}
    exact["lm_head.weight"] = torch.eye(config.hidden_size).double()
    tables = [table.double() for table in tables_of(model)]
    for row in text:
        features = features_and_logits(model, row[None], config.feature_layers)[0][0].double()
        for known in range(3, len(row) - count + 1):
            path = row[known : known + count]
            case = row[:known].tolist(), features[: known - 1], path.tolist()
            xs.append(draft_outputs(config, exact, tables, *case)[0])
            labels.append(path)
    y = F.one_hot(torch.cat(labels), config.vocab_size).double()
    head.lm_head.weight.copy_(fitted(torch.cat(xs), y, 1e-7))
    return head


def fitted(x: Tensor, y: Tensor, ridge: float = 1e-3) -> Tensor:
    """The matrix `[outputs, inputs]` that maps inputs to outputs, by ridge regression."""
    ridge = ridge * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(x.T @ x + ridge, x.T @ y).T


@torch.no_grad()
def features_and_logits(
    model: PreTrainedModel, ids: Tensor, layers: tuple, shift: int = 0
) -> tuple[Tensor, Tensor]:
    """HF's own hidden states of a plain forward, side by side, and its logits.

    Args:
        model: whose.
        ids: `[B, T]`.
        layers: hidden states below L, or `"final"`.
        shift: added to each number.
    """
    output = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    picked = [states[-1] if layer == "final" else states[layer + shift] for layer in layers]
    return torch.cat(picked, dim=-1), output.logits


class FeatureLoop(PlainLoop):
    """A `PlainLoop` whose contexts bring features.

    Args:
        table: `[B, T, F]`, the feature of each row's position.
        garbage_feature: fills every place that belongs to no row.
        prompts, num_draft_tokens, others: as `PlainLoop`.
    """

    def __init__(self, prompts, num_draft_tokens, table, *, garbage_feature=torch.nan, **others):
        super().__init__(prompts, num_draft_tokens, **others)
        self.table, self.garbage_feature = table, garbage_feature

    def with_features(self, context: Context) -> Context:
        """The context, and beside its tokens the features of the rows."""
        shape = *context.tokens[:, 1:].shape, self.table.shape[-1]
        features = self.table.new_full(shape, self.garbage_feature)
        for b, (start, count) in enumerate(zip(context.start, context.num_new, strict=True)):
            count = max(int(count), 0)
            features[b, :count] = self.table[b, int(start) : int(start) + count]
        return replace(context, features=features)

    def prefill(self, drafter, state, chunk_size):
        """As `PlainLoop`."""
        shown = SimpleNamespace(
            prefill=lambda context, state: drafter.prefill(self.with_features(context), state)
        )
        super().prefill(shown, state, chunk_size)

    def context(self):
        """As `PlainLoop`."""
        return self.with_features(super().context())

    def context_from_scratch(self):
        """As `PlainLoop`."""
        return self.with_features(super().context_from_scratch())
