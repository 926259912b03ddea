"""Prediction modules that know exactly the target of `eagle_oracle`."""

import torch
from eagle_oracle import VOCAB, WIDTH, circle_turn, final_norm, oracle_target

from specdec import MTPDrafter
from specdec.drafters import MTPConfig, MTPHead
from specdec.drafters.head.layer_config import LayerConfig

TARGET = oracle_target()


@torch.no_grad()
def oracle_drafter(semantics, num_depths, num_draft_tokens):
    """Depths that exchange the token in the state that they are given and turn its position: by one
    step, or, where every depth is given the target's state, by one step more at each depth.
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
    factor, mean = final_norm(TARGET)
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
    return MTPDrafter(head, TARGET, num_draft_tokens)
