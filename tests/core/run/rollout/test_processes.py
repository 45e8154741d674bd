"""Replicas as processes: together they generate what one engine alone does, and a loss costs no response."""

from __future__ import annotations

import os
import signal
from functools import partial

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.base.seeds import derive_seed
from anytron.device.loading import open_session
from anytron.run.rollout.pool import RolloutPool
from anytron.run.trainer.weight_transfer import load, send_file
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, SamplingParams
from anytron.workers.executor.local import LocalExecutor
from tests.backends.rollout.conftest import QWEN3, engine_for, run_config, write_weights

PROMPTS = [PromptInputs(tuple(range(1, 2 + length))) for length in (3, 9, 1, 4, 7, 2)]
SAMPLING = SamplingParams(max_new_tokens=8, end_token_ids=(11,), pad_token_id=12)


def tokens_of_one_engine(config, manifest, seed):
    engine = engine_for(config)
    engine.load_weights(manifest)
    asked = [prompt for prompt in PROMPTS for _ in range(4)]
    engine.submit(
        [GenerationRequest(n, each, SAMPLING, derive_seed(seed, "response", n)) for n, each in enumerate(asked)]
    )
    found = {}
    while finished := engine.poll(1.0):
        found |= dict(finished)
    return [found[number].tokens for number in range(24)]


def test_two_processes_generate_what_one_engine_does_though_each_is_killed_once(tmp_path):
    torch.manual_seed(0)
    weights = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN3)).state_dict()
    manifest = write_weights(tmp_path / "weights.safetensors", weights, version=3)
    config = run_config(replicas=2, max_batch_size=8, num_threads=1)
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"output_dir": str(tmp_path / "run")})}
    )
    losses = []
    with LocalExecutor(config, open_session(platform="cpu")) as executor:
        pool = RolloutPool(executor, config.rollout, lambda error, then: losses.append(error))
        pool.load_weights(partial(load, partial(send_file, manifest), "weights"))
        groups = [pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=1))]
        os.kill(pool._replicas[1].group._ranks[0].pid, signal.SIGKILL)
        groups.append(pool.finish(pool.begin(PROMPTS, SAMPLING, 4, seed=2)))
        generation = pool.begin(PROMPTS, SAMPLING, 4, seed=3)
        pool.withdraw_weights()
        os.kill(pool._replicas[0].group._ranks[0].pid, signal.SIGKILL)
        pool.finish_in_flight()
        pool.load_weights(partial(load, partial(send_file, manifest), "weights"))
        groups.append(pool.finish(generation))
        assert len(pool.describe()) == 2

    loss, _ = losses
    assert "Rollout replica 1 rank 0" in loss.what
    assert "killed by SIGKILL" in loss.what
    assert loss.where == str(tmp_path / "run" / "logs" / "rollout-1-0.log")
    for seed, found in zip((1, 2, 3), groups, strict=True):
        tokens = [response.tokens for group in found for response in group]
        assert tokens == tokens_of_one_engine(config, manifest, seed)
        assert len(set(tokens)) > 12
