"""What is checked of a sampler where a generator is built."""

from specdec.arguments import shown
from specdec.samplers.base import Sampler
from specdec.samplers.noise import Noise
from specdec.torch_names import CHILDREN


def check_sampler(sampler: Sampler) -> None:
    """Raises `TypeError`, with the name of the class, where an attribute of `Sampler` is missing or
    cannot be right.
    """
    if isinstance(sampler, type):
        made = f"{sampler.__name__}()"
        raise TypeError(f"sampler must be an instance, got the class; pass {made}")
    name = type(sampler).__name__
    if not isinstance(sampler, Sampler):
        raise TypeError(f"sampler must be a specdec Sampler, got {shown(sampler)}")
    if CHILDREN not in vars(sampler):
        raise TypeError(f"{name}.__init__ must call super().__init__()")
    flags = "lossless", "uses_draft_probs", "uses_accept_draws", "takes_trees"
    for flag in flags:
        if not isinstance(value := getattr(sampler, flag, None), bool):
            advice = "; set it in the class, True if texts keep the target's distribution"
            advice = advice if flag == "lossless" else ""
            raise TypeError(f"{name}.{flag} must be True or False, got {shown(value)}{advice}")
    if not callable(rule := sampler.draw_draft):
        raise TypeError(f"{name}.draw_draft must be a function, got {shown(rule)}")
    source = sampler.noise_type
    if not (isinstance(source, type) and issubclass(source, Noise)):
        raise TypeError(f"{name}.noise_type must be a subclass of Noise, got {shown(source)}")
