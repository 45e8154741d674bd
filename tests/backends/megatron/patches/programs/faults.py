"""A fault of Megatron without Transformer Engine, without and with its patch. Prints JSON."""

import json

import torch

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches


class Host(CpuPlatform):
    """The processor, without any Transformer Engine."""

    portable_modules = False


def attempt(function):
    try:
        return function()
    except Exception as error:  # noqa: BLE001 - any failure is the observation
        return f"{type(error).__name__}: {error}"


def patches(phase, context):
    """Without those that import mcore-bridge: that needs a Transformer Engine."""
    bridge = "megatron.gated-delta-net-context"
    return [
        patch for patch in trainer_patches(phase, context) if patch.package != "mcore-bridge" and patch.id != bridge
    ]


def gate():
    """A router's scores of 3 tokens for 2 experts against the definition."""
    from megatron.core.transformer.moe import moe_utils

    linear = getattr(moe_utils, "router_gating_linear", None)
    if linear is None:
        return "this version computes scores another way"
    tokens, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    bias = (None,) if linear.__code__.co_argcount == 4 else ()  # from 0.15 on
    scores = linear(tokens, weight, *bias, torch.float32)
    scores.sum().backward()
    torch.testing.assert_close(scores, tokens @ weight.T)
    torch.testing.assert_close(tokens.grad, weight.sum(0).expand(3, 4).detach())
    return "ok"


def main():
    torch.set_num_threads(1)
    context = PatchContext(Host(), "trainer", hooks_of(), "megatron")
    ledger = Ledger(context=context)
    for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
        ledger.apply(phase, patches(phase, context))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    facts = {}
    for name in ("unpatched", "patched"):
        if name == "patched":
            ledger.apply(Phase.BEFORE_BUILD, patches(Phase.BEFORE_BUILD, context))
        facts[name] = attempt(gate)
    facts["report"] = ledger.report()
    ledger.undo()
    print(json.dumps(facts))


main()
