"""The module ``torch.invented``: the functions that torch itself calls, and nothing else that torch.cuda has."""

import torch


class device:  # noqa: N801 - the name that torch uses
    """Make a device the current one in a ``with`` block."""

    def __init__(self, device):
        self.index = torch.accelerator._get_device_index(device, optional=True)

    def __enter__(self):
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_):
        torch.accelerator.set_device_index(self.before)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    """Memory and devices are made at their first use."""


def device_count() -> int:
    return torch.ops.invented.device_count()


def current_device() -> int:
    return torch.accelerator.current_device_index()


def manual_seed_all(seed: int) -> None:
    before = current_device()
    for index in range(device_count()):
        torch.accelerator.set_device_index(index)
        torch.ops.invented.manual_seed(seed)
    torch.accelerator.set_device_index(before)


def manual_seed(seed: int) -> None:
    torch.ops.invented.manual_seed(seed)


def get_rng_state() -> torch.Tensor:
    return torch.ops.invented.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    torch.ops.invented.set_rng_state(state)
