"""The list of patches, in the order in which they are applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.patches import Patch, Phase
from anytron_megatron.names import ENGINE
from anytron_megatron.patches.faults import machinery_patches, model_patches
from anytron_megatron.patches.gated_delta_net import gated_delta_net_patches
from anytron_megatron.patches.peft_probes import peft_probes

if TYPE_CHECKING:
    from collections.abc import Callable

    from anytron.hooks.types import PatchContext

OWNER = "megatron"


def trainer_patches(phase: Phase, context: PatchContext) -> list[Patch]:
    """Return the patches of a training rank for one phase.

    An engine that only runs its models on Megatron, and has models of its own, is given none of Megatron's and
    mcore-bridge's models' patches.
    """
    candidates: list[Patch] = [import_noise(), triton_stand_in(), one_rank_groups()]
    if context.engine == ENGINE:
        candidates += [bridge_import(), rope_table(), deepstack()]
    if context.platform.redirects_torch_cuda:
        candidates = [torch_cuda(context), torch_compile(), *candidates, host_generator_warning(context)]
    if context.platform.portable_modules:
        # Last of its phase: its modules may import what the others prepare.
        candidates += [portable_transformer_engine(context), *peft_probes(OWNER)]
    if context.engine == ENGINE:
        candidates += [*gated_delta_net_patches(context, OWNER), *model_patches(context, OWNER)]
    candidates += machinery_patches(context, OWNER)
    return [patch for patch in candidates if patch.phase is phase]


def torch_cuda(context: PatchContext) -> Patch:
    """Send ``torch.cuda`` to the platform's device."""

    def install() -> Callable[[], None]:
        from anytron_megatron.redirect import redirect_torch_cuda

        return redirect_torch_cuda(context.platform.runtime())

    return Patch(
        id="megatron.torch-cuda",
        owner=OWNER,
        target="torch:cuda.current_device",
        phase=Phase.BEFORE_IMPORT,
        before="megatron.core",  # it imports functions of torch.cuda by name and keeps some as defaults
        reason="Megatron hard-codes torch.cuda; the platform's device is another",
        upstream="megatron-core 0.16.1: torch.cuda.current_device in 182 places",
        remove_when="Megatron asks torch.accelerator",
        install=install,
    )


def torch_compile() -> Patch:
    """Run Megatron's fused functions as written."""

    def replace(_original: object) -> Callable[..., object]:
        from anytron_megatron.patches.compilation import run_as_written

        return run_as_written

    return Patch(
        id="megatron.torch-compile",
        owner=OWNER,
        target="torch:compile",
        phase=Phase.BEFORE_IMPORT,
        before="megatron.core",  # jit_fuser is bound to torch.compile when megatron.core.jit is imported
        reason=(
            "Megatron's jit_fuser is torch.compile: without its CUDA backend it needs a C++ compiler, compiles for "
            "seconds at the first step, and only importing it costs one"
        ),
        upstream="megatron/core/jit.py, enable_jit_fuser",
        remove_when="Megatron can be told before its import to call disable_jit_fuser",
        replacement=replace,
    )


def portable_transformer_engine(context: PatchContext) -> Patch:
    """Give Megatron's TE wrappers the portable modules."""

    def install() -> Callable[[], None]:
        from anytron_megatron.portable_te.alias import install as install_alias

        return install_alias(context.kernels, context.platform.runtime().device_type)

    return Patch(
        id="megatron.portable-transformer-engine",
        owner=OWNER,
        target="transformer_engine",
        phase=Phase.BEFORE_IMPORT,
        reason="models are built of Transformer Engine's modules, and it computes on CUDA devices only",
        upstream="https://github.com/NVIDIA/TransformerEngine",
        remove_when="Transformer Engine runs on the platform's device",
        install=install,
    )


def import_noise() -> Patch:
    """Keep known messages of Megatron's import out of every rank's output."""

    def install() -> Callable[[], None]:
        from anytron_megatron.patches.import_noise import install as install_filters

        return install_filters()

    return Patch(
        id="megatron.import-noise",
        owner=OWNER,
        target="warnings",
        phase=Phase.BEFORE_IMPORT,
        before="megatron.core",
        reason="importing Megatron warns about its own deprecated imports and about Apex, on every rank",
        upstream="megatron-core 0.16.1; each message is listed in anytron_megatron/patches/import_noise.py",
        remove_when="megatron-core imports without warnings",
        required=False,
        install=install,
    )


def triton_stand_in() -> Patch:
    """Let mcore-bridge and what it imports of Megatron be imported without triton."""

    def install() -> Callable[[], None]:
        from anytron_megatron.patches.triton_stand_in import install as install_finder

        return install_finder()

    return Patch(
        id="megatron.triton-imports",
        owner=OWNER,
        target="triton",
        phase=Phase.BEFORE_IMPORT,
        before="megatron.core",
        reason="mcore-bridge and Megatron import triton unguarded and undeclared; triton exists for few devices",
        upstream=(
            "mcore_bridge/model/modules/kernels/qsa_block_sparse_attn.py, line 43; "
            "megatron/core/inference/contexts/attention_context/triton/tensor_ops.py, line 6"
        ),
        remove_when="both guard the import as mcore_bridge/model/modules/kernels/ple_kernels.py does",
        install=install,
    )


def bridge_import() -> Patch:
    """Import mcore-bridge here and nowhere else, and record what that changes."""
    from anytron_megatron.patches.bridge_import import BridgeImport

    imported = BridgeImport()
    return Patch(
        id="megatron.mcore-bridge-import",
        owner=OWNER,
        target="mcore_bridge",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="mcore-bridge",
        reason="mcore-bridge patches megatron-core and peft when it is imported",
        upstream="mcore_bridge/patcher.py, mcore_bridge/tuners/patcher.py",
        remove_when="mcore-bridge patches when asked",
        install=imported.install,
        describe=imported.describe,
        stays=(
            "its modules stay imported, its logger set up, and what it made transformers import has entered "
            "transformers.models.auto.auto_mappings"
        ),
    )


def rope_table() -> Patch:
    """Keep transformers' table of rotary embeddings as it is."""

    def replace(original: Callable[..., object]) -> Callable[..., object]:
        from anytron_megatron.patches.rope_table import keeping_the_table

        return keeping_the_table(original)

    return Patch(
        id="megatron.mcore-bridge-rope-table",
        owner=OWNER,
        target="mcore_bridge.model.rope:get_rope_inv_freq",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="mcore-bridge",
        requires=">=1.6.5,<1.7",
        reason=(
            "it overwrites transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS['default'] with a function that "
            "reads config.rope_theta; Hugging Face models made afterwards in this process fail"
        ),
        upstream="mcore_bridge/model/rope.py, line 115",
        remove_when="mcore-bridge looks up its own table",
        replacement=replace,
    )


def deepstack() -> Patch:
    """Add Qwen3-VL's deepstack features to the tokens of their own images, in every layout."""

    def replace(original: Callable[..., object]) -> Callable[..., object]:
        from anytron_megatron.patches.deepstack import numbering_features

        return numbering_features(original)

    return Patch(
        id="megatron.mcore-bridge-deepstack",
        owner=OWNER,
        target="mcore_bridge.model.mm_gpts.qwen3_vl:Qwen3VL_Vit._get_inputs_embeds",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="mcore-bridge",
        requires=">=1.6.5,<1.7",
        reason=(
            "with several padded rows deepstack features reach the wrong images, with context parallelism it fails on "
            "them, and with sequence parallelism the features' gradient is divided by the tensor-parallel size"
        ),
        upstream="mcore_bridge/model/mm_gpts/qwen3_vl.py, _get_inputs_embeds, lines 137 to 160",
        remove_when="mcore-bridge passes the tests of these three without it",
        replacement=replace,
    )


def one_rank_groups() -> Patch:
    """Let the process groups of a single rank be one group."""

    def replace(original: Callable[..., object]) -> Callable[..., object]:
        from anytron_megatron.patches.one_rank_groups import sharing_groups_of_one

        return sharing_groups_of_one(original)

    return Patch(
        id="megatron.one-rank-groups",
        owner=OWNER,
        target="megatron.core.parallel_state:create_group",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="megatron-core",
        reason=(
            "each of some twenty groups of a single rank costs three threads over gloo, one of which wakes up a "
            "hundred times a second, although it never communicates"
        ),
        upstream="megatron/core/parallel_state.py, create_group: the same arguments from 0.12.3 to 0.16.1",
        remove_when="Megatron makes no process groups of one rank, or torch no threads for them",
        replacement=replace,
    )


def host_generator_warning(context: PatchContext) -> Patch:
    """Silence a warning of Megatron's RNG tracker that is wrong where device and host share a generator."""

    def install() -> Callable[[], None]:
        from anytron_megatron.patches.generator_warning import install as install_filter

        return install_filter(context.platform.runtime())

    return Patch(
        id="megatron.host-generator-warning",
        owner=OWNER,
        target="megatron.core.tensor_parallel.random",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="megatron-core",
        reason=(
            "the RNG tracker warns 'CPU RNG state changed within GPU RNG context' at each use where the device "
            "draws from the host's generator"
        ),
        upstream="megatron/core/tensor_parallel/random.py, CudaRNGStatesTracker.fork",
        remove_when="the tracker compares generators before it compares their states",
        required=False,
        install=install,
    )
