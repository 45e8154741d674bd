"""What is changed in third-party code: the records, and the functions that they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron import Installed, Patch, Phase

if TYPE_CHECKING:
    from anytron import PatchContext

PATCHES = (
    Patch(
        id="basalt.tile",
        target="basalt_sdk:TILE",
        phase=Phase.BEFORE_BUILD,
        reason="the library reads tiles of 16 tokens, whatever BASALT_TILE says",
        package="basalt-sdk",
        requires="<1.3",
        upstream="basalt-sdk, release notes of 1.3",
        remove_when="basalt-sdk 1.2 is no longer supported",
        install="anytron_basalt.patches:set_tile",
    ),
)


def set_tile(context: PatchContext) -> Installed:
    """Set the library's tile from the options."""
    import basalt_sdk

    before, basalt_sdk.TILE = basalt_sdk.TILE, context.platform.options.tile  # type: ignore[attr-defined]
    return Installed(lambda: setattr(basalt_sdk, "TILE", before), detail=f"was {before}")
