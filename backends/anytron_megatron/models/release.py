"""Names and import paths that differ between the megatron-core versions that the engine trains with.

This is the only place that reads Megatron's version. *Faults* of a version do not belong here: each is
a patch with the range of versions that have the fault (:mod:`anytron_megatron.patches.catalog`).

Only the functions import Megatron, because :data:`SUPPORTED` is also read where it is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from anytron.device.patches.plan import in_range

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from megatron.core.inference.contexts.static_context import StaticInferenceContext
    from torch import Tensor

SUPPORTED = ">=0.16.1,<0.20"
"""Versions of megatron-core that the engine trains with, as a PEP 440 range: those of ``tox -e mcore016`` to
``mcore019``. From 0.17 on Megatron asks for Python 3.12."""

HAS_MAMBA = ">=0.19"
"""Releases whose Mamba layers have the weights that mcore-bridge reads."""

HAS_SPARSE_ATTENTION = ">=0.19"
"""Releases whose DeepSeek sparse attention takes packed sequences and context parallelism."""


def is_release(specifier: str) -> bool:
    """Return whether the version of the imported megatron-core lies in a PEP 440 range, such as ``>=0.18``."""
    from megatron import core

    return in_range(core.__version__, specifier)


def auxiliary_losses() -> Mapping[str, Tensor]:
    """Return the routers' losses since :func:`forget_auxiliary_losses`, by name, float32 ``[layers]``.

    The tensors belong to Megatron's tracker; they are not copies.
    """
    if is_release(">=0.18"):
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

    return {name: entry["values"] for name, entry in get_moe_layer_wise_logging_tracker().items()}


def forget_auxiliary_losses() -> None:
    """Set the recorded losses of routers to zero."""
    if is_release(">=0.18"):
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().clear()
        return
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker

    clear_aux_losses_tracker()


def delta_net_modules() -> tuple[ModuleType, ModuleType]:
    """Import the modules of Gated DeltaNet.

    Returns:
        The module whose ``HAVE_FLA`` the layer's constructor reads, and the module whose ``chunk_gated_delta_rule`` the
        constructor stores (from 0.18 on; in 0.19 it must not be None). Before 0.19 both are the same module.
    """
    package = "megatron.core.ssm.gated_delta_net"
    if is_release(">=0.19"):
        return importlib.import_module(f"{package}.common"), importlib.import_module(f"{package}.gdn")
    module = importlib.import_module(package)
    return module, module


def static_inference_context(rows: int, columns: int) -> StaticInferenceContext:
    """Make the context that holds keys and values of padded rows.

    From 0.17 on, Megatron stores in the context's configuration that only the last token's logits are needed;
    mcore-bridge 1.6.5 reads this from the context itself, where this function sets it.

    Args:
        rows: Largest number of rows, over all micro-batches.
        columns: Largest number of tokens of a row.
    """
    from megatron.core.inference.contexts.static_context import StaticInferenceContext

    context = StaticInferenceContext(rows, columns)
    context.materialize_only_last_token_logits = True
    return context
