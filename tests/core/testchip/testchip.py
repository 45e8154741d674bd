"""A platform that notes in which order a worker does things."""

import contextlib
import sys

from anytron import Platform, hookimpl
from anytron.base.components import EngineInfo
from anytron.config.diagnostics import Diagnostic
from anytron.device.hooks.types import ConfigEdit
from anytron.device.patches import Installed, Patch
from anytron.device.platform import Availability, Decision, Probe

BROKEN, SLOW, REFUSING, HUGE = (
    EngineInfo(f"testchip_engine:{name}") for name in ("BrokenEngine", "SlowEngine", "RefusingEngine", "HugeEngine")
)
SMALL = EngineInfo("testchip_engine:Engine", reward_model=EngineInfo("testchip_engine:Engine"))
EVENTS = [("imported", "torch" in sys.modules)]


def note_order(context):
    EVENTS.append(("patched", context.role, "testchip_engine" in sys.modules))
    return Installed(lambda: None)


class TestChip(Platform):
    name = "testchip"
    api_version = 1
    accelerator = True
    ray_resource = "CHIP"

    def probe(self):
        return Probe(Availability.USABLE, "the tests brought it", devices=8)

    def runtime(self):
        from anytron_cpu.runtime import CpuRuntime

        class TestChipRuntime(CpuRuntime):
            def device_name(self):
                return "simulated chip"

            @contextlib.contextmanager
            def profiler_range(self, name):
                EVENTS.append(("begin", name))
                yield
                EVENTS.append(("end", name))

        return TestChipRuntime()

    def decisions(self):
        return [Decision("clock", "slow", "the tests are patient")]

    @hookimpl
    def configure(self, config):
        return [
            ConfigEdit("executor.num_threads", 1, "the chip wants no help"),
            Diagnostic("warning", "trainer.seed", "this chip ignores it", "do not rely on it"),
        ]

    @hookimpl
    def runtime_env(self, process):
        return {"TESTCHIP_RANK": f"{process.role}:{process.rank}/{process.world_size}"}

    @hookimpl
    def patch_model(self, phase, context):
        if phase.value != "before_import":
            return []

        return [
            Patch(
                id="testchip.mark",
                owner="testchip",
                target="testchip_engine",
                phase=phase,
                reason="the tests look at the order",
                install="testchip:note_order",
            )
        ]
