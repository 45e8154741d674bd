"""Level ``kernels``: the sample's kernels pass, and every kernel is watched while it computes."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anytron.kernels import fused
from anytron.kernels.contract import KernelName
from anytron_conformance.rules import rules_of
from tests.conformance.kernel_mutant import KernelMutant
from tests.conformance.test_mutants import result_of

RULES = [rule.title for rule in rules_of("kernels")]


@pytest.mark.parametrize("name", RULES)
def test_the_sample_keeps_the_rule(name, tmp_path, offer):
    offer("basalt", "anytron_basalt:BasaltPlatform")
    from anytron_basalt import BasaltPlatform

    result = result_of(name, BasaltPlatform(), tmp_path)

    assert result.status != "failed", result.explanation


@pytest.mark.parametrize("name", KernelName, ids=str)
def test_no_kernel_falls_back_unseen(name, tmp_path):
    class FallsBack(KernelMutant):
        def fused(self, asked):
            return detour if asked is name else None

    def detour(*operands, **settings):
        tree_map_only(Tensor, lambda one: one.to("meta"), operands)
        return getattr(fused, name.value)(*operands, **settings)

    result = result_of("kernel-devices", FallsBack(), tmp_path)

    assert result.status == "failed"
    assert (result.broken, result.detail) == (
        f"{name.value}, float32",
        "The kernel computes on another device than cpu.",
    )
