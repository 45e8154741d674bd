"""The device layer, for programs that bring their own trainer."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anytron.cli.main import print_error
    from anytron.device.layer import Layer, open_layer
    from anytron.device.loading import examine_requirements, open_session
    from anytron.device.platform import features_asked
else:

    def __getattr__(name: str) -> object:
        from anytron.base.lazy import find

        return find(__name__, name)


__all__ = ["Layer", "examine_requirements", "features_asked", "open_layer", "open_session", "print_error"]
