"""What the environment has: devices, versions, and which libraries can be imported.

Prints JSON objects, each of which says more than the one before: a library may end the process that imports it.
"""

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
    "anytron_conformance": "anytron-conformance",
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


def installed(distribution):
    """The version; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def usable(module, number):
    """The version; or why it cannot be imported."""
    if number is None or module in ("megatron.core", "mcore_bridge"):
        return number
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever a library of an unknown image does
        return f"{number}, which cannot be imported: {type(error).__name__}: {error}"
    return number


def tell(facts):
    print(json.dumps(facts), flush=True)


def main():
    import torch

    versions = {module: installed(distribution) for module, distribution in MODULES.items()}
    facts = {
        "devices": devices(),
        "python": platform.python_version(),
        "versions": versions,
        "cuda": torch.version.cuda,
        "processor": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }
    tell(facts)
    if facts["devices"]:
        facts |= {"cudnn": torch.backends.cudnn.version(), "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        tell(facts)
    tell(facts | {"versions": {module: usable(module, number) for module, number in versions.items()}})


if __name__ == "__main__":
    main()
