"""The package of the invented accelerator: importing it adds the device type ``invented`` to torch."""

from pathlib import Path

import torch
from torch_invented import invented

torch.ops.load_library(str(Path(__file__).with_name("libinvented.so")))
torch.utils.rename_privateuse1_backend("invented")
torch._register_device_module("invented", invented)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def autoload() -> None:
    """The entry point of torch.backends: the import has done everything."""
