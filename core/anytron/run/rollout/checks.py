"""Check what a rollout engine answers: training would learn from whatever it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.workers.engines.rollout_engine import GenerationRequest, Response
    from anytron.workers.engines.routing import RoutingShape


def mistake_in(
    response: Response, request: GenerationRequest | None, versions: Sequence[int], routing: RoutingShape | None = None
) -> str | None:
    """Say what is wrong with a response; None if nothing is.

    Args:
        response: It.
        request: What it answers; None if the engine was not asked for it, or has answered already.
        versions: Of the weights that the engine has had since it was asked, oldest first.
        routing: Of the model, if responses are to carry it.
    """
    if request is None:
        return "it was not asked for"
    tokens, longest = len(response.tokens), request.sampling.max_new_tokens
    if tokens != len(response.log_probs) or tokens != len(response.versions):
        return f"{tokens} tokens have {len(response.log_probs)} log-probs and {len(response.versions)} versions"
    if tokens > longest:
        return f"it has {tokens} tokens, and {longest} were allowed"
    if response.stop_reason == "abort":
        return "it was given up"
    if other := sorted(set(response.versions) - set(versions)):
        return f"it comes from weights of version {', '.join(map(str, other))}, and version {versions[-1]} is current"
    if list(response.versions) != sorted(response.versions):
        return "weights of older versions follow newer ones"
    if routing is not None:
        return routing.mistake_in(response.routing, len(request.prompt.tokens) + tokens)
    return None
