"""Select the patches of a training rank."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from anytron.hooks.types import OWN_TRAINER
from anytron_megatron.names import ENGINE
from anytron_megatron.patches import catalog

if TYPE_CHECKING:
    from anytron.hooks.types import PatchContext
    from anytron.patches import Patch, Phase


def trainer_patches(phase: Phase, context: PatchContext) -> list[Patch]:
    """Return the patches of a training rank for one phase, in the order in which they are applied.

    The platform decides which devices and modules are redirected. The engine decides whose models are patched:
    ``megatron`` builds mcore-bridge's models, which use Megatron's modules; a trainer that is not ours builds
    Megatron's own; any other engine only runs its own models on Megatron.
    """
    redirected, portable = context.platform.redirects_torch_cuda, context.platform.portable_modules
    bridge = context.engine == ENGINE
    models = context.engine in (ENGINE, OWN_TRAINER)
    transformer_engine = portable or find_spec("transformer_engine") is not None
    # Where torch.cuda is the device, flash-linear-attention computes: an installed one stays.
    flash_linear_attention = not redirected and find_spec("fla") is not None
    wanted = {
        catalog.TORCH_CUDA: redirected,
        catalog.TORCH_COMPILE: redirected,
        catalog.IMPORT_NOISE: True,
        catalog.TRITON_IMPORTS: True,
        # Last of its phase: the modules may import what the patches before it prepare.
        catalog.PORTABLE_TRANSFORMER_ENGINE: portable,
        catalog.ONE_RANK_GROUPS: True,
        catalog.MODEL_CODE: context.engine != OWN_TRAINER,  # whom a trainer of its own trusts is its own affair
        catalog.BRIDGE_IMPORT: bridge,
        catalog.ROPE_TABLE: bridge,
        catalog.CACHED_ROTARY: bridge,
        catalog.ROTARY_KERNEL: portable and models,
        catalog.ROTARY_KERNEL_IN_LAYERS: portable and bridge,
        catalog.DEEPSTACK: bridge,
        catalog.HOST_GENERATOR_WARNING: redirected,
        **dict.fromkeys(catalog.PEFT_PROBES, portable),
        catalog.DELTA_NET_PADDING: bridge,
        catalog.DELTA_NET_CONTEXT: bridge,
        catalog.DELTA_NET_GRADIENTS: bridge,
        catalog.DELTA_NET_KERNELS: bridge and not flash_linear_attention,
        catalog.MLA_PACKED_ROTARY: models,
        catalog.MLA_PACKED_QKV: models,
        catalog.MLA_PADDED_POSITIONS: models,
        catalog.MLA_VALUES: models,
        catalog.MLA_QUERY_NORM: models,
        catalog.ROUTER_PADDING: models,
        catalog.ROUTER_GEMM: models and not transformer_engine,
        catalog.PIPELINE_SENDS: True,
        **dict.fromkeys(catalog.ONE_RANK_COLLECTIVES, True),
        catalog.RECOMPUTE_SCOPES: True,
        catalog.RECOMPUTE_SCOPES_WITHOUT_OUTPUT: True,
        catalog.RECOMPUTE_SCOPES_TRANSFORMER_ENGINE: transformer_engine,
    }
    return [patch for patch, is_wanted in wanted.items() if is_wanted and patch.phase is phase]
