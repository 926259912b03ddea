"""`MuonAdamW`: one optimiser, Muon for hidden matrices and AdamW for everything else."""

import torch
from torch import nn
from torch.optim import AdamW, Muon


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, vocabulary heads, norms and biases.

    It has one state and one list of groups, Muon's first, as schedulers, checkpoints and FSDP
    expect of an optimiser.

    Args:
        module: whose trainable parameters are trained.
        lr: of the hidden matrices.
        lr_others: of everything else.
        weight_decay: of the hidden matrices.

    Example:
        >>> optimizer = MuonAdamW(nn.Linear(4, 4), lr=5e-3, lr_others=2e-3)
        >>> [len(group["params"]) for group in optimizer.param_groups]
        [1, 1]

    Reference: Jordan et al., Muon, 2024; updates as large as AdamW's, whatever the matrix's shape:
    Liu et al., arXiv:2502.16982.
    """

    def __init__(
        self, module: nn.Module, *, lr: float, lr_others: float, weight_decay: float = 0.0
    ):
        tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
        hidden, others = [], []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                is_table = id(parameter) in tables or "lm_head" in name
                (hidden if parameter.ndim == 2 and not is_table else others).append(parameter)
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
