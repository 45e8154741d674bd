"""Patches of Megatron-LM's own scripts, and of modules that they import from outside of ``megatron.core``."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog import FIXES, MEGATRON

BATCH_INVARIANT_MODE = Patch(
    id="megatron.batch-invariant-mode",
    target="megatron.core.transformer.custom_layers.batch_invariant_kernels:enable_batch_invariant_mode",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=MEGATRON,
    reason=(
        "where the modules are portable, batch-invariant mode replaces torch's operators, and then ends in a "
        "ModuleNotFoundError"
    ),
    upstream="megatron/core/transformer/custom_layers/batch_invariant_kernels.py, _te_patch_for_batch_invariant",
    remove_when="batch-invariant mode works without Transformer Engine's cpp_extensions",
    required=False,
    replacement=f"{FIXES}.scripts:refuse_batch_invariance",
)
SCRIPTS = (
    Patch(
        id="megatron-lm.no-cuda",
        target="megatron.training.initialize:initialize_megatron",
        phase=Phase.BEFORE_BUILD,
        package=MEGATRON,
        reason="Megatron-LM's scripts end where torch.cuda is not available, and the platform's device is not CUDA",
        upstream="megatron/training/initialize.py, initialize_megatron, the assertion 'Megatron requires CUDA.'",
        remove_when="Megatron-LM asks for torch.accelerator",
        replacement=f"{FIXES}.scripts:allow_no_cuda",
    ),
    Patch(
        id="megatron-lm.no-nvcc",
        target="megatron.legacy.fused_kernels:load",
        phase=Phase.BEFORE_BUILD,
        package=MEGATRON,
        requires="<0.17",
        reason="Megatron-LM asks nvcc for its version before it trains, and the platform has no CUDA",
        upstream="megatron/legacy/fused_kernels/__init__.py, load",
        remove_when="megatron-core before 0.17 is no longer supported",
        replacement=f"{FIXES}.scripts:load_no_kernels",
    ),
)
"""Applied by ``anytron-megatron`` where ``torch.cuda`` is redirected, with the device stack's patches of the phase."""
