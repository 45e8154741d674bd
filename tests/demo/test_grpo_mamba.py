"""The sorting task with a Nemotron-3: packed sequences, divided over two ranks; rollouts keep states."""

import shutil

import pytest
import yaml

from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.models.release import HAS_MAMBA
from tests.demo.test_grpo_mla import train
from tests.demo.test_grpo_sort import EXAMPLE, ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mcore,
    pytest.mark.skipif(
        not in_range(installed_version("megatron-core"), HAS_MAMBA), reason="refused with earlier releases"
    ),
]
MAMBA = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*M",
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
}


@pytest.fixture
def hybrid(tmp_path):
    """The example with another model."""
    config = yaml.safe_load(EXAMPLE.read_text())
    config["model"]["config"] |= MAMBA
    shutil.copy(ROOT / "examples" / "sort_digits.py", tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "more",
    [("parallel.context_parallel_size=2",), ("parallel.pipeline_model_parallel_size=2", "engine.recompute=full")],
    ids=["context", "pipeline"],
)
def test_a_few_steps_agree_with_transformers(more, hybrid, tmp_path):
    sections = ("algorithm.importance_correction=measured", "trainer.total_steps=4", "data.prompts_per_step=8")
    metrics = train(hybrid, tmp_path / "run", *sections, *more)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["rollout/log_prob_abs_diff_max"] < 2e-5 and line["grad_norm"] > 0 for line in metrics)
