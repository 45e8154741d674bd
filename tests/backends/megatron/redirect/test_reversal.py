"""While it is active everything is redirected; afterwards every object is the one that it was."""

import sys
from types import ModuleType

import pytest
import torch
from torch.utils import _device as device_mode
from transformers.initialization import meta_device_safe_creation_ops

from anytron.base.errors import EngineError
from anytron_megatron.redirect import is_redirected, redirect_torch_cuda, redirection

OWNERS = (
    torch, torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.nvtx, torch.cuda.streams, torch.cuda.nccl,
    torch.Tensor, torch.nn.Module, torch.autocast, torch.utils._device, torch.utils._device.DeviceContext,
    torch.nn.Parameter, torch._C._nn, torch.distributed, torch.distributed.distributed_c10d,
    torch.distributed.DeviceMesh, torch.fft, torch.nested,
)  # fmt: skip


def attributes():
    return {(owner, name): value for owner in OWNERS for name, value in list(vars(owner).items())}


def test_every_touched_attribute_is_restored_by_identity(runtime):
    before = attributes()
    undo = redirect_torch_cuda(runtime)
    during = attributes()
    undo()
    after = attributes()

    changed = {key for key in during if during[key] is not before.get(key)}
    assert len(changed) > 100  # the comparison sees what the redirection does
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []


def test_no_other_owner_is_touched(runtime, monkeypatch):
    touched = []
    monkeypatch.setattr(redirection, "substitute", lambda table: touched.extend(table) or (lambda: None))
    redirect_torch_cuda(runtime)()
    assert len(touched) > 100
    assert {str(entry.owner) for entry in touched if not any(entry.owner is one for one in OWNERS)} == set()


def test_the_processors_own_tensor_types_survive(runtime):
    redirect_torch_cuda(runtime)()
    assert torch.FloatTensor is not torch.cuda.FloatTensor
    assert isinstance(torch.ones(1), torch.FloatTensor)


def test_modules_that_imported_functions_by_name_follow_and_are_freed(runtime, monkeypatch):
    user = ModuleType("imports_by_name")
    user.early = early = torch.cuda.synchronize
    monkeypatch.setitem(sys.modules, "imports_by_name", user)

    undo = redirect_torch_cuda(runtime)
    user.late = torch.cuda.current_device
    user.early()
    undo()

    assert runtime.calls == ["synchronize"]
    assert user.early is early
    assert user.late is torch.cuda.current_device


def test_a_second_redirection_is_refused(redirected):
    with pytest.raises(EngineError, match="already redirected"):
        redirect_torch_cuda(redirected)


def test_it_says_whether_it_is_active(runtime):
    assert not is_redirected()
    undo = redirect_torch_cuda(runtime)
    assert is_redirected()
    undo()
    assert not is_redirected()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a CUDA device")
def test_real_cuda_devices_are_not_touched_and_work_again_afterwards(runtime):
    undo = redirect_torch_cuda(runtime)
    assert torch.ones(2, device="cuda").device.type == "cpu"
    assert not torch.cuda.is_available()
    undo()
    assert torch.ones(2, device="cuda").device.type == "cuda"


def test_a_device_scope_knows_the_factories_that_transformers_had_wrapped_when_torch_first_asked(runtime):
    # torch keeps its set of factories from its first use on, and transformers wraps linspace while it loads a model.
    device_mode._device_constructors.cache_clear()
    with meta_device_safe_creation_ops():
        device_mode._device_constructors()
    with torch.device("meta"):
        assert not torch.linspace(0, 1, 2).is_meta  # without the redirection
    undo = redirect_torch_cuda(runtime)
    try:
        with torch.device("meta"):
            assert torch.linspace(0, 1, 2).is_meta
    finally:
        undo()
    with torch.device("meta"):
        assert torch.linspace(0, 1, 2).is_meta
