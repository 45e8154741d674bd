"""With company-invariant kernels, generation on the training ranks gives training's log-probs to the bit."""

from __future__ import annotations

import pytest

from anytron.run.trainer.updates import UpdatePlan
from tests.backends.megatron.generation.test_generation import CASES, generated, requests_for, trajectories


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case.model}-{case.layout.name}", marks=[getattr(pytest.mark, one) for one in case.marks]
        )
        for case in CASES
    ],
)
def test_log_probs_are_those_of_training(case, dtype, ranks, tiny_family):
    layout, requests = case.layout, requests_for(**case.sampling)
    workers, config = ranks.engine(
        tiny_family(case.model),
        model={"dtype": dtype},
        parallel=layout.parallel,
        engine={**layout.engine, "on_policy": "bitwise"},
        rollout={"engine": "megatron", "max_batch_size": 12},
    )

    batch, log_probs = trajectories(requests, generated(workers, requests))

    scored = workers.score(batch, UpdatePlan.from_config(config, workers.topology[0]), "policy")
    different = (scored[batch.response_mask] != log_probs).sum().item()
    assert different == 0, (different, len(log_probs), (scored[batch.response_mask] - log_probs).abs().max())
