"""Responses of several turns from the engine transformers: training repeats the routing that the turns have told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from anytron.config.generation import EnvironmentSection
from anytron.run.rollout.conversations import Conversations
from anytron.run.trainer.experience import assemble, make_samples
from anytron.run.trainer.weight_transfer import load
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.environments.pool import EnvironmentPool
from anytron.workers.engines.rollout_engine import SamplingParams
from anytron_conformance.tiny_models import VOCABULARY, write_tiny_model
from tests.backends.rollout.conftest import engine_for, run_config, write_weights
from tests.core.run.rollout.replicas import Executor, pool_of

ENVIRONMENT = """
from anytron.task.environments import Observation

class Echo:
    '''Says some of the model's tokens back; does not answer those that begin with a token of the last few.'''

    def reset(self, task):
        assert task.prompt_id != "2", "not this one"

    def step(self, turn):
        assert not turn.tokens or turn.tokens[0] < 110, "not this one"
        return Observation(tokens=[7, *turn.tokens[:3]])
"""


class Undecoded:
    """A tokenizer of a test that reads no text."""

    added_tokens_decoder = {}  # noqa: RUF012 - as the attribute of a tokenizer

    def decode(self, tokens, **settings):
        return ""


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tiny_model("qwen3_moe", tmp_path_factory.mktemp("model"), num_experts=8)


@pytest.fixture
def trajectories(directory, tmp_path):
    """Conversations of a mixture of experts with an environment that fails for some of them."""
    engine = engine_for(run_config({"path": str(directory), "dtype": "float32"}, replay_routing=True))
    manifest = write_weights(tmp_path / "policy.safetensors", load_file(directory / "model.safetensors"))
    pool = pool_of(Executor(make=lambda number, order: engine), 1)
    pool.load_weights(partial(load, lambda method, groups: (1, [engine.load_weights(manifest)]), "weights"))
    (tmp_path / "echo.py").write_text(ENVIRONMENT)
    section = EnvironmentSection(path=f"{tmp_path}/echo.py:Echo", max_turns=3)
    sampling = SamplingParams(max_new_tokens=8, end_token_ids=(3, 4, 5, 6), pad_token_id=0)
    prepared = SimpleNamespace(
        tokenizer=Undecoded(),
        sampling=sampling,
        context_length=None,
        vocab_size=VOCABULARY,
        chat_template_kwargs={},
    )
    prompts = [TokenizedPrompt(str(n), "", tuple(range(10 * n, 11 * n + 1)), {}) for n in range(1, 9)]
    with EnvironmentPool(section, tmp_path / "logs", 60) as environments:
        conversations = Conversations(pool, prepared, environments, section)
        return prompts, conversations.finish(conversations.begin(prompts, 4, seed=3))


def test_training_repeats_the_routing_of_all_turns(trajectories, directory, start_engine, policy_loss):
    """With the same weights in float32 the routers of both engines choose alike, if each token gets its own choice."""
    prompts, groups = trajectories
    samples = make_samples(prompts, groups, Undecoded())
    failed = [sample.environment_failure is not None for sample in samples]
    assert 4 < sum(failed) < 16
    assert all(len(sample.environment.turns) == 3 for sample, why in zip(samples, failed, strict=True) if not why)
    batch = assemble(samples, 1.0)
    kept = batch.response_mask & ~torch.tensor(failed).repeat_interleave(batch.lengths)
    shares = kept / kept.sum()
    batch = replace(
        batch,
        response_mask=kept,
        advantages=1.0 * kept,
        reference_log_probs=torch.zeros(batch.num_tokens),
        loss_weights=shares,
        token_shares=shares,
    )
    with start_engine(
        model={"path": str(directory)}, rollout={"replay_routing": True}, engine={"max_tokens_per_micro_batch": 512}
    ) as (workers, updates, _):
        metrics = workers.update(batch, updates, policy_loss)
        moved = workers.update(replace(batch, routing=batch.routing.roll(1, 0)), updates, policy_loss)
    assert metrics["rollout/log_prob_abs_diff"] <= 1e-5
    assert metrics["moe/rerouted_fraction"] == 0.0
    assert moved["moe/rerouted_fraction"] > 0.1
