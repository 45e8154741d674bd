"""Apply every patch of a training rank, undo all, and compare each target with what it was, by identity.

Prints one JSON object: the ledger's report, what it changed, what was lost meanwhile, what is left after undoing.
"""

import importlib
import json
import sys
from contextlib import suppress
from importlib.util import find_spec

import torch

from anytron.device.hooks.types import PatchContext
from anytron.device.loading import hooks_of
from anytron.device.patches import Ledger, Phase
from anytron_cpu import CpuPlatform
from anytron_megatron.patches import trainer_patches
from anytron_megatron.patches.imports import PATCHED_MODULES

MODULES = (
    "megatron.core.transformer.multi_latent_attention",
    "megatron.core.tensor_parallel",
    "megatron.core.tensor_parallel.random",
    *PATCHED_MODULES,
)


def snapshot():
    """What the modules that anybody patches hold, and the classes that they define: (owner, name) to object."""
    found = {("torch", "compile"): torch.compile, ("torch.cuda", "current_device"): torch.cuda.current_device}
    for name in MODULES:
        module = sys.modules.get(name)
        if module is None:
            continue
        classes = [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == name]
        for owner in (module, *classes):
            for attribute, value in vars(owner).items():
                if callable(getattr(value, "__func__", value)):
                    found[getattr(owner, "__qualname__", owner.__name__), attribute] = value
    return found


platform = CpuPlatform()
context = PatchContext(platform, "trainer", hooks_of(platform), "megatron")
ledger = Ledger(context=context)
host = snapshot()

ledger.apply(Phase.BEFORE_IMPORT, trainer_patches(Phase.BEFORE_IMPORT, context))
for name in MODULES:
    if find_spec(name.partition(".")[0]):
        with suppress(ModuleNotFoundError):  # a module of another version
            importlib.import_module(name)
original = snapshot()
for phase in list(Phase)[1:]:
    ledger.apply(phase, trainer_patches(phase, context))
report = ledger.report()
patched = snapshot()
changed = [" ".join(key) for key, value in (original | host).items() if patched.get(key) is not value]
lost = [patch.id for patch in ledger.verify()]
ledger.undo(Phase.BEFORE_PARALLEL_INIT)
restored = snapshot()
left = [" ".join(key) for key, value in original.items() if restored.get(key) is not value]
# What was imported while these were applied holds them by name, and gets torch's own now.
ledger.undo()
restored = snapshot()
left += [" ".join(key) for key, value in host.items() if restored.get(key) is not value]
print(json.dumps({"report": report, "changed": changed, "lost": lost, "left": left}))
