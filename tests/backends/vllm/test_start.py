"""The directory from which vLLM starts. Needs no vLLM."""

from __future__ import annotations

import json

from anytron.config.schema import default_run
from anytron_cpu import CpuPlatform
from anytron_vllm.checks import diagnostics
from anytron_vllm.start import start_directory

MODEL = {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 64, "max_position_embeddings": 64}


def test_a_model_whose_config_asks_for_code_starts_from_a_directory_that_does_not(tmp_path):
    published = {**MODEL, "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoConfig": "c.C"}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "c.py").write_text("")
    (tmp_path / "model-1.safetensors").write_bytes(b"weights")
    config = default_run({"rollout": {"engine": "vllm"}, "model": {"path": str(tmp_path)}})
    with start_directory(config, takes_images=False) as directory:
        known = json.loads((directory / "config.json").read_text())
        assert known == {**MODEL, "model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}
        assert (directory / "model-1.safetensors").read_bytes() == b"weights"
        assert not (directory / "c.py").exists()
    assert not directory.exists()
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    with start_directory(config, takes_images=False) as directory:
        assert directory == tmp_path


def test_a_thinker_is_refused_because_no_test_has_run_one(tmp_path):
    thinker = {"text_config": MODEL, "vision_config": {"spatial_merge_size": 2}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker}))
    config = default_run({"rollout": {"engine": "vllm"}, "model": {"path": str(tmp_path)}})
    found = diagnostics(config, CpuPlatform())
    assert [one for one in found if "qwen3_omni_moe, whose images Anytron does not read, with vLLM" in one.message]


def test_of_a_directory_with_other_models_vllm_gets_the_language_model(tmp_path):
    text = {name: value for name, value in MODEL.items() if name != "architectures"}
    whole = {"model_type": "llavaonevision1_5", "text_config": {**text, "model_type": "LLaVAOneVision1_5_text"}}
    (tmp_path / "config.json").write_text(json.dumps({**whole, "vision_config": {"patch_size": 14}}))
    config = default_run({"rollout": {"engine": "vllm"}, "model": {"path": str(tmp_path)}})
    with start_directory(config, takes_images=False) as directory:
        known = json.loads((directory / "config.json").read_text())
    assert known == {**text, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
