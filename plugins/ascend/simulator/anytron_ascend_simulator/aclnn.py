"""Python functions behind the aclnn entry points of libopapi.so."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from anytron_ascend_simulator import queues
from anytron_ascend_simulator.memory import CPU, from_pointer
from anytron_ascend_simulator.signatures import SIGNATURES

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSED = 161002
"""``ACLNN_ERR_PARAM_INVALID``: the status that an entry point returns when its arguments break the contract."""

CALLS: Counter[str] = Counter()
"""How often each entry point was called, by name."""

_DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int16,
    9: torch.int64,
    11: torch.float64,
    12: torch.bool,
    27: torch.bfloat16,
}
"""torch dtypes by ``aclDataType`` (acl/acl_base_rt.h)."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("dims_count", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("dims", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
        ("storage_elements", ctypes.c_int64),
    )


class _IntArray(ctypes.Structure):
    _fields_ = (("values", ctypes.POINTER(ctypes.c_int64)), ("size", ctypes.c_uint64))


class _Scalar(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 16), ("dtype", ctypes.c_int32))


class _TensorList(ctypes.Structure):
    _fields_ = (("tensors", ctypes.POINTER(ctypes.c_void_p)), ("size", ctypes.c_uint64))


def _tensor(pointer: int | None) -> torch.Tensor | None:
    if not pointer:
        return None
    given = _Tensor.from_address(pointer)
    dtype, rank = _DTYPES[given.dtype], given.dims_count
    shape, strides = list(given.dims[:rank]), list(given.strides[:rank])
    if not given.data or given.storage_elements == 0:
        return torch.empty(shape, dtype=dtype, device=CPU)
    return from_pointer(given.data, given.storage_elements * dtype.itemsize, dtype, given.offset, shape, strides)


def _int_array(pointer: int | None) -> list[int] | None:
    if not pointer:
        return None
    given = _IntArray.from_address(pointer)
    return list(given.values[: given.size])


def _scalar(pointer: int | None) -> Any:
    if not pointer:
        return None
    given = _Scalar.from_address(pointer)
    raw = bytearray(ctypes.string_at(pointer, 16))
    return torch.frombuffer(raw, dtype=_DTYPES[given.dtype], count=1)[0].item()


def _tensor_list(pointer: int | None) -> list[torch.Tensor | None] | None:
    if not pointer:
        return None
    given = _TensorList.from_address(pointer)
    return [_tensor(entry) for entry in given.tensors[: given.size]]


_TYPES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "T": (ctypes.c_void_p, _tensor),
    "L": (ctypes.c_void_p, _tensor_list),
    "A": (ctypes.c_void_p, _int_array),
    "S": (ctypes.c_void_p, _scalar),
    "d": (ctypes.c_double, float),
    "f": (ctypes.c_float, float),
    "i": (ctypes.c_int64, int),
    "t": (ctypes.c_int32, _DTYPES.get),
    "b": (ctypes.c_bool, bool),
    "s": (ctypes.c_char_p, lambda text: text.decode()),
}

_planned: dict[int, Callable[[], None]] = {}
"""Calls whose execution follows, by the number that stands for the executor."""
_numbers = itertools.count(1)
_callbacks: list[Any] = []  # ctypes frees a callback together with its object


def install(opapi: ctypes.CDLL, runtime: ctypes.CDLL) -> None:
    """Bind all entry points of ``opapi`` to Python kernels; ``runtime`` (libascendcl.so) keeps the last error."""
    from anytron_ascend_simulator.kernels import KERNELS

    for name, signature in SIGNATURES.items():
        _bind(opapi, runtime, name, signature, KERNELS[name])


def _bind(opapi: ctypes.CDLL, runtime: ctypes.CDLL, name: str, signature: str, kernel: Callable[..., None]) -> None:
    types = [_TYPES[letter][0] for letter in signature]
    readers = [_TYPES[letter][1] for letter in signature]

    def compute(values: list[Any]) -> None:
        with torch.no_grad():
            kernel(*values)

    def compute_queued(values: list[Any]) -> None:
        try:
            compute(values)
        except Exception as error:
            raise RuntimeError(f"{name}: {error}") from error

    def plan(*arguments: Any) -> int:
        """GetWorkspaceSize: everything happens here, unless work is queued: that is done by the execution."""
        *values, workspace_size, executor = arguments
        CALLS[name] += 1
        number = next(_numbers)
        try:
            given = [read(value) for read, value in zip(readers, values, strict=True)]
            if queues.asynchronous():
                _planned[number] = functools.partial(compute_queued, given)
            else:
                compute(given)
        except Exception as error:  # noqa: BLE001 - an exception cannot cross C; torch_npu raises the text again
            runtime.anytron_simulator_set_message(f"{name}: {error}".encode())
            return REFUSED
        ctypes.c_uint64.from_address(workspace_size).value = 0
        ctypes.c_uint64.from_address(executor).value = number
        return 0

    def execute(_workspace: int | None, _size: int, executor: int, stream: int | None) -> int:
        if queues.asynchronous():
            queues.enqueue(stream, _planned.pop(executor))
        return 0

    pointer = ctypes.c_void_p
    _fill(opapi, f"{name}GetWorkspaceSize", ctypes.CFUNCTYPE(ctypes.c_int, *types, pointer, pointer)(plan))
    _fill(opapi, name, ctypes.CFUNCTYPE(ctypes.c_int, pointer, ctypes.c_uint64, pointer, pointer)(execute))


def _fill(opapi: ctypes.CDLL, name: str, callback: Any) -> None:
    _callbacks.append(callback)
    ctypes.c_void_p.in_dll(opapi, f"slot_{name}").value = ctypes.cast(callback, ctypes.c_void_p).value
