"""What must be the same about a model before and after anything that specdec does with it."""

import hashlib

from torch import Tensor
from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel) -> dict:
    """Configuration, modes, hooks and every byte of the weights."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(_bytes(tensor))
    modules = list(model.modules())
    return {
        "weights": digest.hexdigest(),
        "training": [module.training for module in modules],
        "hooks": [
            sum(len(hooks) for name, hooks in vars(module).items() if name.endswith("hooks"))
            for module in modules
        ],
        "forwards": [vars(module).get("forward") for module in modules],
        "attention": [
            module.config._attn_implementation
            for module in modules
            if isinstance(module, PreTrainedModel)
        ],
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict(),
    }


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()
