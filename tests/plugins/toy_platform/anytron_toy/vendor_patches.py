"""What is changed in the vendor's library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.patches import Installed
from anytron_toy import vendor

if TYPE_CHECKING:
    from anytron.hooks.types import PatchContext


def set_tile(context: PatchContext) -> Installed:
    """Give the library the tile of the options."""
    before, vendor.TILE = vendor.TILE, context.platform.options.tile
    return Installed(lambda: setattr(vendor, "TILE", before))
