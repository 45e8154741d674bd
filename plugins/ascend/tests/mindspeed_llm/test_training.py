"""The real MindSpeed-LLM on simulated NPUs computes what the engine megatron computes on the processor."""

import json
import subprocess
import sys

import pytest

from plugins.ascend.tests.trajectories import assert_same

# MindSpeed-LLM searches all loaded modules each time it patches for another engine.
pytestmark = [pytest.mark.mindspeed_llm, pytest.mark.timeout(1200)]

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


def test_five_sampled_steps(tmp_path, with_mindspeed_llm):
    command = [
        sys.executable, "-m", "anytron", "train", "examples/grpo_sort.yaml", "trainer.total_steps=5",
        "data.prompts_per_step=4", "platform.options.adaptor=mindspeed_llm", "engine.name=mindspeed_llm",
        "engine.options.model.fused_rotary_embedding=false", "trainer.rollout_log_prob_tolerance=0.01",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    environment = {**with_mindspeed_llm, "ANYTRON_PLATFORM": "ascend"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 5

    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf")
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
