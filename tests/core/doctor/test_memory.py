"""The verdict: parts are added up by phase, shared devices are shared, and an unknown device is said to be one."""

import pytest

from anytron.doctor import memory
from anytron.doctor.live import ProbeError
from anytron.doctor.subject import look

EXAMPLE = "examples/grpo_sort.yaml"


class Device:
    """A device of some size, instead of the process that would ask this machine's."""

    def __init__(self, total):
        self.total = total

    def ask(self, probe):
        assert probe == "devices"
        if self.total is None:
            raise ProbeError("The driver is gone.")
        return {"count": 1, "devices": [{"name": "a chip", "total": self.total}], "type": "chip"}


@pytest.fixture
def verdict(monkeypatch, request):
    """The entries for the example on a device of some bytes."""
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")

    def examine(total, *overrides):
        subject = look(request.config.rootpath / EXAMPLE, overrides)
        return {entry.name: entry for entry in memory.examine(subject, Device(total))}

    return examine


def test_the_verdict_depends_on_the_device(verdict):
    plenty = verdict(1 << 40)["memory.total"]
    assert plenty.status == "ok"
    needed = float(plenty.detail.partition("about ")[2].partition(" MiB")[0]) * 2**20
    assert verdict(int(needed * 1.05))["memory.total"].status == "warn"
    tight = verdict(int(needed * 0.95))["memory.total"]
    assert tight.status == "fail"
    assert "engine.recompute=full" in tight.fix
    unknown = verdict(None)["memory.total"]
    assert unknown.status == "skip"
    assert "The driver is gone." in unknown.detail


def test_ranks_on_one_processor_share_its_memory(verdict):
    two = verdict(1 << 40, "parallel.data_parallel_size=2")["memory.total"]
    assert "2 ranks share one device" in two.detail


def test_every_part_says_how_it_was_computed(verdict):
    found = verdict(1 << 40)
    names = {"parameters", "gradients", "optimizer", "activations", "log-probs", "rollout-weights", "rollout-cache"}
    assert {f"memory.{name}" for name in names} < set(found)
    assert not found["memory.parameters"].detail.startswith("about")
    assert found["memory.activations"].detail.startswith("about")


def test_a_rollout_with_devices_of_its_own_is_judged_by_itself(verdict):
    found = verdict(1 << 40, "rollout.placement=separate")
    assert found["memory.rollout"].status == "ok"
    assert "a rollout replica" in found["memory.rollout"].detail
