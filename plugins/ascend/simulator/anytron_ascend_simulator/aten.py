"""Run aten operators of simulated NPU tensors on the host, on the same memory.

torch_npu registers a kernel for every aten operator that it has on the device. Each of them, apart from
those that only move metadata or memory, is replaced by one that runs the CPU operator on host views.
Tensors of two devices in one call are refused as the real device refuses them.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator import queues
from anytron_ascend_simulator.calls import Call
from anytron_ascend_simulator.deferred import DeferredCall

if TYPE_CHECKING:
    from collections.abc import Callable

KEPT = frozenset(
    {
        "empty.memory_format",
        "empty_strided",
        "empty_with_format",
        "empty_like",
        "as_strided",
        "view",
        "_reshape_alias",
        "unfold",
        "alias",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "resize_",
        "is_set_to",
        "_local_scalar_dense",
        "is_pinned",
        "_pin_memory",
        "record_stream",
        "_copy_from",
        "_copy_from_and_resize",
        "_to_copy",
        "to.device",
        "_fused_adamw_",
    }
)
"""Operators whose torch_npu kernel stays: it touches metadata only, copies through the runtime, which checks pointers,
or calls an aclnn kernel of the simulator."""

CALLS: Counter[str] = Counter()
"""How often each operator ran, by name."""

_library: torch.library.Library | None = None


def install() -> int:
    """Replace torch_npu's aten kernels; return the number of replaced kernels."""
    global _library  # noqa: PLW0603 - torch drops the kernels together with this object
    _library = torch.library.Library("aten", "IMPL")
    count = 0
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        operator = _operator(name)
        if operator is not None:
            _library.impl(name.removeprefix("aten::"), _kernel(operator), "PrivateUse1", allow_override=True)
            count += 1
    return count


def _operator(name: str) -> Any:
    """The aten operator to replace, or None."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    if namespace != "aten" or rest in KEPT:
        return None
    operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
    # Views (a result that shares memory and is not written) are metadata: torch_npu's own are right.
    results = () if operator is None else operator._schema.returns
    return None if any(result.alias_info and not result.alias_info.is_write for result in results) else operator


def _kernel(operator: Any) -> Callable[..., Any]:
    name = str(operator)
    call = DeferredCall if queues.asynchronous() else Call

    def kernel(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        with torch._C._AutoDispatchBelowAutograd():
            return call(operator).run(args, kwargs)

    return kernel
