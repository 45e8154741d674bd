"""ANYTRON_TRACE_HOOKS=1 shows who was asked, with what, and what they answered."""

from __future__ import annotations

import pytest
import torch

from anytron import hookimpl
from anytron.config.schema import default_run
from anytron.device.hooks.dispatch import brief
from anytron.device.hooks.types import ProcessInfo, Requirement
from anytron.device.loading import hooks_of
from anytron.kernels.contract import LogProbSpec
from anytron.sequences.masks import MaskKind
from anytron.sequences.planning import plan_layout


class Chatty:
    @hookimpl
    def runtime_env(self, process):
        return {"A": "1"}

    @hookimpl
    def requirements(self, engine):
        raise OSError("no disk")

    @hookimpl
    def log_prob_kernel(self, spec):
        return None


def test_each_implementation_that_was_asked_is_a_line(monkeypatch, capsys):
    monkeypatch.setenv("ANYTRON_TRACE_HOOKS", "1")
    hooks = hooks_of(extensions={"chatty": Chatty()})
    hooks.runtime_env(ProcessInfo("trainer", rank=2), default_run())
    hooks.log_prob_kernel(LogProbSpec(16, 1, 64))
    printed = capsys.readouterr()
    assert printed.out == "", "standard output stays for results"
    first, second, third = printed.err.splitlines()
    assert first.startswith("anytron hook runtime_env <- chatty: (ProcessInfo(role='trainer', rank=2,")
    assert first.endswith("= {A: '1'}")
    assert second.startswith("anytron hook log_prob_kernel <- chatty:")
    assert second.endswith("= None")
    assert third.startswith("anytron hook log_prob_kernel <- neutral-default:")


def test_an_implementation_that_raises_is_a_line_too(monkeypatch, capsys):
    monkeypatch.setenv("ANYTRON_TRACE_HOOKS", "1")
    with pytest.raises(OSError, match="no disk"):
        hooks_of(extensions={"chatty": Chatty()}).requirements("x")
    assert "requirements <- chatty: ('x') raised OSError: no disk" in capsys.readouterr().err


class Yielding:
    @hookimpl
    def requirements(self):
        yield Requirement("torch", ">=2")

    @hookimpl
    def configure(self, config):
        yield from [0] if config is None else []
        raise OSError("no disk")


def test_a_hook_written_with_yield_is_shown_by_what_it_yields(monkeypatch, capsys):
    monkeypatch.setenv("ANYTRON_TRACE_HOOKS", "1")
    hooks = hooks_of(extensions={"acme": Yielding()})
    assert hooks.requirements() == [("acme", Requirement("torch", ">=2"))]
    assert "requirements <- acme: (None) = [Requirement(...)]" in capsys.readouterr().err
    with pytest.raises(OSError, match="no disk"):
        hooks.remarks(None)
    assert "configure <- acme: (None) raised OSError: no disk" in capsys.readouterr().err


@pytest.mark.parametrize("value", [None, "0", ""])
def test_otherwise_nothing_is_printed(monkeypatch, capsys, value):
    monkeypatch.delenv("ANYTRON_TRACE_HOOKS", raising=False)
    if value is not None:
        monkeypatch.setenv("ANYTRON_TRACE_HOOKS", value)
    hooks_of(extensions={"chatty": Chatty()}).runtime_env(ProcessInfo("trainer"), default_run())
    assert capsys.readouterr().err == ""


def test_values_are_shown_in_short():
    assert brief(torch.zeros(2, 3)) == "float32[2, 3]"
    assert brief(MaskKind.NONE) == "none"
    assert brief([MaskKind.NONE, 1, None]) == "[none, 1, None]"
    assert brief(plan_layout([3])).startswith("SequenceLayout(format='thd', shard=ContextShard(...), lengths=int64[1]")
    assert len(brief(list(range(1000)))) == 160
