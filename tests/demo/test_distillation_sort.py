"""The example of distillation, run as a user runs it: after its teacher's."""

import json
import shutil

import pytest

from tests.demo.expected import SLACK, assert_rewarded
from tests.demo.test_grpo_sort import ROOT, anytron


def train(home, name, *overrides):
    """Train an example of a copy of the examples, whose relative paths lead to ``home/runs``."""
    file = home / "examples" / f"{name}.yaml"
    output = home / "runs" / name
    finished = anytron("train", str(file), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def mean(metrics, name):
    return sum(line[name] for line in metrics) / len(metrics)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("home")
    shutil.copytree(ROOT / "examples", path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return path


@pytest.fixture(scope="module")
def teacher(home):
    """A model that sorts."""
    assert_rewarded("grpo_sort", train(home, "grpo_sort", "tracking.plot=false"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("teacher")
@pytest.mark.parametrize(
    ("split", "slack"), [("parallel.data_parallel_size=1", SLACK), ("parallel.tensor_model_parallel_size=2", 0.05)]
)
def test_it_learns_to_sort_from_its_teacher_alone(split, slack, home):
    metrics = train(home, "distillation_sort", split, "trainer.overwrite=true")
    assert max(line["rollout/log_prob_abs_diff"] for line in metrics) < 1e-5
    assert metrics[0]["reward/mean"] < 0.15
    assert_rewarded("distillation_sort", metrics, slack)
    assert mean(metrics[-10:], "policy/teacher_kl") < 0.1 * metrics[0]["policy/teacher_kl"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("teacher")
def test_a_run_that_is_continued_learns_what_it_would_have_learnt(home):
    short = (
        "trainer.save_hf=false",
        "trainer.overwrite=true",
        "data.prompts_per_step=32",
        "optimizer.schedule=constant",
    )
    whole = train(home, "distillation_sort", "trainer.total_steps=4", *short)
    train(home, "distillation_sort", "trainer.total_steps=2", *short)
    again = train(home, "distillation_sort", "trainer.total_steps=4", "resume=auto", *short[:1], *short[2:])
    for one, other in zip(whole, again, strict=True):
        assert one["policy/teacher_kl"] == other["policy/teacher_kl"]
        assert one["grad_norm"] == other["grad_norm"]
