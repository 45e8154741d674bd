"""Hazards of torch_npu and its operators, each shown on the real torch_npu, and caught.

A test shows both: what goes wrong without the plugin, in silence or late, and what the plugin does. Those that need
no more than the operator's contract are in ``simulator/test_flash_attention.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch_npu
from anytron_ascend_simulator import aclnn
from torch._subclasses.fake_tensor import FakeTensorMode

from anytron.base.errors import ConfigError, PlatformError
from anytron.base.traits import ModelTraits
from anytron.config.diagnostics import refuse
from anytron.kernels.attention import make_attention as make_neutral
from anytron.kernels.contract import AttentionCall, AttentionSpec
from anytron_ascend import platform
from anytron_ascend.kernels.attention import compressed_mask, make_attention
from anytron_ascend.options import AscendOptions, worker_environment
from anytron_ascend.runtime import AscendRuntime

B, S, H, G, D = 2, 6, 4, 2, 8
SCALE = 0.3
TRIANGLE = torch.ones(S, S, dtype=torch.bool).triu(1)


def spec(heads=H, kv_heads=G, size=D, value_size=D, sinks=False):
    return AttentionSpec(heads, kv_heads, size, value_size, SCALE, ModelTraits(), sinks=sinks, device_type="npu")


def operands():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, S, heads, D, generator=generator) for heads in (H, G, G)]


def on_device(tensors):
    return [tensor.npu() for tensor in tensors]


def operator(*tensors, **settings):
    return torch_npu.npu_fusion_attention(*tensors, H, "BSND", scale=SCALE, **settings)[0].cpu()


def kernel(call):
    return make_attention(spec())(*on_device(operands()), call).cpu()


def neutral(call):
    return make_neutral(spec())(*operands(), call)


# Masks and modes of attention


def test_a_sparse_mode_without_its_mask_is_ignored_so_the_kernel_brings_the_mask():
    tensors = on_device(operands())
    causal, both_ways = (neutral(AttentionCall("bshd", mode)) for mode in ("causal", "no_mask"))
    alone = operator(*tensors, sparse_mode=3)
    torch.testing.assert_close(alone, both_ways)
    assert not torch.allclose(alone, causal), "not causal, and nobody said so"
    torch.testing.assert_close(kernel(AttentionCall("bshd", "causal")), causal)


def test_a_call_without_a_mask_leaves_no_mode_behind_for_the_next_explicit_one():
    """MindSpeed writes ``sparse_mode=2`` into the shared config at the first call without a mask, for good; the
    next explicit mask goes to the operator with it."""
    explicit = torch.zeros(B, 1, S, S, dtype=torch.bool)
    explicit[1, :, :, 4:] = True
    with pytest.raises(RuntimeError, match="compressed 2048x2048"):
        operator(*on_device(operands()), atten_mask=explicit.npu(), sparse_mode=2)
    attend, tensors = make_attention(spec()), on_device(operands())
    for mode, mask in (("causal", None), ("padding_causal", explicit)) * 2:
        found = attend(*tensors, AttentionCall("bshd", mode, mask=None if mask is None else mask.npu()))
        torch.testing.assert_close(found.cpu(), neutral(AttentionCall("bshd", mode, mask=mask)))


@pytest.mark.parametrize("mode", ["padding_causal", "arbitrary"])
@pytest.mark.parametrize("shape", [(S, S), (1, 1, S, S), (B, 1, 1, S), (1, H, S, S), (B, H, S, S)])
def test_every_shape_that_broadcasts_to_the_scores_is_read_as_that(shape, mode):
    """The operator has four shapes of masks; one head's mask for a whole batch, ``[1, H, Sq, Sk]``, is not among
    them."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.6
    if shape == (1, H, S, S):
        with pytest.raises(RuntimeError, match=r"atten_mask is \(1, 4, 6, 6\)"):
            operator(*on_device(operands()), atten_mask=mask.npu(), sparse_mode=1)
    found = kernel(AttentionCall("bshd", mode, mask=mask.npu()))
    torch.testing.assert_close(found, neutral(AttentionCall("bshd", mode, mask=mask)))


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(torch.ones(B, S, dtype=torch.bool), id="a keep mask of tokens"),
        pytest.param(torch.zeros(B, 1, S, S), id="an additive mask"),
        pytest.param(torch.zeros(B, 1, S, S, dtype=torch.uint8), id="uint8"),
        pytest.param(torch.zeros(B, 1, S // 2, S // 2, dtype=torch.bool), id="a shard of context parallelism"),
        pytest.param(compressed_mask(torch.device("cpu")), id="the compressed mask"),
    ],
)
def test_what_is_no_mask_of_the_scores_is_refused_by_name(mask):
    with pytest.raises(PlatformError, match="does not accept this attention mask") as caught:
        kernel(AttentionCall("bshd", "padding_causal", mask=mask.npu()))
    assert str(tuple(mask.shape)) in caught.value.why


def test_a_keep_mask_of_as_many_sequences_as_tokens_passes_for_a_mask_of_scores():
    """verl's ``[B, S]`` keep mask on an NPU. With B = S neither the operator nor the kernel can tell; that the kind of
    a mask fixes its shape and polarity (``check_mask``, tests/core/sequences/test_bugs_elsewhere.py, 5 and 10) can."""
    keep = torch.ones(S, S, dtype=torch.bool)
    tensors = [tensor[:1].expand(S, -1, -1, -1).contiguous().npu() for tensor in operands()]
    read = operator(*tensors, atten_mask=keep.npu(), sparse_mode=1, inner_precise=2)
    assert read.abs().max().item() == 0, "everything kept is read as everything masked"


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": "XYZ"},
        {"heads": 3},
        {"sparse_mode": 99},
        {"atten_mask": lambda: torch.zeros(3, 3, device="npu"), "sparse_mode": 1},
    ],
    ids=["layout", "heads", "mode", "mask"],
)
def test_the_meta_kernel_accepts_what_the_operator_refuses(wrong):
    """A dry run in FakeTensorMode says nothing about ``npu_fusion_attention``; the simulator does."""

    def call():
        settings = {name: value() if callable(value) else value for name, value in wrong.items()}
        tensors = [torch.zeros(B, S, heads, D, device="npu") for heads in (H, G, G)]
        heads, layout = settings.pop("heads", H), settings.pop("layout", "BSND")
        return torch_npu.npu_fusion_attention(*tensors, heads, layout, **settings)[0]

    with FakeTensorMode():
        call()
    with pytest.raises(RuntimeError, match=r"input_layout|head|sparse_mode|atten_mask"):
        call()


@pytest.mark.parametrize("argument", ["key", "atten_mask"])
@pytest.mark.parametrize("place", ["cpu", "npu:1"])
def test_tensors_of_another_device_are_refused(argument, place):
    query, key, value = on_device(operands())
    given = {"key": key, "atten_mask": TRIANGLE.npu()}
    given[argument] = given[argument].to(place)
    with pytest.raises(RuntimeError, match=f"{argument} is on {place}"):
        operator(query, given["key"], value, atten_mask=given["atten_mask"], sparse_mode=1)


# Heads and lengths of attention, and what is not modelled


@pytest.mark.parametrize(
    ("heads", "text"),
    [
        ({"heads": 257, "kv_heads": 257}, "at most 256"),
        ({"heads": 3, "kv_heads": 2}, "3 query heads and 2 key/value heads"),
        ({"size": 776, "value_size": 776}, "the query dimension must not exceed 768"),
        ({"value_size": 2 * D}, "the query dimension must not exceed 768"),
    ],
    ids=["many", "uneven", "long", "wide values"],
)
def test_heads_that_the_operator_refuses_are_refused_when_the_layer_is_built(heads, text):
    wanted = spec(**heads)
    shapes = (
        (wanted.num_heads, wanted.qk_dim),
        (wanted.num_kv_heads, wanted.qk_dim),
        (wanted.num_kv_heads, wanted.v_dim),
    )
    with pytest.raises(RuntimeError, match=r"heads|head sizes|Dv"):
        torch_npu.npu_fusion_attention(*(torch.zeros(1, 2, *shape).npu() for shape in shapes), wanted.num_heads, "BSND")
    with pytest.raises(PlatformError) as caught:
        make_attention(wanted)
    assert text in caught.value.why


def test_ends_of_sequences_begin_with_the_first_and_not_with_0():
    """``cu_seqlens`` as MindSpeed passes them on have a leading 0; the operator's documentation has none."""
    tensors = [tensor.flatten(0, 1).npu() for tensor in operands()]
    cu_seqlens = torch.tensor([0, S, 2 * S], dtype=torch.int32)
    ends = {"actual_seq_qlen": cu_seqlens.tolist(), "actual_seq_kvlen": cu_seqlens.tolist()}
    with pytest.raises(RuntimeError, match="leading 0"):
        torch_npu.npu_fusion_attention(*tensors, H, "TND", scale=SCALE, **ends)
    device = cu_seqlens.npu()
    found = make_attention(spec())(*tensors, AttentionCall("thd", "padding_causal", device, device, None, None, S, S))
    torch.testing.assert_close(found.cpu().unflatten(0, (B, S)), neutral(AttentionCall("bshd", "causal")))


@pytest.mark.parametrize("ends", [[S, S, 2 * S], [S, 2 * S, 0], [S, 2 * S, 0, 0]])
def test_empty_sequences_and_zeros_at_the_end_change_nothing(ends):
    tensors = [tensor.flatten(0, 1).npu() for tensor in operands()]
    settings = {"atten_mask": compressed_mask(torch.device("npu", 0)), "sparse_mode": 3, "scale": SCALE}
    found, plain = (
        torch_npu.npu_fusion_attention(
            *tensors, H, "TND", actual_seq_qlen=lengths, actual_seq_kvlen=lengths, **settings
        )[0]
        for lengths in (ends, [S, 2 * S])
    )
    assert torch.equal(found, plain)


@pytest.mark.parametrize("call_format", ["thd", "bshd"])
@pytest.mark.parametrize(("dtype", "operator_calls"), [(torch.float16, 1), (torch.float32, 0)])
def test_sinks_in_float32_are_the_neutral_kernel_s_because_the_gradient_has_no_float32(
    call_format, dtype, operator_calls
):
    ends = torch.tensor([0, B * S], dtype=torch.int32)
    name = {"thd": "aclnnFlashAttentionVarLenScoreV5", "bshd": "aclnnFlashAttentionScoreV3"}[call_format]
    tensors = [tensor.to(dtype) if call_format == "bshd" else tensor.to(dtype).flatten(0, 1) for tensor in operands()]
    results, before = [], aclnn.CALLS[name]
    for make, device, tolerant in ((make_neutral, "cpu", torch.float32), (make_attention, "npu", dtype)):
        sinks = torch.linspace(-1, 2, H, device=device).requires_grad_()
        packed = {"cu_seqlens_q": ends.to(device), "cu_seqlens_kv": ends.to(device)} if call_format == "thd" else {}
        mode = {"thd": "padding_causal", "bshd": "causal"}[call_format]
        moved = [tensor.to(device, tolerant).requires_grad_() for tensor in tensors]
        found = make(spec(sinks=True))(*moved, AttentionCall(call_format, mode, sinks=sinks, **packed))
        gradients = torch.autograd.grad(found.float().square().sum(), [*moved, sinks])
        results.append([found.detach(), *gradients])
    assert aclnn.CALLS[name] - before == operator_calls
    tolerance = {torch.float16: 1e-2, torch.float32: 1e-5}[dtype]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu().float(), expected, atol=tolerance, rtol=tolerance)


def test_sinks_with_values_smaller_than_queries_are_refused_before_the_gradient_is():
    with pytest.raises(PlatformError, match="does not support attention sinks for these head dimensions"):
        make_attention(spec(value_size=D // 2, sinks=True))


@pytest.mark.parametrize("setting", ["pse", "padding_mask", "prefix"])
def test_what_the_simulator_does_not_model_is_refused_and_not_left_out(setting):
    given = {
        "pse": {"pse": torch.zeros(B, H, S, S).npu()},
        "padding_mask": {"padding_mask": torch.zeros(B, H, S, S).npu()},
        "prefix": {"prefix": [1, 1], "atten_mask": TRIANGLE.expand(B, 1, S, S).npu(), "sparse_mode": 5},
    }[setting]
    with pytest.raises(RuntimeError, match=f"{setting} is not"):
        operator(*on_device(operands()), **given)


# Operators without kernels


def test_an_operator_without_an_npu_kernel_is_an_error_in_workers(run_program):
    """torch_npu runs it on the host, and only warns."""
    program = """
from anytron_ascend_simulator import activate
activate()
import torch
print("device of the result:", torch.special.airy_ai(torch.ones(2).npu()).device)
"""
    alone = run_program(program, environment={"TORCH_NPU_FALLBACK_CPU_DISABLE": ""})[0]
    assert "will fall back to run on the CPU" in alone
    assert "device of the result: npu:0" in alone, "as if nothing had happened"
    worker = run_program(program, environment=worker_environment(AscendOptions(), deterministic=False), fails=True)[0]
    assert "CPU fallback is disabled by TORCH_NPU_FALLBACK_CPU_DISABLE=1" in worker


@pytest.mark.parametrize(
    ("name", "text"), [("npu_fast_gelu", "no kernel for operator FastGelu"), ("npu_gelu", "aclnnGelu")]
)
def test_an_operator_that_the_simulator_lacks_is_named(name, text):
    with pytest.raises(RuntimeError, match=text):
        getattr(torch_npu, name)(torch.ones(2, 2).npu())


def test_counts_of_groups_declared_as_sums_are_refused():
    """``group_list_type`` is 0, sums, by default; the plugin gives counts, and says so."""
    with pytest.raises(RuntimeError, match="not ascending"):
        torch_npu.npu_grouped_matmul(
            [torch.ones(5, 4).npu()], [torch.ones(3, 4, 6).npu()], group_list=torch.tensor([2, 0, 3]).npu(),
            split_item=3, group_type=0,
        )  # fmt: skip


# Processes


def run_plainly(*arguments, **variables):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ANYTRON", "TORCH_DEVICE"))
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_torch_cannot_be_imported_beside_a_torch_npu_without_cann_unless_told():
    """torch loads torch_npu by itself; a worker's environment forbids it."""
    assert "Failed to load the backend extension: torch_npu" in run_plainly("-c", "import torch").stderr
    allowed = worker_environment(AscendOptions(), deterministic=False)["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    program = "import torch; print('torch', torch.ones(1).item())"
    done = run_plainly("-c", program, TORCH_DEVICE_BACKEND_AUTOLOAD=allowed)
    assert done.stdout == "torch 1.0\n", done.stderr


def test_the_command_line_works_beside_a_torch_npu_without_cann():
    done = run_plainly("-m", "anytron", "plugins", "list", COLUMNS="200")  # no sentence is broken into lines
    assert "CANN cannot be used" in done.stdout, done.stderr


def test_the_task_queue_is_off_on_the_simulator_whatever_the_user_wants(run_program):
    """torch_npu's queue hands kernels to another thread, after the memory of their tensors has been used again."""
    program = """
from anytron_ascend_simulator import activate
activate()
import os, torch
total = torch.zeros(64, device="npu")
for _ in range(50):
    total += torch.ones(64, device="npu") * 2
print("queue", os.environ["TASK_QUEUE_ENABLE"], "sum", total.sum().item())
"""
    assert "queue 0 sum 6400.0" in run_program(program, environment={"TASK_QUEUE_ENABLE": "2"})[0]


def test_expandable_segments_are_refused_where_torch_npu_is_too_old(monkeypatch):
    monkeypatch.setattr(platform, "_installed", lambda _: "2.7.1")
    options = AscendOptions(expandable_segments=True)
    with pytest.raises(ConfigError, match="expandable segments need"):
        refuse(platform._option_diagnostics(options, "megatron"))
    assert list(platform._option_diagnostics(AscendOptions(), "megatron")) == []


def test_torch_cuda_that_is_redirected_does_not_choose_the_platform(run_program):
    """After ``transfer_to_npu``, which MindSpeed imports, ``torch.cuda.is_available()`` is the NPU's answer."""
    program = """
from anytron_ascend_simulator import activate
activate()
import torch
from torch_npu.contrib import transfer_to_npu
from anytron.device.loading import open_session
print("cuda:", torch.cuda.is_available(), "platform:", open_session().platform.name)
"""
    assert "cuda: True platform: ascend" in run_program(program)[0]


# The runtime


def test_generators_are_there_before_anything_ran_on_the_device(run_program):
    """torch_npu makes them when the device is initialised; before that the tuple is empty."""
    program = """
from anytron_ascend_simulator import activate
activate()
import torch
print("before:", len(torch.npu.default_generators))
from anytron_ascend.runtime import AscendRuntime
print("generator of:", AscendRuntime().default_generator().device)
"""
    output = run_program(program)[0]
    assert "before: 0" in output
    assert "generator of: npu:0" in output


def test_a_random_state_of_another_device_is_refused_and_its_own_restores():
    runtime = AscendRuntime()
    runtime.manual_seed(3)
    state = runtime.get_rng_state()
    first = torch.rand(4, device="npu")
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        runtime.set_rng_state(torch.get_rng_state())
    assert not torch.equal(torch.rand(4, device="npu"), first)
    runtime.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="npu"), first)


def test_memory_that_can_be_pinned_is():
    assert AscendRuntime().can_pin_memory()
    assert torch.ones(3).pin_memory().is_pinned()
