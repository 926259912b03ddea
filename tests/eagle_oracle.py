"""A target whose next token needs token and position, and heads that know it exactly.

The target is a GPT-2 without effect of its layers: its state is the one-hot embedding of the token
plus a point on a circle for the position. The head is given the *next* token's embedding and *this*
position's feature, so it must turn the circle by one step and exchange the token; its output is
then the target's state at the next position, draft step after draft step. A head that is shown
another feature, token or position than it should be, or that attends to another row, predicts
other tokens.
"""

import math

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from specdec import MTPDrafter
from specdec.drafters import EagleConfig, EagleDrafter, EagleHead, MTPConfig, MTPHead
from specdec.drafters.head.layer_config import LayerConfig

WIDTH, VOCAB = 32, 26
CIRCLE, ONE = slice(26, 30), 30  # channels of the position, and of the constant 1 in heads
STEP = 0.7  # radians per position


def circle_turn() -> Tensor:
    """`[4, 4]`: from the point of a position to that of the next."""
    c, s = math.cos(STEP), math.sin(STEP)
    turn = torch.tensor([[c, -s], [s, c]], dtype=torch.float64)
    return torch.block_diag(turn, turn).float()


@torch.no_grad()
def oracle_target(*, seed: int = 0) -> GPT2LMHeadModel:
    """Its greedy text depends on tokens and positions together."""
    shape = {"n_embd": WIDTH, "n_layer": 3, "n_head": 2, "n_positions": 128, "vocab_size": VOCAB}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **ids, tie_word_embeddings=False)).eval()
    for block in model.transformer.h:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            projection.weight.zero_()
            projection.bias.zero_()
    model.transformer.wte.weight.copy_(torch.eye(VOCAB, WIDTH))
    angle = STEP * torch.arange(128, dtype=torch.float64)
    point = torch.stack([angle.cos(), angle.sin(), -angle.cos(), -angle.sin()], dim=1)
    model.transformer.wpe.weight.zero_()
    model.transformer.wpe.weight[:, CIRCLE] = point.float()
    generator = torch.Generator().manual_seed(seed)
    model.lm_head.weight.normal_(0.0, 1.0, generator=generator)
    return model


def final_norm(model: GPT2LMHeadModel) -> tuple[float, float]:
    """(factor, mean): the last norm does `factor * (state - mean)` to every state alike."""
    mean = 1 / WIDTH
    variance = 3 / WIDTH - mean**2
    return (variance + model.transformer.ln_f.eps) ** -0.5, mean


@torch.no_grad()
def oracle_drafter(model: GPT2LMHeadModel, kind: str, num_draft_tokens: int) -> EagleDrafter:
    """`kind` is `"eagle1"` (all in `fc`) or `"eagle3"` (the token comes through the attention, from
    the row's own slot: scores fall off with the distance that rotary positions see).
    """
    head = _eagle1(model) if kind == "eagle1" else _eagle3(model)
    return EagleDrafter(head.eval(), model, num_draft_tokens)


def _zero(head: EagleHead) -> EagleHead:
    for name, parameter in head.named_parameters():
        if "norm" not in name:
            parameter.zero_()
    return head


def _eagle1(model: GPT2LMHeadModel) -> EagleHead:
    config = EagleConfig(
        *("input", LayerConfig(WIDTH, 8, 2, 2, 16), VOCAB, VOCAB, ("final",), WIDTH),
        fc_bias=True,
        output_norm=False,
        has_lm_head=False,
    )
    head = _zero(EagleHead(config))
    factor, mean = final_norm(model)
    turn, offset = circle_turn(), torch.full((4,), factor * mean)
    head.fc.weight[:VOCAB, :VOCAB] = factor * torch.eye(VOCAB)
    head.fc.weight[CIRCLE, WIDTH + 26 : WIDTH + 30] = turn
    head.fc.bias.fill_(-factor * mean)
    head.fc.bias[CIRCLE] = turn @ offset - offset
    return head


def _eagle3(model: GPT2LMHeadModel) -> EagleHead:
    layer = LayerConfig(WIDTH, 8, 1, 1, WIDTH, attention_bias=True, rms_norm_eps=0.0)
    config = EagleConfig(
        *("attention", layer, VOCAB, VOCAB, (2, 0, 1), WIDTH),
        fc_bias=True,
    )
    head = _zero(EagleHead(config))
    attention, tokens = head.layers[0].self_attn, torch.eye(WIDTH)
    tokens[VOCAB:] = 0
    # Hidden states are [one-hot token, circle, 1]; each of the three features brings a third.
    keep = torch.eye(WIDTH)
    keep[ONE:] = 0
    head.fc.weight.copy_(torch.cat([keep] * 3, dim=1) / 3)
    head.fc.bias[ONE] = 1
    # Queries and keys are one constant vector: a score depends on the distance alone.
    attention.q_proj.bias.fill_(20.0)
    attention.k_proj.bias.fill_(20.0)
    rms_of_embedding, rms = (1 / WIDTH) ** 0.5, (4 / WIDTH) ** 0.5
    change = -tokens
    change[CIRCLE, CIRCLE] = circle_turn() - torch.eye(4)
    attention.v_proj.weight.copy_(torch.cat([rms_of_embedding * tokens, rms * change], dim=1))
    attention.o_proj.weight.copy_(torch.eye(WIDTH))
    factor, mean = final_norm(model)
    vocabulary = model.lm_head.weight
    head.lm_head.weight.copy_(factor * rms * vocabulary)
    head.lm_head.weight[:, ONE] = -factor * mean * rms * vocabulary.sum(dim=1)
    head.lm_head.weight[:, ONE + 1 :] = 0
    return head


@torch.no_grad()
def mtp_oracle(target, semantics, num_depths, num_draft_tokens):
    """Prediction modules that know the target. Each exchanges the token in the state that it is
    given, and turns the position by one step. A depth that is given the target's state turns it by
    one step more than the depth before.
    """
    layer = LayerConfig(WIDTH, 8, 2, 2, 16, rms_norm_eps=0.0)
    config = MTPConfig(
        layer,
        VOCAB,
        num_depths,
        semantics=semantics,
        output_norm=False,
        feedback_norm=False,
        projection_bias=True,
    )
    head = MTPHead(config).eval()
    factor, mean = final_norm(target)
    variance = 3 / WIDTH - mean**2
    rms_embedding, rms_state = (1 / WIDTH) ** 0.5, factor * variance**0.5
    circle, tokens = slice(26, 30), WIDTH + torch.arange(26, 30)
    for depth, module in enumerate(head.layers):
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        turn = circle_turn()
        for _ in range(depth if semantics == "target" else 0):
            turn = circle_turn() @ turn
        weight, offset = module.eh_proj.weight, torch.full((4,), factor * mean)
        weight[:VOCAB, :VOCAB] = factor * rms_embedding * torch.eye(VOCAB)
        weight[circle, tokens[0] : tokens[-1] + 1] = rms_state * turn
        module.eh_proj.bias.fill_(-factor * mean)
        module.eh_proj.bias[circle] = turn @ offset - offset
    return MTPDrafter(head, target, num_draft_tokens)
