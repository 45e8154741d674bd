"""A tiny Qwen3 behind the real rollout engine, on the processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from anytron.base.seeds import derive_seed
from anytron.config.anchor import anchor
from anytron.config.schema import RunConfig
from anytron.device.hooks.types import ProcessInfo
from anytron.device.loading import open_session
from anytron.device.patches import Ledger
from anytron.device.stack import DeviceStack
from anytron.workers.engines.context import EngineContext
from anytron.workers.engines.rollout_engine import GenerationRequest
from anytron.workers.weights.transfer import WeightManifest, checksum
from anytron_cpu import CpuPlatform
from anytron_rollout.transformers_engine import TransformersEngine

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 11,
}
EXAMPLES = Path(__file__).parents[3] / "examples"


def run_config(model=None, **rollout) -> RunConfig:
    values = {
        "model": {"dtype": "float32", "tokenizer": "sort_digits.py:tokenizer"}
        | ({"config": QWEN3} if model is None else model),
        "data": {"source": "sort_digits.py:prompts"},
        "rewards": [{"function": "exact_match"}],
        "rollout": rollout,
    }
    return anchor(RunConfig.model_validate(values), EXAMPLES)


def engine_for(config: RunConfig) -> TransformersEngine:
    bitwise = config.engine.on_policy == "bitwise"
    session = open_session("cpu") if bitwise else SimpleNamespace(platform=CpuPlatform())
    stack = DeviceStack(session, Ledger())
    return TransformersEngine(EngineContext(config, stack, ProcessInfo("rollout")))


def write_weights(path: Path, weights: dict[str, torch.Tensor], version: int = 1) -> WeightManifest:
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    save_file(weights, path)
    return WeightManifest(str(path), version, {name: checksum(tensor) for name, tensor in weights.items()})


def generate(engine, prompts, sampling, seed, samples=1):
    """Let an engine make responses for each prompt, in order, by as many polls as it takes."""
    asked = [prompt for prompt in prompts for _ in range(samples)]
    engine.submit(
        [
            GenerationRequest(number, prompt, sampling, derive_seed(seed, "test", number))
            for number, prompt in enumerate(asked)
        ]
    )
    found = {}
    while finished := engine.poll(1.0):
        found |= dict(finished)
    return [[found[place * samples + sample] for sample in range(samples)] for place in range(len(prompts))]


@pytest.fixture
def reference():
    """Plain Hugging Face model with clearly different token probabilities."""
    torch.manual_seed(1)
    fields = dict(QWEN3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture
def new_engine():
    """Make an engine; keyword arguments are keys of ``rollout``, ``model`` replaces the model."""
    return lambda **settings: engine_for(run_config(**settings))


@pytest.fixture
def write(tmp_path):
    """Write a state dict as a training engine would."""
    return lambda weights, name="weights": write_weights(tmp_path / f"{name}.safetensors", weights)


@pytest.fixture
def engine(new_engine, reference, write):
    """An engine with the reference's weights; batches are smaller than what the tests ask for."""
    engine = new_engine(max_batch_size=64)
    engine.load_weights(write(reference.state_dict()))
    return engine
