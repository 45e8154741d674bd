"""The other fused operators against their formulas in float64; op-plugin's real C++ runs in front."""

import pytest
import torch
import torch_npu
from anytron_ascend_simulator import aclnn


def check(operator, formula, *inputs, atol=2e-6):
    """Values and gradients of an operator are those of a formula."""
    leaves = [tensor.npu().requires_grad_() for tensor in inputs]
    value = operator(*leaves)
    gradients = torch.autograd.grad(value.square().sum(), leaves)
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    wanted = formula(*wide)
    torch.testing.assert_close(value.detach().cpu().double(), wanted.detach(), atol=atol, rtol=1e-5)
    for found, want in zip(gradients, torch.autograd.grad(wanted.square().sum(), wide), strict=True):
        torch.testing.assert_close(found.cpu().double(), want, atol=10 * atol, rtol=1e-5)


def test_rms_norm():
    def formula(x, gamma):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gamma

    before = aclnn.CALLS["aclnnRmsNormGrad"]
    check(lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-5)[0], formula, torch.randn(3, 5, 8), torch.randn(8))
    assert aclnn.CALLS["aclnnRmsNormGrad"] == before + 1


def test_swiglu():
    check(
        lambda x: torch_npu.npu_swiglu(x, -1),
        lambda x: torch.nn.functional.silu(x[..., :4]) * x[..., 4:],
        torch.randn(3, 8),
    )


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode):
    def formula(x, cos, sin):
        if mode == "half":
            turned = torch.cat([-x[..., 4:], x[..., :4]], -1)
        else:
            turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos + turned * sin

    angles = torch.randn(5, 1, 1, 8)
    check(
        lambda x, c, s: torch_npu.npu_rotary_mul(x, c, s, mode),
        formula,
        torch.randn(5, 2, 3, 8),
        angles.cos(),
        angles.sin(),
    )


def test_rotary_mul_refuses_cosines_that_do_not_fit():
    with pytest.raises(RuntimeError, match=r"broadcast|shape|dim"):
        torch_npu.npu_rotary_mul(
            torch.ones(5, 2, 3, 8).npu(), torch.ones(4, 1, 1, 8).npu(), torch.ones(4, 1, 1, 8).npu()
        )


def product(x, weight, groups, **settings):
    return torch_npu.npu_grouped_matmul([x], [weight], group_list=groups.npu(), split_item=3, **settings)[0]


@pytest.mark.parametrize(("kind", "groups"), [(1, [2, 0, 3]), (0, [2, 2, 5])])
def test_grouped_matmul_of_rows(kind, groups):
    x, weight = torch.randn(5, 4), torch.randn(3, 4, 6)
    found = product(x.npu(), weight.npu(), torch.tensor(groups), group_type=0, group_list_type=kind)
    torch.testing.assert_close(found.cpu(), torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]]))


def test_grouped_matmul_of_the_reduced_dimension():
    x, weight = torch.randn(5, 4), torch.randn(5, 6)
    found = product(x.npu().t(), weight.npu(), torch.tensor([2, 0, 3]), group_type=2, group_list_type=1).cpu()
    torch.testing.assert_close(found[0], x[:2].T @ weight[:2])
    assert found[1].abs().max() == 0
    torch.testing.assert_close(found[2], x[2:].T @ weight[2:])


def test_grouped_matmul_refuses_more_rows_than_there_are():
    with pytest.raises(RuntimeError, match="asks for 9 rows"):
        product(
            torch.ones(5, 4).npu(), torch.ones(3, 4, 6).npu(), torch.tensor([2, 3, 4]), group_type=0, group_list_type=1
        )


def test_adamw_in_place():
    settings = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.99), "eps": 1e-8}
    start, gradients = torch.randn(3, 4), torch.randn(5, 3, 4)
    parameters = []
    before = aclnn.CALLS["aclnnApplyAdamWV2"]
    for device, fused in (("cpu", False), ("npu", True)):
        parameter = torch.nn.Parameter(start.clone().to(device))
        optimizer = torch.optim.AdamW([parameter], fused=fused, **settings)
        for gradient in gradients:
            parameter.grad = gradient.to(device)
            optimizer.step()
        parameters.append(parameter.detach().cpu())
    torch.testing.assert_close(*parameters)
    assert aclnn.CALLS["aclnnApplyAdamWV2"] == before + 5
