"""The process group of :func:`anytron.device.host_collectives.host_collectives`. This module imports torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

BACKEND = "gloo_on_host"
"""Name of the backend in ``torch.distributed``."""
WITH_RESULTS = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "_allgather_base", "all_gather_single",
    "all_gather_single_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced", "reduce_scatter",
    "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single", "gather", "scatter", "recv",
    "recv_anysource",
)  # fmt: skip
"""Methods of a process group whose first argument receives the result; a release of torch may lack some of them."""
WITHOUT_RESULTS = ("send",)


def make_process_group(store: Any, rank: int, size: int, timeout: timedelta) -> HostProcessGroup:
    """Make a process group; ``torch.distributed`` calls this function."""
    return HostProcessGroup(store, rank, size, timeout)


class HostProcessGroup(distributed.ProcessGroup):
    """A process group for tensors of any device; gloo does the work, on copies in host memory."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.inner = distributed.ProcessGroup(store, rank, size)
        gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)
        self.inner._register_backend(torch.device("cpu"), distributed.ProcessGroup.BackendType.GLOO, gloo)
        self.inner._set_default_backend(distributed.ProcessGroup.BackendType.GLOO)

    def getBackendName(self) -> str:  # noqa: N802 - a method of torch's class
        """Name of the backend."""
        return BACKEND

    def barrier(self, opts: Any = None) -> HostWork:
        """Start a barrier of all ranks, and return its handle; ``opts.device`` is replaced by the CPU, for gloo."""
        options = distributed.BarrierOptions() if opts is None else opts
        options.device = torch.device("cpu")
        return HostWork(self.inner.barrier(options), [])

    def shutdown(self) -> None:
        """End gloo's connections."""
        self.inner.shutdown()


class HostWork(distributed.Work):
    """The handle of a collective. :meth:`wait` copies the results to the device, on the current stream."""

    def __init__(self, inner: distributed.Work, results: list[tuple[Tensor, Tensor]]) -> None:
        """Keep gloo's handle.

        Args:
            inner: The handle of gloo's collective.
            results: Pairs of the caller's tensor and its copy on the host, which receives the result.
        """
        super().__init__()
        self._inner, self._results, self._lock = inner, results, threading.Lock()
        self._tensors = [tensor for tensor, _ in results]

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for gloo, then copy the results to the device."""
        _ = self._inner.wait() if timeout is None else self._inner.wait(timeout)
        with self._lock:
            while self._results:
                tensor, host = self._results[-1]
                tensor.detach().copy_(host)
                self._results.pop()
        return True

    def is_completed(self) -> bool:
        """Whether gloo is done; if it is, the results are copied to the device before this returns True."""
        return self._inner.is_completed() and self.wait()

    def _source_rank(self) -> int:
        """Rank of the sender, for a receive from any rank."""
        return self._inner._source_rank()

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a future that is done; its value is the list of result tensors."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def _through_host(name: str, *, receives: bool) -> Callable[..., HostWork]:
    """Define a method that calls gloo's method with copies on the host.

    Args:
        name: Name of the method.
        receives: Whether the first argument receives the result.
    """

    def method(self: HostProcessGroup, *args: Any, **kwargs: Any) -> HostWork:
        results: list[tuple[Tensor, Tensor]] = []
        given = [_on_host(value, results if receives and place == 0 else None) for place, value in enumerate(args)]
        return HostWork(getattr(self.inner, name)(*given, **kwargs), results)

    return method


def _on_host(value: Any, results: list[tuple[Tensor, Tensor]] | None) -> Any:
    """Copy tensors, in nested lists too, to the host; append each pair to ``results`` unless that is None."""
    if isinstance(value, (list, tuple)):
        return [_on_host(item, results) for item in value]
    if not isinstance(value, Tensor) or value.device.type == "cpu":
        return value
    host = value.detach().to("cpu").contiguous()
    if results is not None:
        results.append((value, host))
    return host


for _name in (*WITH_RESULTS, *WITHOUT_RESULTS):
    if hasattr(distributed.ProcessGroup, _name):
        setattr(HostProcessGroup, _name, _through_host(_name, receives=_name in WITH_RESULTS))
