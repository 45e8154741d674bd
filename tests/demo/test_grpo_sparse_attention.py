"""The example of a DeepSeek-V3 as a DeepSeek-V3.2: packed sequences, divided over two ranks, with frozen indexers."""

import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.device.patches.plan import in_range, installed_version
from anytron.task.data.pretrained import INDEXER
from anytron_megatron.models.release import HAS_SPARSE_ATTENTION
from tests.demo.test_grpo_mla import EXAMPLE, train
from tests.demo.test_grpo_sort import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.mcore,
    pytest.mark.skipif(
        not in_range(installed_version("megatron-core"), HAS_SPARSE_ATTENTION),
        reason="refused with earlier releases",
    ),
]
SPARSE = {
    "model_type": "deepseek_v32",
    "index_head_dim": 32,
    "index_n_heads": 16,
    "index_topk": 4,
    # transformers would embed it as zeros, with which all keys have the same score, and ties have no order.
    "pad_token_id": None,
}
CONTEXT = ("parallel.context_parallel_size=2", "algorithm.importance_correction=measured", "optimizer.weight_decay=0.1")


@pytest.fixture
def sparse(tmp_path):
    """The example with a DeepSeek-V3.2 on disk."""
    config = yaml.safe_load(EXAMPLE.read_text())
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**{**config["model"].pop("config"), **SPARSE})
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    config["model"]["path"] = "model"
    shutil.copy(ROOT / "examples" / "sort_digits.py", tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("more", [(), ("engine.recompute=selective",)], ids=["kept", "recomputed"])
def test_a_few_steps_agree_with_transformers_and_leave_indexers_alone(more, sparse, tmp_path):
    output = tmp_path / "run"
    metrics = train(sparse, output, *CONTEXT, *more, "trainer.total_steps=4", "data.prompts_per_step=8")
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["rollout/log_prob_abs_diff_max"] < 2e-5 and line["grad_norm"] > 0 for line in metrics)
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(output / "hf" / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    unrouted = {name for name in before if name.endswith("e_score_correction_bias")}  # DeepSeek's own rule moves it
    assert same - unrouted == {name for name in before if INDEXER in name}
