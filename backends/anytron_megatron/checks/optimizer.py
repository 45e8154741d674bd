"""Check that Megatron has the optimizer, and can reduce gradients as it is told. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig
    from anytron_megatron.checks.subject import Subject
    from anytron_megatron.options import MegatronOptions

_OVERLAP = "engine.options.overlap_grad_reduce"
_SEES = frozenset({"vision_tower", "aligner"})


def optimizer_diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Check the optimizers of policy and critic against the way in which their state is sharded."""
    names = {"optimizer.name": run.optimizer.name}
    if run.critic is not None:
        names["critic.optimizer.name"] = run.critic.optimizer.name
    for key, name in names.items():
        if name != "adam" and run.engine.distributed_optimizer:
            # megatron/core/optimizer/distrib_optimizer.py: "Only Adam and HybridDeviceOptimizer currently supported".
            yield Diagnostic(
                "error",
                "engine.distributed_optimizer",
                f"Megatron's distributed optimizer supports Adam only, and {key} is {name}",
                f"set engine.distributed_optimizer=false, or {key}=adam",
            )


def reduction_diagnostics(policy: Subject, run: RunConfig, options: MegatronOptions) -> Iterator[Diagnostic]:
    """Check that every parameter gets a gradient in each micro-batch, which overlapped reduction waits for."""
    if options.ddp_bucket_size is not None and not options.overlap_grad_reduce:
        message = "gradients are divided into buckets only if reduction overlaps with the backward pass"
        yield Diagnostic("error", "engine.options.ddp_bucket_size", message, f"set {_OVERLAP}=true, or leave it out")
    idle = _SEES - set(run.model.freeze)
    if options.overlap_grad_reduce and policy.config.get("vision_config") and idle:
        # megatron/core/distributed/param_and_grad_buffer.py, finish_grad_sync: an assertion, where there are no images.
        yield Diagnostic(
            "error",
            _OVERLAP,
            f"micro-batches without images have no gradients for {' and '.join(sorted(idle))}, and overlapped "
            "reduction would wait for them",
            "leave it out, or put them into model.freeze",
        )
