"""The example of a DeepSeek-V3: latent attention and experts over two pipeline stages, and its prediction modules."""

import json
import shutil

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from anytron_conformance.tiny_models import turn_last_layers_into_prediction_modules
from tests.demo.test_grpo_sort import ROOT, anytron

EXAMPLE = ROOT / "examples" / "grpo_mla.yaml"
FIRST_STEPS = ("trainer.total_steps=150",)
"""For layouts, which agree step by step: a reward of 0.04 becomes one of 0.56."""


def train(config, output, *overrides):
    finished = anytron("train", str(config), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def with_modules(tmp_path):
    """The example with a model on disk that has one prediction module."""
    config = yaml.safe_load(EXAMPLE.read_text())
    fields = config["model"].pop("config")
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**fields | {"num_hidden_layers": fields["num_hidden_layers"] + 1})
    AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    turn_last_layers_into_prediction_modules(tmp_path / "model", 1)
    config["model"]["path"] = "model"
    shutil.copy(ROOT / "examples" / "sort_digits.py", tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_a_few_steps_over_two_stages_train_the_policy_and_its_module(with_modules, tmp_path):
    metrics = train(
        with_modules,
        tmp_path / "run",
        "trainer.total_steps=4",
        "data.prompts_per_step=8",
        "parallel.pipeline_model_parallel_size=2",
        "engine.options.mtp_loss_coefficient=0.1",
    )
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert all(line["rollout/log_prob_abs_diff"] < 1e-5 and line["grad_norm"] > 0 for line in metrics)
    assert metrics[-1]["mtp/loss"] < metrics[0]["mtp/loss"]
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in ("model.layers.2.eh_proj.weight", "model.layers.0.self_attn.kv_b_proj.weight"):
        assert not torch.equal(before[name], after[name]), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("overrides", "reward"),
    [
        ((), 0.7),
        (("parallel.tensor_model_parallel_size=2", "parallel.expert_model_parallel_size=2", *FIRST_STEPS), 0.45),
        (("parallel.pipeline_model_parallel_size=2", *FIRST_STEPS), 0.45),
    ],
    ids=["whole", "tp2-ep2", "pp2"],
)
def test_it_learns_to_sort(overrides, reward, tmp_path):
    metrics = train(EXAMPLE, tmp_path / "run", *overrides)
    assert metrics[0]["reward/mean"] < 0.15
    assert metrics[-1]["reward/mean"] >= reward
