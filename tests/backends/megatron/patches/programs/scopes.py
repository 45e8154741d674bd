"""Recompute through each of Megatron's three ways, on another thread and while another micro-batch is current.

Prints one JSON object: for each way, unpatched and patched, what scope the first run and the recomputation saw.
"""

import json
import threading
from contextlib import contextmanager

import torch

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron.sequences import scopes
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches

torch.set_num_threads(1)
platform = CpuPlatform()
context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
ledger = Ledger(context=context)
for phase in (Phase.BEFORE_IMPORT, Phase.BEFORE_PARALLEL_INIT):
    ledger.apply(phase, trainer_patches(phase, context))

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.extensions import transformer_engine  # noqa: E402
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed  # noqa: E402

parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
device_state = threading.local()


def scope_of(micro_batch):
    @contextmanager
    def scope():
        before = getattr(device_state, "micro_batch", None)
        device_state.micro_batch = micro_batch
        try:
            yield
        finally:
            device_state.micro_batch = before

    return scope


def checkpoint(function, x):
    return tensor_parallel.checkpoint(function, False, x)


def without_output(function, x):
    handle = tensor_parallel.random.CheckpointWithoutOutput()
    output = handle.checkpoint(function, x)
    doubled = output * 2
    handle.discard_output_and_register_recompute(doubled)
    return doubled


def te_checkpoint(function, x):
    group = parallel_state.get_tensor_model_parallel_group()
    return transformer_engine.te_checkpoint(
        lambda hidden, *_: function(hidden), False, get_cuda_rng_tracker, group, x, None, None, None, None
    )


def seen_by(way):
    """What the runs of a checkpointed function of micro-batch 1 see: first, and when it is run again."""
    seen = []

    def function(x):
        seen.append(getattr(device_state, "micro_batch", None))
        return (x * x).tanh()

    def backward():
        with scopes.enter(scope_of(2)):
            loss.backward()

    x = torch.ones(3, requires_grad=True)
    with scopes.enter(scope_of(1)):
        loss = way(function, x).sum()
    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    reference = torch.ones(3, requires_grad=True)
    (way(lambda y: (y * y).tanh(), reference)).sum().backward()
    assert torch.equal(x.grad, reference.grad)
    return seen


def observe():
    return {way.__name__: seen_by(way) for way in (checkpoint, without_output, te_checkpoint)}


facts = {"unpatched": observe()}
ledger.apply(Phase.BEFORE_BUILD, trainer_patches(Phase.BEFORE_BUILD, context))
facts["patched"] = observe()
ledger.undo()
print(json.dumps(facts))
