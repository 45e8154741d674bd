"""Select the patches of a training rank."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from anytron.device.hooks.types import OWN_TRAINER
from anytron_megatron.options import ENGINE
from anytron_megatron.patches.catalog import attention, imports, models, parallel, scripts

if TYPE_CHECKING:
    from anytron.device.hooks.types import PatchContext
    from anytron.device.patches import Patch, Phase


def trainer_patches(phase: Phase, context: PatchContext) -> list[Patch]:
    """Return the patches of a training rank for one phase, in the order in which they are applied.

    The platform decides which devices and modules are redirected. The engine decides whose models are patched:
    ``megatron`` builds mcore-bridge's models, which use Megatron's modules; a custom trainer builds
    Megatron's own models; any other engine only runs its own models on Megatron.
    """
    redirected, portable = context.platform.redirects_torch_cuda, context.platform.portable_modules
    bridge = context.engine == ENGINE
    of_megatron = context.engine in (ENGINE, OWN_TRAINER)
    transformer_engine = portable or find_spec("transformer_engine") is not None
    # Where torch.cuda is the device, flash-linear-attention computes: an installed one stays.
    flash_linear_attention = not redirected and _has_files("fla")
    wanted = {
        imports.TORCH_CUDA: redirected,
        imports.TORCH_COMPILE: redirected,
        imports.IMPORT_NOISE: True,
        imports.TRITON_IMPORTS: True,
        # Last of its phase: the modules may import what the patches before it prepare.
        imports.PORTABLE_TRANSFORMER_ENGINE: portable,
        parallel.ONE_RANK_GROUPS: True,
        imports.MODEL_CODE: context.engine != OWN_TRAINER,  # whom a trainer of its own trusts is its own affair
        imports.BRIDGE_LOCK: bridge,
        imports.BRIDGE_IMPORT: bridge,
        attention.ROPE_TABLE: bridge,
        attention.CACHED_ROTARY: bridge,
        attention.ROTARY_KERNEL: portable and of_megatron,
        attention.ROTARY_KERNEL_IN_LAYERS: portable and bridge,
        scripts.BATCH_INVARIANT_MODE: portable,
        models.DEEPSTACK: bridge,
        models.SCORE_HEAD: bridge,
        models.GATE_AND_UP: bridge,
        models.EXPERTS_ORIENTATION: bridge,
        models.ERNIE_BIAS: bridge,
        models.HEAD_SIZES: bridge,
        models.MODALITIES: bridge,
        models.KEYS_AS_VALUES: bridge,
        models.LAYER_EMBEDDINGS: bridge,
        **dict.fromkeys(models.THINKER_SOUND, bridge),
        models.PLACES: bridge,
        models.BLANK_IMAGE: bridge,
        imports.HOST_GENERATOR_WARNING: redirected,
        **dict.fromkeys(imports.PEFT_PROBES, portable),
        attention.DELTA_NET_PADDING: bridge,
        attention.DELTA_NET_CONTEXT: bridge,
        attention.DELTA_NET_GRADIENTS: bridge,
        attention.DELTA_NET_KERNELS: bridge and not flash_linear_attention,
        attention.MAMBA_PADDING: bridge,
        attention.MAMBA_KERNELS: bridge,
        attention.YARN_DEVICE: redirected,
        attention.MLA_PACKED_ROTARY: of_megatron,
        attention.MLA_PACKED_QKV: of_megatron,
        attention.MLA_PADDED_POSITIONS: of_megatron,
        attention.MLA_VALUES: of_megatron,
        attention.MLA_QUERY_NORM: of_megatron,
        attention.MLA_ROTARY_KEY: bridge,
        attention.SPARSE_ROTATION: of_megatron,
        models.ROUTER_PADDING: of_megatron,
        models.ROUTER_BIAS: of_megatron,
        **dict.fromkeys(models.INVARIANCE, portable and of_megatron),
        models.OFFLOADED_OPTIMIZER: redirected,
        models.ROUTER_GEMM: of_megatron and not transformer_engine,
        parallel.PIPELINE_SENDS: True,
        **dict.fromkeys(parallel.ONE_RANK_COLLECTIVES, True),
        parallel.RECOMPUTE_SCOPES: True,
        parallel.RECOMPUTE_SCOPES_WITHOUT_OUTPUT: True,
        parallel.RECOMPUTE_SCOPES_TRANSFORMER_ENGINE: transformer_engine,
    }
    return [patch for patch, is_wanted in wanted.items() if is_wanted and patch.phase is phase]


def _has_files(package: str) -> bool:
    """Whether a package is installed. An adaptor may have made a module of its name, which has few of its functions."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None
