"""Find stop strings in responses: what ends a response, for every rollout engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

STRIPPED_TOKENS = 2
"""Tokens decoded before the longest stop string: SentencePiece decoders strip a leading space."""


class StopStrings:
    """Tells whether the end of a response shows a stop string.

    It looks for them in the decoded tail of a response. (transformers' ``StopStringCriteria`` derives a table from the
    vocabulary instead, and fails on tokenizers that do not know its letters.)

    Args:
        strings: The stop strings, at least one.
        tokenizer: A Hugging Face tokenizer.

    Attributes:
        tail: How many tokens from its end to give of a response.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A token is at least a byte of text; some decoders strip the first characters.
        self.tail = max(len(stop.encode()) for stop in strings) + STRIPPED_TOKENS

    def shown(self, tails: list[list[int]]) -> list[bool]:
        """Say for each tail whether a stop string is in it."""
        texts = self._tokenizer.batch_decode(tails)
        return [any(stop in text for stop in self._strings) for text in texts]
