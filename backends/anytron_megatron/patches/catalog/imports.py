"""Patches of imports, of a loader that would run a model directory's Python files, and of code that expects CUDA."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog import BRIDGE, FIXES, MEGATRON

IMPORT_NOISE = Patch(
    id="megatron.import-noise",
    target="warnings",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="Megatron, when imported, warns about its own deprecated imports and about Apex, on every rank",
    upstream="megatron-core 0.16.1; anytron_megatron/patches/imports.py lists the messages",
    remove_when="megatron-core can be imported without warnings",
    required=False,
    install=f"{FIXES}.imports:filter_messages",
)
BRIDGE_IMPORT = Patch(
    id="megatron.mcore-bridge-import",
    target="mcore_bridge",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    reason="mcore-bridge patches megatron-core and peft when it is imported, and does not say what",
    upstream="mcore_bridge/patcher.py, mcore_bridge/tuners/patcher.py",
    remove_when="mcore-bridge patches in a function instead of at its import",
    install=f"{FIXES}.imports:import_bridge",
    stays=(
        "its modules stay imported, its logger stays set up, and transformers.models.auto.auto_mappings keeps the "
        "models that it made transformers import"
    ),
)
BRIDGE_LOCK = Patch(
    id="megatron.mcore-bridge-lock",
    target="mcore_bridge",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    reason=(
        "mcore-bridge takes a lock from datasets, which it does not declare, and its directory from modelscope: "
        "with pandas, a third of a rank's imports"
    ),
    upstream="mcore_bridge/utils/torch_utils.py, lines 11 and 12",
    remove_when="mcore-bridge imports FileLock from filelock, and modelscope where it uses it",
    install=f"{FIXES}.bridge_lock:lock_without_datasets",
)
MODEL_CODE = Patch(
    id="megatron.model-code",
    target="transformers.dynamic_module_utils:get_cached_module_file",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package="transformers",
    reason="mcore-bridge runs Python files of model directories of some families without asking for trust",
    upstream=(
        "mcore_bridge/model/mm_gpts/kimi_vl.py, lines 27 and 79, and internvl.py, llava.py, qwen.py: "
        "get_class_from_dynamic_module has no gate"
    ),
    remove_when="neither mcore-bridge nor transformers can run a file of a model directory",
    replacement=f"{FIXES}.imports:refuse_model_code",
)

TORCH_CUDA = Patch(
    id="megatron.torch-cuda",
    target="torch:cuda.current_device",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",  # Megatron imports functions of torch.cuda by name and keeps some as defaults
    reason="Megatron hard-codes torch.cuda, and the platform's device is not CUDA",
    upstream="megatron-core 0.16.1: torch.cuda.current_device in 182 places",
    remove_when="Megatron asks torch.accelerator",
    install=f"{FIXES}.imports:redirect_to_platform",
)
TORCH_COMPILE = Patch(
    id="megatron.torch-compile",
    target="torch:compile",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",  # jit_fuser is bound to torch.compile when megatron.core.jit is imported
    reason=(
        "Megatron's jit_fuser is torch.compile, which needs a C++ compiler where there is no CUDA, compiles for "
        "seconds at the first step, and takes a second to import"
    ),
    upstream="megatron/core/jit.py, enable_jit_fuser",
    remove_when="Megatron has a switch for jit_fuser that works before its import",
    replacement=f"{FIXES}.imports:leave_uncompiled",
)
TRITON_IMPORTS = Patch(
    id="megatron.triton-imports",
    target="triton",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="mcore-bridge and Megatron import triton without declaring it, and triton supports few devices",
    upstream=(
        "mcore_bridge/model/modules/kernels/qsa_block_sparse_attn.py, line 43; "
        "megatron/core/inference/contexts/attention_context/triton/tensor_ops.py, line 6"
    ),
    remove_when="both guard the import, as mcore_bridge/model/modules/kernels/ple_kernels.py does",
    install=f"{FIXES}.triton_stand_in:stand_in_for_triton",
)
PORTABLE_TRANSFORMER_ENGINE = Patch(
    id="megatron.portable-transformer-engine",
    target="transformer_engine",
    phase=Phase.BEFORE_IMPORT,
    reason="Megatron builds models from Transformer Engine's modules, which compute on CUDA devices only",
    upstream="https://github.com/NVIDIA/TransformerEngine",
    remove_when="Transformer Engine runs on the platform's device",
    install=f"{FIXES}.imports:alias_portable_modules",
)
HOST_GENERATOR_WARNING = Patch(
    id="megatron.host-generator-warning",
    target="megatron.core.tensor_parallel.random",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=MEGATRON,
    reason=(
        "where the device draws from the host's generator, the RNG tracker warns at each use that the 'CPU RNG "
        "state changed within GPU RNG context'"
    ),
    upstream="megatron/core/tensor_parallel/random.py, CudaRNGStatesTracker.fork",
    remove_when="the tracker compares the generators before their states",
    required=False,
    install=f"{FIXES}.imports:drop_warning",
)
PEFT_PROBES = tuple(
    Patch(
        id=f"megatron.peft-{name.replace('_', '-')}",
        target=f"peft.import_utils:{name}",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="peft",
        requires=">=0.19",
        reason="peft mistakes the portable modules for Transformer Engine, depending on the order of imports",
        upstream=f"peft/import_utils.py, {name}",
        remove_when="peft looks for Transformer Engine's distribution, as accelerate does",
        required=False,
        replacement=f"{FIXES}.imports:deny_transformer_engine",
    )
    for name in ("is_te_available", "is_te_pytorch_available")
)
