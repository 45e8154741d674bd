"""Device memory: limits, owners, and pointers that do not belong."""

import ctypes

import pytest
import torch
from anytron_ascend_simulator import activation


@pytest.fixture(scope="module")
def cann():
    library = activation._loaded[0]
    library.aclrtMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_int]
    library.aclrtFree.argtypes = [ctypes.c_void_p]
    library.aclrtMemcpy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.aclGetRecentErrMsg.restype = ctypes.c_char_p
    library.anytron_simulator_owns.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


def test_tensors_live_in_memory_of_their_device(cann):
    tensor = torch.arange(6, device="npu:0")
    assert cann.anytron_simulator_owns(tensor.data_ptr(), 48) == 1
    assert cann.anytron_simulator_owns(torch.arange(6).data_ptr(), 48) == 0
    assert torch.arange(3, device="npu:1").device == torch.device("npu", 1)


def test_copies_check_both_pointers(cann):
    host = ctypes.create_string_buffer(64)
    device = ctypes.c_void_p()
    assert cann.aclrtMalloc(ctypes.byref(device), 64, 0) == 0
    address = ctypes.addressof(host)
    assert cann.aclrtMemcpy(device, 64, address, 64, HOST_TO_DEVICE) == 0
    assert cann.aclrtMemcpy(address, 64, address, 64, HOST_TO_DEVICE) != 0
    assert b"the target of a copy is not device memory" in cann.aclGetRecentErrMsg()
    assert cann.aclrtMemcpy(address, 64, address, 64, DEVICE_TO_HOST) != 0
    assert b"the source of a copy is not device memory" in cann.aclGetRecentErrMsg()
    assert cann.aclrtMemcpy(device, 64, address, 128, HOST_TO_DEVICE) != 0
    assert b"128 bytes into 64" in cann.aclGetRecentErrMsg()
    assert cann.aclrtFree(device) == 0
    assert cann.aclrtFree(device) != 0
    assert b"freed twice" in cann.aclGetRecentErrMsg()


def test_memory_that_is_not_used_is_given_back():
    torch.npu.empty_cache()
    before = torch.npu.memory_allocated()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
    assert torch.npu.memory_allocated() - before >= 1 << 20
    del tensor
    assert torch.npu.memory_allocated() == before


def test_a_device_has_a_limit(run_program):
    program = """
from anytron_ascend_simulator import activate
activate()
import torch
kept = torch.empty(40 << 20, dtype=torch.uint8, device="npu")
try:
    torch.empty(40 << 20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    print("refused:", "out of memory" in str(error))
print("other device:", torch.empty(40 << 20, dtype=torch.uint8, device="npu:1").numel() == 40 << 20)
del kept
torch.npu.empty_cache()
print("again:", torch.empty(40 << 20, dtype=torch.uint8, device="npu").numel() == 40 << 20)
"""
    output = run_program(program, environment={"ANYTRON_ASCEND_SIMULATOR_MEMORY_MIB": "64"})[0]
    assert "refused: True" in output
    assert "other device: True" in output
    assert "again: True" in output


@pytest.mark.parametrize(
    ("value", "count"), [("0,2", 2), ("3", 1), ("2,0", 1), ("0,0,1", 1), ("0,9", 1), ("", 0), ("x", 0), (None, 4)]
)
def test_the_driver_stops_at_the_first_id_that_is_not_ascending(value, count, run_program):
    program = """
from anytron_ascend_simulator import preload
preload()
import ctypes
number = ctypes.c_uint32()
ctypes.CDLL("libascendcl.so").aclrtGetDeviceCount(ctypes.byref(number))
print("count", number.value)
"""
    variables = {"ANYTRON_ASCEND_SIMULATOR_DEVICES": "4"}
    if value is not None:
        variables["ASCEND_RT_VISIBLE_DEVICES"] = value
    assert f"count {count}" in run_program(program, environment=variables)[0]
