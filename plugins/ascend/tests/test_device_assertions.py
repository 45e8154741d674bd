"""Assertions of tensors, of which torch_npu has none: the real operator without the ledger's patch, and with it."""


def test_an_assertion_on_the_device_does_not_run_on_the_host(run_program):
    """mcore-bridge asserts so that a sequence with images has as many placeholders as features."""
    program = """
import torch
from anytron.device.hooks.types import PatchContext
from anytron.device.patches import Ledger, Phase
from anytron.device.loading import open_session
session = open_session(platform="ascend")
session.platform.runtime()
wrong, right = torch.zeros((), device="npu", dtype=torch.bool), torch.ones((), device="npu")
try:
    torch._assert_async(right, "unpatched")
except RuntimeError as error:
    print("without:", error)
context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
ledger = Ledger(context=context)
ledger.apply(Phase.BEFORE_BUILD, session.platform.patch_model(Phase.BEFORE_BUILD, context))
torch._assert_async(right)
torch._assert_async(right, "not said")
torch._assert_async(right.cpu(), "not said")
for tensor in (wrong, wrong.cpu()):
    for message in ((), ("too few placeholders",)):
        try:
            torch._assert_async(tensor, *message)
        except RuntimeError as error:
            print("with:", error)
"""
    (output,) = run_program(program, environment={"TORCH_NPU_FALLBACK_CPU_DISABLE": "1"})
    without, *lines = [line for line in output.splitlines() if line.startswith("with")]
    assert "aten::_assert_async.msg" in without
    assert "CPU fallback is disabled" in without
    assert lines == ["with: Expected Tensor with single nonzero value, but got zero", "with: too few placeholders"] * 2
