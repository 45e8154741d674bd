"""A simulated CANN runtime, so that the real torch_npu runs on a machine without an NPU. A test tool.

Device memory is host memory; ``aten`` operators run on the host's processor; ``aclnn`` operators are
reference kernels that check the documented contract first; HCCL goes through shared memory. What this
models and what it cannot stands in ``README.md``.

Nothing happens when this package is imported. :func:`preload` stands in for the CANN libraries (without
torch), :func:`activate` for the device (imports torch_npu); both say on stderr that the simulator is active.
"""

from anytron_ascend_simulator.activation import SimulatorError, activate, asked_for, is_active, preload

__all__ = ["SimulatorError", "activate", "asked_for", "is_active", "preload"]
