"""Algorithms in whole runs: a user's own, a KL penalty in the reward, and a coefficient that follows the divergence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from anytron.base.errors import DataError
from tests.core.run.trainer.disturbed_runs import comparable, lines

GUIDE = Path(__file__).parents[4] / "docs" / "how-to" / "algorithms.md"
SEVENS = """
def sevens(samples):
    return [sample.response_text.count("7") / 3 for sample in samples]
"""
REWARD = {"rewards": [{"function": "task.py:sevens"}]}


@pytest.mark.slow
def test_the_loss_of_the_guide_trains(new_run):
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    code = code.replace("from __future__ import annotations\n", "")
    algorithm = {"loss": "task.py:geometric", "options": {"limit": 1.2}, "mini_batches": 2}
    run = new_run(f"{code}\n{SEVENS}", algorithm=algorithm, trainer={"total_steps": 30}, **REWARD)
    run.train()
    first, *_, last = lines(Path(run.config.trainer.output_dir) / "metrics.jsonl")
    assert first["reward/mean"] < 0.2
    assert last["reward/mean"] > 0.5
    assert 0.5 < last["loss/metrics/mine/weight"] <= 1.2


@pytest.mark.slow
def test_an_advantage_of_a_users_trains_too(new_run):
    code = """
import torch
from anytron.algorithms.advantages import compare
from anytron.algorithms.contract import Advantages

def centred(batch, rewards, algorithm):
    own = compare(rewards, batch.groups, lambda rows: rows - rows.nanmean(1, keepdim=True))
    own *= algorithm.options["scale"]
    return Advantages(torch.repeat_interleave(own, batch.lengths) * batch.response_mask)
"""
    algorithm = {"advantage": "task.py:centred", "options": {"scale": 3.0}}
    run = new_run(f"{code}\n{SEVENS}", algorithm=algorithm, trainer={"total_steps": 30}, **REWARD)
    run.train()
    assert lines(Path(run.config.trainer.output_dir) / "metrics.jsonl")[-1]["reward/mean"] > 0.5


def test_a_loss_that_returns_the_wrong_thing_stops_the_run_and_says_what(new_run):
    code = """
from anytron.algorithms.contract import TokenLosses

def summed(tokens, algorithm):
    return TokenLosses((tokens.advantages * tokens.log_probs).sum())
"""
    with pytest.raises(
        DataError, match=r"(?s)loss returned an invalid value.*algorithm\.loss.*per_token of shape \[\]"
    ):
        new_run(code, algorithm={"loss": "task.py:summed"}).train()


@pytest.mark.parametrize("placement", ["loss", "reward"])
def test_the_coefficient_follows_the_divergence_and_goes_on_in_a_resumed_run(placement, new_run, tmp_path):
    algorithm = {"kl_coefficient": 0.1, "kl_target": 1e-5, "kl_horizon": 640.0, "kl_placement": placement}
    algorithm |= {"kl_estimator": "k2", "mini_batches": 2}

    def run(steps, **sections):
        return new_run(
            SEVENS,
            algorithm=algorithm,
            trainer={"total_steps": steps, **sections.pop("trainer", {})},
            checkpoint={"every_steps": 2},
            **REWARD,
            **sections,
        )

    whole = run(4, trainer={"output_dir": str(tmp_path / "whole")})
    whole.train()
    metrics = lines(tmp_path / "whole" / "metrics.jsonl")
    wanted = 0.1
    for line in metrics:
        assert line["kl/coefficient"] == pytest.approx(wanted, rel=1e-6)
        assert line["policy/kl"] >= 0
        assert (line["loss/kl"] > 0) == (placement == "loss")
        error = min(max(line["policy/kl"] / 1e-5 - 1, -0.2), 0.2)
        wanted *= 1 + error * 64 / 640
    assert len({line["kl/coefficient"] for line in metrics}) == 4
    parts = {"output_dir": str(tmp_path / "parts")}
    run(2, trainer=parts).train()
    run(4, trainer=parts, resume="auto").train()
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
