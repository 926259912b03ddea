"""`specdec` with accelerate's FSDP on CPUs, run by the tests of this folder under `accelerate
launch --use_fsdp`: accelerate has FSDP on GPUs only, and trains copies (DDP) on CPUs.
"""

import sys

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from specdec.lab.cli import main


def has_fsdp_on_cpus() -> None:
    """Accelerate takes several CPUs for several devices of a kind that it has FSDP for."""
    own = AcceleratorState.__init__

    def init(self, *args, **kwargs):
        state = PartialState(cpu=True)
        if state.distributed_type == DistributedType.MULTI_CPU:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        own(self, *args, **kwargs)

    AcceleratorState.__init__ = init


if __name__ == "__main__":
    has_fsdp_on_cpus()
    sys.exit(main())
