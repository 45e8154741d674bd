import pytest
import torch

pytestmark = pytest.mark.usefixtures("redirected")


def test_is_cuda_means_on_the_runtimes_device():
    assert torch.ones(2).is_cuda
    assert torch.nn.Parameter(torch.ones(2)).is_cuda
    assert not torch.ones(2, device="meta").is_cuda


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "Float"), (torch.bfloat16, "BFloat16"), (torch.float16, "Half"), (torch.int64, "Long")],
)
def test_type_names_are_those_of_cuda(dtype, name):
    # Megatron's optimizers sort parameters by these strings.
    assert torch.ones(2, dtype=dtype).type() == f"torch.cuda.{name}Tensor"
    assert torch.ones(2).type(f"torch.cuda.{name}Tensor").dtype is dtype
    assert isinstance(torch.ones(2, dtype=dtype), getattr(torch.cuda, f"{name}Tensor"))


def test_type_still_converts():
    assert torch.ones(2).type(torch.int32).dtype is torch.int32
    assert torch.ones(2).type(dtype=torch.int32).dtype is torch.int32


def test_moving_keeps_the_gradient():
    weight = torch.ones(2, requires_grad=True)
    weight.cuda().to("cuda:0", torch.float64).sum().backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_a_tensor_that_is_there_already_is_not_copied():
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor.to("cuda") is tensor.to(0) is tensor


def test_record_stream_has_nothing_to_keep():
    torch.ones(2).record_stream(torch.cuda.current_stream())
