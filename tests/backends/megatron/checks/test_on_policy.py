"""What cannot be equal to the bit is refused by name, before anything starts."""

from __future__ import annotations

import pytest

from anytron.base.errors import ConfigError
from anytron.device.loading import open_session
from anytron_conformance.tiny_models import write_tiny_model
from anytron_megatron.checks.on_policy import bitwise_platform_diagnostics
from tests.backends.megatron.ranks import engine_config

BITWISE = {"on_policy": "bitwise"}
TRANSFORMERS, MEGATRON = ({"engine": name} for name in ("transformers", "megatron"))


def configure(directory, output, **sections):
    sections = {**sections, "engine": {**BITWISE, **sections.get("engine", {})}}
    return open_session(platform="cpu").hooks.configure(engine_config(directory, output, **sections))


@pytest.mark.parametrize(
    ("model", "sections", "message"),
    [
        ("qwen3_next", {}, "linear attention, for example, is computed in chunks"),
        ("qwen3", {"parallel": {"context_parallel_size": 2}}, "context-parallel ranks"),
        ("qwen3", {"model": {"lora": {"rank": 4}}}, "adapters have layers whose bits"),
        (
            "qwen3",
            {"engine": {"options": {"transformer": {"attention_dropout": 0.1}}}},
            "dropout changes log-probs in training only",
        ),
    ],
)
def test_a_difference_that_is_certain_or_untested_is_refused(model, sections, message, tiny_family, tmp_path):
    with pytest.raises(ConfigError, match=message) as caught:
        configure(tiny_family(model), tmp_path, **sections)
    assert "set engine.on_policy=close" in str(caught.value)


def test_another_activation_is_refused(tmp_path):
    directory = write_tiny_model("qwen3", tmp_path / "model", hidden_act="gelu")
    with pytest.raises(ConfigError, match="no test has compared the bits of the activation gelu"):
        configure(directory, tmp_path / "run")


@pytest.mark.parametrize("rollout", [TRANSFORMERS, MEGATRON])
def test_a_dense_model_is_not(rollout, tiny_family, tmp_path):
    configure(tiny_family("qwen3"), tmp_path, rollout=rollout, model={"dtype": "bfloat16"})


def test_a_vendors_modules_are_refused(tiny_family, tmp_path):
    class Platform:
        name, portable_modules = "acme", False

    run = engine_config(tiny_family("qwen3"), tmp_path, engine=BITWISE)
    (found,) = bitwise_platform_diagnostics(run, Platform())
    assert "acme uses its vendor's modules" in found.message
    assert list(bitwise_platform_diagnostics(engine_config(tiny_family("qwen3"), tmp_path), Platform())) == []
