"""Tiny models behind the real vLLM, on the processor, and what Hugging Face computes with the same weights."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from anytron.config.anchor import anchor
from anytron.config.schema import RunConfig
from anytron.device.hooks.types import ProcessInfo
from anytron.device.patches import Ledger
from anytron.device.stack import DeviceStack
from anytron.run.trainer.models import write_random_model
from anytron.task.data.pretrained import load_tokenizer, model_class
from anytron.workers.engines.context import EngineContext
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, SamplingParams
from anytron.workers.weights.transfer import WeightFile, WeightManifest
from anytron_cpu import CpuPlatform

EXAMPLES = Path(__file__).parents[1] / "examples"
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 11,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def run_config(
    model: dict[str, Any],
    output: Path,
    adapters: dict[str, Any] | None = None,
    dtype: str = "float32",
    **rollout: Any,
) -> RunConfig:
    values = {
        "model": {"config": model, "dtype": dtype, "tokenizer": "sort_digits.py:tokenizer", "lora": adapters},
        "data": {"source": "sort_digits.py:prompts"},
        "rewards": [{"function": "exact_match"}],
        "rollout": {"engine": "vllm", **rollout},
        "trainer": {"output_dir": str(output)},
    }
    return anchor(RunConfig.model_validate(values), EXAMPLES)


def vllm_engine(config: RunConfig) -> Any:
    """Start vLLM in this process."""
    from anytron_vllm.engine import VllmEngine

    write_random_model(config, load_tokenizer(config.model))
    stack = DeviceStack(SimpleNamespace(platform=CpuPlatform()), Ledger())
    return VllmEngine(EngineContext(config, stack, ProcessInfo("rollout")))


def hf_model(model: dict[str, Any], seed: int) -> Any:
    """A Hugging Face model with clearly different token probabilities."""
    fields = dict(model)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    made = model_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made


def weights_of(model: Any, directory: Path) -> dict[str, torch.Tensor]:
    """A model's weights by the names of published checkpoints."""
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def send(weights: dict[str, torch.Tensor], directory: Path, version: int) -> WeightManifest:
    """Write weights as a training engine does."""
    return WeightFile(str(directory / "weights.safetensors")).send(weights.items(), version, lambda name: False)


def requests(prompts: list[tuple[int, ...]], first: int = 0, **sampling: Any) -> list[GenerationRequest]:
    """One request for each prompt, numbered from ``first``, each with a seed of its own."""
    params = SamplingParams(**{"max_new_tokens": 8, "pad_token_id": 12, **sampling})
    return [
        GenerationRequest(first + place, PromptInputs(prompt), params, 1000 + place)
        for place, prompt in enumerate(prompts)
    ]


def answers(engine: Any, asked: list[GenerationRequest]) -> list[Any]:
    """Let an engine answer, by as many polls as it takes; in the order of the requests."""
    engine.submit(asked)
    found: dict[int, Any] = {}
    deadline = time.monotonic() + 300
    while len(found) < len(asked) and time.monotonic() < deadline:
        found |= dict(engine.poll(1.0))
    return [found[request.id] for request in asked]


@torch.no_grad()
def log_probs(model: Any, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a response's tokens from one forward pass of Hugging Face, in float64."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


def largest_difference(model: Any, asked: list[GenerationRequest], answered: list[Any]) -> float:
    """The largest difference between an engine's log-probs and Hugging Face's."""
    return max(
        float(
            (
                log_probs(model, request.prompt.tokens, response.tokens, request.sampling.temperature)
                - torch.tensor(response.log_probs).double()
            )
            .abs()
            .max()
        )
        for request, response in zip(asked, answered, strict=True)
    )
