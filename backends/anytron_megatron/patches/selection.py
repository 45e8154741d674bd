"""Select the patches of a training rank."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from anytron.device.hooks.types import OWN_TRAINER
from anytron_megatron.options import ENGINE
from anytron_megatron.patches.catalog import delta_net, device, imports, latent_attention, parallel, recompute, rotary
from anytron_megatron.patches.catalog import models as models_module

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext
    from anytron.device.patches import Patch, Phase


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
    flash_linear_attention = not redirected and _has_files("fla")
    wanted = {
        device.TORCH_CUDA: redirected,
        device.TORCH_COMPILE: redirected,
        imports.IMPORT_NOISE: True,
        device.TRITON_IMPORTS: True,
        # Last of its phase: the modules may import what the patches before it prepare.
        device.PORTABLE_TRANSFORMER_ENGINE: portable,
        parallel.ONE_RANK_GROUPS: True,
        imports.MODEL_CODE: context.engine != OWN_TRAINER,  # whom a trainer of its own trusts is its own affair
        imports.BRIDGE_IMPORT: bridge,
        rotary.ROPE_TABLE: bridge,
        rotary.CACHED_ROTARY: bridge,
        rotary.ROTARY_KERNEL: portable and models,
        rotary.ROTARY_KERNEL_IN_LAYERS: portable and bridge,
        models_module.DEEPSTACK: bridge,
        models_module.SCORE_HEAD: bridge,
        device.HOST_GENERATOR_WARNING: redirected,
        **dict.fromkeys(device.PEFT_PROBES, portable),
        delta_net.DELTA_NET_PADDING: bridge,
        delta_net.DELTA_NET_CONTEXT: bridge,
        delta_net.DELTA_NET_GRADIENTS: bridge,
        delta_net.DELTA_NET_KERNELS: bridge and not flash_linear_attention,
        latent_attention.MLA_PACKED_ROTARY: models,
        latent_attention.MLA_PACKED_QKV: models,
        latent_attention.MLA_PADDED_POSITIONS: models,
        latent_attention.MLA_VALUES: models,
        latent_attention.MLA_QUERY_NORM: models,
        latent_attention.MLA_ROTARY_KEY: bridge,
        models_module.ROUTER_PADDING: models,
        models_module.ROUTER_GEMM: models and not transformer_engine,
        parallel.PIPELINE_SENDS: True,
        **dict.fromkeys(parallel.ONE_RANK_COLLECTIVES, True),
        recompute.RECOMPUTE_SCOPES: True,
        recompute.RECOMPUTE_SCOPES_WITHOUT_OUTPUT: True,
        recompute.RECOMPUTE_SCOPES_TRANSFORMER_ENGINE: transformer_engine,
    }
    return [patch for patch, is_wanted in wanted.items() if is_wanted and patch.phase is phase]


def _has_files(package: str) -> bool:
    """Whether a package is installed. An adaptor may have made a module of its name, which has few of its functions."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
