"""Broken kernels are found on the live device, in a process of its own, and named with their supplier."""

import pytest

from anytron.doctor import devices, examination, executors, kernels, live, numbers
from anytron.doctor.subject import look
from tests.core.doctor.conftest import by_name

SABOTEUR = """
import os, time
import torch
from anytron import hookimpl
from anytron.kernels.attention import make_attention
from anytron.kernels.log_prob import make_log_prob
from dataclasses import replace

class Plugin:
    @hookimpl
    def attention_kernel(self, spec):
        right = make_attention(spec)
        def kernel(query, key, value, call):
            {attention}
        return kernel

    @hookimpl
    def log_prob_kernel(self, spec):
        right = make_log_prob(spec)
        def kernel(hidden, weight, labels, temperature, group):
            {log_probs}
        kernel.description = "acme (not fast: it is a test)"
        return kernel
"""
RIGHT = {
    "attention": "return right(query, key, value, call)",
    "log_probs": "return right(hidden, weight, labels, temperature, group)",
}


def examined(site, monkeypatch, **broken):
    site.extension("saboteur", SABOTEUR.format(**{**RIGHT, **broken}))
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(None, ())
    with live.Live(subject) as process:
        return by_name([*kernels.examine(subject, process), *numbers.examine(subject, process)])


def examined_by_all(monkeypatch):
    monkeypatch.setattr(examination, "TOPICS", {})
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    return by_name(examination.examine())


def test_right_kernels_pass_and_are_named_with_their_reason(site, monkeypatch):
    found = examined(site, monkeypatch)
    assert {name: entry.detail for name, entry in found.items() if entry.status != "ok"} == {}
    assert all("of 'saboteur'" in found[f"numbers.{probe}"].detail for probe in numbers.PROBES)
    assert found["kernels.log_prob_kernel"].detail == "from 'saboteur': acme (not fast: it is a test)"
    assert found["kernels.rms_norm"].detail == "from 'neutral-default': plain torch"


PARTIAL = """
from functools import partial
from anytron import hookimpl

def gate(limit, x):
    return x

class Norm:
    def __call__(self, x, weight, eps, zero_centered):
        return x

class Plugin:
    @hookimpl
    def fused_kernel(self, name):
        return {"swiglu": partial(gate, 4), "rms_norm": Norm()}.get(name.value)
"""


def test_a_kernel_that_says_nothing_is_named_by_its_function(site, monkeypatch):
    site.extension("plain", PARTIAL)
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(None, ())
    with live.Live(subject) as process:
        found = by_name(kernels.examine(subject, process))
    assert found["kernels.swiglu"].detail == "from 'plain': plain.gate"
    assert found["kernels.rms_norm"].detail == "from 'plain': plain.Norm"


ATTENTION = {
    "causality": "return right(query.flip(0), key, value, call).flip(0)",
    "no mask": "return right(query, key, value, replace(call, mode='padding' if call.format == 'thd' else 'no_mask'))",
    "groups": "return right(query, key.flip(-2), value.flip(-2), call)",
    "scale": "return right(query * 1.3, key, value, call)",
    "no gradient": "return right(query.detach(), key.detach(), value.detach(), call)",
    "gradient of keys": "return right(query, key.detach(), value, call)",
    "NaN": "return right(query, key, value, call) * float('nan')",
    "one sequence": "n = call.cu_seqlens_q[[0, -1]] if call.cu_seqlens_q is not None else None; return right(query, "
    "key, value, call if n is None else replace(call, cu_seqlens_q=n, cu_seqlens_kv=n, cu_seqlens_q_padded=None, "
    "cu_seqlens_kv_padded=None))",
    "raises": "raise RuntimeError('no kernel image is available')",
}


@pytest.mark.parametrize("fault", ATTENTION)
def test_attention_that_is_wrong_fails_and_log_probs_are_still_computed(site, monkeypatch, fault):
    found = examined(site, monkeypatch, attention=ATTENTION[fault])
    packed = found["numbers.attention-thd"]
    assert packed.status == "fail", packed
    assert "'saboteur'" in packed.detail
    assert "'saboteur'" in packed.fix
    assert found["numbers.log-probs"].status == "ok"


LOG_PROBS = {
    "temperature": "return right(hidden, weight, labels, 1.0, group)",
    "entropy": "a, b = right(hidden, weight, labels, temperature, group); return a, -b",
    "filled-up rows": "return make_log_prob(replace(spec, vocab_size=weight.shape[0]))(hidden, weight, labels, "
    "temperature, group)",
    "gradient": "a, b = right(hidden, weight, labels, temperature, group); return a, b.detach()",
}


@pytest.mark.parametrize("fault", LOG_PROBS)
def test_log_probs_that_are_wrong_fail(site, monkeypatch, fault):
    found = examined(site, monkeypatch, log_probs=LOG_PROBS[fault])
    assert found["numbers.log-probs"].status == "fail"
    assert found["numbers.attention-thd"].status == "ok"


def test_a_kernel_that_kills_its_process_is_an_entry_and_the_next_probe_has_a_new_one(site, monkeypatch):
    found = examined(site, monkeypatch, attention="os.abort()")
    assert found["numbers.attention-bshd"].status == "fail"
    assert "'saboteur'" in found["numbers.attention-bshd"].detail
    assert "SIGABRT" in found["numbers.attention-bshd"].detail
    assert found["numbers.log-probs"].status == "ok"


def test_a_torch_that_cannot_be_imported_is_not_blamed_on_kernels(site, monkeypatch):
    site.module("torch", "raise ImportError('libdevice.so.12: cannot open shared object file')")
    found = examined_by_all(monkeypatch)
    assert {found[name].status for name in ("devices.crashed", "kernels.crashed")} == {"fail"}
    assert "libdevice.so.12" in found["devices.crashed"].detail
    assert {found[f"numbers.{probe}"].status for probe in numbers.PROBES} == {"skip"}


@pytest.mark.slow
def test_a_kernel_that_hangs_is_an_entry(site, monkeypatch):
    monkeypatch.setattr(live, "CALL_S", 20.0)
    found = examined(site, monkeypatch, log_probs="time.sleep(1e6)")
    assert found["numbers.log-probs"].status == "fail"
    assert "hung" in found["numbers.log-probs"].detail


def test_devices_and_executors_are_asked_in_that_process(monkeypatch):
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(None, ())
    with live.Live(subject) as process:
        found = by_name([*devices.examine(subject, process), *executors.examine(subject, process)])
    assert found["devices.seen"].status == "ok"
    assert "GiB" in found["devices.0"].detail
    assert found["executors.local"].detail == "this run uses it"
