"""Read and tokenise prompts in a confined process, because rows, templates, tokenizers and pictures are not trusted.

The user's own sources are trusted programs that run in the driver; their prompts are also tokenised in the process.
"""

from __future__ import annotations

import itertools
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.config.data import SOURCE_OPTIONS
from anytron.task.data.examples import RESPONSE
from anytron.task.data.prompts import TokenizedPrompt, batched, size_of
from anytron.task.data.sources import load_prompts
from anytron.task.data.table import INT32
from anytron.task.isolation.reader import ConfinedReader, Errand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from anytron.config.data import DataSection, MixedSource
    from anytron.task.data.prompts import Prompt
    from anytron.task.data.vision import VisionProcessor
    from anytron.task.isolation.reader import Note

    Tokenize = Callable[..., Iterator[TokenizedPrompt]]
    """(prompts, tokenizer, vision) -> prompts."""

AT_ONCE = 256
"""Prompts in a message."""
MEMORY = 7 << 27
"""Bytes that the process may allocate: less than 1 GiB, with what it loads meanwhile."""
CHARACTERS = 1 << 20
"""Letters that are tokenised between two signs of life, and letters in a message; one longer text is not divided."""


def read_prompts(
    source: DataSection | MixedSource, key: str, tokenize: Tokenize, tokenizer: Any, vision: VisionProcessor | None
) -> Iterator[TokenizedPrompt]:
    """Read and tokenise the prompts, or examples, of a source.

    Args:
        source: The section that names the source.
        key: Configuration key of the source.
        tokenize: Function that tokenises prompts.
        tokenizer: A Hugging Face tokenizer.
        vision: Image preprocessing; None for a model without image input.

    Raises:
        ConfigError: The source does not exist or refuses its options; or ``tokenize`` raises one.
        DataError: The source fails or has an unusable prompt; or reading it takes too long, too much memory,
            or ends the process.
    """

    def service(prompts: Sequence[Prompt] | None, note: Note) -> Iterator[Any]:
        rows = load_prompts(source, key) if prompts is None else prompts
        watched = None if vision is None else _WatchedVision(vision, note)
        read = tokenize(_noted(rows, note), _WatchedTokenizer(tokenizer, note), watched)
        return _records(read, of_files=prompts is None)

    where = f"{key}.source = {source.source}"
    if path := source.options.get("path"):
        where += f" ({path})"
    own = source.source not in SOURCE_OPTIONS
    fix = "give shorter prompts or smaller pictures" if own else "make the file smaller or write it again"
    fix += "; if they are correct, the tokenizer or the chat template is at fault"
    errand = Errand(DataError, "The prompts cannot be read.", where, fix)
    reader = ConfinedReader(service, MEMORY)
    try:
        if source.source in SOURCE_OPTIONS:
            for records in reader.ask(None, errand):
                yield from _prompts(records, errand)
            return
        for some in batched(load_prompts(source, key), AT_ONCE, CHARACTERS):
            answers = reader.ask([_bare(prompt) for prompt in some], errand)
            read = itertools.chain.from_iterable(_prompts(records, errand) for records in answers)
            yield from _rejoined(some, read, errand)
    finally:
        reader.close()


class PromptReader:
    """Tokenises prompts that come one after another, in one confined process.

    The constructor starts the process; :meth:`close` ends it.

    Args:
        tokenize: Function that tokenises prompts.
        tokenizer: A Hugging Face tokenizer.

    Raises:
        DataError: No process can be started or confined.
    """

    def __init__(self, tokenize: Tokenize, tokenizer: Any) -> None:
        def service(prompts: Sequence[Prompt], note: Note) -> Iterator[Any]:
            return _records(tokenize(_noted(prompts, note), _WatchedTokenizer(tokenizer, note), None), of_files=False)

        fix = "give shorter prompts; if they are short, the tokenizer or the chat template is at fault"
        self._errand = Errand(DataError, "The prompts cannot be read.", tokenizer.name_or_path, fix)
        self._reader = ConfinedReader(service, memory=MEMORY)
        self.read([])

    def read(self, prompts: Sequence[Prompt]) -> list[TokenizedPrompt]:
        """Tokenise prompts.

        Args:
            prompts: The prompts, without images.

        Raises:
            ConfigError: ``tokenize`` raises one.
            DataError: A prompt is not usable; or reading it takes too long, too much memory, or ends the process.
        """
        answers = self._reader.ask([_bare(prompt) for prompt in prompts], self._errand)
        read = itertools.chain.from_iterable(_prompts(records, self._errand) for records in answers)
        return list(_rejoined(prompts, read, self._errand))

    def close(self) -> None:
        """End the process."""
        self._reader.close()


def _bare(prompt: Prompt) -> Prompt:
    """Leave out data that the process has no use for, and that it might be impossible to send."""
    data = {name: value for name, value in prompt.data.items() if name == RESPONSE}
    return replace(prompt, data=data)


def _rejoined(given: Sequence[Prompt], read: Iterable[TokenizedPrompt], errand: Errand) -> Iterator[TokenizedPrompt]:
    answers = list(read)
    if len(answers) != len(given):
        raise errand.failed(f"the process that reads it returned {len(answers)} prompts for {len(given)}")
    for prompt, one in zip(given, answers, strict=True):
        data = prompt.data
        if RESPONSE in data and RESPONSE not in one.data:  # it is among the tokens now
            data = {name: value for name, value in data.items() if name != RESPONSE}
        yield replace(one, data=data, images=tuple(prompt.images))


def _records(prompts: Iterable[TokenizedPrompt], of_files: bool) -> Iterator[dict[str, Any]]:
    """Put prompts into messages, as plain data; their pictures only if the driver does not have them."""
    some: list[TokenizedPrompt] = []
    size = 0
    for prompt in prompts:
        some.append(prompt)
        size += size_of(prompt)
        if len(some) == AT_ONCE or size > CHARACTERS:
            yield _record(some, of_files)
            some, size = [], 0
    if some:
        yield _record(some, of_files)


def _record(prompts: Sequence[TokenizedPrompt], of_files: bool) -> dict[str, Any]:
    return {
        "ids": [prompt.id for prompt in prompts],
        "texts": [prompt.text for prompt in prompts],
        "lengths": [len(prompt.tokens) for prompt in prompts],
        "tokens": array(INT32, itertools.chain.from_iterable(prompt.tokens for prompt in prompts)).tobytes(),
        "data": [dict(prompt.data) for prompt in prompts],
        "images": [list(one.images) if of_files else [] for one in prompts],
        "masks": [None if one.response_mask is None else bytes(one.response_mask) for one in prompts],
    }


def _prompts(records: Any, errand: Errand) -> Iterator[TokenizedPrompt]:
    """Read a message, which may be anything."""
    try:
        tokens = array(INT32)
        tokens.frombytes(records["tokens"])
        begin = 0
        columns = [records[name] for name in ("ids", "texts", "lengths", "data", "images", "masks")]
        for name, text, length, data, images, mask in zip(*columns, strict=True):
            if type(length) is not int or length < 0:
                raise ValueError("a length is not a number of tokens")  # noqa: TRY301 - one way to say it
            one = tuple(tokens[begin : begin + length])
            begin += length
            learnt = None if mask is None else tuple(map(bool, mask))
            if not all(isinstance(image, (bytes, Path)) for image in images):
                raise TypeError("a picture is neither bytes nor a path")  # noqa: TRY301 - one way to say it
            yield TokenizedPrompt(str(name), str(text), one, dict(data), tuple(images), response_mask=learnt)
    except (ValueError, TypeError, KeyError) as error:
        raise errand.failed(f"the process that reads it wrote an invalid answer: {error}") from error


def _noted(prompts: Iterable[Prompt], note: Note) -> Iterator[Prompt]:
    for prompt in prompts:
        note()
        yield prompt


class _WatchedTokenizer:
    """A tokenizer that gives signs of life between pieces of its work."""

    def __init__(self, tokenizer: Any, note: Note) -> None:
        self._tokenizer, self._note = tokenizer, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: Sequence[str], **wanted: Any) -> dict[str, Any]:
        tokens: list[Any] = []
        for piece in _pieces(texts):
            tokens += self._tokenizer(piece, **wanted)["input_ids"]
            self._note()
        return {"input_ids": tokens}

    def apply_chat_template(self, *given: Any, **wanted: Any) -> Any:
        self._note()
        return self._tokenizer.apply_chat_template(*given, **wanted)


def _pieces(texts: Sequence[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    size = 0
    for text in texts:
        if piece and size + len(text) > CHARACTERS:
            yield piece
            piece, size = [], 0
        piece.append(text)
        size += len(text)
    if piece:
        yield piece


class _WatchedVision:
    """A vision processor that gives a sign of life before each prompt."""

    def __init__(self, vision: VisionProcessor, note: Note) -> None:
        self._vision, self._note = vision, note

    def expand(self, tokens: Sequence[int], images: Sequence[Any], where: str) -> tuple[int, ...]:
        self._note()
        return self._vision.expand(tokens, images, where)
