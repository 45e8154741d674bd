"""Replicas of vLLM share the prompts of a run: neither their number nor what happens to them changes a response."""

from __future__ import annotations

import json

import pytest

from tests.faults.run import Difference, Run
from tests.faults.saboteur import Blow
from tests.needs_vllm import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.slow]

VLLM = ("rollout.engine=vllm", "model.config.head_dim=32", "trainer.max_restarts=10", "executor.heartbeat_timeout_s=20")
SERIES = {  # the saboteur wraps one method of an engine in a run
    "generation": (Blow("rollout.poll", "kill", after=1), Blow("rollout.poll", "stop", after=1)),
    "update": (Blow("rollout.load_weights", "kill", after=1),),
}


def finished(run):
    """Carry out a run to its end."""
    run.directory.mkdir()
    life = run.start()
    try:
        status = run.wait(life)
        assert (status, run.finished, run.leftovers()) == (0, True, []), life.text[-3000:]
    finally:
        run.end()
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return finished(Run(tmp_path_factory.mktemp("undisturbed") / "run", (), VLLM))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("blows", SERIES.values(), ids=SERIES)
def test_replicas_that_are_killed_or_hang_are_replaced_and_no_token_differs(undisturbed, tmp_path, blows):
    struck = finished(Run(tmp_path / "struck", blows, (*VLLM, "rollout.replicas=2")))

    assert len(struck.struck()) == len(blows)
    losses = [json.loads(line) for line in (struck.output / "losses.jsonl").read_text().splitlines()]
    assert len(losses) == len(blows)
    difference = Difference.between(undisturbed, struck)
    assert difference.same_bytes  # of the trained weights: they follow from the tokens
    assert difference.metrics < 1e-5
