"""Patches of recomputation: a recomputed layer runs in the scopes of its own micro-batch."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import FIXES, MEGATRON


def _recompute_scopes(suffix: str, target: str, function: str) -> Patch:
    return Patch(
        id=f"megatron.recompute-scopes{suffix}",
        target=target,
        phase=Phase.BEFORE_BUILD,
        package=MEGATRON,
        reason=(
            "autograd recomputes a layer later and on its own thread, where it would see the device state of "
            "another micro-batch, or none"
        ),
        upstream="verl util.py, preprocess_for_mindspeed: recomputed functions read globals of the process",
        remove_when="no device needs process-global state around a micro-batch",
        replacement=f"{FIXES}.recompute_scopes:{function}",
    )


RECOMPUTE_SCOPES = _recompute_scopes("", "megatron.core.tensor_parallel.random:checkpoint", "rescope_function")
RECOMPUTE_SCOPES_WITHOUT_OUTPUT = _recompute_scopes(
    ".without-output", "megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint", "rescope_method"
)
RECOMPUTE_SCOPES_TRANSFORMER_ENGINE = _recompute_scopes(
    ".transformer-engine", "megatron.core.extensions.transformer_engine:te_checkpoint", "rescope_function"
)
