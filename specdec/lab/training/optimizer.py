"""`MuonAdamW`: one optimiser, Muon for hidden matrices and AdamW for everything else."""

import re

import torch
from torch import nn
from torch.optim import AdamW, Muon


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, vocabulary matrices, norms and biases.

    A vocabulary matrix has a row for each id of a configuration (`vocab_size`, `draft_vocab_size`)
    that a module inside has, or is named `lm_head`.

    It has one state and one list of groups, Muon's first, as schedulers, checkpoints and FSDP
    expect of an optimiser.

    Args:
        module: whose trainable parameters are trained.
        lr: of the hidden matrices.
        lr_others: of everything else.
        weight_decay: of the hidden matrices.

    Example:
        >>> optimizer = MuonAdamW(nn.Linear(4, 4), lr=5e-3, lr_others=2e-3)
        >>> optimizer.roles
        'Muon trains weight; AdamW trains bias'

    Reference: Jordan et al., Muon, 2024; updates as large as AdamW's, whatever the matrix's shape:
    Liu et al., arXiv:2502.16982.
    """

    def __init__(
        self, module: nn.Module, *, lr: float, lr_others: float, weight_decay: float = 0.0
    ):
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        configs = [c for m in module.modules() if (c := getattr(m, "config", None)) is not None]
        sizes = {
            getattr(c, name, 0) for c in configs for name in ("vocab_size", "draft_vocab_size")
        }
        hidden, others, names = [], [], ([], [])
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                is_table = id(parameter) in tables or "lm_head" in name or len(parameter) in sizes
                is_hidden = parameter.ndim == 2 and not is_table
                (hidden if is_hidden else others).append(parameter)
                names[0 if is_hidden else 1].append(name)
        self.roles = "; ".join(
            f"{who} trains {_listed(own)}"
            for who, own in zip(("Muon", "AdamW"), names, strict=True)
            if own
        )
        """What trains which parameters, in words."""
        self._parts: list[torch.optim.Optimizer] = []
        if hidden:
            options = {"weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
            self._parts.append(Muon(hidden, lr=lr, **options))
        if others:
            self._parts.append(AdamW(others, lr=lr_others, betas=(0.9, 0.98), weight_decay=0.0))
        if not self._parts:
            raise ValueError("nothing to train: no parameter of the objective requires a gradient")
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        """Updates all parameters; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Anew each time, since `load_state_dict` and FSDP replace both.
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss


def _listed(names: list[str]) -> str:
    """Names whose numbers stand for all of them: `layers.*.weight`."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in names))
