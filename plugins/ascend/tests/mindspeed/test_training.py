"""Real MindSpeed on simulated NPUs computes what Megatron computes on the processor."""

import json
import subprocess
import sys

import pytest

from plugins.ascend.tests.trajectories import assert_same

pytestmark = pytest.mark.mindspeed

ADAPTOR = {"adaptor": "mindspeed"}
TENSOR = {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}
CONTEXT = {"parallel": {"context_parallel_size": 2}}
ROWS = {"engine": {"sequence_format": "bshd"}}


def test_dense_and_sparse_and_latent_attention_in_both_formats(follow_engines, tiny_model, tiny_family):
    engines = [(tiny_model, {}), (tiny_model, ROWS), (tiny_family("qwen3_moe"), {}), (tiny_family("deepseek_v3"), {})]
    expected = follow_engines("cpu", {}, engines)
    for found, wanted in zip(follow_engines("ascend", ADAPTOR, engines), expected, strict=True):
        assert_same(found, wanted)
        facts = found["facts"][0]
        assert facts["attention_mask"]["mode"] == "sparse_mode=2"
        (mindspeed,) = [patch for patch in facts["patches"] if patch["id"] == "ascend.mindspeed"]
        assert mindspeed["outcome"] == "applied"
        assert "MindSpeed 0.16.0, megatron-core 0.16." in mindspeed["detail"]


def test_two_ranks_of_each_kind_in_turn(follow_engines, tiny_model):
    # Context parallelism makes MindSpeed patch process groups, rotary embeddings and attention; an engine
    # without it, built afterwards, must have none of that.
    both = {**CONTEXT, **ROWS}
    engines = [(tiny_model, sections) for sections in (TENSOR, CONTEXT, both, TENSOR)]
    (packed, rows) = follow_engines("cpu", {}, [(tiny_model, {}), (tiny_model, ROWS)])
    for found, wanted in zip(follow_engines("ascend", ADAPTOR, engines), [packed, packed, rows, packed], strict=True):
        assert_same(found, wanted)


def test_five_sampled_steps(tmp_path, with_mindspeed):
    command = [
        sys.executable, "-m", "anytron", "train", "examples/grpo_sort.yaml", "trainer.total_steps=5",
        "data.prompts_per_step=4", "platform.options.adaptor=mindspeed", "trainer.rollout_log_prob_tolerance=0.01",
        f"trainer.output_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    environment = {**with_mindspeed, "ANYTRON_PLATFORM": "ascend"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 5
