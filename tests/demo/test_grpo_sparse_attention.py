"""The example of a DeepSeek-V3 as a DeepSeek-V3.2: packed sequences, divided over two ranks, with frozen indexers."""

import pytest
from safetensors.torch import load_file

from anytron.device.patches.plan import in_range, installed_version
from anytron_megatron.models.loading import INDEXER
from anytron_megatron.models.release import SPARSE_ATTENTION
from tests.demo.test_grpo_mla import EXAMPLE, train

pytestmark = [
    pytest.mark.mcore,
    pytest.mark.skipif(
        not in_range(installed_version("megatron-core"), SPARSE_ATTENTION), reason="refused with earlier releases"
    ),
]
SPARSE = (
    "model.config.model_type=deepseek_v32",
    "model.config.index_head_dim=32",
    "model.config.index_n_heads=16",
    "model.config.index_topk=4",
    "parallel.context_parallel_size=2",
    "algorithm.importance_correction=measured",
    "optimizer.weight_decay=0.1",
)


@pytest.mark.slow
def test_a_few_steps_agree_with_transformers_and_leave_indexers_alone(tmp_path):
    output = tmp_path / "run"
    metrics = train(
        EXAMPLE, output, *SPARSE, "trainer.total_steps=4", "data.prompts_per_step=8", "trainer.save_every=2"
    )
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["rollout/log_prob_abs_diff_max"] < 2e-5 and line["grad_norm"] > 0 for line in metrics)
    weights = load_file(output / "hf" / "model.safetensors")
    assert {name for name in weights if INDEXER in name}
    print(sorted(p.as_posix() for p in output.rglob("*")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_sort(tmp_path):
    metrics = train(EXAMPLE, tmp_path / "run", *SPARSE, "trainer.total_steps=150")
    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= 0.4
    assert max(line["rollout/log_prob_abs_diff_max"] for line in metrics) < 1e-4
