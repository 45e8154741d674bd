"""The README's demonstration without a rollout process: the training ranks generate."""

import pytest

from tests.demo.test_grpo_sort import METRICS, STEEPEST, train


@pytest.mark.slow
def test_a_few_steps_exchange_no_weights(tmp_path):
    run = tmp_path / "run"
    overrides = ("parallel.tensor_model_parallel_size=2", "trainer.total_steps=3", "data.prompts_per_step=8")
    _, metrics = train(run, "rollout.engine=megatron", *overrides)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert METRICS - set(line) == {"time/sync_s"}
        assert line["rollout/log_prob_abs_diff"] <= 1e-5
        assert line["grad_norm"] > 0
    logs = {path.name for path in (run / "logs").iterdir()}
    assert {"trainer-0.log", "trainer-1.log"} <= logs
    assert not [name for name in logs if name.startswith("rollout")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overrides", "reward"),
    [((), 0.90), (("parallel.pipeline_model_parallel_size=2", *STEEPEST), 0.45)],
    ids=["whole", "pp2"],
)
def test_it_learns_to_sort(overrides, reward, tmp_path):
    _, metrics = train(tmp_path / "run", "rollout.engine=megatron", *overrides)
    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= reward
    assert max(line["rollout/log_prob_abs_diff"] for line in metrics) <= 1e-5
    assert not [name for line in metrics for name in line if "sync" in name]
