"""Tokenised prompts in columns: numbers in flat arrays, and all else encoded; in memory, or mapped from files.

In files, a prompt takes 4 bytes for each token (5 for an example of fine-tuning), the bytes of its text and data as
:func:`anytron.task.isolation.plain.packed` encodes them, and 24 bytes. Memory then holds two numbers for each prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from anytron.base.errors import DataError
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.isolation.plain import packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import TypeAlias

    import numpy.typing as npt

    from anytron.task.data.vision import Picture

    Frame: TypeAlias = dict[str, bytes]
    """Columns of some prompts as bytes, by the names in :data:`COLUMNS`."""
    Record: TypeAlias = tuple[str, str, Any, tuple[Picture, ...]]
    """Id, text, data and images of a prompt."""
    Numbers: TypeAlias = npt.NDArray[Any]

COLUMNS: Final = {"tokens": "<i4", "lengths": "<i4", "masks": "u1", "digests": "V16", "records": "u1", "sizes": "<i4"}
"""The columns and their types: token ids, number of tokens of each prompt, response masks (0 or 1 for each token; empty
for prompts without responses), a digest of each prompt's tokens and mask, encoded records, and bytes of each record."""
DIGEST_BYTES = 16
AT_ONCE = 256
"""Most prompts whose tokens are held as Python numbers at a time, and most prompts of a :data:`Frame`."""


@dataclass(frozen=True, eq=False)
class PromptColumns:
    """Prompts of one source, in its order.

    Attributes:
        lengths: ``[prompts]`` int32: number of tokens of each prompt.
        ends: ``[prompts]`` int64: number of tokens of all prompts up to and including each one.
        tokens: ``[tokens]`` int32: token ids of all prompts.
        masks: ``[tokens]`` uint8: 1 = the token is trained; empty for prompts without responses.
        digests: ``[prompts]`` of 16 bytes: equal for prompts with the same tokens and mask.
        records: Id, text, data and images of each prompt.
        folder: Folder in which the prompts are kept for later starts; None = they are not kept.
    """

    lengths: Numbers
    ends: Numbers
    tokens: Numbers
    masks: Numbers
    digests: Numbers
    records: Sequence[Record]
    folder: Path | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def prompt(self, index: int, prefix: str = "") -> TokenizedPrompt:
        """Make the prompt at an index, with ``prefix`` before its id."""
        end = int(self.ends[index])
        part = slice(end - int(self.lengths[index]), end)
        mask = tuple(map(bool, self.masks[part])) if len(self.masks) else None
        name, text, data, images = self.records[index]
        return TokenizedPrompt(prefix + name, text, tuple(self.tokens[part].tolist()), data, images, response_mask=mask)


def in_memory(prompts: Iterable[TokenizedPrompt]) -> PromptColumns:
    """Return prompts as columns in memory; their data may be any objects."""
    frames: list[Frame] = []
    records: list[Record] = []
    some: list[TokenizedPrompt] = []

    def take() -> None:
        frames.append(numbers_of(some))
        records.extend((one.id, one.text, one.data, one.images) for one in some)
        some.clear()

    for prompt in prompts:
        some.append(prompt)
        if len(some) == AT_ONCE:
            take()
    take()
    arrays = {name: np.frombuffer(b"".join(frame[name] for frame in frames), COLUMNS[name]) for name in frames[0]}
    return _columns(arrays, records, None)


def numbers_of(prompts: Sequence[TokenizedPrompt]) -> Frame:
    """Return the columns ``tokens``, ``lengths``, ``masks`` and ``digests`` of some prompts, as bytes, by name."""
    lengths = [len(one.tokens) for one in prompts]
    tokens = np.fromiter(chain.from_iterable(one.tokens for one in prompts), "<i4", sum(lengths)).tobytes()
    ends = [0, *(4 * end for end in np.cumsum(lengths).tolist())]
    masks = [b"" if one.response_mask is None else bytes(one.response_mask) for one in prompts]
    digests = [
        hashlib.blake2b(tokens[begin:end] + mask, digest_size=DIGEST_BYTES).digest()
        for mask, begin, end in zip(masks, ends, ends[1:], strict=False)
    ]
    return {
        "tokens": tokens,
        "lengths": np.array(lengths, "<i4").tobytes(),
        "masks": b"".join(masks),
        "digests": b"".join(digests),
    }


def frame_of(prompts: Sequence[TokenizedPrompt], *, pictures: bool) -> Frame:
    """Encode prompts as the bytes of all columns; their data must be plain (:mod:`anytron.task.isolation.plain`).

    Args:
        prompts: The prompts.
        pictures: Whether their images are part of the records.

    Raises:
        TypeError: The data of a prompt have an object that is not plain.
    """
    records = [packed([one.id, one.text, dict(one.data), list(one.images) if pictures else []]) for one in prompts]
    sizes = np.array([len(record) for record in records], "<i4").tobytes()
    return {**numbers_of(prompts), "records": b"".join(records), "sizes": sizes}


def arrays_of(frame: Any) -> dict[str, Numbers]:
    """Read the columns of a frame, which may come from an untrusted process.

    Raises:
        ValueError: The frame is malformed.
    """
    if not isinstance(frame, dict) or any(type(frame.get(name)) is not bytes for name in COLUMNS):
        raise ValueError("a message does not have the columns of prompts")
    return checked({name: np.frombuffer(frame[name], kind) for name, kind in COLUMNS.items()})


def checked(arrays: dict[str, Numbers]) -> dict[str, Numbers]:
    """Return the arrays, one for each of :data:`COLUMNS`; raise ValueError if their sizes contradict each other."""
    lengths, sizes = arrays["lengths"], arrays["sizes"]
    if len(lengths) and min(lengths.min(), sizes.min(initial=0)) < 0:
        raise ValueError("a prompt's number of tokens, or of bytes of its record, is negative")
    tokens, size = int(lengths.sum(dtype=np.int64)), int(sizes.sum(dtype=np.int64))
    if (
        not len(lengths) == len(sizes) == len(arrays["digests"])
        or (len(arrays["tokens"]), len(arrays["records"])) != (tokens, size)
        or len(arrays["masks"]) not in (0, tokens)
    ):
        raise ValueError("the columns of prompts have sizes that contradict each other")
    return arrays


def encoded(arrays: Mapping[str, Numbers], folder: Path | None = None) -> PromptColumns:
    """Make columns whose records are decoded when they are read.

    Args:
        arrays: Arrays from :func:`checked`.
        folder: As in :class:`PromptColumns`.
    """
    return _columns(arrays, _Encoded(arrays["records"], _ends(arrays["sizes"]), folder), folder)


def _columns(arrays: Mapping[str, Numbers], records: Sequence[Record], folder: Path | None) -> PromptColumns:
    lengths, tokens, masks, digests = (arrays[name] for name in ("lengths", "tokens", "masks", "digests"))
    return PromptColumns(lengths, _ends(lengths), tokens, masks, digests, records, folder)


def _ends(lengths: Numbers) -> Numbers:
    return np.cumsum(lengths, dtype=np.int64)


class _Encoded(Sequence["Record"]):
    """Records that are decoded when they are read."""

    def __init__(self, whole: Numbers, ends: Numbers, folder: Path | None) -> None:
        self._whole, self._ends, self._folder = whole, ends, folder

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        begin = int(self._ends[index - 1]) if index else 0
        try:
            name, text, data, images = unpacked(self._whole[begin : int(self._ends[index])].tobytes())
            if type(data) is dict and all(isinstance(image, (bytes, Path)) for image in images):
                return str(name), str(text), data, tuple(images)
            why = "its record does not hold the data and images of a prompt"
        except (ValueError, TypeError) as error:
            why = str(error)
        place = "in memory" if self._folder is None else str(self._folder)
        fix = "start again" if self._folder is None else f"delete the folder {self._folder}, and start again"
        raise DataError("A tokenized prompt is damaged.", where=f"prompt {index} ({place})", why=why, fix=fix)
