"""The real MindSpeed-LLM on simulated NPUs computes what the engine megatron computes on the processor."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from plugins.ascend.tests.trajectories import ROOT, assert_same

# MindSpeed-LLM searches all loaded modules each time it patches for another engine.
pytestmark = [pytest.mark.mindspeed_llm, pytest.mark.timeout(1200)]

EXAMPLES = ROOT / "examples"
SGD = {"name": "sgd", "lr": 0.1, "clip_grad": 0.0}
CRITIC = {"algorithm": {"advantage": "gae"}, "critic": {"optimizer": SGD}}
ROWS = {"engine": {"sequence_format": "bshd"}}
RECOMPUTED = {"engine": {"recompute": "full"}}
TENSOR = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
STAGES = {"parallel": {"pipeline_model_parallel_size": 2}}
COPIES = {"parallel": {"data_parallel_size": 2}}
EXPERTS = {"parallel": {"data_parallel_size": 2, "expert_model_parallel_size": 2}}


def test_families_in_both_formats(on_the_processor, with_the_engine, tiny_model, tiny_family):
    # A dense model after one with experts, rows after packed sequences: nothing of the engine before is left.
    moe, qwen2, llama = tiny_family("qwen3_moe"), tiny_family("qwen2"), tiny_family("llama")
    engines = [(tiny_model, CRITIC), (moe, {}), (tiny_model, ROWS), (qwen2, {}), (llama, {}), (tiny_model, RECOMPUTED)]
    dense, *others = on_the_processor([(tiny_model, CRITIC), (moe, {}), (qwen2, {}), (llama, {})])
    plain = {name: value for name, value in dense.items() if "critic" not in name and name != "values"}
    expected = [dense, others[0], plain, *others[1:], plain]
    for found, wanted, (_, sections) in zip(with_the_engine(engines), expected, engines, strict=True):
        assert_same(found, wanted)
        facts = found["facts"][0]
        assert facts["attention_mask"]["mode"] == ("sparse_mode=2" if sections == ROWS else "sparse_mode=4")
        (record,) = [patch for patch in facts["patches"] if patch["id"] == "ascend.mindspeed-llm"]
        assert record["outcome"] == "applied"
        assert "MindSpeed 0.12.1, megatron-core 0.12.1" in record["detail"]


def test_two_ranks_of_each_kind(on_the_processor, with_the_engine, tiny_model, tiny_family):
    moe = tiny_family("qwen3_moe")
    engines = [
        (tiny_model, {**TENSOR, **CRITIC}),
        (tiny_model, {**STAGES, **CRITIC}),
        (tiny_model, {**COPIES, **CRITIC}),
        (moe, EXPERTS),
    ]
    dense, sparse = on_the_processor([(tiny_model, CRITIC), (moe, {})])
    for found, wanted in zip(with_the_engine(engines), [dense, dense, dense, sparse], strict=True):
        assert_same(found, wanted)


@pytest.fixture
def train(tmp_path, with_mindspeed_llm):
    """Train an example with overrides; return the run's metrics and its directory."""

    def run(example, steps, *overrides):
        command = [
            sys.executable, "-m", "anytron", "train", str(example), f"trainer.total_steps={steps}",
            "data.prompts_per_step=4", "engine.name=mindspeed_llm",
            "engine.options.model.fused_rotary_embedding=false", f"trainer.output_dir={tmp_path / 'run'}", *overrides,
        ]  # fmt: skip
        environment = {**with_mindspeed_llm, "ANYTRON_PLATFORM": "ascend"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], tmp_path / "run"

    return run


def test_five_sampled_steps(train):
    metrics, run = train("examples/grpo_sort.yaml", 5, "trainer.rollout_log_prob_tolerance=0.0001")
    assert len(metrics) == 5

    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(run / "hf")
    assert all(parameter.isfinite().all() for parameter in trained.parameters())


def test_sampled_steps_of_grouped_experts_in_bfloat16(train, tmp_path):
    example = yaml.safe_load((EXAMPLES / "grpo_moe.yaml").read_text())
    example["engine"] = {"options": {"moe": {"aux_loss_coefficient": 0.001, "fused_permutation": True}}}
    (tmp_path / "example.yaml").write_text(yaml.safe_dump(example))
    shutil.copy(EXAMPLES / "sort_digits.py", tmp_path)
    # Two ranks with half of the experts each, as the example has it; bfloat16 has three digits.
    metrics, _ = train(tmp_path / "example.yaml", 2, "model.dtype=bfloat16", "trainer.rollout_log_prob_tolerance=0.01")
    assert len(metrics) == 2
