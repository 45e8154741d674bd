"""The device as the engines use it. Imported when a run needs the device, not before."""

from __future__ import annotations

from anytron_cpu.runtime import CpuRuntime


class AcmeRuntime(CpuRuntime):
    """The host's processor in the place of the device, until you change this class.

    If a package adds your device to torch, import that package above (and name it in
    ``AcmePlatform.device_packages``), and three lines are enough::

        class AcmeRuntime(AcceleratorRuntime):  # of anytron
            device_type = "acme"  # as in torch.device("acme")
            communication_backend = "acmeccl"  # as in torch.distributed.init_process_group

    A device without collectives has ``communication_backend = host_collectives("acme")`` (of anytron): through host
    memory, for the first runs on several ranks.

    Otherwise inherit from ``anytron.DeviceRuntime`` and write its methods: devices, synchronisation,
    memory, random numbers. Their docstrings are the contract
    (``python -m pydoc anytron.DeviceRuntime``), and ``anytron conformance acme --level device`` checks
    them.
    """

    # Delete these two methods together with CpuRuntime.

    def device_count(self) -> int:
        """Return the number of devices that ``AcmePlatform.probe`` reports: ranks share the processor."""
        return 8

    def device_name(self) -> str:
        """Return the device's name."""
        return "the host's processor (anytron-acme names no device yet)"
