"""The rows of a batch while they are generated: which tokens are fed, which are drawn, and where a response ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from anytron.workers.engines.rollout_engine import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from anytron.workers.engines.rollout_engine import GenerationRequest, StopReason
    from anytron.workers.engines.sampling import StopStrings


@dataclass
class Row:
    """One response in the making."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: StopReason | None = None

    def at(self, column: int) -> int:
        """The token of a column: the prompt's, or the response's; of a row that has ended, any."""
        place = column - len(self.prompt)
        if place < 0:
            return self.prompt[column]
        return self.tokens[min(place, len(self.tokens) - 1)]


class Rows:
    """A batch of requests that are sampled alike. All ranks of a replica keep the same rows.

    Args:
        requests: At least one.
        stop: Search for stop strings; None = there are none.

    Attributes:
        column: How many tokens of each row have been fed.
    """

    def __init__(self, requests: Sequence[GenerationRequest], stop: StopStrings | None) -> None:
        self.column = 0
        self._rows = [Row(request.prompt.tokens) for request in requests]
        self._sampling, self._stop = requests[0].sampling, stop
        self._lengths = torch.tensor([len(row.prompt) for row in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def columns(self) -> int:
        """Tokens that are fed to a row at most: the last one of a response is not."""
        return int(self._lengths.max()) + self._sampling.max_new_tokens - 1

    @property
    def ended(self) -> bool:
        """Whether all responses have."""
        return all(row.ended for row in self._rows)

    def beginnings(self) -> Tensor:
        """Tokens that all prompts have but for the last one of the shortest: int64 ``[B, C']``, C' from 0."""
        shortest = int(self._lengths.min())
        return torch.tensor([row.prompt[: shortest - 1] for row in self._rows], dtype=torch.int64)

    def next_tokens(self) -> Tensor:
        """The tokens to feed: int64 ``[B]``."""
        return torch.tensor([row.at(self.column) for row in self._rows])

    def places(self) -> Tensor:
        """Place in its response of the token behind the fed one, int64 ``[B]``; negative within a prompt."""
        return self.column - self._lengths

    def take(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add drawn tokens and their log-probs, B of each, to the rows whose prompts are over."""
        grown = []
        for row, place, token, log_prob in zip(self._rows, self.places().tolist(), tokens, log_probs, strict=True):
            if place >= 0 and not row.ended:
                row.tokens.append(token)
                row.log_probs.append(log_prob)
                grown.append(row)
        sampling = self._sampling
        may_stop = [row for row in grown if len(row.tokens) >= sampling.min_new_tokens]
        shown = self._shown(may_stop)
        for row, shows in zip(may_stop, shown, strict=True):
            if shows or row.tokens[-1] in sampling.end_token_ids:
                row.ended = "stop"
        for row in grown:
            if row.ended is None and len(row.tokens) == sampling.max_new_tokens:
                row.ended = "length"

    def responses(self, version: int) -> list[Response]:
        """Return the responses, all of which have ended."""
        found = []
        for row in self._rows:
            assert row.ended is not None, "asked for when all have ended"
            versions = (version,) * len(row.tokens)
            found.append(Response(tuple(row.tokens), tuple(row.log_probs), row.ended, versions))
        return found

    def _shown(self, rows: Sequence[Row]) -> list[bool]:
        stop = self._stop
        return [False] * len(rows) if stop is None else stop.shown([row.tokens[-stop.tail :] for row in rows])
