"""MFU and tokens per device from numbers that are computed by hand."""

from __future__ import annotations

import pytest

from anytron.base.components import EngineInfo
from anytron.base.errors import ConfigError
from anytron.config.schema import RunConfig
from anytron.record.tracking.progress import Clock
from anytron.run.trainer import metrics as step_metrics
from anytron.run.trainer.metrics import Throughput
from anytron.workers.engines.estimates import AttentionLayers, ModelFlops

POLICY = ModelFlops(1000.0, (AttentionLayers(10.0),))
CRITIC = ModelFlops(500.0, ())
PEAK = {"per_s": 1e6, "source": "a data sheet"}


def count(config):
    return POLICY, None if config.critic is None else CRITIC


def count_not(config):
    raise ConfigError("Not known.", why="no list of tensors")


def of(monkeypatch, facts, *, flops="count", **sections):
    info = EngineInfo("nothing:Nothing")
    counting = {"count": count, "count_not": count_not, "": None}[flops]
    monkeypatch.setattr(EngineInfo, "load_flops", lambda self: counting)
    monkeypatch.setattr(step_metrics, "engine_info", lambda *_: info)
    values = {
        "model": {"config": {"model_type": "qwen3"}, "tokenizer": "t"},
        "data": {"source": "jsonl"},
        "rewards": [{"function": "exact_match"}],
        "parallel": {"data_parallel_size": len(facts)},
    }
    return Throughput.of(RunConfig.model_validate(values | sections), facts)


def metrics(found, *, updates_policy=True):
    clock = Clock(lambda part: None)
    clock.seconds["update"] = 0.5
    return found.metrics([4, 6], {"throughput/tokens_per_s": 120.0}, clock, updates_policy=updates_policy)


def test_operations_by_time_by_the_peak_of_all_ranks(monkeypatch):
    found = of(monkeypatch, [{"peak_flops": PEAK}] * 2, algorithm={"epochs": 3})
    operations = 3 * (6 * 1000 * 10 + 12 * 10 * (16 + 36) / 2)
    assert metrics(found) == {
        "throughput/tokens_per_s_per_device": 60.0,
        "throughput/mfu": pytest.approx(operations / 0.5 / 2e6),
    }


def test_the_critic_counts_and_in_its_warm_up_it_alone(monkeypatch):
    found = of(monkeypatch, [{"peak_flops": PEAK}], critic={}, algorithm={"advantage": "gae"})
    alone = 6 * 500 * 10 / 0.5 / 1e6
    assert metrics(found, updates_policy=False)["throughput/mfu"] == pytest.approx(alone)
    whole = metrics(found)["throughput/mfu"]
    assert whole == pytest.approx(alone + POLICY.update([4, 6]) / 0.5 / 1e6)


def test_replicas_with_devices_of_their_own_count_as_devices_and_not_for_mfu(monkeypatch):
    rollout = {"placement": "separate", "replicas": 3}
    found = of(monkeypatch, [{"peak_flops": PEAK}], rollout=rollout)
    assert metrics(found)["throughput/tokens_per_s_per_device"] == 30.0
    assert metrics(found)["throughput/mfu"] == pytest.approx(POLICY.update([4, 6]) / 0.5 / 1e6)


@pytest.mark.parametrize(
    ("facts", "flops", "why"),
    [
        ([{"peak_flops": {"per_s": None, "source": "a processor"}}], "count", "a processor"),
        ([{}], "count", "the engine reports no peak"),
        ([{"peak_flops": PEAK}], "", "the engine megatron does not count operations"),
        ([{"peak_flops": PEAK}], "count_not", "Not known; no list of tensors"),
        ([{"peak_flops": PEAK}, {}], "count", "the engine reports no peak"),
    ],
)
def test_without_one_of_the_numbers_there_is_no_mfu_and_a_reason(monkeypatch, facts, flops, why):
    found = of(monkeypatch, facts, flops=flops)
    assert "throughput/mfu" not in metrics(found)
    assert found.why_no_mfu == why
