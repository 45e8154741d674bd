"""The attention kernel of a layer on this machine."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

from anytron_cuda.attention.choice import CANDIDATES, choose_attention, obstacles, unable
from anytron_cuda.choices import NEUTRAL, DescribedKernel

if TYPE_CHECKING:
    from torch import Tensor

    from anytron.kernels import AttentionCall, AttentionSpec
    from anytron_cuda.capabilities import Capabilities
    from anytron_cuda.options import Attention

logger = logging.getLogger(__name__)


def make_attention(spec: AttentionSpec, offered: Capabilities, wanted: Attention = "auto") -> DescribedKernel:
    """Return the kernel of one layer: the fastest one that can compute it, or the one that is wanted by name.

    A call that the layer's kernel cannot compute, for example one with a mask, is computed by the next one that can;
    the log says that once. So it does where plain operations are all that is left.

    Raises:
        PlatformError: The kernel that is wanted by name cannot compute this layer, or, when it is called, this call.
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
        raise unable(choice.kernel, "; ".join(passed_over), "the next one that can")

    return DescribedKernel(attend, str(choice))


@functools.cache
def _warn(what: str) -> None:
    """Log it once per process."""
    logger.warning("%s", what)
