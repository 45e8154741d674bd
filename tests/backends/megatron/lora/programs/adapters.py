"""Adapters on models of mcore-bridge, bit by bit; run by ``test_weights.py`` in a process of its own.

The tiny models lie in the directory ``TINY_MODELS``, one folder for each family.
"""

import os
from pathlib import Path

import pytest
import torch

from anytron.base.traits import ParallelSizes
from anytron.config.running import OptimizerSection
from anytron.config.schema import LoraSection
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

REARRANGED = ("q_proj.", "k_proj.", "v_proj.", ".experts.")
"""Tensors whose rows Megatron keeps in another order, and tensors of experts, which mcore-bridge joins."""
FAMILIES = sorted(path.name for path in Path(os.environ["TINY_MODELS"]).iterdir())


@pytest.fixture(scope="module")
def megatron():
    torch.set_num_threads(1)
    platform = CpuPlatform()
    context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, trainer_patches(phase, context))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    ledger.apply(Phase.BEFORE_BUILD, trainer_patches(Phase.BEFORE_BUILD, context))


@pytest.fixture(params=[(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")], ids="-".join)
def adapted(request, megatron):
    """A model with adapters whose ``B`` is not zero: (bridge, model, adapters)."""
    from anytron_megatron.lora.adapters import Adapters
    from anytron_megatron.models.bridge import BridgeSource

    family, dtype = request.param
    bridge = BridgeSource(
        Path(os.environ["TINY_MODELS"]) / family,
        dtype=getattr(torch, dtype),
        sizes=ParallelSizes(),
        recompute="none",
        deterministic=False,
        transformer={},
    )
    (model,) = bridge.build(torch.device("cpu"))
    adapters = Adapters(bridge, [model], LoraSection(rank=4), seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return bridge, model, adapters


def bits(model):
    """Copies of everything that is not an adapter."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if ".lora_" not in name}


def test_an_update_moves_adapters_and_nothing_else(adapted):
    from anytron_megatron.training.trained_model import DataParallel, build_optimizer, wrap_for_training

    _, model, _ = adapted
    before = bits(model)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    begun = {name: parameter.detach().clone() for name, parameter in trained.items()}

    (wrapped,) = wrap_for_training([model], DataParallel())
    dtype = next(iter(trained.values())).dtype
    optimizer, _ = build_optimizer(
        OptimizerSection(lr=0.1, clip_grad=0.0), [wrapped], dtype=dtype, data_parallel=DataParallel(), steps=1,
        updates_per_step=1,
    )  # fmt: skip
    size = sum(parameter.numel() for parameter in trained.values())
    assert sum(buffer.numel_unpadded for buffer in wrapped.buffers + wrapped.expert_parallel_buffers) == size
    assert sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"]) == size
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for parameter in trained.values():
        parameter.main_grad.normal_()
    successful, norm, _ = optimizer.step()

    assert successful
    assert norm == pytest.approx(size**0.5, rel=0.1)  # the gradients are standard normal: no other counts
    for name, parameter in trained.items():
        assert not torch.equal(parameter, begun[name]), name
    assert bits(model).keys() == before.keys()
    for name, tensor in bits(model).items():
        assert torch.equal(tensor, before[name]), name


def test_an_export_copies_nothing_but_what_it_rearranges(adapted):
    bridge, model, _ = adapted
    before = bits(model)
    storages = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    copied = []
    for name, tensor in bridge.export([model]):
        assert tensor.clone().data_ptr() != tensor.data_ptr()
        if tensor.untyped_storage().data_ptr() not in storages:
            copied.append(name)

    assert all(any(part in name for part in REARRANGED) for name in copied), copied
    for name, tensor in bits(model).items():
        assert torch.equal(tensor, before[name]), name


def test_merging_leaves_the_weights_where_and_what_they_were(adapted):
    bridge, model, adapters = adapted
    before = bits(model)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    base = {name: tensor.clone() for name, tensor in bridge.export([model])}
    with adapters.merged():
        merged = dict(bridge.export([model]))
        changed = {name for name, tensor in bits(model).items() if not torch.equal(tensor, before[name])}
    with pytest.raises(ZeroDivisionError), adapters.merged():
        raise ZeroDivisionError

    assert changed
    assert merged.keys() == base.keys()
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    for name, tensor in bits(model).items():
        assert torch.equal(tensor, before[name]), name
    for name, tensor in bridge.export([model]):
        assert torch.equal(tensor, base[name]), name


def test_merged_weights_are_rounded_once(adapted):
    """They are those nearest to the exact ``W + scaling * B A`` (in float32 within its own rounding)."""
    bridge, model, adapters = adapted
    scaling = 32.0 / 4
    base = {name: tensor.clone() for name, tensor in bridge.export([model])}
    factors = {
        name.removeprefix("base_model.model."): tensor.double() for name, tensor in bridge.export_adapters([model])
    }
    with adapters.merged():
        merged = {name: tensor.clone() for name, tensor in bridge.export([model])}
    adapted_weights = [name for name in base if name.replace(".weight", ".lora_A.weight") in factors]

    assert len(adapted_weights) == len(factors) / 2
    for name in adapted_weights:
        a, b = (factors[name.replace(".weight", f".lora_{factor}.weight")] for factor in "AB")
        exact = base[name].double() + scaling * (b @ a)
        half_a_step = 0.51 * torch.finfo(merged[name].dtype).eps * exact.abs()
        assert ((merged[name].double() - exact).abs() <= half_a_step + 1e-6).all(), name
