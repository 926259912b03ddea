"""Multi-token prediction heads of every wiring, and what they compute over a whole text without a
cache, shared by the tests of MTP drafters.

The oracle is written from the definition (arXiv:2412.19437, section 2.2), one index after the
other: depth d at index i reads token i + d + 1 beside the hidden state of index i.
"""

import torch
from eagle_heads import fitted, flagged, redrawn, stand_in
from eagle_reference import attention, mlp, rms_norm
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters import MTPConfig, MTPDrafter, MTPHead
from specdec.drafters.head.layer_config import LayerConfig
from specdec.lab.training.mtp import MultiTokenPrediction

VOCAB, WIDTH = 23, 16


PLAIN = MTPConfig(
    layer=LayerConfig(WIDTH, 24, num_heads=4, num_kv_heads=2, head_dim=6),
    vocab_size=VOCAB,
    num_layers=3,
)
WIRINGS = {
    "chain": PLAIN,
    "target": flagged(PLAIN, semantics="target"),
    "chain, raw feedback": flagged(PLAIN, feedback_norm=False),
    "target, raw feedback": flagged(PLAIN, semantics="target", feedback_norm=False),
    "hidden first": flagged(PLAIN, hidden_first=True),
    "no norms after layers": flagged(PLAIN, output_norm=False, feedback_norm=False),
    "first embedding zero": flagged(PLAIN, zero_first_embedding=True),
    "centred norms": flagged(PLAIN, centred_norms=True),
    "projection bias": flagged(PLAIN, projection_bias=True),
    "own heads": flagged(PLAIN, has_lm_head=True, lm_head_per_depth=True, has_embed_tokens=True),
    "own head": flagged(PLAIN, has_lm_head=True),
    "before the target's norm": flagged(PLAIN, target_state=1),
    "one depth": flagged(PLAIN, num_layers=1),
    "two depths": flagged(PLAIN, num_layers=2, attention_bias=True),
    "five depths": flagged(PLAIN, num_layers=5, has_qk_norm=True),
}


def random_head(config: MTPConfig, *, seed: int = 0, dtype=torch.float64) -> MTPHead:
    """Weights large enough for every part to show."""
    return randomise(MTPHead(config).to(dtype).eval(), seed)


def randomise(head: MTPHead, seed: int) -> MTPHead:
    """Draws every parameter anew."""
    return redrawn(head, torch.Generator().manual_seed(seed))


def random_drafter(name: str, num_draft_tokens: int = 3, **options) -> MTPDrafter:
    """A random head of a wiring, and a stand-in for its target."""
    config = WIRINGS[name]
    return MTPDrafter(random_head(config), stand_in(config), num_draft_tokens, **options)


class Recomputation:
    """What a head of the library's own decoder layers computes after one text, without a cache.

    Args:
        drafter: whose head.
        sees: as of `attention`.
    """

    def __init__(self, drafter: MTPDrafter, sees=None):
        self.sees = sees
        self.drafter, self.head, self.config = drafter, drafter.head, drafter.config

    @torch.no_grad()
    def logits_after(self, text: list[int], features: Tensor, path: list[int]) -> Tensor:
        """`[K, V]` of the tokens of a path that is drafted after a text of two tokens or more."""
        newest = len(text) - 1  # features are known below it
        text, hidden, logits, out = list(text), features[:newest], [], None
        for step, token in enumerate(path):
            depth = min(step, self.drafter.num_depths - 1)
            if step > depth:  # the last depth, one index further on, reads its own output
                hidden = torch.cat([hidden, self.feedback(depth, out)[-1:]])
            out = self.run(depth, text[depth + 1 :], hidden)
            logits.append(self.logits(depth, out[-1]))
            text.append(token)
            if depth + 1 < self.drafter.num_depths:
                hidden = self.next_hidden(depth, out, features[:newest])
        return torch.stack(logits)

    def next_hidden(self, depth, out, features):
        """What the next depth reads at every index."""
        if self.config.semantics == "target":
            return features
        return self.feedback(depth, out)

    def run(self, depth, tokens, hidden) -> Tensor:
        """Outputs `[n, H]` of one depth at indices 0, 1, ..."""
        config, module = self.config, self.head.layers[depth]
        embeds = self.drafter.embed(torch.tensor(tokens))
        if config.zero_first_embedding:
            embeds = torch.cat([0 * embeds[:1], embeds[1:]])
        pair = [self.norm(module.enorm, embeds), self.norm(module.hnorm, hidden)]
        fused = module.eh_proj(torch.cat(pair[::-1] if config.hidden_first else pair, dim=-1))
        weights = {f"block.{name}": tensor for name, tensor in module.block.state_dict().items()}
        read = rms_norm(config, fused, module.block.input_layernorm.weight)
        case = config, weights, "block.self_attn", read, list(range(len(fused)))
        out = fused + attention(*case, sees=self.sees)
        return out + mlp(config, weights, "block", out)

    def norm(self, module, x):
        return rms_norm(self.config, x, module.weight + self.config.centred_norms)

    def feedback(self, depth, out):
        return self.norm(self.head.layers[depth].norm, out) if self.config.feedback_norm else out

    def logits(self, depth, out):
        config, module = self.config, self.head.layers[depth]
        if config.output_norm:
            out = self.norm(module.norm, out)
        if not config.has_lm_head:
            return self.drafter.borrowed.lm_head(out)
        return (module if config.lm_head_per_depth else self.head).lm_head(out)


def head_for(model: PreTrainedModel, *, seed: int = 0, num_depths: int = 3, **flags) -> MTPHead:
    """A random head for a model, in float32."""
    text = model.config.get_text_config()
    sizes = {"hidden_size": text.hidden_size, "vocab_size": text.vocab_size}
    config = flagged(PLAIN, **(sizes | {"num_layers": num_depths} | flags))
    return random_head(config, seed=seed, dtype=torch.float32)


@torch.no_grad()
def informed(model, *, num_depths=3, seed=5, **flags):
    """A random head whose depths have vocabulary heads that are fitted (ridge regression) to the
    target's logits: right often enough, and wrong often enough.
    """
    head = head_for(model, num_depths=num_depths, has_lm_head=True, lm_head_per_depth=True, **flags)
    drafter = MTPDrafter(head, model, num_depths)
    ids = torch.randint(
        1, model.config.vocab_size, (256, 24), generator=torch.Generator().manual_seed(seed)
    )
    objective = MultiTokenPrediction(drafter, model)
    teacher, features = objective._teacher(ids)
    outputs = []
    handles = [
        depth.lm_head.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
        for depth in head.layers
    ]
    for depth, out in enumerate(objective.unroll(ids, features)):
        drafter.logits(out, depth)
    for handle in handles:
        handle.remove()
    for depth, out in enumerate(outputs):
        x = out.flatten(0, 1).double()
        y = teacher[:, 1 + depth : 1 + depth + out.shape[1]].flatten(0, 1).double()
        head.layers[depth].lm_head.weight.copy_(fitted(x, y))
    return head
