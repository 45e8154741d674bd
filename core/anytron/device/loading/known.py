"""Facts about this project's distributions and about torch that choosing a platform needs."""

from __future__ import annotations

import os

OFFICIAL_PLATFORMS = {"ascend": "pip install 'anytron[ascend]'", "cuda": "pip install 'anytron[cuda]'"}
"""How to install the platforms of this project that are distributions of their own."""


def disable_device_autoload() -> None:
    """Keep ``import torch`` from importing device extensions by itself.

    With an extension installed whose driver is missing, the autoload makes ``import torch`` itself
    fail (torch/__init__.py, ``_import_device_backends``). The active platform loads its own device.
    What the user has set is kept. Call it before torch is imported; worker processes inherit it.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
