"""How verl's process comes to a stack, or does not, and who says so."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from anytron.base.errors import ConfigError, EngineError, PlatformError
from anytron.base.traits import ParallelSizes
from anytron.device.platform import Feature, Limit
from anytron.device.stack import DeviceStack
from anytron.proof.doctor.subject import Subject
from anytron_cpu import CpuPlatform
from anytron_verl import examination, plugin, process


def test_another_platform_of_verls_is_left_alone(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    plugin.load()
    with pytest.raises(EngineError, match="verl runs without Anytron"):
        process.stack()


def test_a_plugin_that_fails_says_so(monkeypatch, caplog):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("ANYTRON_PLATFORM", "nowhere")
    with caplog.at_level(logging.ERROR), pytest.raises(PlatformError):
        plugin.load()
    assert "verl continues without it" in caplog.text
    assert "nowhere" in caplog.text


REGISTERED = """
import json, os, sys
import verl
seen = {"rollouts": "verl.workers.rollout.replica" in sys.modules}
seen["ray"] = json.loads(os.environ["RAY_OVERRIDE_RESOURCES"])
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl.plugin.platform import get_platform
seen["resource"] = get_platform().ray_resource_name()
seen["replica"] = get_rollout_replica_class("transformers").__name__
seen["adapter"] = get_rollout_class("transformers").__name__
print(json.dumps(seen))
"""


def test_the_rollout_is_registered_once_verl_asks_for_rollouts():
    environment = {**os.environ, "ANYTRON_PLATFORM": "cpu"}
    environment.pop("RAY_OVERRIDE_RESOURCES", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REGISTERED], env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "rollouts": False, "ray": {"GPU": 1024}, "resource": "GPU",
        "replica": "TransformersReplica", "adapter": "ServerAdapter",
    }  # fmt: skip


STOPPED = """
import json, os
os.environ.pop("RAY_OVERRIDE_RESOURCES", None)
import verl  # without its plugins
from anytron_verl import plugin, process
plugin.load()
from verl.plugin.platform import PlatformRegistry, get_platform
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

def told():
    tables = [PlatformRegistry._platforms, _ROLLOUT_REGISTRY, RolloutReplicaRegistry._registry]
    tables += [EngineRegistry._engines[model]["megatron"] for model in ("language_model", "value_model")]
    ours = [sum(any(word in str(one).lower() for word in ("anytron", "transformers")) for one in table.items())
            for table in tables]
    return [*ours, "RAY_OVERRIDE_RESOURCES" in os.environ]

assert get_platform().vendor_name == get_platform().vendor_name == "anytron"
during = told()
process.stop()
after = told()
platform = get_platform()
process.stop()
print(json.dumps([during, after, type(platform).__name__, platform.device_name, EngineRegistry.get_engine_cls(
    "language_model", "megatron").__name__]))
"""


def test_stop_takes_back_all_that_verl_was_told():
    environment = {**os.environ, "ANYTRON_PLATFORM": "cpu", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STOPPED], env=environment, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    during, after, platform, device, engine = json.loads(done.stdout.splitlines()[-1])
    assert during == [1, 1, 1, 1, 1, True]
    assert after == [0, 0, 0, 0, 0, False]
    assert (platform, device, engine) == ("PlatformCUDA", "cuda", "MegatronEngineWithLMHead")


def test_a_plugin_that_fails_half_way_takes_back_what_it_did(monkeypatch):
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES", raising=False)
    undone = []
    stack = SimpleNamespace(platform=SimpleNamespace(ray_resource=None), undo=lambda: undone.append(True))
    monkeypatch.setattr(process, "open_device_stack", lambda: stack)
    monkeypatch.setattr(plugin, "_offer", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        plugin.load()
    assert undone == [True]
    assert "RAY_OVERRIDE_RESOURCES" not in os.environ
    with pytest.raises(EngineError):
        process.stack()


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A distribution with a plugin of verl's that cannot be loaded."""
    metadata = tmp_path / "broken_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nbroken = no_such_module\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("broken")
def test_doctor_names_the_plugins_that_verl_passes_over(monkeypatch):
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    found = {entry.name: entry for entry in examination.examine(Subject(None, ()))}
    assert found["verl.version"].status == "passed"
    assert found["verl.plugin.anytron"].status == "passed"
    assert found["verl.plugin.broken"].status == "failed"
    assert "No module named 'no_such_module'" in found["verl.plugin.broken"].detail
    assert found["verl.platform"].detail == "anytron_verl.device.AnytronDevice"


@pytest.mark.filterwarnings("ignore")  # Megatron is imported without the device stack here
def test_a_way_to_share_sequences_that_no_layout_has_is_refused():
    from anytron_verl.layouts import MicroBatch, current_micro_batch, preprocess_thd_engine

    def never(*_, **__):
        raise AssertionError("verl's own function is not a way out")

    replaced = preprocess_thd_engine(never)
    ids = torch.nested.as_nested_tensor([torch.arange(3)], layout=torch.jagged)

    class Prepared:
        def scope(self):
            return None

    with current_micro_batch(MicroBatch(None, Prepared(), ids.offsets())):  # type: ignore[arg-type]
        for wanted in ({"local_cp_size": 2}, {"cp_layout": "contiguous"}, {"min_local_rows": 8}):
            with pytest.raises(EngineError, match=next(iter(wanted))):
                replaced(ids, **wanted)


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_the_platform_declines_is_refused_as_it_is_built():
    from megatron.core.transformer import TransformerConfig

    from anytron_verl.layouts import Layouts

    class Limited(CpuPlatform):
        def limits(self):
            return [Limit(Feature.ATTENTION_SINKS, "no sinks yet"), Limit(Feature.BSHD, "no rows yet")]

    def build(sequence_format, **options):
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **options)
        stack = DeviceStack(SimpleNamespace(platform=Limited()), None)  # type: ignore[arg-type]
        Layouts(stack, config, sequence_format, ParallelSizes())

    with pytest.raises(ConfigError, match="no attention-sinks: no sinks yet"):
        build("thd", softmax_type="learnable")
    with pytest.raises(ConfigError, match="no bshd: no rows yet"):
        build("bshd")
    with pytest.raises(AttributeError, match="hooks"):  # the platform has no objection: this session has no hooks
        build("thd")


@pytest.mark.filterwarnings("ignore")
def test_calls_from_outside_of_our_engines_go_to_verl():
    from anytron_verl.layouts import preprocess_thd_engine

    replaced = preprocess_thd_engine(lambda *arguments, **named: (arguments, named))
    assert replaced("ids", cp_layout="contiguous") == (
        ("ids",),
        {"pre_process": True, "need_roll": False, "cp_layout": "contiguous"},
    )
