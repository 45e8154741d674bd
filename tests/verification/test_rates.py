"""Learning rates by definition, and the short run in which they are compared."""

from __future__ import annotations

import pytest

from anytron.config.running import OptimizerSection
from anytron.config.schema import default_run
from anytron.proof.verification.rates import STEPS, rates_of, shortened


def section(**keys):
    return OptimizerSection(**{"lr": 1.0, "min_lr": 0.2, **keys})


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "linear"}, [1.0, 0.8, 0.6, 0.4]),
        ({"schedule": "constant", "warmup_steps": 1}, [0.0, 0.5, 1.0, 1.0]),
        ({"schedule": "linear", "warmup_steps": 1}, [0.0, 0.5, 1.0, 0.6]),
        ({"schedule": "cosine", "warmup_steps": 1}, [0.0, 0.5, 1.0, 0.6]),
        ({"schedule": "cosine"}, [1.0, 0.2 + 0.4 * (1 + 2**-0.5), 0.6, 0.2 + 0.4 * (1 - 2**-0.5)]),
    ],
)
def test_rates_of_two_steps_with_two_updates(keys, rates):
    assert rates_of(section(**keys), 2, 2) == pytest.approx(rates)


@pytest.mark.parametrize(("warmup", "short"), [(0, 0), (1, 1), (500, 1)])
def test_a_short_run_has_the_same_kind_of_schedule(warmup, short):
    given = {"schedule": "cosine", "lr": 3e-4, "warmup_steps": warmup}
    config = shortened(default_run({"optimizer": given, "algorithm": {"epochs": 2, "mini_batches": 8}}))
    assert config.trainer.total_steps == STEPS
    assert config.optimizer.warmup_steps == short
    assert (config.optimizer.schedule, config.optimizer.lr) == ("cosine", 3e-4)
    assert config.algorithm.epochs * config.algorithm.mini_batches == 2
