"""The rows of a batch while they are generated: their input tokens, their drawn tokens, and the ends of responses."""

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
    """One response while it is generated."""

    prompt: Sequence[int]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    ended: StopReason | None = None

    def at(self, column: int) -> int:
        """The token in a column, from the prompt or the response; any token if the row has ended."""
        place = column - len(self.prompt)
        if place < 0:
            return self.prompt[column]
        return self.tokens[min(place, len(self.tokens) - 1)]


class Rows:
    """A batch of requests with the same sampling parameters. All ranks of a replica keep the same rows.

    Args:
        requests: The requests; at least one.
        stop: Finds stop strings in responses; None = there are no stop strings.

    Attributes:
        column: Number of tokens of each row that the model has read.
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
        """Largest number of tokens that the model reads of any row: it does not read the last token of a response."""
        return int(self._lengths.max()) + self._sampling.max_new_tokens - 1

    @property
    def ended(self) -> bool:
        """Whether all responses have ended."""
        return all(row.ended for row in self._rows)

    def beginnings(self) -> Tensor:
        """The first C' tokens of each prompt, int64 ``[B, C']``; C' is the length of the shortest prompt minus 1."""
        shortest = int(self._lengths.min())
        return torch.tensor([row.prompt[: shortest - 1] for row in self._rows], dtype=torch.int64)

    def next_tokens(self) -> Tensor:
        """The next input tokens: int64 ``[B]``."""
        return torch.tensor([row.at(self.column) for row in self._rows])

    def places(self) -> Tensor:
        """Position of each row's next token in the response, int64 ``[B]``; negative = it belongs to the prompt."""
        return self.column - self._lengths

    def take(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Add drawn tokens and their log-probs, B of each, to the rows whose prompts have been read."""
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
        """Return the responses, drawn with weights of this version; all must have ended."""
        found = []
        for row in self._rows:
            assert row.ended is not None, "asked for when all have ended"
            versions = (version,) * len(row.tokens)
            found.append(Response(tuple(row.tokens), tuple(row.log_probs), row.ended, versions))
        return found

    def _shown(self, rows: Sequence[Row]) -> list[bool]:
        stop = self._stop
        return [False] * len(rows) if stop is None else stop.shown([row.tokens[-stop.tail :] for row in rows])
