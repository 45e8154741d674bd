"""Replace NCCL by other backends where code names it, and accept the arguments that NCCL accepts."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch.distributed

from anytron_megatron.redirect.substitution import Substitution

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from anytron.device.runtime import DeviceRuntime

SUMS = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "_reduce_scatter_base")
"""Collectives with which Megatron-FSDP multiplies gradients before it adds them (``ReduceOp.PREMUL_SUM``)."""

OF_ONE_TENSOR = (
    "all_gather_into_tensor",
    "all_gather_single",  # the name since torch 2.13
    "_all_gather_base",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "_reduce_scatter_base",
)
"""Collectives whose input or output is one tensor for all ranks."""


def substitutions(runtime: DeviceRuntime) -> Iterator[Substitution]:
    """Replace functions of ``torch.distributed``: collectives that gloo restricts, and those that make process groups.

    Nothing is replaced if torch was built without distributed support.
    """
    if torch.distributed.is_available():
        c10d = torch.distributed.distributed_c10d
        originals = {name: getattr(c10d, name) for name in (*SUMS, *OF_ONE_TENSOR) if hasattr(c10d, name)}
        summing = {name: _premultiplied(function) if name in SUMS else function for name, function in originals.items()}
        replacements = {
            **summing,
            **{name: _of_flat_tensors(function) for name, function in summing.items() if name in OF_ONE_TENSOR},
            "scatter": _contiguous_scatter(torch.distributed.scatter),
            "all_gather": _uneven_all_gather(torch.distributed.all_gather),
            "init_process_group": _of_the_runtime(torch.distributed.init_process_group, runtime),
            "new_group": _of_the_runtime(torch.distributed.new_group, runtime),
        }
        for module in (torch.distributed, c10d):
            for name, replacement in replacements.items():
                if hasattr(module, name):
                    yield Substitution(module, name, replacement)
        mesh = torch.distributed.device_mesh.DeviceMesh
        yield Substitution(mesh, "__init__", _on_the_device(mesh.__init__, runtime))
    yield Substitution(torch.cuda.nccl, "version", lambda: (0, 0, 0))  # none: older than any that a caller demands


def _contiguous_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Send contiguous copies of the chunks.

    Gloo sends a strided chunk in the order of its storage, so that a weight split along its second dimension
    arrives scrambled, without an error. NCCL's wrapper copies such chunks.
    """

    @functools.wraps(original)
    def scatter(tensor: Tensor, scatter_list: list[Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [chunk.contiguous() for chunk in scatter_list]
        return original(tensor, scatter_list, *args, **kwargs)

    return scatter


def _uneven_all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather tensors whose first dimensions differ.

    Gloo refuses them. Megatron's dispatcher needs them where experts are split (``moe/token_dispatcher.py``,
    ``dispatch_postprocess``): each rank has as many tokens as were routed to it.
    """

    @functools.wraps(original)
    def all_gather(tensor_list: list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        lengths = [part.shape[0] for part in tensor_list if part.ndim]
        if len(set(lengths)) <= 1:
            return original(tensor_list, tensor, *args, **kwargs)
        longest = torch.empty(max(lengths), *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        padded = [torch.empty_like(longest) for _ in tensor_list]
        longest[: tensor.shape[0]] = tensor
        work = original(padded, longest, *args, **kwargs)
        if work is not None:
            work.wait()
        for part, whole in zip(tensor_list, padded, strict=True):
            part.copy_(whole[: part.shape[0]])
        return work

    return all_gather


def _of_flat_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Pass both tensors as one-dimensional views, so that only the numbers of their elements matter.

    NCCL accepts any shapes. Gloo refuses a flat output for a matrix, which Megatron's ``gather_split_1d_tensor`` needs,
    and a result without dimensions ends the process (torch 2.13).
    """
    parameters = inspect.signature(original)
    names = tuple(parameters.parameters)[:2]  # output and input, under other names in each function

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        output, given = (call.arguments[name] for name in names)
        if output.is_contiguous():
            call.arguments.update(zip(names, (output.view(-1), given.reshape(-1)), strict=True))
        return original(*call.args, **call.kwargs)

    return collective


def _premultiplied(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compute ``ReduceOp.PREMUL_SUM``, which only NCCL knows: multiply this rank's tensor, and sum.

    As with NCCL, the tensor that is reduced in place is the only one that changes, and autograd does not see it.
    """
    parameters = inspect.signature(original)
    given = tuple(parameters.parameters)[0 if original.__name__ == "all_reduce" else 1]

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        operation = call.arguments.get("op")
        if operation is not None and operation == torch.distributed.ReduceOp.PREMUL_SUM:
            _, factor = operation.__getstate__()
            tensor = call.arguments[given]
            multiplied = (tensor.detach() * factor).to(tensor.dtype)
            if original.__name__ == "all_reduce":
                if torch.distributed.distributed_c10d._rank_not_in_group(call.arguments.get("group")):
                    return original(*call.args, **call.kwargs)  # it warns, and changes nothing
                multiplied = tensor.detach().copy_(multiplied)  # the same memory
            call.arguments |= {given: multiplied, "op": torch.distributed.ReduceOp.SUM}
        return original(*call.args, **call.kwargs)

    return collective


def _of_the_runtime(original: Callable[..., Any], runtime: DeviceRuntime) -> Callable[..., Any]:
    """Wrap a function that makes a process group: replace CUDA's backend by the runtime's."""
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        if isinstance(backend := call.arguments.get("backend"), str):
            call.arguments["backend"] = translated_backend(backend, runtime)
        return original(*call.args, **call.kwargs)

    return make


def _on_the_device(original: Callable[..., Any], runtime: DeviceRuntime) -> Callable[..., Any]:
    """Wrap the constructor of device meshes: a mesh of CUDA devices becomes one of the runtime's.

    FSDP2 takes the device of its parameters from the mesh, and Megatron names CUDA there.
    """
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        call = parameters.bind(*args, **kwargs)
        if call.arguments.get("device_type") == "cuda":
            call.arguments["device_type"] = runtime.device_type
        return original(*call.args, **call.kwargs)

    return make


def translated_backend(backend: str, runtime: DeviceRuntime) -> str:
    """Return the backend of a device that corresponds to ``backend`` on CUDA.

    ``nccl`` becomes the runtime's backend, and ``cuda`` the device's type: ``cpu:gloo,cuda:nccl`` becomes
    ``cpu:gloo,npu:hccl`` on an NPU and ``cpu:gloo`` on a CPU. Other names are unchanged.

    Args:
        backend: Argument of ``torch.distributed.init_process_group``: one name for all devices, or pairs of device
            and name. If two pairs become pairs of one device, the first is used.
        runtime: Runtime of the device.
    """
    of_device: dict[str, str] = {}
    for part in backend.lower().split(","):
        device, colon, name = part.rpartition(":")
        device = runtime.device_type if device == "cuda" else device
        name = runtime.communication_backend if name == "nccl" else name
        of_device.setdefault(device, f"{device}{colon}{name}")
    return ",".join(of_device.values())
