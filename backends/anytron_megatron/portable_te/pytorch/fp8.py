"""FP8: always off; turning it on is an error."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from anytron_megatron.portable_te.refusals import refuse, refuse_settings

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_fp8_support() -> tuple[bool, str]:
    """Return False and the reason: FP8 is not supported. Accelerate calls this."""
    return False, "the portable Transformer Engine has no FP8"


def check_mxfp8_support() -> tuple[bool, str]:
    """Return False and the reason: MXFP8 is not supported. Accelerate calls this."""
    return check_fp8_support()


class FP8GlobalStateManager:
    """The state that Megatron reads around every layer: FP8 is off."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Return False: nothing computes in FP8."""
        return False

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Return False: no maxima for FP8 scales are collected."""
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        """Return None: without FP8 there is no recipe."""

    @staticmethod
    def get_fp8_group() -> None:
        """Return None: there is no group over which maxima are reduced."""

    @staticmethod
    def reset() -> None:
        """Do nothing: there is no state to reset."""


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: object = None,
    fp8_group: object = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Compute as usual in the block; ``enabled`` and ``calibrating`` must be False, the others have no effect."""
    del fp8_recipe, fp8_group, _graph
    if enabled:
        refuse("fp8_autocast", "FP8", "set fp8 to null")
    refuse_settings("fp8_autocast", {"calibrating": calibrating})
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: object = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Create parameters as usual in the block; ``enabled`` must be False, the others have no effect."""
    del recipe, preserve_high_precision_init_val
    if enabled:
        refuse("fp8_model_init", "FP8 parameters", "set fp8_param to false")
    yield


class Fp8Padding:
    """Pads each expert's tokens to blocks of FP8 kernels; creating an instance is refused."""

    def __init__(self, *_: object, **_settings: object) -> None:
        refuse(type(self).__name__, "FP8 for experts", "set fp8 to null")


class Fp8Unpadding(Fp8Padding):
    """Removes the padding; creating an instance is refused."""
