"""Put a model on one device, or spread it over all devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from anytron.base.errors import ConfigError

if TYPE_CHECKING:
    from anytron.device.runtime import DeviceRuntime

_NO_LIMIT = 1 << 60
"""Bytes. How much fits is only known once the training engine has taken its part, which is later."""


def place(model: Any, runtime: DeviceRuntime, device_map: Literal["balanced"] | None) -> Any:
    """Move a model to its device or devices.

    Args:
        model: A Hugging Face model, on the host.
        runtime: The devices.
        device_map: None = the whole model on the current device; ``balanced`` = its layers in order on all devices
            that this process can use, as many bytes on each (accelerate's big model inference). Then one device
            computes at a time: use it for models that do not fit on one.

    Raises:
        ConfigError: There is no second device.
    """
    if device_map is None:
        return model.to(runtime.current_device())
    devices = runtime.device_count()
    if devices < 2:
        raise ConfigError(
            "The rollout model cannot be spread over several devices.",
            where="rollout.options.device_map",
            why=f"{device_map} needs two devices, and this process can use {devices}",
            fix="leave the option out, or let the process use several devices",
        )
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = model._no_split_modules
    limits = get_balanced_memory(
        model, max_memory=dict.fromkeys(range(devices), _NO_LIMIT), no_split_module_classes=whole
    )
    return dispatch_model(model, infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole))
