"""Check that Megatron has the optimizer. Imports no Megatron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig


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
                f"Megatron's distributed optimizer knows Adam only, and {key} is {name}",
                f"set engine.distributed_optimizer=false, or {key}=adam",
            )
