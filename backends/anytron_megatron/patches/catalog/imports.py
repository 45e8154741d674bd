"""Patches of what Megatron and mcore-bridge do when they are imported, and of the files that they would import."""

from __future__ import annotations

from anytron.device.patches import Patch, Phase
from anytron_megatron.patches.catalog.packages import BRIDGE, FIXES

IMPORT_NOISE = Patch(
    id="megatron.import-noise",
    target="warnings",
    phase=Phase.BEFORE_IMPORT,
    before="megatron.core",
    reason="Megatron, when imported, warns about its own deprecated imports and about Apex, on every rank",
    upstream="megatron-core 0.16.1; anytron_megatron/patches/imports.py lists the messages",
    remove_when="megatron-core can be imported without warnings",
    required=False,
    install=f"{FIXES}.import_noise:filter_messages",
)
BRIDGE_IMPORT = Patch(
    id="megatron.mcore-bridge-import",
    target="mcore_bridge",
    phase=Phase.BEFORE_PARALLEL_INIT,
    package=BRIDGE,
    reason="mcore-bridge patches megatron-core and peft when it is imported, and does not say what",
    upstream="mcore_bridge/patcher.py, mcore_bridge/tuners/patcher.py",
    remove_when="mcore-bridge patches in a function instead of at its import",
    install=f"{FIXES}.bridge_import:import_bridge",
    stays=(
        "its modules stay imported, its logger stays set up, and transformers.models.auto.auto_mappings keeps the "
        "models that it made transformers import"
    ),
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
    replacement=f"{FIXES}.model_code:refuse_model_code",
)
