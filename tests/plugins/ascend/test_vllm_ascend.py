"""vLLM on NPUs: what has to be installed with it, and how it is set. Needs neither package, and no NPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from anytron.config.diagnostics import Diagnostic
from anytron.config.schema import RunConfig, default_run
from anytron.device.loading import hooks_of
from tests.core.other_environment import make_environment
from tests.fake_vllm import install

PLUGIN = Path(__file__).parents[3] / "plugins" / "ascend"
RUN = {
    "model": {"path": "unused"},
    "data": {"source": "unused"},
    "rewards": [{"function": "unused"}],
}


def install_vllm_ascend(site, version):
    info = site / f"vllm_ascend-{version}.dist-info"
    info.mkdir()
    needs = ("numpy", "torch==1.2.3", "torch-npu==1.2.3.post4", 'torch==0.1; extra == "old"')
    lines = ["Metadata-Version: 2.1", "Name: vllm-ascend", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {need}" for need in needs), ""]))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages, before all others."""
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(PLUGIN)
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield tmp_path / "site"
    for name in [name for name in sys.modules if name.partition(".")[0] == "anytron_ascend"]:
        del sys.modules[name]


def diagnostics(**rollout):
    from anytron_ascend import AscendPlatform

    found = AscendPlatform().configure(RunConfig.model_validate({**RUN, "rollout": rollout}))
    return [one for one in found if one.key == "rollout.engine"]


def requirements():
    from anytron_ascend import AscendPlatform

    found = {one.package: one for one in AscendPlatform().requirements()}
    del found["torch-npu"]  # the platform's own, and vllm-ascend's where there is one
    assert all(one.optional for one in found.values())
    return {package: one.specifier for package, one in found.items()}


def test_without_vllm_nothing_is_needed(site, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert requirements() == {}


def test_with_vllm_its_twin_of_the_same_minor_version_and_what_that_pins_are_named(site):
    install(site, "0.32.1")
    assert requirements() == {"vllm-ascend": "==0.32.*"}
    install_vllm_ascend(site, "0.32.0rc2")
    assert requirements() == {"vllm-ascend": "==0.32.*", "torch": "==1.2.3"}


@pytest.mark.parametrize(("version", "text"), [(None, "is not installed"), ("0.23.0", "is 0.23.0"), ("0.32.0rc2", "")])
def test_a_run_that_generates_with_vllm_is_refused_without_it(site, version, text):
    install(site, "0.32.1")
    if version is not None:
        install_vllm_ascend(site, version)
    assert diagnostics(engine="transformers") == []
    found = diagnostics(engine="vllm")
    assert (found == []) == (not text)
    for one in found:
        assert f"on NPUs vLLM 0.32.1 needs vllm-ascend==0.32.*, but vllm-ascend {text}" in one.message


def test_the_environment_of_rollout_python_counts(site, tmp_path):
    python = str(make_environment(tmp_path / "venv", anytron=None))
    (there,) = (tmp_path / "venv").glob("lib/python3*/site-packages")
    install(there, "0.32.1")
    install_vllm_ascend(site, "0.32.0")
    assert len(diagnostics(engine="vllm", python=python)) == 1
    install_vllm_ascend(there, "0.32.0")
    assert diagnostics(engine="vllm", python=python) == []


def test_weights_keep_a_layout_that_can_be_replaced(site):
    from anytron_ascend import AscendPlatform

    hooks = hooks_of(AscendPlatform())
    options = hooks.configure(default_run({"rollout": {"engine": "vllm"}}))[0].rollout.options
    assert options["engine_args"] == {"additional_config": {"weight_nz_mode": 0}}
    assert options["enforce_eager"]
    asked = {"engine": "vllm", "options": {"engine_args": {"additional_config": {"weight_nz_mode": 1}}}}
    remarks = AscendPlatform().configure(RunConfig.model_validate({**RUN, "rollout": asked}))
    (refused,) = (one for one in remarks if one.key.endswith("weight_nz_mode") and isinstance(one, Diagnostic))
    assert refused.severity == "error"
    assert hooks.configure(default_run())[0].rollout.options == {}
