"""Requests that vLLM is working on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anytron.workers.engines.rollout_engine import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.workers.engines.rollout_engine import GenerationRequest, SamplingParams, StopReason


@dataclass(eq=False)
class UnderWay:
    """A request, and what there is of its response.

    Attributes:
        request: As submitted.
        tokens: Made so far.
        log_probs: Of each.
        versions: Of the weights that made each.
        ended: Whether vLLM has ended it.
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ended: bool = False

    def extend(self, tokens: Sequence[int], log_probs: Sequence[float], version: int, *, ended: bool) -> None:
        """Add tokens that weights of one version have made."""
        self.tokens.extend(tokens)
        self.log_probs.extend(log_probs)
        self.versions.extend([version] * len(tokens))
        self.ended = ended

    def response(self, reason: StopReason) -> Response:
        """What there is."""
        return Response(tuple(self.tokens), tuple(self.log_probs), reason, tuple(self.versions))


def sampling_params(request: GenerationRequest) -> Any:
    """Make vLLM's ``SamplingParams`` of a request."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: SamplingParams = request.sampling
    return VllmSamplingParams(
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        temperature=1.0,  # logits are divided before vLLM sees them
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        stop_token_ids=list(sampling.end_token_ids),
        ignore_eos=True,  # the end tokens are those of the request, not of the checkpoint
        logprobs=0,  # of the token that was drawn
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        seed=request.seed % 2**63,
    )
