"""The package of the invented accelerator: importing it adds the device type ``invented`` to torch."""

import os
from pathlib import Path

import torch
from torch_invented import invented

torch.ops.load_library(str(Path(__file__).with_name("libinvented.so")))
torch.utils.rename_privateuse1_backend("invented")
torch._register_device_module("invented", invented)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _to_without_marks(module: torch.nn.Module, *arguments, **options) -> torch.nn.Module:
    """Move a module as some packages' own ``Module.to`` does: with new parameters, of which only the values remain."""
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = torch.nn.Parameter(old.detach().to(*arguments, **options), old.requires_grad)
    return module


if os.environ.get("INVENTED_FAULT") == "marks-lost":
    torch.nn.Module.to = _to_without_marks


def autoload() -> None:
    """The entry point of torch.backends: the import has done everything."""
