"""Kimi-K2 and MiMo, whose published files ask for code: a whole run, and the directory that it saves."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anytron.config.imports import resolve
from anytron.task.data.model_files import SAME_MODELS
from anytron.task.data.pretrained import TOKENIZER
from tests.backends.megatron.families.published import PUBLISHED
from tests.house import ROOT

pytestmark = pytest.mark.families

MODULES = "model.mtp_layers."
"""Beginning of the names of MiMo's prediction modules."""
STEPS = ("trainer.total_steps=2", "optimizer.lr=0.01", "rollout.max_batch_size=8")


@pytest.fixture
def published(tiny_family, tmp_path):
    """Make a directory as it is published: with code that must not run, prediction modules and a tokenizer."""

    def make(name):
        folder = shutil.copytree(tiny_family(name), tmp_path / name)
        for stem in ("configuration_deepseek", "modeling_deepseek", "configuration_mimo", "modeling_mimo"):
            (folder / f"{stem}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        if name == "mimo":
            weights = load_file(folder / "model.safetensors")
            for part in ("token_layernorm.weight", "input_proj.weight"):
                weights[f"{MODULES}0.{part}"] = torch.randn(64)
            save_file(weights, folder / "model.safetensors", {"format": "pt"})
        resolve(f"{ROOT}/examples/sort_digits.py:tokenizer", TOKENIZER)().save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("name", SAME_MODELS)
def test_a_run_trains_it_and_saves_what_transformers_loads(name, published, tmp_path):
    folder, output = published(name), tmp_path / "run"
    assert json.loads((folder / "config.json").read_text()) == PUBLISHED[name]
    sections = [f'model={{"path": "{folder}", "dtype": "float32"}}', f"trainer.output_dir={output}", *STEPS]
    command = [sys.executable, "-m", "anytron", "train", f"{ROOT}/examples/grpo_sort.yaml", *sections]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    apart = [line["rollout/log_prob_abs_diff"] for line in lines if "rollout/log_prob_abs_diff" in line]
    assert len(apart) == 2
    assert max(apart) <= 1e-5
    model, loading = AutoModelForCausalLM.from_pretrained(output / "hf", output_loading_info=True)
    assert model.config.model_type == SAME_MODELS[name]
    assert not loading["missing_keys"]
    before, after = load_file(folder / "model.safetensors"), load_file(output / "hf/model.safetensors")
    assert after.keys() == before.keys()
    own = [key for key in before if not key.startswith(MODULES)]
    assert all(torch.equal(before[key], after[key]) for key in before.keys() - own)
    assert sum(not torch.equal(before[key], after[key]) for key in own) > len(own) // 2
