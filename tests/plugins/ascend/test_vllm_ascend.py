"""vLLM on NPUs: what has to be installed with it, and how it is set. Needs neither package, and no NPU."""

from __future__ import annotations

import json
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
    assert options["engine_args"] == {"additional_config": {"weight_nz_mode": 0, "enable_fused_mc2": 0}}
    assert options["enforce_eager"]
    assert hooks.configure(default_run())[0].rollout.options == {}


def refusals(model=None, **rollout):
    """The keys of what is refused, without the versions."""
    from anytron_ascend import AscendPlatform

    run = RunConfig.model_validate({**RUN, "model": model or RUN["model"], "rollout": {"engine": "vllm", **rollout}})
    found = [one for one in AscendPlatform().configure(run) if isinstance(one, Diagnostic)]
    assert all(one.severity == "error" and one.message and one.fix for one in found)
    return [one.key for one in found]


def with_arguments(**arguments):
    return {"options": {"engine_args": arguments}}


ADDITIONAL = "rollout.options.engine_args.additional_config"


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("weight_nz_mode", 1, 0),
        ("enable_fused_mc2", 1, 0),
        ("enable_reduce_sample", True, False),
        ("eplb_config", {"dynamic_eplb": True}, {}),
        ("multistream_overlap_shared_expert", True, False),
        ("layer_sharding", ["o_proj"], None),
    ],
)
def test_a_setting_with_which_numbers_would_be_wrong_is_refused(site, monkeypatch, key, bad, good):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert refusals(**with_arguments(additional_config={key: bad})) == [f"{ADDITIONAL}.{key}"]
    assert refusals(**with_arguments(additional_config={key: good})) == []


def test_each_refused_setting_has_a_case_above(site):
    from anytron_ascend.vllm_ascend import REFUSED

    (cases,) = (one.args[1] for one in test_a_setting_with_which_numbers_would_be_wrong_is_refused.pytestmark)
    assert [one.key for one in REFUSED] == [case[0] for case in cases]


def test_quantised_weights_are_refused(site, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert refusals(quantization="fp8") == ["rollout.quantization"]
    (tmp_path / "config.json").write_text("{}")
    assert refusals({"path": str(tmp_path)}) == []
    (tmp_path / "quant_model_description.json").touch()
    assert refusals({"path": str(tmp_path)}) == ["model.path"]


@pytest.mark.parametrize("nested", [False, True])
def test_sparse_attention_is_refused_because_its_weights_are_freed(site, monkeypatch, tmp_path, nested):
    monkeypatch.setitem(sys.modules, "vllm", None)
    for fields, key in (({"index_topk": 2048}, ["model.path"]), ({"kv_lora_rank": 512}, [])):
        (tmp_path / "config.json").write_text(json.dumps({"text_config": fields} if nested else fields))
        assert refusals({"path": str(tmp_path)}) == key
    (tmp_path / "config.json").write_text("[")
    assert refusals({"path": str(tmp_path)}) == []  # the core reports it


@pytest.mark.parametrize(("device", "key"), [("_310P", ["rollout.engine"]), ("A2", []), (None, [])])
def test_a_vllm_ascend_that_was_built_for_the_310p_is_refused(site, device, key):
    install(site, "0.23.0")
    install_vllm_ascend(site, "0.23.0.post1")
    if device is not None:
        (site / "vllm_ascend").mkdir()
        (site / "vllm_ascend" / "_build_info.py").write_text(f"# generated\n__device_type__ = '{device}'\n")
    assert refusals() == key


@pytest.mark.parametrize(
    ("version", "key"), [("0.23.0", ["rollout.sleep"]), ("0.26.0rc1", ["rollout.sleep"]), ("0.27.0", [])]
)
def test_sleep_with_experts_is_refused_where_waking_up_transposes_them(site, tmp_path, version, key):
    install(site, version)
    install_vllm_ascend(site, version)
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    assert refusals({"path": str(tmp_path)}, sleep=True) == key
    assert refusals({"path": str(tmp_path)}) == []
    (tmp_path / "config.json").write_text("{}")
    assert refusals({"path": str(tmp_path)}, sleep=True) == []
