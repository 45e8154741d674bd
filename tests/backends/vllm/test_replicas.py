"""Replicas of vLLM share the prompts of a run: neither their number nor what happens to them changes a response."""

from __future__ import annotations

import json

import pytest

from tests.faults.run import Difference, Run
from tests.faults.saboteur import Blow
from tests.needs_vllm import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

VLLM = ("rollout.engine=vllm", "model.config.head_dim=32", "trainer.max_restarts=10", "executor.heartbeat_timeout_s=20")
BLOWS = (Blow("rollout.poll", "kill", after=1), Blow("rollout.poll", "stop", after=1))


@pytest.mark.timeout(1800)
def test_replicas_that_are_killed_or_hang_in_generation_are_replaced_and_no_token_differs(tmp_path):
    runs = [Run(tmp_path / "one", (), VLLM), Run(tmp_path / "two", BLOWS, (*VLLM, "rollout.replicas=2"))]
    for run in runs:
        run.directory.mkdir()
        life = run.start()
        try:
            status = run.wait(life)
            assert (status, run.finished, run.leftovers()) == (0, True, []), life.text[-3000:]
        finally:
            run.end()
    undisturbed, struck = runs

    assert len(struck.struck()) == len(BLOWS)
    losses = [json.loads(line) for line in (struck.output / "losses.jsonl").read_text().splitlines()]
    assert len(losses) == len(BLOWS)
    difference = Difference.between(undisturbed, struck)
    assert difference.same_bytes  # of the trained weights: they follow from the tokens
    assert difference.metrics < 1e-5
