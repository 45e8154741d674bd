"""Linear layers and norms against torch and Hugging Face; what Megatron and the bridges read on them."""

from __future__ import annotations

import pytest
import torch

from anytron import hookimpl
from anytron.base.errors import EngineError
from anytron.device.loading import hooks_of
from anytron_megatron.portable_te import pytorch as te
from anytron_megatron.portable_te.binding import bind


def filled(module):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torchs(bound, bias):
    layer = filled(te.Linear(6, 4, bias=bias))
    reference = torch.nn.Linear(6, 4, bias=bias)
    reference.load_state_dict({name: value for name, value in layer.state_dict().items() if "extra" not in name})
    x = torch.randn(3, 2, 6)
    assert torch.equal(layer(x), reference(x))


def test_linear_returns_its_bias_instead_of_adding_it(bound):
    layer = filled(te.Linear(6, 4, return_bias=True))
    x = torch.randn(3, 6)
    output, bias = layer(x)
    assert bias is layer.bias
    torch.testing.assert_close(output, x @ layer.weight.T)


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_layer_norm_linear_is_a_norm_and_a_linear(bound, normalization, zero_centered):
    layer = filled(te.LayerNormLinear(6, 4, eps=1e-6, normalization=normalization, zero_centered_gamma=zero_centered))
    norm = getattr(te, normalization)(6, eps=1e-6, zero_centered_gamma=zero_centered)
    norm.weight.data.copy_(layer.layer_norm_weight.data)
    if norm.bias is not None:
        norm.bias.data.copy_(layer.layer_norm_bias.data)
    x = torch.randn(3, 6)
    torch.testing.assert_close(layer(x), norm(x) @ layer.weight.T + layer.bias)


def test_norms_are_torchs(bound):
    x = torch.randn(3, 6)
    layer_norm, rms_norm = filled(te.LayerNorm(6)), filled(te.RMSNorm(6))
    expected = torch.nn.functional.layer_norm(x, (6,), layer_norm.weight, layer_norm.bias, 1e-5)
    torch.testing.assert_close(layer_norm(x), expected)
    torch.testing.assert_close(rms_norm(x), torch.nn.functional.rms_norm(x, (6,), rms_norm.weight, 1e-5))


def test_a_new_norm_is_the_identity_factor(bound):
    assert te.RMSNorm(3).weight.eq(1).all()
    assert te.RMSNorm(3, zero_centered_gamma=True).weight.eq(0).all()
    layer = te.LayerNormLinear(3, 2, zero_centered_gamma=True)
    assert layer.layer_norm_weight.eq(0).all()
    assert layer.layer_norm_bias.eq(0).all()


def test_a_norm_can_be_told_later_where_its_factor_is_centred(bound):
    """mcore-bridge sets it on the output norms of Gated DeltaNet after they are built."""
    x = torch.randn(3, 6)
    norm = filled(te.RMSNorm(6, zero_centered_gamma=True))
    before = norm(x)
    norm.zero_centered_gamma = False
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (6,), norm.weight, 1e-5))
    assert not torch.equal(norm(x), before)


def test_lora_asks_for_the_norms_output_by_an_attribute(bound):
    layer = filled(te.LayerNormLinear(6, 4, normalization="RMSNorm", bias=False))
    layer.return_layernorm_output = True
    output, normalized = layer(torch.randn(3, 6))
    torch.testing.assert_close(output, normalized @ layer.weight.T)


def test_grouped_linear_is_one_linear_per_group(bound):
    layer = filled(te.GroupedLinear(3, 6, 4))
    x = torch.randn(5, 6)
    parts = [
        part @ getattr(layer, f"weight{index}").T + getattr(layer, f"bias{index}")
        for index, part in enumerate(x.split([2, 0, 3]))
    ]
    torch.testing.assert_close(layer(x, [2, 0, 3]), torch.cat(parts))


@pytest.mark.parametrize(
    ("parallel_mode", "rng_name", "split", "dim"),
    [
        ("column", None, True, 0),
        ("row", None, True, 1),
        (None, None, False, -1),
        # Megatron hides tensor parallelism from experts; without the attribute the gradient norm is short.
        (None, "expert-parallel-rng", True, 0),
    ],
)
def test_weights_say_whether_they_are_part_of_a_split_tensor(bound, parallel_mode, rng_name, split, dim):
    layer = te.Linear(4, 4, parallel_mode=parallel_mode, rng_tracker_name=rng_name, tp_size=2 if parallel_mode else 1)
    assert layer.weight.tensor_model_parallel is split
    assert layer.weight.partition_dim == dim
    assert tuple(layer.weight.shape) == {"column": (2, 4), "row": (4, 2)}.get(parallel_mode, (4, 4))


@pytest.fixture
def group_of_four():
    """A group of four ranks that exist only in this process."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_the_size_of_a_group_takes_precedence_over_a_size(bound, group_of_four):
    # Megatron passes its configuration's size, and the group of a caller's own (TELayerNormColumnParallelLinear).
    column = te.LayerNormLinear(8, 8, parallel_mode="column", tp_size=1, tp_group=group_of_four)
    row = te.Linear(8, 8, parallel_mode="row", sequence_parallel=True, tp_size=1, tp_group=group_of_four)
    attention = te.DotProductAttention(8, 4, softmax_type="learnable", tp_size=1, tp_group=group_of_four)
    assert (column.tp_size, tuple(column.weight.shape), tuple(row.weight.shape)) == (4, (2, 8), (8, 2))
    assert (row.sequence_parallel, attention.softmax_offset.numel()) == (True, 2)
    with pytest.raises(EngineError, match="tensor parallelism in GroupedLinear"):
        te.GroupedLinear(2, 8, 8, parallel_mode="column", tp_group=group_of_four)


def test_norm_weights_say_that_their_gradients_are_parts(bound):
    layer = te.LayerNormLinear(4, 4, sequence_parallel=True, parallel_mode="column", tp_size=2)
    assert layer.layer_norm_weight.sequence_parallel is True
    assert te.RMSNorm(4, sequence_parallel=True).weight.sequence_parallel is True
    assert te.Linear(4, 4, sequence_parallel=True, parallel_mode="row", tp_size=2).bias.sequence_parallel is True


def test_checkpoints_have_an_empty_extra_state_and_fp8_state_is_refused(bound):
    layer = te.Linear(4, 4)
    state = layer.state_dict()
    assert state["_extra_state"].shape == (0,)
    assert layer.fp8_meta == {"fp8_checkpoint": False}
    te.Linear(4, 4).load_state_dict(state)
    with pytest.raises(EngineError, match="FP8 state"):
        layer.set_extra_state(torch.ones(3, dtype=torch.uint8))


@pytest.mark.parametrize(
    "build",
    [
        lambda: te.Linear(4, 4, ub_name="qkv"),
        lambda: te.LayerNormLinear(4, 4, ub_name="qkv"),
        lambda: te.GroupedLinear(2, 4, 4, ub_name="qkv"),
    ],
)
def test_layers_have_what_megatron_reads(bound, build):
    # megatron/core/extensions/transformer_engine.py; the functions named are its.
    layer = build()
    assert (layer.in_features, layer.out_features, layer.tp_size) == (4, 4, 1)  # extra_repr
    assert (layer.use_bias, layer.ub_name) == (True, "qkv")  # split_te_layernorm_column_parallel_linear
    assert layer.save_original_input is False  # set_save_original_input
    assert (layer.fp8, layer.fp8_calibration) == (False, False)
    layer.init_fp8_metadata(num_gemms=2)  # TEGroupedLinear.merge_extra_states
    assert layer._decode_extra_state(layer._encode_extra_state(None)) is None
    layer.set_tensor_parallel_group("group")
    assert layer.tp_group == "group"
    for parameter in layer.parameters():
        if parameter.ndim == 2:  # param_is_not_tensor_parallel_duplicate, dist_checkpointing
            assert (parameter.partition_dim, parameter.partition_stride) == (-1, 1)


def test_layers_without_bias_have_empty_ones(bound):
    # Megatron reads their length, mcore-bridge's LoRA their truth.
    assert te.Linear(4, 4, bias=False).bias.numel() == 0
    assert te.GroupedLinear(2, 4, 4, bias=False).bias1.numel() == 0


def test_weights_of_experts_are_parts_of_split_tensors(bound):
    layer = te.GroupedLinear(2, 4, 4, rng_tracker_name="expert-parallel-rng")
    assert all(parameter.tensor_model_parallel for parameter in layer.parameters())
    assert not any(parameter.tensor_model_parallel for parameter in te.GroupedLinear(2, 4, 4).parameters())


def test_the_norms_output_is_given_whole_or_in_parts(bound):
    layer = filled(te.LayerNormLinear(6, 4, return_bias=True, return_layernorm_output=True))
    output, bias, normalized = layer(torch.randn(3, 6))
    assert bias is layer.bias
    torch.testing.assert_close(output, normalized @ layer.weight.T)


@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_gradients_of_layer_norm_linear_are_the_definitions(bound, normalization, zero_centered):
    layer = filled(
        te.LayerNormLinear(
            6, 4, normalization=normalization, zero_centered_gamma=zero_centered, params_dtype=torch.float64
        )
    )
    x = torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True)

    def defined():
        centered = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
        normal = centered / (centered.square().mean(-1, keepdim=True) + layer.eps).sqrt()
        normal = normal * (layer.layer_norm_weight + 1 if zero_centered else layer.layer_norm_weight)
        normal = normal if layer.layer_norm_bias is None else normal + layer.layer_norm_bias
        return normal @ layer.weight.T + layer.bias

    # The neutral RMS norm computes in float32, as Hugging Face's.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if normalization == "RMSNorm" else {}
    leaves = [x, *layer.parameters()]
    cotangent = torch.randn(3, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(layer(x), defined(), **tolerance)
    got, want = (torch.autograd.grad(output, leaves, cotangent) for output in (layer(x), defined()))
    torch.testing.assert_close(got, want, **tolerance)


def test_gradients_of_grouped_linear_are_those_of_its_parts(bound):
    layer = filled(te.GroupedLinear(3, 6, 4, params_dtype=torch.float64))
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    splits = [2, 0, 3]
    parts = [
        part @ getattr(layer, f"weight{index}").T + getattr(layer, f"bias{index}")
        for index, part in enumerate(x.split(splits))
    ]
    leaves = [x, *layer.parameters()]
    cotangent = torch.randn(5, 4, dtype=torch.float64)
    got, want = (torch.autograd.grad(output, leaves, cotangent) for output in (layer(x, splits), torch.cat(parts)))
    torch.testing.assert_close(got, want)


def test_weights_are_drawn_in_the_state_that_megatron_names(bound):
    import contextlib

    entered = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            entered.append(name)
            yield

    te.Linear(4, 4, bias=False, get_rng_state_tracker=Tracker)
    te.Linear(4, 4, bias=False, get_rng_state_tracker=Tracker, rng_tracker_name="data-parallel-rng")
    assert entered == ["model-parallel-rng", "data-parallel-rng"]


def test_parameters_on_the_meta_device_are_not_filled(bound):
    assert te.LayerNormLinear(4, 4, device="meta").weight.is_meta


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: te.Linear(4, 4, delay_wgrad_compute=True), "delay_wgrad_compute=True"),
        (lambda: te.Linear(4, 4, ub_overlap_ag=True, ub_name="qkv"), "ub_overlap_ag=True"),
        (lambda: te.LayerNormLinear(4, 4, symmetric_ar_type="one_shot"), "symmetric_ar_type='one_shot'"),
        (lambda: te.GroupedLinear(2, 4, 4, delay_wgrad_compute=True), "delay_wgrad_compute=True"),
        (lambda: te.GroupedLinear(2, 4, 4, parallel_mode="row", tp_size=2), "tensor parallelism"),
        (lambda: te.LayerNormLinear(4, 4, normalization="Odd"), "normalization 'Odd'"),
        (lambda: te.Linear(4, 4, parallel_mode="diagonal"), "parallel_mode 'diagonal'"),
        (lambda: te.LayerNormMLP(4, 4), "LayerNormMLP"),
        (lambda: te.TransformerLayer(4, 4, 2), "TransformerLayer"),
        (te.ops.Sequential, "fuser"),
        (lambda: te.ops.SwiGLU(cache_quantized_input=True), "cache_quantized_input=True"),
        (te.CudaRNGStatesTracker, "random states"),
        (te.ops.SiLU, "operation"),
        (te.router.fused_moe_aux_loss, "fused routing"),
        (te.router.fused_topk_with_score_function, "fused routing"),
        (te.router.fused_compute_score_for_moe_aux_loss, "fused routing"),
        (lambda: te.Linear(4, 4).backward_dw(), "delayed weight gradients"),
        (lambda: te.fp8_autocast(enabled=True).__enter__(), "FP8"),
        (lambda: te.fp8_autocast(enabled=False, calibrating=True).__enter__(), "calibrating=True"),
        (lambda: te.fp8_model_init().__enter__(), "FP8"),
        (lambda: te.checkpoint(torch.relu, torch.ones(1), use_reentrant=False), "use_reentrant=False"),
        (lambda: te.checkpoint(torch.relu, torch.ones(1), determinism_check="none"), "determinism_check='none'"),
        (lambda: te.Fp8Padding(2), "FP8 for experts"),
        (lambda: te.Fp8Unpadding(2), "FP8 for experts"),
    ],
)
def test_what_is_not_computed_is_refused(bound, build, named):
    with pytest.raises(EngineError) as error:
        build()
    assert named in str(error.value)
    assert "fix:" in str(error.value)


def test_settings_that_ask_for_nothing_are_accepted(bound):
    te.Linear(4, 4, delay_wgrad_compute=False, symmetric_ar_type=None, fuse_wgrad_accumulation=True, ub_name="fc1")
    with te.fp8_autocast(enabled=False), te.fp8_model_init(enabled=False):
        pass


def test_modules_without_hooks_say_what_is_missing():
    with pytest.raises(EngineError, match="has no kernels") as error:
        te.RMSNorm(4)
    assert "open_device_stack()" in str(error.value)


def test_kernels_are_asked_for_once_per_module_and_called_directly():
    asked = []

    class Chip:
        @hookimpl
        def fused_kernel(self, name, spec):
            asked.append((name.value, spec.device_type, spec.options["eps"]))
            return lambda x, weight, eps, zero_centered: x * 0 + eps

    undo = bind(hooks_of(extensions={"chip": Chip()}), "chip")
    try:
        norm = te.RMSNorm(4, eps=0.5)
        assert norm(torch.ones(2, 4)).eq(0.5).all()
        norm(torch.ones(2, 4))
    finally:
        undo()
    assert asked == [("rms_norm", "chip", 0.5)]


def test_swiglu_is_the_platforms_kernel(bound):
    x = torch.randn(3, 8)
    torch.testing.assert_close(te.ops.SwiGLU()(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])
