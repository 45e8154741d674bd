"""The example of LoRA, run as a user runs it; what it leaves is loaded with PEFT."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from anytron.config.imports import resolve
from anytron.task.data.pretrained import TOKENIZER
from tests.demo.test_grpo_sort import users_environment

EXAMPLES = Path(__file__).parents[2] / "examples"


def anytron(*arguments):
    command = [sys.executable, "-m", "anytron", *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, env=users_environment(), check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def train(example, output, *overrides):
    anytron("train", EXAMPLES / example, f"trainer.output_dir={output}", *overrides)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def random_base(tmp_path_factory):
    """The model of ``grpo_sort.yaml`` before it has learnt anything, with its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("base")
    fields = yaml.safe_load((EXAMPLES / "grpo_sort.yaml").read_text())["model"]["config"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).save_pretrained(
        directory
    )
    resolve(f"{EXAMPLES / 'sort_digits.py'}:tokenizer", TOKENIZER)().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def short_run(random_base, tmp_path_factory):
    """Three steps on two pipeline stages, with a reference model, dropout and two updates per step."""
    output = tmp_path_factory.mktemp("short") / "run"
    metrics = train(
        "grpo_lora.yaml", output, f"model.path={random_base}", "trainer.total_steps=3", "model.lora.dropout=0.1",
        "parallel.pipeline_model_parallel_size=2", "algorithm.kl_coefficient=0.01", "algorithm.mini_batches=2",
    )  # fmt: skip
    return output, metrics


def test_the_rollout_computes_with_the_adapters_of_every_step(short_run):
    _, metrics = short_run

    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["rollout/log_prob_abs_diff"] < 1e-5
        assert line["grad_norm"] > 0
    assert metrics[2]["loss/kl"] > metrics[0]["loss/kl"] >= 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_merged_model_and_the_adapter_are_one_model_and_the_base_is_what_it_was(short_run, random_base):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output, _ = short_run
    ids = AutoTokenizer.from_pretrained(output / "hf")("3195>", return_tensors="pt").input_ids
    merged = AutoModelForCausalLM.from_pretrained(output / "hf")
    base = AutoModelForCausalLM.from_pretrained(random_base)
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, output / "adapter")(ids).logits
        torch.testing.assert_close(after, merged(ids).logits, atol=1e-5, rtol=0)
    assert (after - before).abs().max() > 1e-3
    trained = load_file(output / "hf" / "model.safetensors")
    for name, weight in load_file(random_base / "model.safetensors").items():
        assert torch.equal(weight, trained[name]) != name.endswith("proj.weight"), name


def test_the_merged_model_comes_out_of_the_checkpoint(short_run, tmp_path):
    """On one rank, from two pipeline stages."""
    output, _ = short_run
    anytron("checkpoint", "export", output, tmp_path / "model")

    assert {file.name for file in (tmp_path / "model").iterdir()} == {file.name for file in (output / "hf").iterdir()}
    weights = (output / "hf" / "model.safetensors").read_bytes()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.fixture(scope="module")
def sorter(tmp_path_factory):
    """A model that sorts in ascending order."""
    output = tmp_path_factory.mktemp("sort")
    assert train("grpo_sort.yaml", output)[-1]["reward/mean"] >= 0.85
    return output / "hf"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("split", ["parallel.data_parallel_size=1", "parallel.tensor_model_parallel_size=2"])
def test_adapters_learn_the_opposite_order(split, sorter, tmp_path):
    metrics = train("grpo_lora.yaml", tmp_path / "lora", f"model.path={sorter}", split)

    assert metrics[0]["reward/mean"] < 0.3
    # By the seed, of a base model that sorts at 0.95: 0.70, 0.86, 0.92.
    assert statistics.fmean(line["reward/mean"] for line in metrics[-10:]) >= 0.6
