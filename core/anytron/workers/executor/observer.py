"""What a worker process observes of a training rank, whatever the engine: its memory, and where its time goes.

The methods named in :data:`OBSERVED` are called on groups of workers like those of their engine.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.device.runtime import DeviceRuntime

OBSERVED = ("begin_trace", "end_trace", "peak_memory")
"""Methods that a worker answers itself."""


class RankObserver:
    """Observes the calls of one process.

    Args:
        runtime: The device; None = the engine of this process may leave it alone, and it is not touched.
    """

    def __init__(self, runtime: DeviceRuntime | None) -> None:
        self._runtime = runtime
        self._profiler: Any = None

    @contextlib.contextmanager
    def marked(self, method: str) -> Iterator[None]:
        """Make a call of the engine a range of its name: in the device's own profiler, and in a trace."""
        with contextlib.ExitStack() as ranges:
            if self._runtime is not None:
                ranges.enter_context(self._runtime.profiler_range(method))
            if self._profiler is not None:
                import torch

                ranges.enter_context(torch.profiler.record_function(method))
            yield

    def peak_memory(self) -> int:
        """Say how many bytes of the device were allocated at most since this was last asked."""
        assert self._runtime is not None, "only training ranks are asked"
        peak = self._runtime.memory_stats().peak_allocated
        self._runtime.reset_peak_memory_stats()
        return peak

    def begin_trace(self, wanted: bool, stacks: bool, memory: bool) -> None:
        """Begin to record operations of the host, and kernels of the device where torch's profiler knows them.

        Args:
            wanted: Record this rank.
            stacks: With the lines of Python that called them.
            memory: With what each allocates.
        """
        if not wanted:
            return
        import torch

        assert self._runtime is not None, "only training ranks are asked"
        self._runtime.synchronize()
        profiler = torch.profiler.profile(
            activities=torch.profiler.supported_activities(), with_stack=stacks, profile_memory=memory
        )
        profiler.start()
        self._profiler = profiler

    def end_trace(self, path: str, largest: int) -> str | None:
        """Write what was recorded, as a file for Perfetto or ``chrome://tracing``.

        Args:
            path: The file, ``.json.gz``; what is there is replaced.
            largest: Bytes that it may have.

        Returns:
            Why there is no file; None if there is one, or if this rank was not recorded.
        """
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return None
        assert self._runtime is not None, "only training ranks are asked"
        self._runtime.synchronize()
        profiler.stop()
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            profiler.export_chrome_trace(path)
            size = file.stat().st_size
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            return f"{type(error).__name__}: {error}"
        if size > largest:
            file.unlink()
            return f"it had {size:,} bytes, and trainer.profile.max_mib allows {largest:,}"
        return None
