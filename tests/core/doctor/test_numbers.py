"""Broken kernels are found on the live device, in a process of its own, and named with their supplier."""

import pytest

from anytron.doctor import devices, executors, kernels, live, numbers
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


def test_right_kernels_pass_and_are_named_with_their_reason(site, monkeypatch):
    found = examined(site, monkeypatch)
    assert {name: entry.detail for name, entry in found.items() if entry.status != "ok"} == {}
    assert all("of 'saboteur'" in found[f"numbers.{probe}"].detail for probe in numbers.PROBES)
    assert found["kernels.log_prob_kernel"].detail == "from 'saboteur': acme (not fast: it is a test)"
    assert found["kernels.rms_norm"].detail == "from 'neutral-default': plain torch"


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
