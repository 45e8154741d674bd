"""The device runtime of Ascend NPUs."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, ClassVar

from anytron import AcceleratorRuntime, PlatformError
from anytron_ascend import cann

if TYPE_CHECKING:
    from collections.abc import Iterator


class AscendRuntime(AcceleratorRuntime):
    """The runtime of ``torch.npu`` devices, which importing torch_npu adds to torch.

    Raises:
        PlatformError: torch_npu cannot be imported.
    """

    device_type: ClassVar[str] = "npu"
    communication_backend: ClassVar[str] = "hccl"

    def __init__(self) -> None:
        cann.activate_simulator()
        try:
            importlib.import_module("torch_npu")
        except (ImportError, OSError, RuntimeError) as error:
            raise PlatformError(
                "torch_npu cannot be imported.",
                where="platform ascend",
                why=f"{type(error).__name__}: {error}",
                fix="source the set_env.sh of the CANN toolkit; torch_npu and torch must have the same minor version",
            ) from error
        super().__init__()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether torch_npu's allocator ran out of memory; until 2.6 it raises a RuntimeError with such a message."""
        return super().is_out_of_memory(error) or "NPU out of memory" in str(error)

    @contextlib.contextmanager
    def profiler_range(self, name: str) -> Iterator[None]:
        """Mark an MSTX range on the host, which ``msprof`` shows (``--msproftx=on``)."""
        number = self.module.mstx.range_start(name)
        try:
            yield
        finally:
            self.module.mstx.range_end(number)
