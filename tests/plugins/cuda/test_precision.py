"""FP8 and FP4 are refused by name on GPUs that do not have them, before a process is started."""

from __future__ import annotations

import pytest

from anytron.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("plugin")

A100, ADA, H100, B200, B40 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)


def found(*capabilities, **transformer):
    from anytron_cuda.gpus import precision_diagnostics
    from anytron_cuda.nvml import Gpu

    gpus = [Gpu(f"NVIDIA {major}{minor}", "GPU-0", (major, minor)) for major, minor in capabilities]
    run = RunConfig.model_validate(
        {
            "model": {"path": "x"},
            "data": {"source": "jsonl"},
            "rewards": [{"function": "exact_match"}],
            "engine": {"options": {"transformer": transformer}},
        }
    )
    return [one.message for one in precision_diagnostics(run, gpus)]


@pytest.mark.parametrize(
    ("recipe", "having", "lacking"),
    [
        ("delayed", [ADA, H100, B200, B40], [A100]),
        ("tensorwise", [ADA, H100, B200, B40], [A100]),
        ("blockwise", [H100, B200], [A100, ADA]),
        ("mxfp8", [B200], [A100, ADA, H100, B40]),
    ],
)
def test_each_recipe_has_its_gpus(recipe, having, lacking):
    for capability in having:
        assert found(capability, fp8="hybrid", fp8_recipe=recipe) == []
    for capability in lacking:
        (message,) = found(capability, fp8="hybrid", fp8_recipe=recipe)
        assert f"the recipe {recipe}" in message
        assert f"and NVIDIA {capability[0]}{capability[1]} has {capability[0]}.{capability[1]}" in message


def test_fp4_is_blackwells():
    assert found(B200, fp4="e2m1") == []
    assert found(H100, fp4="e2m1") == [
        "FP4 runs on Blackwell only (compute capability 10.0 or higher), and NVIDIA 90 has 9.0"
    ]


def test_the_weakest_gpu_counts_and_is_named_once():
    (message,) = found(H100, A100, A100, fp8="hybrid")
    assert "NVIDIA 80" in message


def test_nothing_is_refused_without_such_a_format_or_without_a_gpu_in_sight():
    assert found(A100) == found(A100, fp8=None) == found(fp8="hybrid") == []
    assert found(A100, fp8="hybrid", fp8_recipe="custom") == [], "the user's own recipe is the user's to judge"
