"""Decode responses: for byte-level tokenizers by a table of bytes, in a tenth of the time; else by the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from anytron.base.packed import as_numpy
from anytron.task.data.thoughts import is_mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    Numbers = npt.NDArray[Any]

_AT_ONCE = 1 << 16
"""Number of tokens that the library `tokenizers` decodes in one call."""


def decode_responses(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """Decode responses without special tokens, but with tags of thought, even if they are special for the tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        responses: Token ids of each response; ids that the tokenizer does not have are left out.
    """
    # Lists of ids take nine times the memory of an array, and the tokenizer looks at each id of a list first.
    ids = map(as_numpy, responses)
    if _is_byte_level(tokenizer):
        table = _table(tokenizer, len(tokenizer))
        return [table.text(one) for one in ids]
    special, marks = _special(tokenizer)
    if marks:
        left_out = np.array(sorted((special | set(tokenizer.all_special_ids)) - marks))
        return [tokenizer.decode(one[~np.isin(one, left_out)]) for one in ids]
    if not _is_plain(tokenizer):
        return [tokenizer.decode(one, skip_special_tokens=True) for one in ids]
    return list(chain.from_iterable(map(tokenizer.backend_tokenizer.decode_batch, _lists(ids))))


def _lists(ids: Iterable[Numbers]) -> Iterator[list[list[int]]]:
    """Lists of ids, in parts of about :data:`_AT_ONCE` tokens: a list takes nine times the memory of an array."""
    part: list[list[int]] = []
    size = 0
    for one in ids:
        part.append(one.tolist())
        size += len(one)
        if size >= _AT_ONCE:
            yield part
            part, size = [], 0
    yield part


def _special(tokenizer: Any) -> tuple[set[int], set[int]]:
    """Return the ids of special tokens, and of those among them that are tags of thought."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special, {number for number in special if is_mark(str(tokenizer.added_tokens_decoder[number]))}


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether decoding only joins the bytes of the tokens, without any other rule."""
    from tokenizers.decoders import ByteLevel

    return _is_plain(tokenizer) and type(tokenizer.backend_tokenizer.decoder) is ByteLevel


def _is_plain(tokenizer: Any) -> bool:
    """Whether the library `tokenizers` alone decodes, without a rule that transformers or a subclass adds."""
    from transformers import PreTrainedTokenizerFast as Fast

    own = type(tokenizer)
    return (
        isinstance(tokenizer, Fast)
        and (own._decode, own.decode, own.batch_decode) == (Fast._decode, Fast.decode, Fast.batch_decode)
        and not tokenizer.clean_up_tokenization_spaces
    )


@dataclass(frozen=True, eq=False)
class _Table:
    """The bytes of each token id.

    Attributes:
        letters: uint8: the bytes of all ids, one after the other.
        starts: ``[ids]`` int32: where the bytes of an id begin. The last entry is for all ids beyond.
        sizes: ``[ids]`` int32: number of bytes; 0 for special tokens, missing ids, and all beyond.
    """

    letters: Numbers
    starts: Numbers
    sizes: Numbers

    def text(self, ids: Numbers) -> str:
        """Return the text of a response; bytes that are not UTF-8 become the character U+FFFD."""
        places = np.minimum(ids.astype(np.uint32, copy=False), len(self.sizes) - 1)  # a negative id becomes a large one
        sizes = self.sizes[places]
        before = np.cumsum(sizes) - sizes
        found = np.repeat(self.starts[places] - before, sizes)
        found += np.arange(len(found), dtype=np.int32)
        text: bytes = self.letters[found].tobytes()
        return text.decode(errors="replace")


@lru_cache(maxsize=2)
def _table(tokenizer: Any, size: int) -> _Table:
    """Make the table of a tokenizer with the decoder ``ByteLevel``; if tokens are added, ``size`` renews the cache."""
    del size
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    special, marks = _special(tokenizer)
    if marks:
        special |= set(tokenizer.all_special_ids)
    found = {number: token for token, number in tokenizer.get_vocab().items() if number not in special - marks}
    parts = [b""] * (max(found, default=-1) + 2)
    for number, token in found.items():
        # A token with any other letter was added as it is, as the decoder of the library `tokenizers` takes it.
        parts[number] = bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else token.encode()
    sizes = np.array([len(part) for part in parts], np.int32)
    return _Table(np.frombuffer(b"".join(parts), np.uint8), np.cumsum(sizes, dtype=np.int32) - sizes, sizes)
