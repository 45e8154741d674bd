"""Qwen2.5-Omni and Qwen3-Omni: what is trained of them, what is kept, and how transformers ties their embeddings."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMultimodalLM

from anytron.config.imports import resolve
from anytron.task.data.model_files import IDLE
from anytron.task.data.pretrained import SPEAKER_FILE, TOKENIZER
from tests.backends.megatron.families.layouts import PUBLISHED_MODELS
from tests.backends.megatron.families.observe import hugging_face_logits, largest
from tests.backends.megatron.families.published import PUBLISHED
from tests.house import ROOT

pytestmark = pytest.mark.families

MODELS = {one.name: one for one in PUBLISHED_MODELS if one.name in ("qwen2_5_omni", "qwen3_omni_moe", "minicpmv4_6")}
OMNI = [name for name in MODELS if "omni" in name]
PARTS = {"qwen2_5_omni": {"talker", "token2wav"}, "qwen3_omni_moe": {"talker", "code2wav"}}
STEPS = ("trainer.total_steps=2", "optimizer.lr=0.01", "rollout.max_batch_size=8")
TWO = ("parallel.pipeline_model_parallel_size=2",)


@pytest.mark.parametrize("name", OMNI)
def test_a_run_trains_the_thinker_and_saves_the_rest_as_it_was(name, tiny_family, tmp_path):
    folder, output = shutil.copytree(tiny_family(name), tmp_path / name), tmp_path / "run"
    torch.save({"Chelsie": {"cond": torch.randn(4)}}, folder / SPEAKER_FILE)
    resolve(f"{ROOT}/examples/sort_digits.py:tokenizer", TOKENIZER)().save_pretrained(folder)
    sections = [f'model={{"path": "{folder}", "dtype": "float32"}}', f"trainer.output_dir={output}", *STEPS, *TWO]
    command = [sys.executable, "-m", "anytron", "train", f"{ROOT}/examples/grpo_sort.yaml", *sections]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"gets no images: {name} is not supported with images.*its thinker", done.stdout + done.stderr)

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    apart = [line["rollout/log_prob_abs_diff"] for line in lines if "rollout/log_prob_abs_diff" in line]
    assert len(apart) == 2
    assert max(apart) <= 1e-5
    before, after = load_file(folder / "model.safetensors"), load_file(output / "hf/model.safetensors")
    assert after.keys() == before.keys()
    idle = {key for key in before if key.startswith(IDLE)}
    assert {key.split(".")[0] for key in idle} == PARTS[name]
    kept = idle | {key for key in before if re.search(MODELS[name].still, key)}
    assert [key for key in kept if not torch.equal(before[key], after[key])] == []
    trained = before.keys() - kept
    assert sum(not torch.equal(before[key], after[key]) for key in trained) > len(trained) // 2

    assert (output / "hf" / SPEAKER_FILE).read_bytes() == (folder / SPEAKER_FILE).read_bytes()
    AutoModelForMultimodalLM.from_pretrained(output / "hf").save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == after.keys()
    assert [key for key in again if not torch.equal(again[key], after[key])] == []


@pytest.mark.parametrize("name", MODELS)
def test_ids_of_images_and_sound_are_embedded_as_they_are(name, ranks, tiny_family, recorded):
    """As a response may have them: no image or sound belongs to these, in transformers as here."""
    tokens = recorded.tokens.clone()
    tokens[1::3] = torch.arange(118, 128).repeat(len(tokens))[: len(tokens[1::3])]
    batch = replace(recorded, tokens=tokens)
    workers, _ = ranks.engine(tiny_family(name))
    assert largest(workers.logits(batch) - hugging_face_logits(tiny_family(name), batch, torch.float32)) <= 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_tied_as_transformers_ties_them(tied, ranks, tiny_family, recorded, tmp_path):
    """It asks the thinker; the class of its ``text_config`` has another default, which mcore-bridge would take."""
    folder = shutil.copytree(tiny_family("qwen2_5_omni"), tmp_path / "model")
    config = json.loads(json.dumps(PUBLISHED["qwen2_5_omni"]))
    del config["thinker_config"]["text_config"]["tie_word_embeddings"]
    if tied:
        config["thinker_config"]["tie_word_embeddings"] = True
        weights = load_file(folder / "model.safetensors")
        del weights["thinker.lm_head.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(folder).get_text_config().tie_word_embeddings
    workers, _ = ranks.engine(folder)
    assert largest(workers.logits(recorded) - hugging_face_logits(folder, recorded, torch.float32)) <= 1e-5
