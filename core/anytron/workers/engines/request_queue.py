"""Requests that an engine has been given and has not begun, for engines that generate batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.workers.engines.rollout_engine import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.workers.engines.rollout_engine import GenerationRequest


class RequestQueue:
    """A queue with the longest prompts in front, so that a batch holds prompts of similar lengths."""

    def __init__(self) -> None:
        self._requests: list[GenerationRequest] = []

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._requests.extend(requests)
        self._requests.sort(key=lambda request: -len(request.prompt.tokens))

    def take(self, count: int) -> list[GenerationRequest]:
        """Take the next batch: ``count`` requests at most that are sampled alike; empty if there are none."""
        if not self._requests:
            return []
        sampling = self._requests[0].sampling
        batch = [request for request in self._requests if request.sampling == sampling][:count]
        taken = {request.id for request in batch}
        self._requests = [request for request in self._requests if request.id not in taken]
        return batch

    def abort(self, ids: Sequence[int] | None = None) -> list[tuple[int, Response]]:
        """Give up requests, None = all; return their responses, which are empty."""
        given_up = [request.id for request in self._requests if ids is None or request.id in ids]
        self._requests = [request for request in self._requests if request.id not in given_up]
        return [(one, Response((), (), "abort", ())) for one in given_up]
