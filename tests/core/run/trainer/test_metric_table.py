"""Every number that a run writes is in the table of metrics, and the table has nothing that no run writes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from anytron.base.components import TRAINING_ENGINES, component_names, engine_info
from anytron.base.metric import Metric
from anytron.record.tracking.metric_table import METRICS
from anytron.serving.keys import KEY_VARIABLE
from tests.core.run.trainer.conftest import CALCULATOR
from tests.core.run.trainer.disturbed_runs import lines
from tests.core.run.trainer.test_distillation import teacher
from tests.core.run.trainer.test_supervised import HELD_OUT, new_sft
from tests.core.run.trainer.validations import section

__all__ = ["new_sft", "teacher"]  # fixtures

ROOT = Path(__file__).parents[4]
ELSEWHERE = {metric.name for metric in METRICS if metric.name.startswith("memory/")} - {"memory/training_peak_bytes"}
"""Plain torch on a processor gives no memory back; tests/demo/test_metrics.py has these of real engines."""
ELSEWHERE |= {"throughput/mfu"}
"""A processor has no peak; tests/core/run/trainer/test_throughput.py computes it."""
ELSEWHERE |= {"policy/rollout_mismatch"}
"""Of ``engine.on_policy=bitwise``, which plain torch does not obey; tests/demo/test_on_policy.py reads it."""
FUNCTIONS = """
from anytron.algorithms.contract import TokenLosses

def short(samples):
    return [1.0 / (1 + sample.own_tokens) for sample in samples]


def sevens(samples):
    return [sample.response_text.count("7") / 3 for sample in samples]


def usurping(tokens, algorithm):
    return TokenLosses(-tokens.advantages * tokens.log_probs, {"reward/mean": tokens.entropy, "step": tokens.entropy})
"""
"""All in one text: a file is read once in a process."""


def written(run):
    """The keys of all steps."""
    output = run.train().output_dir
    files = [output / name for name in ("metrics.jsonl", "validation.jsonl")]
    return {key for file in files if file.is_file() for record in lines(file) for key in record}


def unknown(keys, table=METRICS):
    return sorted(key for key in keys if sum(metric.matches(key) for metric in table) != 1)


@pytest.mark.slow
def test_runs_of_all_kinds_write_the_table(new_run, new_sft, new_calculator, teacher, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "a-key-that-is-long-enough")
    ahead = new_run(
        FUNCTIONS,
        rewards=[{"function": "task.py:short"}, {"function": "task.py:sevens"}],
        rollout={"max_staleness": 1},
        algorithm={"advantage": "gae", "kl_coefficient": 0.01, "kl_target": 0.1},
        critic={},
        validation=section(every_steps=1),
        trainer={"total_steps": 2},
    )
    keys = written(ahead)
    played = new_calculator(
        algorithm={"loss": "cispo"},
        rollout={**CALCULATOR["rollout"], "endpoint": {}},
        trainer={"total_steps": 1, "output_dir": str(tmp_path / "played")},
    )
    keys |= written(played)
    taught = new_run(
        FUNCTIONS,
        algorithm={
            "loss": "task.py:usurping",
            "distillation_coefficient": 1.0,
            "dynamic_sampling": True,
            "overlong_buffer": 1,
        },
        teacher={"path": teacher},
        trainer={"total_steps": 1, "output_dir": str(tmp_path / "taught")},
    )
    keys |= written(taught)
    (record,) = lines(tmp_path / "taught" / "metrics.jsonl")
    assert (record["step"], record["policy/entropy"]) == (1, record["loss/metrics/reward/mean"])
    assert record["reward/mean"] <= 1.0 < record["policy/entropy"]
    tuned = {"total_steps": 1, "output_dir": str(tmp_path / "tuned")}
    keys |= written(new_sft(trainer=tuned, validation={"sets": [HELD_OUT]}))

    assert unknown(keys) == []
    assert {metric.name for metric in METRICS if not any(metric.matches(key) for key in keys)} == ELSEWHERE


def test_a_number_that_the_table_does_not_have_is_noticed():
    assert unknown({"reward/mean", "reward/mode"}) == ["reward/mode"]
    assert unknown({"lr"}, [*METRICS, Metric("lr", "", "the same again")]) == ["lr"]


@pytest.mark.parametrize(
    ("name", "key", "is_it"),
    [
        ("reward/NAME/mean", "reward/exact/mean", True),
        ("reward/NAME/mean", "reward/mean", False),
        ("reward/mean", "reward/exact/mean", False),
        ("lr", "critic/lr", False),
        ("validation/NAME/mean@N", "validation/aime/mean@16", True),
        ("validation/NAME/mean@N", "validation/aime/mean@16/low", False),
        ("validation/NAME/mean@N", "validation/aime/mean@n", False),
    ],
)
def test_capitals_stand_for_a_name(name, key, is_it):
    assert Metric(name, "", "").matches(key) is is_it


KEY = re.compile(
    r"(?:reward|validation|response|environment|endpoint|loss|policy|rollout|update|critic|data|time|throughput|memory|moe|mtp|kl)"
    r"/[\w/]*\w"
)
SOURCES = [path for folder in ("core", "backends") for path in (ROOT / folder).rglob("*.py")]


def test_every_name_of_a_metric_in_the_sources_is_in_a_table():
    """Also those that no test of this file makes a run write."""
    engines = [
        engine_info(TRAINING_ENGINES, name, "engine.name") for name in component_names(TRAINING_ENGINES, "anytron")
    ]
    table = [*METRICS, *(metric for engine in engines for metric in engine.metrics)]
    named = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and KEY.fullmatch(node.value)
    }
    assert len(named) > 40
    assert unknown(named - {metric.name for metric in table}, table) == []


def test_every_metric_is_explained():
    assert [metric.name for metric in METRICS if not metric.meaning or metric.meaning.endswith(".")] == []
    assert len({metric.name for metric in METRICS}) == len(METRICS)
