"""Every fault of docs/upstream is there: its program shows it on the installed packages."""

from __future__ import annotations

import ast

import pytest

from anytron.device.patches.plan import in_range, installed_version
from tests.docs.reproductions import CHECKOUTS, SETTINGS, outcomes, reproductions, sections

HERE = ("megatron-core", "mcore-bridge", "torch")
ELSEWHERE = {"verl", "megatron-bridge", *CHECKOUTS}
"""Their programs run in plugins/verl/tests and in two folders of plugins/ascend/tests."""
NEWER = "Latent attention without `q_lora_rank` gets a norm of queries that the model lacks"
"""Its program runs in tests/backends/megatron/patches/test_mla_query_norm.py, on each version of Megatron-Core."""
INSTALLED = [one for one in reproductions(*HERE) if one.is_installed]


@pytest.fixture(scope="module")
def found():
    ran = {}

    def outcome(one):
        if one.setting not in ran:
            ran[one.setting] = outcomes(one.setting, *HERE)
        return ran[one.setting]

    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("one", INSTALLED, ids=lambda one: one.title)
def test_the_fault_is_there(one, found):
    status, said = found(one)[one.title]
    assert status == 0, said
    assert said.strip()


@pytest.mark.slow
def test_a_fault_that_is_not_there_would_be_noticed(found):
    status, said = found(INSTALLED[0])["no fault"]
    assert status == 1
    assert "AssertionError" in said


def test_the_normal_environment_has_the_versions_of_the_page():
    """Faults of Megatron are on the page as the oldest version has them; a newer version has some of them."""
    megatron = installed_version("megatron-core")
    others = {one.title: one.requirements for one in reproductions(*HERE) if not one.is_installed}
    if in_range(megatron, "<0.17"):
        assert len(INSTALLED) == 29
        assert others.keys() == {NEWER}
    else:
        assert len(INSTALLED) == 15 + in_range(megatron, "<0.18") + (NEWER not in others)
        assert (NEWER not in others) == in_range(megatron, ">=0.19")
        for title, requirements in others.items():
            (needed,) = [one for one in requirements if one.name == "megatron-core"]
            assert not needed.specifier.contains(megatron), title


def test_every_fault_has_a_program_that_a_maintainer_can_read_at_a_glance():
    all_of_them = reproductions()
    assert [one.title for one in all_of_them] == list(sections())
    for one in all_of_them:
        lines = [line for line in one.text.splitlines() if line.strip()]
        assert len(lines) <= 20, one.title
        assert max(map(len, lines)) <= 120, one.title
        ast.parse(one.text)
        assert "anytron" not in one.text, one.title
        assert one.setting in SETTINGS
        assert one.package in {*HERE, *ELSEWHERE}
        assert all(requirement.specifier or requirement.name in CHECKOUTS for requirement in one.requirements)
