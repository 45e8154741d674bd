"""Broken kernels are found on the live device, in a process of its own, and named with their supplier."""

from dataclasses import replace

import pytest

from anytron.base.results import Result
from anytron.config.schema import default_run
from anytron.proof.doctor import devices, examination, live
from anytron.proof.doctor.subject import look
from tests import packed_platform
from tests.core.proof.doctor.conftest import by_name

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
ROWS = """
from anytron import hookimpl
from anytron.device.hooks.types import ConfigEdit

class Plugin:
    @hookimpl
    def configure(self, config):
        return [ConfigEdit("engine.sequence_format", "bshd", "there are rows")]
"""
PROBES = ("attention-thd", "attention-bshd", "log-probs")
"""Of any model."""
RIGHT = {
    "attention": "return right(query, key, value, call)",
    "log_probs": "return right(hidden, weight, labels, temperature, group)",
}


def examined(site, monkeypatch, **broken):
    site.extension("saboteur", SABOTEUR.format(**{**RIGHT, **broken}))
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(None, ())
    with live.Live(subject) as process:
        return by_name([*devices.examine_kernels(subject, process), *devices.examine_numbers(subject, process)])


def examined_by_all(monkeypatch):
    monkeypatch.setattr(examination, "TOPICS", {})
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    return by_name(examination.examine())


def test_right_kernels_pass_and_are_named_with_their_reason(site, monkeypatch):
    found = examined(site, monkeypatch)
    assert {name: entry.detail for name, entry in found.items() if entry.status != "passed"} == {}
    assert all("of 'saboteur'" in found[f"numbers.{probe}"].detail for probe in PROBES)
    assert found["kernels.log_prob_kernel"].detail == "from 'saboteur': acme (not fast: it is a test)"
    assert found["kernels.rms_norm"].detail == "from 'neutral-default': plain torch"


@pytest.mark.parametrize("says", [True, False])
def test_kernels_of_a_run_to_the_bit_are_asked_to_be_company_invariant(site, monkeypatch, says):
    told = ["ours.invariant = log_probs.invariant = True"] if says else []
    site.extension("plain", "\n".join([COMPANY, *told]))
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = replace(look(None, ()), run=default_run({"engine": {"on_policy": "bitwise"}}))
    with live.Live(subject) as process:
        found = by_name(devices.examine_kernels(subject, process))
    asked = {found[f"kernels.{name}"].status for name in ("linear", "log_prob_kernel", "rms_norm")}
    assert asked == ({"passed"} if says else {"failed", "passed"})
    if says:
        detail = found["kernels.company-invariance"].detail
        assert detail.startswith("of plugins: fused_kernel linear, log_prob_kernel; plain torch: the others, but ")
    else:
        assert "its attribute invariant is True" in found["kernels.linear"].detail
        assert "its attribute invariant is True" in found["kernels.log_prob_kernel"].detail


COMPANY = """
from anytron import hookimpl

def ours(x, weight, bias):
    return x

def log_probs(hidden, weight, labels, temperature, group):
    return hidden

class Plugin:
    @hookimpl
    def fused_kernel(self, name):
        return ours if name.value == "linear" else None

    @hookimpl
    def log_prob_kernel(self):
        return log_probs
"""


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
        found = by_name(devices.examine_kernels(subject, process))
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
    assert packed.status == "failed", packed
    assert "'saboteur'" in packed.detail
    assert "'saboteur'" in packed.fix
    assert found["numbers.log-probs"].status == "passed"


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
    assert found["numbers.log-probs"].status == "failed"
    assert found["numbers.attention-thd"].status == "passed"


def test_a_kernel_that_kills_its_process_is_an_entry_and_the_next_probe_has_a_new_one(site, monkeypatch):
    found = examined(site, monkeypatch, attention="os.abort()")
    assert found["numbers.attention-bshd"].status == "failed"
    assert "'saboteur'" in found["numbers.attention-bshd"].detail
    assert "SIGABRT" in found["numbers.attention-bshd"].detail
    assert found["numbers.log-probs"].status == "passed"


def test_a_torch_that_cannot_be_imported_is_not_blamed_on_kernels(started_cold, site, monkeypatch):
    site.module("torch", "raise ImportError('libdevice.so.12: cannot open shared object file')")
    found = examined_by_all(monkeypatch)
    assert {found[name].status for name in ("devices.all", "kernels.all")} == {"failed"}
    assert "libdevice.so.12" in found["devices.all"].detail
    assert {found[f"numbers.{probe}"].status for probe in PROBES} == {"skipped"}


def test_numbers_that_the_platform_declares_not_to_have_are_not_asked_for(site, monkeypatch):
    """The kernel of one raises for them; the other adapts every run."""
    packed_platform.install_into(site.path)
    monkeypatch.setenv("ANYTRON_PLATFORM", "packed")
    subject = look(None, ())
    with live.Live(subject) as process:
        found = by_name(devices.examine_numbers(subject, process))
    assert {name: entry.status for name, entry in found.items()} == {
        "numbers.attention-thd": "passed", "numbers.attention-bshd": "skipped", "numbers.log-probs": "passed",
    }  # fmt: skip
    assert found["numbers.attention-bshd"].detail == "platform 'packed' has no bshd: its queue takes no rows"

    site.extension("rows", ROWS)
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    monkeypatch.setattr(devices, "_judged", lambda name, *_: Result(name, "passed", ""))
    found = by_name(devices.examine_numbers(look(None, ()), None))
    assert found["numbers.attention-thd"].detail == "platform 'cpu' has no thd: there are rows"
    assert found["numbers.attention-bshd"].status == "passed"


SPECIAL = """
model:
  config: {model_type: MODEL, vocab_size: 16, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2, \
num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, max_position_embeddings: 64, sliding_window: 128, \
layer_types: [sliding_attention, full_attention], num_local_experts: 2}
  tokenizer: tokenizer
data: {source: jsonl, options: {path: prompts.jsonl}}
rewards: [{function: exact_match}]
"""
WINDOW = "return make_attention(replace(spec, traits=replace(spec.traits, window=None)))(query, key, value, call)"
SINKS = "return right(query, key, value, replace(call, sinks=None))"
NO_GRADIENT = "return right(query, key, value, replace(call, sinks=call.sinks.detach()))"


@pytest.mark.parametrize(
    ("model", "attention", "failing"),
    [
        ("gpt_oss", RIGHT["attention"], set()),
        ("gemma3_text", WINDOW, {"attention-thd-window", "attention-bshd-window"}),
        ("gpt_oss", SINKS, {"attention-thd", "attention-bshd", "attention-thd-window", "attention-bshd-window"}),
        ("gpt_oss", NO_GRADIENT, {"attention-thd", "attention-bshd", "attention-thd-window", "attention-bshd-window"}),
    ],
    ids=["right", "no window", "no sinks", "sinks without gradient"],
)
def test_windows_and_sinks_of_the_model_are_computed(site, tmp_path, monkeypatch, model, attention, failing):
    site.extension("saboteur", SABOTEUR.format(**{**RIGHT, "attention": attention}))
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    (tmp_path / "run.yaml").write_text(SPECIAL.replace("MODEL", model))
    subject = look(tmp_path / "run.yaml", ())
    assert subject.run is not None, subject.misread
    with live.Live(subject) as process:
        found = by_name(devices.examine_numbers(subject, process))
    assert {name for name, entry in found.items() if entry.status != "passed"} == {f"numbers.{one}" for one in failing}
    assert (
        found["numbers.attention-thd-window"]
        .detail.partition(":")[0]
        .endswith("4/2 heads of 8/8, torch.bfloat16, a window of 3 tokens" + ", sinks" * (model == "gpt_oss"))
    )


@pytest.mark.slow
def test_a_kernel_that_hangs_is_an_entry(site, monkeypatch):
    monkeypatch.setattr(live, "CALL_S", 20.0)
    found = examined(site, monkeypatch, log_probs="time.sleep(1e6)")
    assert found["numbers.log-probs"].status == "failed"
    assert "hung" in found["numbers.log-probs"].detail


def test_devices_and_executors_are_asked_in_that_process(monkeypatch):
    monkeypatch.setenv("ANYTRON_PLATFORM", "cpu")
    subject = look(None, ())
    with live.Live(subject) as process:
        found = by_name([*devices.examine_devices(subject, process), *devices.examine_executors(subject, process)])
    assert found["devices.seen"].status == "passed"
    assert "GiB" in found["devices.0"].detail
    assert found["executors.local"].detail == "this run uses it"
