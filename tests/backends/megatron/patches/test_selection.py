"""Whose kernels Gated DeltaNet layers have: the platform's, unless flash-linear-attention is installed and fits."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches
from anytron_megatron.patches.catalog.attention import DELTA_NET_KERNELS


class WithTorchCuda(CpuPlatform):
    """Where ``torch.cuda`` is the device, or an adaptor has redirected it by itself."""

    portable_modules = False
    redirects_torch_cuda = False


def replaces_kernels(platform):
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    return DELTA_NET_KERNELS in trainer_patches(Phase.BEFORE_BUILD, context)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))


def test_where_it_is_not_installed():
    assert replaces_kernels(WithTorchCuda())


def test_where_it_is_installed(installed):
    assert not replaces_kernels(WithTorchCuda())


def test_where_torch_cuda_is_another_device(installed):
    assert replaces_kernels(CpuPlatform())


def test_an_empty_module_in_its_place_has_no_kernels(monkeypatch):
    module = ModuleType("fla")
    module.__spec__ = ModuleSpec("fla", None)  # as MindSpeed makes one, mindspeed/patch_utils.py, parse_path
    monkeypatch.setitem(sys.modules, "fla", module)
    assert replaces_kernels(WithTorchCuda())
