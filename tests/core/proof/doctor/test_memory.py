"""The verdict: parts are added up by phase, shared devices are shared, and an unknown device is said to be one."""

import pytest

from anytron.proof.doctor import devices
from anytron.proof.doctor.live import ProbeError
from anytron.proof.doctor.subject import look

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
        return {entry.name: entry for entry in devices.examine_memory(subject, Device(total))}

    return examine


def test_the_verdict_depends_on_the_device(verdict):
    plenty = verdict(1 << 40)["memory.machine"]
    assert plenty.status == "passed"
    needed = float(plenty.detail.partition("about ")[2].partition(" GiB")[0]) * 2**30
    assert verdict(int(needed * 1.05))["memory.machine"].status == "warning"
    tight = verdict(int(needed * 0.95))["memory.machine"]
    assert tight.status == "failed"
    assert "anytron plan" in tight.fix
    unknown = verdict(None)["memory.machine"]
    assert unknown.status == "skipped"
    assert "The driver is gone." in unknown.detail


def test_all_processes_on_one_processor_share_its_memory(verdict):
    two = verdict(1 << 40, "parallel.data_parallel_size=2")["memory.machine"]
    assert "2 training ranks, 1 rollout replica and 1 driver" in two.detail


def test_every_part_says_how_it_was_computed(verdict):
    found = verdict(1 << 40)
    rank = {"parameters", "gradients", "optimizer", "activations", "log-probs", "process"}
    replica = {"rollout-weights", "rollout-cache", "rollout-logits", "process"}
    assert {f"memory.training-rank.{name}" for name in rank} < set(found)
    assert {f"memory.rollout-replica.{name}" for name in replica} < set(found)
    assert not found["memory.training-rank.parameters"].detail.startswith("about")
    assert found["memory.training-rank.activations"].detail.startswith("about")


class Silent(Device):
    """A device whose memory torch cannot tell."""

    def ask(self, probe):
        return {"count": 1, "devices": [{"name": "a chip", "total": None}], "type": "chip"}


def test_memory_that_torch_cannot_tell_is_called_unknown(monkeypatch, request):
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(request.config.rootpath / EXAMPLE, ())
    found = {entry.name: entry for entry in devices.examine_memory(subject, Silent(None))}["memory.machine"]
    assert (found.status, "is not known: torch cannot tell it" in found.detail) == ("skipped", True)
    (shown, *_) = [one for one in devices.examine_devices(subject, Silent(None)) if one.name == "devices.0"]
    assert shown.detail == "a chip, memory unknown to torch (chip)"
