"""Directories of which the language model alone is trained: whole runs, and the directories that they save."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from anytron.base.errors import ConfigError
from anytron.config.imports import resolve
from anytron.device.loading import open_session
from anytron.proof.verification.hugging_face import load_model
from anytron.task.data.composites import COMPOSITES
from anytron.task.data.model_files import tensor_names
from anytron.task.data.pretrained import TOKENIZER
from tests.backends.megatron.families.published import PUBLISHED
from tests.backends.megatron.families.published_composites import OTHER_TENSORS, WHOLE_MODELS
from tests.backends.megatron.ranks import engine_config
from tests.house import ROOT

pytestmark = pytest.mark.families

STEPS = ("trainer.total_steps=2", "optimizer.lr=0.01", "rollout.max_batch_size=8")
ONE_OF_EACH = ("kimi_k25", "kimi_vl", "internvl_chat", "ovis2_5", "llava_onevision1_5")
SMALL_TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "pos_emb_height": 4,
    "pos_emb_width": 4,
}  # fmt: skip


def test_there_is_one_of_each():
    assert {PUBLISHED[name]["model_type"] for name in ONE_OF_EACH} == set(COMPOSITES) == set(OTHER_TENSORS)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_run_trains_the_language_model_and_saves_the_rest_as_it_was(name, tiny_family, tmp_path):
    folder, output = shutil.copytree(tiny_family(name), tmp_path / name), tmp_path / "run"
    for classes in PUBLISHED[name]["auto_map"].values():
        (folder / f"{classes.partition('.')[0]}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    resolve(f"{ROOT}/examples/sort_digits.py:tokenizer", TOKENIZER)().save_pretrained(folder)
    sections = [f'model={{"path": "{folder}", "dtype": "float32"}}', f"trainer.output_dir={output}", *STEPS]
    command = [sys.executable, "-m", "anytron", "train", f"{ROOT}/examples/grpo_sort.yaml", *sections]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()
    assert "only the language model is read" in done.stdout + done.stderr

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    apart = [line["rollout/log_prob_abs_diff"] for line in lines if "rollout/log_prob_abs_diff" in line]
    assert len(apart) == 2
    assert max(apart) <= 1e-5
    assert json.loads((output / "hf/config.json").read_text()) == PUBLISHED[name]
    before, after = load_file(folder / "model.safetensors"), load_file(output / "hf/model.safetensors")
    assert after.keys() == before.keys()
    inner = tensor_names(output / "hf").inner
    others = [key for key in before if inner(key) is None]
    assert sorted(others) == sorted(OTHER_TENSORS[PUBLISHED[name]["model_type"]])
    for key in others:
        assert after[key].dtype is before[key].dtype is torch.bfloat16
        assert torch.equal(before[key], after[key])
    assert sum(not torch.equal(before[key], after[key]) for key in before) > len(before) // 2
    assert load_model(output / "hf", None, torch.float32) is not None


def test_transformers_own_class_of_kimi_k25_computes_the_same_of_text(tiny_family, tmp_path):
    """It reads published names; what it would write has others for the tower."""
    folder = shutil.copytree(tiny_family("kimi_k25"), tmp_path / "kimi")
    alone = load_model(folder, None, torch.float32)
    weights = load_file(folder / "model.safetensors")
    language = {name: tensor for name, tensor in weights.items() if name.startswith("language_model.")}
    save_file(language, folder / "model.safetensors", {"format": "pt"})
    config = {**PUBLISHED["kimi_k25"], "vision_config": SMALL_TOWER, "projection_hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    whole, loading = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=False
    )
    assert all("vision_tower" in name or "mm_projector" in name for name in loading["missing_keys"])
    assert not loading["unexpected_keys"]
    tokens = torch.randint(3, 110, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(whole.eval()(tokens).logits, alone(tokens).logits)
    whole.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert "model.vision_tower.layers.0.norm1.weight" in saved
    assert "vision_tower.encoder.blocks.0.norm0.weight" not in saved


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_adapters_are_refused(name, tiny_family, tmp_path):
    config = engine_config(tiny_family(name), tmp_path, model={"lora": {"rank": 2, "targets": ["linear_proj"]}})
    with pytest.raises(ConfigError, match="holds more than a language model"):
        open_session(platform="cpu").hooks.configure(config)
