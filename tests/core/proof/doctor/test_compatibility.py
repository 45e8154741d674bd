"""Versions are compared with the ranges of plugins and of metadata, in environments that are really wrong."""

import re

import pytest

from anytron.proof.doctor import packages
from tests.core.proof.doctor.conftest import by_name


def examined(subject):
    return by_name(packages.examine_compatibility(subject))


def test_this_environment_is_in_order(subject):
    found = examined(subject)
    assert {name: entry for name, entry in found.items() if entry.status == "failed"} == {}
    megatron = found["compatibility.megatron-core"]
    assert megatron.status == "passed"
    assert "plugin 'megatron'" in megatron.detail
    assert {"torch", "transformers", "mcore-bridge"} <= {name.partition(".")[2] for name in found}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("package", "version", "range_"),
    [
        ("torch", "2.1.0", ">=2.6"),
        ("megatron-core", "0.12.1", ">=0.16.1,<0.20"),
        pytest.param("mcore-bridge", "1.7.0", ">=1.6.5,<1.7", marks=pytest.mark.slow),
        pytest.param("transformers", "4.57.0", ">=5.0,<6", marks=pytest.mark.slow),
    ],
)
def test_a_version_out_of_range_fails_with_who_asks_and_a_remedy(subject, site, package, version, range_):
    site.distribution(package, version)
    found = examined(subject)[f"compatibility.{package}"]
    assert found.status == "failed"
    assert found.detail.startswith(f"{version} is installed, and plugin 'megatron' needs {package}{range_}")
    assert "pip install" in found.fix
    ranges = re.findall(r"[<>=!~]+[\d.]+", found.fix)
    assert sorted(ranges) == sorted(set(ranges)), "who asks for the same is named once"


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("package", "extra", "bad"),
    [
        pytest.param("vllm", "vllm", "0.20.0", marks=pytest.mark.slow),
        pytest.param("transformer-engine", "te", "1.9", marks=pytest.mark.slow),
        ("flash-attn", "flash", "2.0"),
        ("ray", "ray", "1"),
    ],
)
def test_an_optional_library_of_another_version_is_a_warning_with_its_extra(subject, site, package, extra, bad):
    site.distribution(package, bad)
    found = examined(subject)[f"compatibility.{package}"]
    assert found.status == "warning"
    assert f"anytron[{extra}] needs {package}" in found.detail
    assert found.fix == f"pip install 'anytron[{extra}]'"


def test_what_an_installed_library_needs_itself_is_compared(subject, site):
    """vLLM names one torch, and another one breaks its binaries."""
    site.distribution(
        "vllm", "0.32.1", "Requires-Dist: torch==2.12.0", 'Requires-Dist: absent; sys_platform == "win32"'
    )
    found = examined(subject)
    assert found["compatibility.torch"].status == "warning"
    assert "vllm 0.32.1 needs torch==2.12.0" in found["compatibility.torch"].detail
    assert "compatibility.absent" not in found


def test_a_plugin_whose_requirements_fail_hides_no_range(site, monkeypatch):
    from anytron.proof.doctor.subject import look

    source = "from anytron import hookimpl\nclass Plugin:\n    @hookimpl\n    def requirements(self):\n        1 / 0\n"
    site.extension("acme", source)
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    found = examined(look(None, ()))
    assert found["compatibility.plugins"].status == "failed"
    assert "ZeroDivisionError" in found["compatibility.plugins"].detail
    assert "compatibility.torch" in found
