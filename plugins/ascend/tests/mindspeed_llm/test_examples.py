"""The examples: what they are translated to for the published models, and how they are launched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anytron.base.errors import ConfigError
from anytron.config.load import load_config
from anytron_ascend.mindspeed_llm.arguments import translate
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions
from plugins.ascend.tests.mindspeed_llm.test_arguments import QWEN3_8B, QWEN3_30B
from plugins.ascend.tests.trajectories import ROOT

NPU = ROOT / "examples" / "npu"
LAUNCH = NPU / "launch.sh"


@pytest.mark.parametrize(
    ("name", "model", "ranks", "shares"),
    [("grpo_qwen3_8b", QWEN3_8B, 8, (4, 2, 1)), ("grpo_qwen3_30b_a3b", QWEN3_30B, 16, (4, 1, 16))],
)
def test_they_fit_the_published_models(name, model, ranks, shares):
    config = load_config(NPU / f"{name}.yaml", [])
    assert config.parallel.world_size == ranks
    found = translate(config, model, MindSpeedLlmOptions.model_validate(config.engine.options))
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    assert tuple(found[name] for name in sizes) == shares
    tensor, pipeline, experts = shares
    assert model.num_attention_heads % tensor == model.num_key_value_heads % tensor == 0
    assert model.num_hidden_layers % pipeline == 0
    assert getattr(model, "num_experts", experts) % experts == 0


def test_a_typo_in_their_options_is_named():
    with pytest.raises(ConfigError, match=r"engine\.options\.moe\.token_dispatch\b"):
        load_config(NPU / "grpo_qwen3_30b_a3b.yaml", ["engine.options.moe.token_dispatch=alltoall"])


def launch(*arguments, **environment):
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **environment}
    return subprocess.run(
        ["bash", str(LAUNCH), *arguments], env=variables, capture_output=True, text=True, check=False, timeout=120
    )


def test_launching_without_arguments_says_how():
    done = launch()
    assert (done.returncode, "launch.sh CONFIG MODEL PROMPTS [key=value ...]" in done.stderr) == (2, True)


def test_launching_without_cann_says_so(tmp_path):
    arguments = (str(NPU / "grpo_qwen3_8b.yaml"), str(tmp_path), str(tmp_path / "prompts.jsonl"))
    done = launch(*arguments, ANYTRON_ASCEND_SIMULATOR="0", ASCEND_HOME_PATH="")
    assert (done.returncode, "source its set_env.sh" in done.stderr) == (1, True)


def test_launching_reaches_anytron_with_the_paths(tmp_path):
    (tmp_path / "Qwen3-8B").mkdir()
    arguments = (str(NPU / "grpo_qwen3_8b.yaml"), str(tmp_path / "Qwen3-8B"), str(tmp_path / "prompts.jsonl"))
    done = launch(*arguments, "trainer.total_steps=1")
    # There is neither MindSpeed-LLM here nor a model in that directory: said before anything starts.
    assert done.returncode == 1
    assert "megatron-core==0.12.1" in done.stderr
