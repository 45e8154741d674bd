"""Choose the attention kernel of a layer: a function of what the machine offers, the layer, and what the user wants."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from anytron import PlatformError
from anytron.kernels import make_attention as make_neutral
from anytron_cuda.attention import flash_attention_2, flash_attention_3, fused_sdpa, packed, varlen
from anytron_cuda.choices import Choice, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from anytron.kernels import AttentionCall, AttentionKernel, AttentionSpec
    from anytron_cuda.capabilities import Capabilities
    from anytron_cuda.options import Attention

Name = Literal["flash_attention_3", "flash_attention_2", "varlen", "sdpa", "neutral"]
OPTION = "platform.options.attention"


def _none(*_: object) -> None:
    """No obstacle."""


@dataclass(frozen=True)
class Candidate:
    """One kernel.

    Attributes:
        obstacle: Why it cannot compute a layer; None if it can.
        call_obstacle: Why it cannot compute a call of such a layer; None if it can.
        make: The kernel of a layer.
    """

    obstacle: Callable[[Capabilities, AttentionSpec], str | None]
    call_obstacle: Callable[[AttentionSpec, AttentionCall, torch.dtype], str | None]
    make: Callable[[AttentionSpec], AttentionKernel]


CANDIDATES: Mapping[Name, Candidate] = MappingProxyType(
    {
        "flash_attention_3": Candidate(
            flash_attention_3.obstacle,
            flash_attention_3.call_obstacle,
            lambda spec: packed.make_packed(spec, flash_attention_3.attend),
        ),
        "flash_attention_2": Candidate(
            flash_attention_2.obstacle,
            packed.call_obstacle,
            lambda spec: packed.make_packed(spec, flash_attention_2.attend),
        ),
        "varlen": Candidate(
            varlen.obstacle, packed.call_obstacle, lambda spec: packed.make_packed(spec, varlen.attend)
        ),
        "sdpa": Candidate(fused_sdpa.obstacle, _none, fused_sdpa.make_attention),
        "neutral": Candidate(_none, _none, make_neutral),
    }
)
"""Fastest first."""


def obstacles(offered: Capabilities, spec: AttentionSpec) -> dict[Name, str | None]:
    """Why each kernel cannot compute a layer, None if it can, fastest first. The last one always can."""
    return {name: candidate.obstacle(offered, spec) for name, candidate in CANDIDATES.items()}


def choose_attention(offered: Capabilities, spec: AttentionSpec, wanted: Attention = "auto") -> Choice:
    """Choose the kernel of a layer.

    Raises:
        PlatformError: A kernel is wanted by name that cannot compute this layer.
    """
    found = obstacles(offered, spec)
    choice = choose(found.items())
    if wanted == "auto":
        return choice
    why = found[wanted]
    if why is not None:
        raise unable(wanted, why, choice.kernel)
    return Choice(wanted)


def unable(wanted: str, why: str, instead: str) -> PlatformError:
    """The error of a kernel that the user wants and that cannot compute."""
    return PlatformError(
        f"The attention kernel {wanted} cannot compute this layer.",
        where=f"{OPTION}={wanted}",
        why=why,
        fix=f"{OPTION}=auto, which takes {instead} for it",
    )
