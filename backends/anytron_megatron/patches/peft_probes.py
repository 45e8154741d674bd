"""Tell peft that there is no Transformer Engine where the portable one has its name.

peft only asks whether the name can be imported. Depending on whether it asked before or after the
portable modules took the name, it would treat them as a quantisation back end whose layers cannot
be merged, or not. accelerate and transformers ask for the distribution, which is absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.patches import Patch, Phase

if TYPE_CHECKING:
    from collections.abc import Callable


def peft_probes(owner: str) -> list[Patch]:
    """One patch for each of peft's two questions."""
    return [_probe(owner, name) for name in ("is_te_available", "is_te_pytorch_available")]


def _probe(owner: str, name: str) -> Patch:
    def replace(_original: Callable[[], bool]) -> Callable[[], bool]:
        return _no

    return Patch(
        id=f"megatron.peft-{name.replace('_', '-')}",
        owner=owner,
        target=f"peft.import_utils:{name}",
        phase=Phase.BEFORE_PARALLEL_INIT,
        package="peft",
        requires=">=0.19",
        reason="it takes the portable modules for those of Transformer Engine, or not, by the order of imports",
        upstream=f"peft/import_utils.py, {name}",
        remove_when="peft looks for the distribution, as accelerate does",
        required=False,
        replacement=replace,
    )


def _no() -> bool:
    return False
