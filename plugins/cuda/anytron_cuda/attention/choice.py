"""Choose the attention kernel of a layer, by the machine's libraries, the layer and the user's options, and make it."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from anytron import PlatformError
from anytron.kernels import make_attention as make_neutral
from anytron_cuda.attention import flash_attention_2, flash_attention_3, fused_sdpa, packed, varlen
from anytron_cuda.capabilities import NEUTRAL, Choice, DescribedKernel, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch import Tensor

    from anytron.kernels import AttentionCall, AttentionKernel, AttentionSpec
    from anytron_cuda.capabilities import Capabilities
    from anytron_cuda.options import Attention


logger = logging.getLogger(__name__)

Name = Literal["flash_attention_3", "flash_attention_2", "varlen", "sdpa", "neutral"]

OPTION = "platform.options.attention"


def _none(*_: object) -> None:
    """Return None: no obstacle."""


@dataclass(frozen=True)
class Candidate:
    """One attention kernel that may be chosen.

    Attributes:
        obstacle: Function that returns why the kernel cannot compute a layer; None if it can.
        call_obstacle: Function that returns why the kernel cannot compute a call of a layer that it supports; None if
            it can.
        make: Function that makes the kernel of a layer.
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
    """Return why each kernel cannot compute a layer, None if it can, fastest first. The last kernel always can."""
    return {name: candidate.obstacle(offered, spec) for name, candidate in CANDIDATES.items()}


def choose_attention(offered: Capabilities, spec: AttentionSpec, wanted: Attention = "auto") -> Choice:
    """Choose the kernel of a layer.

    Raises:
        PlatformError: The user has selected a kernel that cannot compute this layer.
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
    """Return the error for a kernel that the user has selected and that cannot compute a layer or a call."""
    return PlatformError(
        f"The attention kernel {wanted} cannot compute this layer.",
        where=f"{OPTION}={wanted}",
        why=why,
        fix=f"set {OPTION}=auto, which selects {instead}",
    )


def make_attention(spec: AttentionSpec, offered: Capabilities, wanted: Attention = "auto") -> DescribedKernel:
    """Return the kernel of one layer: the fastest one that can compute it, or the one that the user has selected.

    A call that the layer's kernel cannot compute, for example one with a mask, is computed by the next kernel that can;
    a warning says so once. Another warning says once if only plain torch operations can compute the layer.

    Raises:
        PlatformError: The selected kernel cannot compute this layer, or, when it is called, this call.
    """
    choice = choose_attention(offered, spec, wanted)
    if choice.kernel == NEUTRAL != wanted:
        _warn(f"attention keeps all scores in memory: {choice}")
    able = [name for name, why in obstacles(offered, spec).items() if why is None]
    taken = [name for name in able if wanted in ("auto", name)]
    made = [(name, CANDIDATES[name].call_obstacle, CANDIDATES[name].make(spec)) for name in taken]

    def attend(query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        passed_over: list[str] = []
        for name, call_obstacle, kernel in made:
            why = call_obstacle(spec, call, query.dtype)
            if why is None:
                if passed_over:
                    _warn(f"attention: {name} computes some calls ({'; '.join(passed_over)})")
                return kernel(query, key, value, call)
            passed_over.append(f"not {name}: {why}")
        raise unable(choice.kernel, "; ".join(passed_over), "another kernel for such calls")

    return DescribedKernel(attend, str(choice))


@functools.cache
def _warn(what: str) -> None:
    """Log a warning, once per process."""
    logger.warning("%s", what)
