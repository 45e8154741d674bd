"""What ``checkpoint export`` and ``replay`` leave of a run: nothing in it that one rank alone could not have."""

import pytest

from anytron.cli.single_rank import alone
from anytron.config.load import load_config
from anytron.run.preflight.open_run import open_run

PIPELINED = """
model: {config: {model_type: qwen3, num_hidden_layers: 8, vocab_size: 16}, tokenizer: .}
data: {source: gone.py:prompts, options: {seed: 1}, prompts_per_step: 8}
environment: {path: gone.py:Environment}
rewards: [{function: gone.py:reward, options: {strict: true}}]
rollout: {engine: nobody_has_it, options: {eager: true}, samples_per_prompt: 4}
algorithm: {mini_batches: 8}
parallel: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: true}
engine: {options: {virtual_pipeline_model_parallel_size: 2, transformer: {layernorm_epsilon: 1.0e-6}}}
executor: {kind: ray}
checkpoint: {path: elsewhere, keep: 0}
"""


@pytest.fixture
def pipelined(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(PIPELINED)
    return path


def test_one_rank_remains_without_prompts_rewards_and_rollouts(pipelined, tmp_path):
    overrides = [*alone(load_config(pipelined)), "platform.name=cpu", f"trainer.output_dir={tmp_path}"]

    run = open_run(pipelined, overrides)

    assert [str(found) for found in run.diagnostics if found.severity == "error"] == []
    assert run.config.parallel.world_size == 1
    assert run.config.engine.options == {
        "virtual_pipeline_model_parallel_size": 1,
        "transformer": {"layernorm_epsilon": 1e-6},
    }
    assert (run.config.executor.kind, run.config.checkpoint.path) == ("local", None)
    assert run.config.algorithm.mini_batches == 8


def test_an_engine_without_virtual_pipelines_is_not_given_one(pipelined):
    assert not any("virtual" in override for override in alone(load_config(pipelined, ["engine.options={}"])))


@pytest.mark.parametrize("advantage", ["none", "grpo"])
def test_a_teacher_is_not_asked_for_what_it_has_taught_already(pipelined, tmp_path, advantage):
    taught = ["teacher={path: gone}", "algorithm.distillation_coefficient=1.0", f"algorithm.advantage={advantage}"]
    left = alone(load_config(pipelined, taught))

    run = open_run(pipelined, [*taught, *left, "platform.name=cpu", f"trainer.output_dir={tmp_path}"])

    assert [str(found) for found in run.diagnostics if found.severity == "error"] == []
    assert run.config.teacher is None


def test_a_reward_model_is_not_asked(pipelined, tmp_path):
    judged = ["reward_model={path: gone}", "rewards=[{function: reward_model}]"]
    left = alone(load_config(pipelined, judged))

    run = open_run(pipelined, [*judged, *left, "platform.name=cpu", f"trainer.output_dir={tmp_path}"])

    assert [str(found) for found in run.diagnostics if found.severity == "error"] == []
    assert run.config.reward_model is None
