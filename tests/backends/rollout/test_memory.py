"""What generation takes of a device, against caches that are really filled."""

import pytest
import torch

from anytron.config.schema import RunConfig
from anytron.task.data.pretrained import model_class
from anytron.workers.engines.estimates import DeviceMemory, TrainingEstimate, key_value_elements
from anytron_conformance.tiny_models import CONFIGS
from anytron_rollout.options import estimate
from anytron_vllm.options import estimate as estimate_vllm

GIB = 1 << 30
SIZES = TrainingEstimate((), 1000, CONFIGS["qwen3"])
GPU = DeviceMemory(80 * GIB, accelerator=True)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_moe", "deepseek_v3"])
def test_the_cache_of_a_token_is_what_transformers_keeps(family):
    from transformers import AutoConfig

    fields = dict(CONFIGS[family])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = model_class(config).from_config(config)
    with torch.no_grad():
        cache = model(torch.ones(1, 7, dtype=torch.int64), use_cache=True).past_key_values
    kept = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert 7 * key_value_elements(CONFIGS[family]) == kept


def run(parallel=None, **rollout):
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "unused", "dtype": "bfloat16"},
            "data": {"source": "unused", "prompts_per_step": 2},
            "rewards": [{"function": "unused"}],
            "rollout": {"samples_per_prompt": 3, "max_new_tokens": 10, **rollout},
            "parallel": parallel or {},
        }
    )


def test_a_replica_has_the_whole_model_and_the_cache_of_a_batch():
    weights, cache, logits = estimate(run(), SIZES, GPU)
    assert (weights.size, weights.when) == (2000, "always")
    assert cache.size == 2 * 3 * 10 * key_value_elements(CONFIGS["qwen3"]) * 2
    spread = run(options={"device_map": "balanced"}, parallel={"data_parallel_size": 4})
    assert estimate(spread, SIZES, GPU)[0].size == 500
    assert logits.size == 6 * 2 * 3 * CONFIGS["qwen3"]["vocab_size"] * 4
    assert estimate(run(sleep=True), SIZES, GPU)[0].when == "generation"
    assert estimate(run(max_batch_size=2), SIZES, GPU)[1].size == cache.size // 3


@pytest.mark.parametrize(
    ("options", "device", "size"),
    [
        ({"kv_cache_gib": 3.0}, GPU, 3 * GIB),
        ({"gpu_memory_utilization": 0.5}, GPU, 40 * GIB - 2000),
        ({}, GPU, 72 * GIB - 2000),
        ({}, DeviceMemory(80 * GIB, accelerator=False), GIB),
    ],
)
def test_vllm_takes_what_it_is_told(options, device, size):
    weights, cache = estimate_vllm(run(engine="vllm", options=options), SIZES, device)
    assert (weights.size, cache.size) == (2000, size)


def test_vllm_on_a_device_that_nobody_knows_has_weights_at_least():
    (weights,) = estimate_vllm(run(engine="vllm"), SIZES, DeviceMemory(None, accelerator=True))
    assert weights.size == 2000
