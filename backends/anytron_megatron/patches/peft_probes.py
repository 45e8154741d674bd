"""Tell peft that Transformer Engine is absent where the portable modules have its name.

peft only asks whether the name can be imported. If it asks after the portable modules have taken the name, it
treats their layers as quantised ones, which cannot be merged; if it asks before, it does not. accelerate and
transformers look for the distribution, which is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def deny_transformer_engine(_original: Callable[[], bool]) -> Callable[[], bool]:
    """Replace a probe for Transformer Engine: answer no."""
    return lambda: False
