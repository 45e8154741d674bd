"""Messages come out as they went in."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anytron.base.errors import DataError, EngineError
from anytron.workers.executor.channel import Call, Failure, Result, decode, encode

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@given(shape=st.lists(st.integers(0, 4), max_size=4), dtype=st.sampled_from(DTYPES), transposed=st.booleans())
def test_a_tensor_keeps_values_shape_and_dtype_and_can_be_written_to(shape, dtype, transposed):
    tensor = torch.randint(0, 2, shape).to(dtype)
    tensor = tensor.permute(tuple(reversed(range(tensor.ndim)))) if transposed else tensor

    back = decode(encode(Result(tensor))).value

    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)
    back.zero_()
    assert not back.any()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
    ],
)
def test_unusual_tensors_are_pickled_as_torch_does(tensor):
    back = decode(encode(Result(tensor))).value

    assert type(back) is type(tensor)
    assert (back.layout, back.requires_grad) == (tensor.layout, tensor.requires_grad)
    assert torch.equal(back.detach().to_dense(), tensor.detach().to_dense())


def test_a_tensor_that_stands_twice_is_sent_once_and_stays_one():
    tensor = torch.zeros(10_000)

    message = encode(Call("f", (tensor, tensor), {}))
    first, second = decode(message).args

    assert len(message) < 2 * tensor.nbytes
    assert first is second


def test_a_view_takes_only_its_own_bytes_along():
    assert len(encode(Result(torch.zeros(1_000_000)[:10]))) < 1000


def test_a_failure_carries_an_error_of_the_core_or_only_text():
    class SpecialError(EngineError):
        pass

    special = Failure.of(SpecialError("what", where="where", why="why", fix="fix"), "text")

    assert type(special.error) is EngineError
    assert str(special.error) == str(SpecialError("what", where="where", why="why", fix="fix"))
    assert type(decode(encode(Failure.of(DataError("bad"), ""))).error) is DataError
    assert Failure.of(ValueError("no"), "text") == Failure("text", None)


def test_reading_the_bootstrap_needs_no_torch():
    code = "import sys, anytron.workers.executor.worker; print('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
