"""What a call that is like an earlier one brings to the device before its steps comes in three
transfers, and none of them makes the host wait.
"""

import sys

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL, make
from drafting import ragged_prompts
from torch.overrides import TorchFunctionMode

from specdec import SpeculativeGenerator
from specdec.samplers import LogitsFilter, Noise

OPTIONS = {"temperature": [0.0, 0.8, 1.3], "top_p": [1.0, 0.9, 0.8], "top_k": [0, 7, 7]}
OPTIONS |= {"min_p": 0.1, "do_sample": True, "seed": [1, 2, 3], "max_new_tokens": 12}
MAKERS = {"tensor", "as_tensor", "from_numpy"}
ON_HOST = {LogitsFilter: "specdec.samplers.logits_filter", Noise: "specdec.samplers.noise"}
"""Made where they are told to be, by default on the host, and in which file."""


class Uploads(TorchFunctionMode):
    """Notes, in specdec's own lines, what on a GPU would be a copy from the host: tensors of the
    host's numbers on a named device, tensors that are moved, and those among indices.
    """

    def __init__(self):
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        caller, name = sys._getframe(1), getattr(func, "__name__", "")
        room = caller.f_globals.get("__name__", "")
        device = (kwargs or {}).get("device")  # of the library's own words, the host is "cpu"
        is_there = name in MAKERS and device is not None and not isinstance(device, str)
        is_there |= name == "__setitem__" and any(isinstance(x, torch.Tensor) for x in args[1:])
        is_there |= name in ("to", "cuda")
        if is_there and room.startswith("specdec") and room not in ON_HOST.values():
            self.places.append(f"{room}:{caller.f_lineno}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("drafter", ["none", "eagle3", "model", "mtp"])
def test_a_warm_call_is_brought_to_the_device_in_two_transfers(drafter, monkeypatch):
    part = None if drafter == "none" else make(drafter, 3)
    generator = SpeculativeGenerator(MODEL, part, graphs=True)
    generator.generate(*ragged_prompts(VOCAB, 5, 3, 9), **OPTIONS)  # 3 rows, and one that fills up
    sent, devices = [], []

    def sending(into, source):
        sent.append(into)

    for room in ("specdec.loop.state", "specdec.graphs.tree"):
        monkeypatch.setattr(f"{room}.copy_from_host", sending)
    for kind in ON_HOST:

        def making(self, *args, plain=kind.__init__, device="cpu", **options):
            devices.append(device)
            plain(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", making)
    with Uploads() as uploads:
        generator.start(torch.tensor([[5], [6], [7]]), **OPTIONS).close()  # nothing is read
    assert [len(into) for into in sent] == [2, 7]  # prompts and lengths; a filter, seeds and ends
    assert len(devices) > 1
    assert {type(device) for device in devices} == {str}  # and not the target's
    assert [place.split(":")[0] for place in uploads.places] == ["specdec.request.prompts"]
