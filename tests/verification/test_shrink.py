"""``anytron verify --shrink`` as a person runs it: published configurations pass, without weights and tokenizers."""

from __future__ import annotations

import json

import pytest
import yaml

from anytron.task.data.model_files import as_known
from tests.verification.published_configs import PUBLISHED
from tests.verification.test_verify import verify

COMPARED = {
    "advantages",
    "loss",
    "mask-conformance",
    "export-equals-import",
    "saved-model",
    "learning-rates",
    "prompt-order",
    "token-frequencies",
    "long-sequence",
    "gradients-add-up",
    "resumed-equals-continued",
    "hf-logits",
    "hf-log-probs",
    "hf-gradients",
    "optimizer-update",
    "rollout-equals-training",
    "samples-of-a-prompt",
    "rollout-follows-updates",
    "empty-shares",
    "packed-equals-padded",
}
WITH_EXPERTS = {"balance-loss", "router-bias"}
"""Checks of models with experts, as far as their routers have a loss or a bias."""

LAYERS = dict.fromkeys(("gemma-4-12B-it", "gemma-4-26B-A4B-it"), 6)
"""Layers that stay, if not 4: that is the period of their pattern."""

pytestmark = pytest.mark.slow


def publish(name, directory, **changes):
    """Write a published ``config.json``, alone in its directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**PUBLISHED[name], **changes}))
    return directory


def verified(*arguments, example):
    status, out, err = verify(*arguments, "--shrink", "--json", example=example)
    assert status == 0, out + err
    report = json.loads(out)
    return report, {result["name"] for result in report["results"] if result["status"] == "passed"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_passes(name, tmp_path):
    report, passed = verified(example=publish(name, tmp_path / name))
    assert passed - WITH_EXPERTS == COMPARED
    known = as_known(PUBLISHED[name])
    published = known.get("text_config", known)
    assert report["shrunk"]["num_hidden_layers"] == [published["num_hidden_layers"], LAYERS.get(name, 4)]
    assert "proposal" not in report, "its family is proven"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen3-30B-A3B", {"expert_model_parallel_size": 2, "data_parallel_size": 8}),
        ("DeepSeek-V3", {"pipeline_model_parallel_size": 2, "data_parallel_size": 8}),
    ],
)
def test_a_run_keeps_its_layout_and_its_other_models(name, layout, tmp_path):
    """Nothing else of the run is there: neither weights, nor tokenizer, nor data."""
    model = publish(name, tmp_path / "model")
    judge = publish("Qwen3-8B", tmp_path / "judge", num_labels=1)
    run = {
        "model": {"path": str(model), "lora": {}},
        "data": {"source": "parquet", "options": {"path": "nowhere.parquet"}},
        "rewards": [{"function": "reward_model"}],
        "rollout": {"engine": "vllm"},
        "reward_model": {"path": str(judge)},
        "teacher": {"path": str(model)},
        "parallel": layout,
        "algorithm": {"distillation_coefficient": 0.1},
    }
    (tmp_path / "my_run.yaml").write_text(yaml.safe_dump(run))
    here = ["platform.name=cpu", "model.dtype=float32", "rollout.engine=transformers", "parallel.data_parallel_size=1"]
    if "pipeline_model_parallel_size" not in layout:
        here.append("parallel.tensor_model_parallel_size=2")
    _, passed = verified(*here, example=tmp_path / "my_run.yaml")
    others = {"adapters-equal-merged", "teacher-log-probs", "reward-model-scores", "parallel-equals-single"}
    assert passed == COMPARED | others
