"""The peak of GPUs by name."""

import pytest

pytestmark = pytest.mark.usefixtures("plugin")


def peak_flops(*arguments):
    from anytron_cuda.gpus import peak_flops

    return peak_flops(*arguments)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_names_as_drivers_give_them(name, tflops):
    found = peak_flops(name, "bfloat16", None)
    assert found.per_s == tflops * 1e12
    assert "data sheet" in found.source


def test_an_option_wins_and_what_is_not_known_has_a_remedy():
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32", 60.0).per_s == 60e12
    for name, dtype in (("NVIDIA H100 80GB HBM3", "float32"), ("NVIDIA Z9000", "bfloat16"), ("Tesla V100", "bfloat16")):
        found = peak_flops(name, dtype, None)
        assert found.per_s is None
        assert "platform.options.peak_tflops" in found.source


def test_no_name_is_hidden_by_an_earlier_one():
    from anytron_cuda.gpus import PEAK_TFLOPS

    parts = [part for part, *_ in PEAK_TFLOPS]
    for place, part in enumerate(parts):
        words = f" {part} "
        assert not any(f" {earlier} " in words for earlier in parts[:place]), part
