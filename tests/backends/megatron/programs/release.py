"""Ask the installed Megatron what ``anytron_megatron.models.release`` says of it. Prints ``fact-NAME VALUE`` lines."""

from __future__ import annotations

import torch

from anytron.device.stack import open_device_stack
from anytron_megatron.models.release import auxiliary_losses, delta_net_modules, forget_auxiliary_losses, is_release


def note() -> None:
    """Note a loss as routers of the installed version do."""
    if is_release(">=0.18"):
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

        get_moe_metrics_tracker().record("some_loss", torch.tensor(0.5), 1, 2)
    else:
        from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

        save_to_aux_losses_tracker("some_loss", torch.tensor(0.5), 1, 2)


def told() -> str:
    """Write down what was noted, by layer."""
    return ",".join(map(str, auxiliary_losses()["some_loss"].tolist()))


def construct() -> str:
    """Name the first error that the constructor of Gated DeltaNet meets."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    try:
        GatedDeltaNet(None, None)
    except Exception as error:  # noqa: BLE001 - any is an answer
        return type(error).__name__
    return "none"


if __name__ == "__main__":
    with open_device_stack("cpu", engine="megatron"):
        note()
        print("fact-noted", told())
        forget_auxiliary_losses()
        print("fact-forgotten", told())
        constructor, _ = delta_net_modules()
        print("fact-without", construct())
        constructor.HAVE_FLA = True
        print("fact-with", construct())
