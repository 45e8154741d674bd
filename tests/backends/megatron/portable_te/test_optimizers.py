"""FusedAdam over steps against torch's, and the operations over lists of tensors."""

from __future__ import annotations

import pytest
import torch

from anytron.base.errors import EngineError
from anytron_megatron.portable_te.pytorch.optimizers import (
    FusedAdam,
    FusedSGD,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)


def parameters(count=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2 + index, generator=generator).requires_grad_() for index in range(count)]


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_fused_adam_takes_torchs_steps(bound, adam_w_mode):
    ours, theirs = parameters(), parameters()
    settings = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-7}
    optimizer = FusedAdam(
        [{"params": ours[:1]}, {"params": ours[1:], "weight_decay": 0.2, "lr": 0.01}],
        adam_w_mode=adam_w_mode,
        **settings,
    )
    family = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    reference = family(
        [{"params": theirs[:1], "weight_decay": 0.0}, {"params": theirs[1:], "weight_decay": 0.2, "lr": 0.01}],
        **settings,
    )
    for step in range(5):
        for params, one in ((ours, optimizer), (theirs, reference)):
            one.zero_grad()
            sum(((param - step) ** 2).sum() for param in params).backward()
            one.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_step_number_stands_in_the_group_and_survives_a_checkpoint(bound):
    params = parameters()
    optimizer = FusedAdam(params, lr=0.1)
    for _ in range(3):
        sum(param.square().sum() for param in params).backward()
        optimizer.step()
    state = optimizer.state_dict()
    assert state["param_groups"][0]["step"] == 3
    assert set(state["state"][0]) == {"exp_avg", "exp_avg_sq"}

    again = [param.detach().clone().requires_grad_() for param in params]
    resumed = FusedAdam(again, lr=0.1)
    resumed.load_state_dict(state)
    for some, one in ((params, optimizer), (again, resumed)):
        one.zero_grad()
        sum(param.square().sum() for param in some).backward()
        one.step()
    assert all(torch.equal(left, right) for left, right in zip(params, again, strict=True))


def test_a_rank_without_gradients_counts_the_step_all_the_same(bound):
    optimizer = FusedAdam(parameters())
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert not optimizer.state


def test_moments_of_bfloat16_parameters_are_float32_also_after_a_checkpoint(bound):
    param = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = FusedAdam([param], lr=0.5)
    (param.sum() * 1.001).backward()
    optimizer.step()
    moment = optimizer.state[param]["exp_avg_sq"]
    assert moment.dtype is torch.float32
    assert torch.equal(param, torch.full((4,), 0.5, dtype=torch.bfloat16))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[param]["exp_avg_sq"].dtype is torch.float32
    assert torch.equal(optimizer.state[param]["exp_avg_sq"], moment)


@pytest.mark.parametrize("setting", [{"amsgrad": True}, {"master_weights": True}, {"exp_avg_dtype": torch.uint8}])
def test_settings_that_are_not_computed_are_refused(bound, setting):
    with pytest.raises(EngineError, match=next(iter(setting))):
        FusedAdam(parameters(), **setting)


def test_fused_sgd_takes_momentum_steps():
    (param,) = parameters(1)
    start = param.detach().clone()
    optimizer = FusedSGD([param], lr=0.1, momentum=0.5)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    torch.testing.assert_close(param.detach(), start - 0.1 - 0.15)


@pytest.mark.parametrize("kind", [FusedAdam, FusedSGD])
@pytest.mark.parametrize(("chosen", "freed"), [(None, True), (True, True), (False, False)])
def test_gradients_are_freed_unless_the_constructor_was_told_otherwise(bound, kind, chosen, freed):
    params = parameters()
    optimizer = kind(params, lr=0.1, set_grad_none=chosen)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.zero_grad()
    assert all((param.grad is None) is freed for param in params)
    if chosen is not None:
        with pytest.raises(ValueError, match="contradicts set_grad_none"):
            optimizer.zero_grad(set_to_none=not chosen)


def test_the_norm_of_a_list_is_the_norm_of_all_its_numbers():
    tensors = [param.detach() for param in parameters()]
    flag = torch.zeros(1, dtype=torch.int)
    norm, each = multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], True)
    torch.testing.assert_close(norm, torch.cat(tensors).norm().reshape(1))
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    assert multi_tensor_applier(multi_tensor_l2norm, flag, [tensors], False)[1] is None


def test_scaling_writes_the_second_list_in_its_own_type():
    flag = torch.zeros(1, dtype=torch.int)
    sources = [torch.tensor([1.001, 2.0])]
    targets = [torch.zeros(2, dtype=torch.bfloat16)]
    multi_tensor_applier(multi_tensor_scale, flag, [sources, targets], 3.0)
    assert torch.equal(targets[0], (sources[0] * 3).bfloat16())
    multi_tensor_applier(multi_tensor_scale, flag, [sources, sources], 0.5)
    torch.testing.assert_close(sources[0], torch.tensor([0.5005, 1.0]))
