"""Runs with an endpoint: agents that reach the model by HTTP, and clients that ask while a model is trained."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import pytest

from anytron.base.errors import ConfigError
from anytron.serving.keys import KEY_VARIABLE
from tests.core.run.rollout import toy_agents
from tests.core.run.trainer.disturbed_runs import comparable, lines

KEY = "the-key-of-this-run-1234"
AGENT = {"path": None, "agent": f"{toy_agents.__file__}:solve", "processes": 2, "max_observation_tokens": 1024}


def rounded(metrics):
    """Metrics without those that compare log-probs of rollout and training: an engine's batches have other shapes."""
    return {name: value for name, value in metrics.items() if not name.startswith(("rollout/", "endpoint/"))}


@pytest.mark.some(1)
@pytest.mark.parametrize("ahead", [False, True])
def test_an_agent_is_trained_exactly_like_the_environment_that_does_the_same(new_calculator, tmp_path, ahead):
    rollout = {"stop": ["*"], "samples_per_prompt": 8, "max_new_tokens": 5, **({"max_staleness": 1} if ahead else {})}
    found = []
    for name, environment in (("environment", {"max_observation_tokens": 1024}), ("agent", AGENT)):
        run = new_calculator(
            environment,
            rollout=rollout,
            trainer={"total_steps": 3, "output_dir": str(tmp_path / name), "log_samples": 1000},
        )
        run.train()
        found.append((comparable(tmp_path / name), lines(tmp_path / name / "samples.jsonl")))
    (expected, samples), (metrics, own) = found
    assert any(len(sample["turns"]) == 2 for sample in samples)
    assert own == samples
    turns = [sum(len(sample["turns"]) for sample in samples if sample["step"] == step) for step in (1, 2, 3)]
    if not ahead:  # then turns of the next step are among them
        assert [one["endpoint/answered"] for one in metrics] == turns
    assert {one["endpoint/refused"] for one in metrics} == {0}
    # With weights that are a step old, the loss has the rounded log-probs of the rollout.
    assert [rounded(one) for one in metrics] == [pytest.approx(rounded(one), rel=1e-5, abs=1e-6) for one in expected]


def test_clients_ask_the_policy_while_it_is_trained_and_change_nothing(new_run, undisturbed, tmp_path, monkeypatch):
    expected, samples, _ = undisturbed(6)
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    run = new_run(rollout={"endpoint": {}}, trainer={"total_steps": 6, "output_dir": str(tmp_path / "run")})
    answers, refused, over = [], [], threading.Event()

    def ask():
        while not (notes := [note for note in run.progress.notes if note.startswith("serving")]):
            time.sleep(0.01)
        url = notes[0].split(" at ")[1].split()[0]
        body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 3, "return_token_ids": True}
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            refused.append(client.post("/completions", json=body).status_code)
            client.headers["Authorization"] = f"Bearer {KEY}"
            while not over.is_set():
                try:
                    found = client.post("/completions", json=body)
                except httpx.HTTPError:
                    return
                answers.append((found.status_code, found.json()))

    client = threading.Thread(target=ask)
    client.start()
    try:
        run.train()
    finally:
        over.set()
        client.join()
    assert refused == [401]
    answered = [body["choices"][0] for status, body in answers if status == 200]
    assert {status for status, _ in answers} <= {200, 503}  # the run ends while a request waits
    assert len({version for choice in answered for version in choice["weight_versions"]}) > 1
    assert [rounded(one) for one in comparable(tmp_path / "run")] == [rounded(one) for one in expected]
    assert lines(tmp_path / "run" / "samples.jsonl") == samples


def test_a_run_whose_endpoint_has_no_key_is_refused_before_a_process_starts(new_run, monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    run = new_run(rollout={"endpoint": {}})
    with pytest.raises(ConfigError, match="key_file"):
        run.train()
    assert not run.executor.started


def test_a_port_that_is_taken_is_refused_with_the_key_that_chooses_another(new_run, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run = new_run(rollout={"endpoint": {"port": taken.getsockname()[1]}})
        with pytest.raises(ConfigError, match=r"rollout\.endpoint\.port=0 takes a free one"):
            run.train()
    assert not run.executor.started
