"""The prompts of one source that remain after filtering by length, for duplicates and for unusable answers."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from anytron.base.errors import DataError
from anytron.task.data.columns import DIGEST_BYTES
from anytron.task.data.prompts import TokenizedPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import numpy.typing as npt

    from anytron.task.data.columns import PromptColumns
    from anytron.task.data.vision import Picture

NAMED = 5
"""Most prompts without a usable answer that a message names; it counts all of them."""


@dataclass(frozen=True)
class PromptFilter:
    """The rules by which prompts are left out.

    Attributes:
        longest: Largest number of tokens of a prompt; None = no limit.
        seen: Digests of the kept prompts of all sources; None = duplicates are kept.
        pictures: Whether prompts may have images; if so, two prompts are equal only if their images are equal too.
        unusable: Function that returns why rewards cannot read a prompt's data, empty if they can; None = all are kept.
    """

    longest: int | None = None
    seen: set[bytes] | None = None
    pictures: bool = False
    unusable: Callable[[Mapping[str, Any]], str] | None = None


class PromptTable(Sequence[TokenizedPrompt]):
    """The prompts of one source, in the source's order, with counts of the prompts that were left out.

    Args:
        name: Name of the source, for messages.
        columns: Prompts of the source.
        wanted: Filter, which decides which prompts are left out.
        prefix: Prefix of the prompts' ids.

    Attributes:
        name: Name of the source.
        columns: Prompts of the source, before filtering.
        read: Number of prompts of the source.
        too_long: Number of prompts that were left out because they are too long.
        duplicates: Number of prompts that were left out because they equal an earlier prompt.
        bad_answers: Number of prompts that were left out because rewards cannot read their right answer.

    Raises:
        DataError: The source has no prompts, or none is left.
    """

    def __init__(
        self, name: str, columns: PromptColumns, wanted: PromptFilter = PromptFilter(), prefix: str = ""
    ) -> None:
        self.name, self.columns, self.read, self._prefix = name, columns, len(columns), prefix
        self._bad: list[str] = []
        kept = np.arange(self.read)
        if wanted.unusable is not None:
            kept = kept[self._readable(wanted.unusable)]
        self.bad_answers = self.read - len(kept)
        lengths = columns.lengths[kept]
        if wanted.longest is not None:
            kept = kept[lengths <= wanted.longest]
        self.too_long = self.read - self.bad_answers - len(kept)
        if wanted.seen is not None:
            digests = _with_images(columns, kept) if wanted.pictures else columns.digests[kept].tobytes()
            kept = kept[_first_ones(digests, wanted.seen)]
        self.duplicates = self.read - self.bad_answers - self.too_long - len(kept)
        self._kept = kept
        if not self.read:
            raise DataError(
                "There are no prompts.",
                where=name,
                why="the source yields no prompt",
                fix="check the source and its options in the section data",
            )
        if not len(kept):
            longest = f"{wanted.longest} tokens" + (f" (the shortest has {lengths.min()})" if self.too_long else "")
            counts = {
                f"have more than {longest}": self.too_long,
                "repeat an earlier prompt": self.duplicates,
                f"have an answer that rewards cannot read{self._named}": self.bad_answers,
            }
            shorter = (
                "raise data.max_prompt_tokens if it is set, lower rollout.max_new_tokens if responses are generated"
            )
            remedies = (
                f"{shorter}, or use a model with a longer context" if self.too_long else "",
                "remove the source, or set data.deduplicate=false" if self.duplicates else "",
                "correct the answers in the data, or set the reward's option 'key' to the entry that holds them"
                if self.bad_answers
                else "",
            )
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
            raise DataError(
                "Every prompt of a source was left out.",
                where=name,
                why=f"of its {self.read} prompts, {reasons}",
                fix="; ".join(filter(None, remedies)),
            )

    def _readable(self, unusable: Callable[[Mapping[str, Any]], str]) -> npt.NDArray[np.bool_]:
        """Mark the prompts with data that rewards can read, and name some of the others."""
        readable = np.ones(self.read, bool)
        bad = 0
        for index, (name, _, data, _) in enumerate(self.columns.records):
            if why := unusable(data):
                readable[index] = False
                bad += 1
                if bad <= NAMED:
                    self._bad.append(self._prefix + name if self._bad else f"{self._prefix}{name}: {why}")
        return readable

    def __len__(self) -> int:
        return len(self._kept)

    @overload
    def __getitem__(self, index: int) -> TokenizedPrompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenizedPrompt]: ...
    def __getitem__(self, index: int | slice) -> TokenizedPrompt | list[TokenizedPrompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return self.columns.prompt(int(self._kept[index]), self._prefix)

    def data(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the id and the data of each prompt."""
        for index in self._kept.tolist():
            name, _, data, _ = self.columns.records[index]
            yield self._prefix + name, data

    def passed(self, check: Mapping[str, Any]) -> bool:
        """Whether an earlier start has noted that these prompts pass a check; ``check`` describes it as JSON values."""
        note = self._note(check)
        return note is not None and note.exists()

    def note_pass(self, check: Mapping[str, Any]) -> None:
        """Note beside the kept prompts that they pass a check; without effect for prompts that are not kept."""
        if (note := self._note(check)) is not None:
            with suppress(OSError):  # a full disk: the next start checks again
                note.touch()

    def _note(self, check: Mapping[str, Any]) -> Path | None:
        if self.columns.folder is None:
            return None
        told = json.dumps([check, self.digest], sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        return self.columns.folder / f"passed-{hashlib.blake2b(told, digest_size=DIGEST_BYTES).hexdigest()}"

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each prompt."""
        lengths: list[int] = self.columns.lengths[self._kept].tolist()
        return lengths

    @cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the kept prompts' tokens and response masks; equal for tables of the same prompts."""
        return hashlib.blake2b(self.columns.digests[self._kept].tobytes(), digest_size=DIGEST_BYTES).hexdigest()

    @property
    def _named(self) -> str:
        """Names of some prompts with an answer that rewards cannot read, and the reason for the first one."""
        return f" ({', '.join(self._bad)}{', ...' * (self.bad_answers > NAMED)})" if self._bad else ""

    @property
    def remark(self) -> str:
        """Description of the prompts that were left out; empty if there are none."""
        bad = f"with an answer that rewards cannot read{self._named}"
        dropped = {"too long": self.too_long, "equal to earlier ones": self.duplicates, bad: self.bad_answers}
        parts = [f"{count} {why}" for why, count in dropped.items() if count]
        return f"prompts of {self.name}: {len(self)} of {self.read}, without {', '.join(parts)}" if parts else ""


def _first_ones(digests: bytes, seen: set[bytes]) -> npt.NDArray[np.bool_]:
    """Mark the digests that were not seen before, and add them to ``seen``."""
    first = np.zeros(len(digests) // DIGEST_BYTES, bool)
    for index in range(len(first)):
        digest = digests[DIGEST_BYTES * index : DIGEST_BYTES * (index + 1)]
        if digest not in seen:
            first[index] = True
            seen.add(digest)
    return first


def _with_images(columns: PromptColumns, kept: npt.NDArray[np.int64]) -> bytes:
    """Digest each prompt's tokens, and its images as they are encoded, wherever they lie."""
    digests = []
    for index in kept.tolist():
        whole = hashlib.blake2b(columns.digests[index].tobytes(), digest_size=DIGEST_BYTES)
        for image in columns.records[index][3]:
            whole.update(hashlib.blake2b(_encoded(image), digest_size=DIGEST_BYTES).digest())
        digests.append(whole.digest())
    return b"".join(digests)


def _encoded(image: Picture) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, os.PathLike)):
        return Path(image).read_bytes()
    return f"{image.mode} {image.size} ".encode() + image.tobytes()
