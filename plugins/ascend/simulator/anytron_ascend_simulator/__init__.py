"""A simulated CANN runtime, so that the real torch_npu runs on a machine without an NPU. A test tool.

Device memory is host memory; ``aten`` operators run on the host's CPU; ``aclnn`` operators are
reference kernels that check the documented contract first; HCCL uses shared memory. ``README.md`` describes
what is modelled and what is not.

Nothing happens when this package is imported. :func:`preload` replaces the CANN libraries (without
torch), :func:`activate` the device (imports torch_npu); both say on stderr that the simulator is active.
"""

from anytron_ascend_simulator.activation import activate, preload
from anytron_ascend_simulator.build import SimulatorError

__all__ = ["SimulatorError", "activate", "preload"]
