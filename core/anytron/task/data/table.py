"""The prompts of one source that a run draws from: tokenised, filtered, and kept compactly."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from anytron.base.errors import DataError
from anytron.task.data.prompts import TokenizedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from anytron.task.data.vision import Picture

NAMED = 5
"""Prompts without a usable answer that are named; all are counted."""
INT32: Final = "i"
"""Type code of token ids: 4 bytes, where a tuple of numbers has 36 for each."""


@dataclass(frozen=True)
class PromptFilter:
    """The rules by which prompts are left out.

    Attributes:
        longest: Largest number of tokens of a prompt; None = no limit.
        seen: Digests of the kept prompts of all sources; None = duplicates are kept.
        unusable: Function that returns why rewards cannot read a prompt's data, empty if they can; None = all are kept.
    """

    longest: int | None = None
    seen: set[bytes] | None = None
    unusable: Callable[[Mapping[str, Any]], str] | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    id: str
    text: str
    tokens: array[int]
    data: Mapping[str, Any]
    images: tuple[Picture, ...]
    mask: bytes | None


class PromptTable(Sequence[TokenizedPrompt]):
    """The prompts of one source, in the source's order, with counts of the prompts that were left out.

    The source is read once, prompt by prompt. Memory holds the text and data of each prompt and 4 bytes for each token,
    or 5 for each token of an example; images that are files stay on disk.

    Args:
        name: Name of the source, for messages.
        prompts: Prompts of the source.
        wanted: Filter, which decides which prompts are left out.
        prefix: Prefix of the prompts' ids.

    Attributes:
        name: The argument.
        read: Number of prompts of the source.
        too_long: How many of them were longer than allowed.
        duplicates: How many were equal to an earlier one.
        bad_answers: How many had a right answer that rewards cannot read.
        digest: Hexadecimal digest of the kept prompts' tokens and response masks, to tell whether two tables
            hold the same prompts.

    Raises:
        DataError: The source has no prompts, or none is left.
    """

    def __init__(
        self,
        name: str,
        prompts: Iterable[TokenizedPrompt],
        wanted: PromptFilter = PromptFilter(),
        prefix: str = "",
    ) -> None:
        self.name, self.read, self.too_long, self.duplicates, self.bad_answers = name, 0, 0, 0, 0
        self._entries: list[_Entry] = []
        self._bad: list[str] = []
        whole, shortest = hashlib.blake2b(digest_size=16), 0
        for prompt in prompts:
            self.read += 1
            length = len(prompt.tokens)
            if wanted.unusable is not None and (why := wanted.unusable(prompt.data)):
                self.bad_answers += 1
                if self.bad_answers <= NAMED:
                    self._bad.append(prefix + prompt.id if self._bad else f"{prefix}{prompt.id}: {why}")
                continue
            if wanted.longest is not None and length > wanted.longest:
                self.too_long += 1
                shortest = min(shortest or length, length)
                continue
            tokens = array(INT32, prompt.tokens)
            if wanted.seen is not None:
                digest = _digest(tokens, prompt.images)
                if digest in wanted.seen:
                    self.duplicates += 1
                    continue
                wanted.seen.add(digest)
            mask = None if prompt.response_mask is None else bytes(prompt.response_mask)
            whole.update(length.to_bytes(4, "little") + tokens.tobytes() + (mask or b""))
            self._entries.append(_Entry(prefix + prompt.id, prompt.text, tokens, prompt.data, prompt.images, mask))
        self.digest = whole.hexdigest()
        if not self.read:
            raise DataError("There are no prompts.", where=name, fix="check data.source and data.options")
        if not self._entries:
            longest = f"{wanted.longest} tokens" + (f" (the shortest has {shortest})" if shortest else "")
            counts = {
                f"have more than {longest}": self.too_long,
                "repeat an earlier prompt": self.duplicates,
                f"have an answer that rewards cannot read{self._named}": self.bad_answers,
            }
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
            raise DataError(
                "Every prompt of a source was left out.",
                where=name,
                why=f"of its {self.read} prompts, {reasons}",
                fix="if answers cannot be read, repair them or set the reward's option 'key'; if prompts are too "
                "long, raise data.max_prompt_tokens, lower rollout.max_new_tokens (if responses are generated), or use "
                "a model with a longer context",
            )

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> TokenizedPrompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedPrompt]: ...
    def __getitem__(self, index: int | slice) -> TokenizedPrompt | list[TokenizedPrompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        one = self._entries[index]
        mask = None if one.mask is None else tuple(map(bool, one.mask))
        return TokenizedPrompt(one.id, one.text, tuple(one.tokens), one.data, one.images, response_mask=mask)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt."""
        return [len(one.tokens) for one in self._entries]

    @property
    def _named(self) -> str:
        """Some of those with an answer that rewards cannot read, and why of the first."""
        return f" ({', '.join(self._bad)}{', ...' * (self.bad_answers > NAMED)})" if self._bad else ""

    @property
    def remark(self) -> str:
        """Description of the prompts that were left out; empty if there are none."""
        bad = f"with an answer that rewards cannot read{self._named}"
        dropped = {"too long": self.too_long, "equal to earlier ones": self.duplicates, bad: self.bad_answers}
        parts = [f"{count} {why}" for why, count in dropped.items() if count]
        return f"prompts of {self.name}: {len(self)} of {self.read}, without {', '.join(parts)}" if parts else ""


def _digest(tokens: array[int], images: Sequence[Picture]) -> bytes:
    """What makes two prompts the same: tokens, and images as they are encoded, wherever they lie."""
    digest = hashlib.blake2b(tokens.tobytes(), digest_size=16)
    for image in images:
        digest.update(hashlib.blake2b(_encoded(image), digest_size=16).digest())
    return digest.digest()


def _encoded(image: Picture) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, os.PathLike)):
        return Path(image).read_bytes()
    return f"{image.mode} {image.size} ".encode() + image.tobytes()
