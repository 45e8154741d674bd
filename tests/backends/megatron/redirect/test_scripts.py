"""``torch.jit.script`` under the redirection, and after it."""

import warnings
from types import FunctionType

import pytest
import torch
from torch.jit import _builtins

from anytron_megatron.redirect import redirect_torch_cuda


def counted(values: torch.Tensor) -> torch.Tensor:  # TorchScript reads the source of a function in a file
    made = torch.zeros([values.shape[0]], dtype=values.dtype, device=values.device)
    return made + torch.arange(values.shape[0], device=values.device) + values.to(values.device)


def script():
    # torch keeps what it has compiled by the function's identity: each call compiles one of its own.
    copy = FunctionType(counted.__code__, globals())
    copy.__annotations__ = counted.__annotations__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(copy)


@pytest.mark.parametrize("first_use", [False, True], ids=["table filled before", "table filled under it"])
def test_functions_that_make_tensors_compile_during_and_after(runtime, monkeypatch, first_use):
    if first_use:
        monkeypatch.setattr(_builtins, "_builtin_table", None)
    values = torch.ones(3)
    undo = redirect_torch_cuda(runtime)
    during = dict(_builtins._get_builtin_table())
    try:
        assert script()(values).tolist() == [1.0, 2.0, 3.0]
        made = torch.zeros
    finally:
        undo()
    after = _builtins._get_builtin_table()
    assert script()(values).tolist() == [1.0, 2.0, 3.0]
    assert during[id(made)] == after[id(torch.zeros)] == "aten::zeros"
    assert id(made) not in after
