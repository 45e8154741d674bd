"""Public names for programs with their own trainer: functions that open the plugins and platform of a device."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.cli.main import print_error
    from anytron.device.loading import examine_requirements, open_session
    from anytron.device.platform import features_asked
    from anytron.device.stack import DeviceStack, open_device_stack
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = ["DeviceStack", "examine_requirements", "features_asked", "open_device_stack", "open_session", "print_error"]
