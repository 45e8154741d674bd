"""Who is asked first does not depend on who was found first, and asking is cheap."""

from __future__ import annotations

import itertools
import timeit

import pytest

from anytron import Platform, hookimpl
from anytron.base.errors import PluginError
from anytron.device.hooks.facade import Hooks
from anytron.device.hooks.registry import Precedence, read_member
from anytron.device.loading import hooks_of
from anytron.device.loading.neutral import NeutralDefaults
from anytron.kernels.contract import KernelName, KernelSpec, LogProbSpec

SPEC = LogProbSpec(16, 1, 64)


class Answers:
    """Answers ``log_prob_kernel`` with a kernel that carries its name, or leaves it to the next."""

    def __init__(self, name: str, *, answers: bool = True) -> None:
        self.name = name
        self.answers = answers
        self.kernel = lambda: name

    @hookimpl
    def log_prob_kernel(self, spec):
        return self.kernel if self.answers else None


@pytest.mark.parametrize(
    ("silent", "expected"),
    [([], "platform"), (["platform"], "aaa"), (["platform", "aaa"], "zzz")],
)
def test_platform_then_extensions_by_name_then_default_in_any_order_of_registration(silent, expected):
    """pluggy asks the plugin registered last first."""
    precedence = {"platform": Precedence.PLATFORM, "aaa": Precedence.EXTENSION, "zzz": Precedence.EXTENSION}
    members = [read_member(Answers(name, answers=name not in silent), name, precedence[name]) for name in precedence]
    members.append(read_member(NeutralDefaults(), "neutral-default", Precedence.DEFAULT))
    for order in itertools.permutations(members):
        hooks = Hooks(order)
        assert [member.name for member in hooks.members] == ["platform", "aaa", "zzz", "neutral-default"]
        assert hooks.log_prob_kernel(SPEC)() == expected


def test_two_members_of_one_name_are_refused():
    twin = read_member(Answers("twin"), "twin", Precedence.EXTENSION)
    with pytest.raises(PluginError, match="unique"):
        Hooks([twin, twin])


def test_two_platforms_are_refused():
    with pytest.raises(PluginError, match="at most one plugin may be a platform"):
        Hooks([read_member(Answers(name), name, Precedence.PLATFORM) for name in ("one", "two")])


def test_implementations_take_any_subset_of_the_arguments_in_any_order():
    class Chip(Platform):
        name = "chip"

        def probe(self):
            raise NotImplementedError

        def runtime(self):
            raise NotImplementedError

        @hookimpl
        def fused_kernel(self, spec, name):
            return lambda: (name, spec)

        @hookimpl
        def attention_kernel(self):
            return lambda: "no argument"

    hooks, spec = hooks_of(Chip()), KernelSpec("cpu")
    assert hooks.fused_kernel(KernelName.SWIGLU, spec)() == (KernelName.SWIGLU, spec)
    assert hooks.attention_kernel(spec)() == "no argument"


def test_a_call_costs_at_most_two_microseconds_more_than_a_direct_one():
    plugin = Answers("only")
    hooks = Hooks([read_member(plugin, "only", Precedence.PLATFORM)])
    calls = 2000
    through = min(timeit.repeat(lambda: hooks.log_prob_kernel(SPEC), number=calls, repeat=20)) / calls
    direct = min(timeit.repeat(lambda: plugin.log_prob_kernel(SPEC), number=calls, repeat=20)) / calls
    assert through - direct < 2e-6
