"""peft is told that there is no Transformer Engine where the portable one has its name.

peft only asks whether the name can be imported. Depending on whether it asked before or after the
portable modules took the name, it would treat them as a quantisation back end whose layers cannot
be merged, or not. accelerate and transformers ask for the distribution, which is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def deny_transformer_engine(_original: Callable[[], bool]) -> Callable[[], bool]:
    """Replace a probe for Transformer Engine: the answer is no."""
    return lambda: False
