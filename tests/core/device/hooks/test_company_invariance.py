"""What a kernel must say where the bits of a row's result must not depend on what else is in the call."""

from __future__ import annotations

import dataclasses

import pytest

from anytron.base.errors import HookContractError
from anytron.kernels.contract import NEVER_INVARIANT, KernelName, KernelSpec, LogProbSpec
from tests.core.device.hooks.test_contract import ATTENTION, answering, hooks_with


def _kernel(*_arguments):
    """Stand for a kernel: only its identity is asked for."""


INVARIANT = {
    "attention_kernel": (dataclasses.replace(ATTENTION, invariant=True),),
    "fused_kernel": (KernelName.LINEAR, KernelSpec("cpu", invariant=True)),
    "log_prob_kernel": (LogProbSpec(16, 1, 64, invariant=True),),
}
"""Requests for company-invariant kernels."""


@pytest.mark.parametrize("hook", INVARIANT)
def test_a_kernel_that_must_be_company_invariant_says_so(hook):
    def invariant_kernel(*_arguments):
        """Stand for a kernel."""

    invariant_kernel.invariant = True
    said = answering(**{hook: lambda *_: invariant_kernel})
    assert getattr(hooks_with(acme=said), hook)(*INVARIANT[hook]) is invariant_kernel
    for value in (False, 1, "yes", None):
        kernel = lambda *_: None  # noqa: E731 - takes an attribute
        kernel.invariant = value
        for silent in (kernel, _kernel):
            hooks = hooks_with(acme=answering(**{hook: lambda *_, silent=silent: silent}))
            with pytest.raises(HookContractError, match=r"'acme'.*its attribute invariant is True") as raised:
                getattr(hooks, hook)(*INVARIANT[hook])
            assert "the hook may return None instead" in str(raised.value)
    passing = hooks_with(acme=answering(**{hook: lambda *_: None}))
    assert callable(getattr(passing, hook)(*INVARIANT[hook])), "the neutral default needs no attribute"


@pytest.mark.parametrize("hook", INVARIANT)
def test_an_engine_s_wish_for_company_invariant_kernels_is_in_every_spec(hook):
    asked = []
    hooks = hooks_with(acme=answering(**{hook: lambda *arguments: asked.append(arguments[-1].invariant)}))
    *name, spec = INVARIANT[hook]
    usual = dataclasses.replace(spec, invariant=False)
    getattr(hooks, hook)(*name, usual)
    hooks.invariant = True
    getattr(hooks, hook)(*name, usual)
    assert asked == [False, True]


@pytest.mark.parametrize("name", NEVER_INVARIANT)
def test_some_kernels_are_never_asked_to_be_company_invariant(name):
    """Patches ask for those of linear attention in every run, also for models that do not use them."""
    hooks = hooks_with(acme=answering(fused_kernel=lambda name, spec: _kernel if not spec.invariant else None))
    hooks.invariant = True
    assert hooks.fused_kernel(name, KernelSpec("cpu")) is _kernel
