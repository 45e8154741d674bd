"""What cannot generate on its training ranks is refused by name, before anything starts."""

from __future__ import annotations

import pytest

from anytron.base.errors import ConfigError
from anytron.device.loading import open_session
from anytron_conformance.tiny_models import CONFIGS
from anytron_megatron.models.families import FAMILIES
from tests.backends.megatron.families.published import PUBLISHED
from tests.backends.megatron.ranks import engine_config

GENERATES = {"rollout": {"engine": "megatron"}}


def configure(directory, output, **sections):
    config = engine_config(directory, output, **sections)
    return open_session(platform="cpu").hooks.configure(config)


@pytest.mark.parametrize("model", [*CONFIGS, *PUBLISHED])
def test_a_family_without_a_proven_cache_is_refused_with_the_reason(model, tiny_family, tmp_path):
    family = FAMILIES[{**CONFIGS, **PUBLISHED}[model]["model_type"]]
    if "cache" in family.proof:
        configure(tiny_family(model), tmp_path, **GENERATES)
        return
    message = f"models of type {family.model_type} cannot generate on the training ranks: {family.cacheless}"
    with pytest.raises(ConfigError, match=message) as caught:
        configure(tiny_family(model), tmp_path, **GENERATES)
    assert "rollout.engine=transformers" in str(caught.value)
    assert family.cacheless
    assert "cache" in family.refused


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"context_parallel_size": 2}}, "context parallelism splits them"),
        ({"engine": {"options": {"transformer": {"fp8": "hybrid"}}}}, "take whole blocks of tokens"),
    ],
)
def test_what_the_cache_cannot_hold_is_refused(sections, message, tiny_family, tmp_path):
    directory = tiny_family("qwen3")
    configure(directory, tmp_path, **sections)
    with pytest.raises(ConfigError, match=message):
        configure(directory, tmp_path, **GENERATES, **sections)


def test_latent_attention_is_refused_with_tensor_parallelism(tiny_family, tmp_path):
    sections = {"parallel": {"tensor_model_parallel_size": 2}}
    configure(tiny_family("qwen3_moe"), tmp_path, **GENERATES, **sections)
    with pytest.raises(ConfigError, match=r"multi-latent attention needs one tensor-parallel rank.*gathers keys"):
        configure(tiny_family("deepseek_v3"), tmp_path, **GENERATES, **sections)


def test_a_sliding_window_is_refused(tmp_path):
    model = {**CONFIGS["qwen3"], "use_sliding_window": True, "sliding_window": 8}
    sections = {"model": {"path": None, "config": model, "tokenizer": "unused"}}
    with pytest.raises(ConfigError, match="no test compares their cache"):
        configure(tmp_path, tmp_path, **GENERATES, **sections)
