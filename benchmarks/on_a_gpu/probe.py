"""What the environment has: devices, versions, and which libraries can be imported. Prints one JSON object."""

from __future__ import annotations

import importlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version

MODULES = {
    "torch": "torch",
    "megatron.core": "megatron-core",
    "mcore_bridge": "mcore-bridge",
    "transformers": "transformers",
    "peft": "peft",
    "datasets": "datasets",
    "anytron": "anytron",
    "anytron_cuda": "anytron-cuda",
    "triton": "triton",
    "transformer_engine": "transformer-engine",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "flash-attn-3",
    "liger_kernel": "liger-kernel",
    "trl": "trl",
    "pytest": "pytest",
}
"""Import names, and the distributions that have their versions. mcore_bridge and megatron.core are only looked for:
Anytron patches before it imports them."""


def devices():
    import torch

    if not torch.cuda.is_available():
        return []
    rows = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {
            "name": row.name,
            "memory_bytes": row.total_memory,
            "compute_capability": f"{row.major}.{row.minor}",
            "multiprocessors": row.multi_processor_count,
        }
        for row in rows
    ]


def found(module, distribution):
    """The version; or why it cannot be imported; None if it is not installed."""
    try:
        number = version(distribution)
    except PackageNotFoundError:
        return None
    if module in ("megatron.core", "mcore_bridge"):
        return number
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a library of an unknown image does
        return f"{number}, which cannot be imported: {type(error).__name__}: {error}"
    return number


def main():
    import torch

    facts = {
        "devices": devices(),
        "python": platform.python_version(),
        "versions": {module: found(module, distribution) for module, distribution in MODULES.items()},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.version.cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
