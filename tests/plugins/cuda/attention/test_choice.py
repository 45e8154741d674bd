"""Which kernel a layer takes, and why not a faster one, as a table."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from packaging.version import Version

from anytron.base.errors import PlatformError
from anytron.kernels.contract import AttentionCall
from tests.plugins.cuda.attention.cases import operands, spec

HOPPER, AMPERE, ADA, TURING, BLACKWELL = (9, 0), (8, 0), (8, 9), (7, 5), (10, 0)
ALL = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0"}
ORDER = FA3, FA2, VARLEN, SDPA, NEUTRAL = "flash_attention_3", "flash_attention_2", "varlen", "sdpa", "neutral"


def offered(capability=HOPPER, torch_version="2.13.0", broken=(), **libraries):
    from anytron_cuda.capabilities import Capabilities

    versions = {name: Version(text) for name, text in libraries.items()}
    return Capabilities(capability, Version(torch_version), versions, dict(broken))


def choose(machine, layer, wanted="auto"):
    from anytron_cuda.attention.choice import choose_attention

    return choose_attention(machine, layer, wanted)


@pytest.mark.parametrize(
    ("machine", "layer", "able", "reasons"),
    [
        ({**ALL}, {}, (FA3, FA2, VARLEN, SDPA, NEUTRAL), {}),
        ({}, {}, (VARLEN, SDPA, NEUTRAL), {FA3: "flash-attn-3 is not installed", FA2: "flash-attn is not installed"}),
        ({"flash_attn": "2.4.2"}, {}, (VARLEN, SDPA, NEUTRAL), {FA2: "2.4.2 is older than 2.5.5"}),
        ({"broken": {"flash_attn": "a symbol"}.items()}, {}, (VARLEN, SDPA, NEUTRAL), {FA2: "imported: a symbol"}),
        ({**ALL, "capability": AMPERE}, {}, (FA2, VARLEN, SDPA, NEUTRAL), {FA3: "Hopper"}),
        ({**ALL, "capability": BLACKWELL}, {}, (FA2, VARLEN, SDPA, NEUTRAL), {FA3: "Hopper"}),
        ({**ALL, "capability": TURING}, {}, (SDPA, NEUTRAL), {FA3: "Hopper", FA2: "Ampere", VARLEN: "8.0 to 12.1"}),
        ({"torch_version": "2.10.0+cu128"}, {}, (SDPA, NEUTRAL), {VARLEN: "requires torch 2.12"}),
        ({**ALL}, {"window": (128, 0)}, (FA3, FA2, VARLEN, SDPA, NEUTRAL), {}),
        ({**ALL}, {"size": 192, "v_size": 128}, (FA3, FA2, VARLEN, SDPA, NEUTRAL), {}),
        ({**ALL}, {"size": 576, "v_size": 512}, (SDPA, NEUTRAL), {FA3: "at most 256", FA2: "576", VARLEN: "576"}),
        ({**ALL}, {"sinks": True}, (VARLEN, NEUTRAL), {FA3: "log-sum-exp", FA2: "log-sum-exp"}),
        ({**ALL, "torch_version": "2.10"}, {"sinks": True}, (NEUTRAL,), {SDPA: "attention sinks", VARLEN: "2.12"}),
        ({**ALL}, {"dropout": 0.1}, (FA2, SDPA, NEUTRAL), {FA3: "support dropout"}),
        ({**ALL, "capability": ADA}, {"dropout": 0.1, "size": 256}, (SDPA, NEUTRAL), {FA2: "this GPU it does not"}),
        ({**ALL, "capability": ADA}, {"size": 256, "v_size": 256}, (FA2, VARLEN, SDPA, NEUTRAL), {FA3: "Hopper"}),
        ({"capability": ADA}, {"size": 224, "v_size": 224}, (SDPA, NEUTRAL), {VARLEN: "193 to 224"}),
    ],
)  # fmt: skip
def test_the_fastest_that_can(machine, layer, able, reasons):
    from anytron_cuda.attention.choice import obstacles

    found = obstacles(offered(**machine), spec(**layer))
    assert tuple(name for name, why in found.items() if why is None) == able
    for name, why in reasons.items():
        assert why in found[name]
    choice = choose(offered(**machine), spec(**layer))
    assert choice.kernel == able[0]
    faster = ORDER[: ORDER.index(able[0])]
    assert choice.passed_over == tuple((name, found[name]) for name in faster)


def test_a_kernel_named_by_the_user_is_taken():
    for name in ORDER:
        assert str(choose(offered(**ALL), spec(), name)) == name


def test_a_kernel_named_by_the_user_that_cannot_is_an_error():
    with pytest.raises(PlatformError, match="flash_attention_2 cannot compute this layer") as caught:
        choose(offered(), spec(), FA2)
    assert "flash-attn is not installed" in caught.value.why
    assert "platform.options.attention=auto" in caught.value.fix
    assert "varlen" in caught.value.fix


MASK = torch.zeros(1, 1, 5, 5, dtype=torch.bool)


@pytest.mark.parametrize(
    ("dtype", "call", "why"),
    [
        (torch.float32, AttentionCall("bshd", "causal"), "the operands are float32"),
        (torch.float16, AttentionCall("bshd", "arbitrary", mask=MASK), "the mode 'arbitrary' has one"),
    ],
)
def test_what_a_kernel_cannot_compute_of_a_layer_the_next_one_does(dtype, call, why, caplog):
    from anytron_cuda.attention.choice import _warn, make_attention

    _warn.cache_clear()
    layer = spec()
    attend = make_attention(layer, offered())
    assert attend.description == (
        "varlen (not flash_attention_3: flash-attn-3 is not installed; "
        "not flash_attention_2: flash-attn is not installed)"
    )
    inputs = operands(5, 5, layer, leading=(1,), dtype=dtype)
    for _ in range(2):
        assert attend(*inputs, call).dtype == dtype
    (record,) = caplog.records
    assert record.getMessage().startswith("attention: sdpa computes some calls (not varlen: ")
    assert why in record.getMessage()
    named = make_attention(layer, offered(), "varlen")
    with pytest.raises(PlatformError, match="varlen cannot compute this layer") as caught:
        named(*inputs, call)
    assert why in caught.value.why


def test_the_plain_operations_come_with_a_warning_that_says_what_is_missing(caplog):
    from anytron_cuda.attention.choice import _warn, make_attention

    _warn.cache_clear()
    make_attention(spec(sinks=True), offered(torch_version="2.10"))
    (record,) = caplog.records
    assert record.getMessage().startswith("attention keeps all scores in memory: neutral (")
    assert "not varlen: it requires torch 2.12 or later, and torch 2.10 is installed" in record.getMessage()


def test_flash_attention_3_has_no_deterministic_backward_pass_of_its_largest_heads(monkeypatch):
    from anytron_cuda.attention.choice import CANDIDATES

    obstacle, call = CANDIDATES[FA3].call_obstacle, AttentionCall("bshd", "causal")
    assert obstacle(spec(size=256, v_size=256), call, torch.float16) is None
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "not deterministic" in obstacle(spec(size=256, v_size=256), call, torch.float16)
    assert obstacle(spec(size=192, v_size=128), call, torch.float16) is None


def test_operands_that_no_fused_operator_takes_are_an_error(monkeypatch):
    from anytron_cuda.attention import fused_sdpa

    layer = spec()
    query, key, value = (one.transpose(1, 2) for one in operands(5, 5, layer, leading=(1,)))
    mask = torch.ones(5, 5, dtype=torch.bool)
    monkeypatch.setattr(fused_sdpa, "padded_heads", lambda q, k, v: (q, k, v[..., :8]))  # torch wants one size here
    with pytest.raises(PlatformError, match="None of torch's fused kernels"):
        fused_sdpa.attend(query, key, value, attn_mask=mask, enable_gqa=True)


def test_the_platform_answers_for_its_own_device(monkeypatch):
    from anytron_cuda import CudaPlatform, capabilities

    monkeypatch.setattr(capabilities, "capabilities", offered)
    answer = CudaPlatform().attention_kernel
    assert answer(spec()).description.startswith("varlen (")
    assert answer(dataclasses.replace(spec(), device_type="cpu")) is None


def test_the_option_of_the_platform_names_a_kernel(monkeypatch):
    from anytron_cuda import CudaPlatform, capabilities
    from anytron_cuda.options import CudaOptions

    monkeypatch.setattr(capabilities, "capabilities", offered)
    platform = CudaPlatform()
    platform.configure_options(CudaOptions(attention="sdpa"))
    assert platform.attention_kernel(spec()).description == "sdpa"
    platform.configure_options(CudaOptions(attention="flash_attention_2"))
    with pytest.raises(PlatformError, match="flash_attention_2 cannot compute this layer"):
        platform.attention_kernel(spec())
