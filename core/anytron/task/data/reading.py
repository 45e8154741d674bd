"""Read and tokenise prompts in a confined process, because rows, templates, tokenizers and pictures are not trusted.

The user's own sources are trusted programs that run in the driver; their prompts are also tokenised in the process.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anytron.base.errors import DataError
from anytron.config.data import SOURCE_OPTIONS
from anytron.task.data.columns import AT_ONCE, arrays_of, encoded, frame_of
from anytron.task.data.examples import RESPONSE
from anytron.task.data.prompts import batched, size_of
from anytron.task.data.sources import Share, load_prompts
from anytron.task.isolation.reader import ConfinedReader, Errand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from anytron.config.data import DataSection, MixedSource
    from anytron.task.data.columns import Frame, Numbers
    from anytron.task.data.prompts import Prompt, TokenizedPrompt
    from anytron.task.data.vision import VisionProcessor
    from anytron.task.isolation.reader import Note

    Tokenize = Callable[..., Iterator[TokenizedPrompt]]
    """Function ``(prompts, tokenizer, vision)`` that yields tokenised prompts."""

END_OF_RUN = "end of a run"
MEMORY = 7 << 27
"""Bytes that the process may allocate, for what it loads, too: less than 1 GiB."""
CHARACTERS = 1 << 20
"""Most letters that are tokenised between two reports of progress, and in a message; a longer text is not divided."""


def read_files(
    source: DataSection | MixedSource,
    key: str,
    tokenize: Tokenize,
    tokenizer: Any,
    vision: VisionProcessor | None,
    processes: int = 1,
) -> Iterator[dict[str, Numbers]]:
    """Read and tokenise the prompts, or examples, of a registered source that reads files.

    Each process reads the rows of all files, and tokenises its share of them.

    Args:
        source: The section that names the source.
        key: Configuration key of the source.
        tokenize: Function that tokenises prompts.
        tokenizer: A Hugging Face tokenizer.
        vision: Image preprocessing; None for a model without image input.
        processes: Number of confined processes.

    Yields:
        Arrays as :func:`anytron.task.data.columns.checked` returns them, in the order of the source.

    Raises:
        ConfigError: The source does not exist or refuses its options; or ``tokenize`` raises one.
        DataError: The source fails or has an unusable prompt; or reading it takes too long, too much memory,
            or ends the process.
    """

    def service(number: int, note: Note) -> Iterator[Any]:
        share = Share(number, processes, note=note)
        prompts = load_prompts(source, key, share)
        watched = None if vision is None else _WatchedVision(vision, note)
        while (first := next(prompts, None)) is not None:
            run = itertools.chain([first], itertools.islice(prompts, share.run - 1))
            yield from _frames(tokenize(run, _WatchedTokenizer(tokenizer, note), watched), pictures=True)
            yield END_OF_RUN

    errand = _errand(source, key)
    readers = [ConfinedReader(service, MEMORY) for _ in range(processes)]
    try:
        answers = [reader.ask(number, errand) for number, reader in enumerate(readers)]
        for turn in itertools.count():
            for frame in answers[turn % processes]:
                if frame == END_OF_RUN:
                    break
                yield _arrays(frame, errand)
            else:
                return
    finally:
        for reader in readers:
            reader.close()


def read_prompts(
    source: DataSection | MixedSource, key: str, tokenize: Tokenize, tokenizer: Any, vision: VisionProcessor | None
) -> Iterator[TokenizedPrompt]:
    """Read and tokenise the prompts, or examples, of a source that is a function; arguments as in :func:`read_files`.

    Raises:
        ConfigError: The source does not exist or refuses its options; or ``tokenize`` raises one.
        DataError: The source fails or has an unusable prompt; or reading it takes too long, too much memory,
            or ends the process.
    """

    def service(prompts: Sequence[Prompt], note: Note) -> Iterator[Any]:
        watched = None if vision is None else _WatchedVision(vision, note)
        return _frames(tokenize(_noted(prompts, note), _WatchedTokenizer(tokenizer, note), watched), pictures=False)

    errand = _errand(source, key)
    reader = ConfinedReader(service, MEMORY)
    try:
        for some in batched(load_prompts(source, key), AT_ONCE, CHARACTERS):
            yield from _rejoined(some, reader.ask([_bare(prompt) for prompt in some], errand), errand)
    finally:
        reader.close()


def _errand(source: DataSection | MixedSource, key: str) -> Errand:
    where = f"{key}.source = {source.source}"
    if path := source.options.get("path"):
        where += f" ({path})"
    own = source.source not in SOURCE_OPTIONS
    fix = "give shorter prompts or smaller pictures" if own else "make the file smaller or write it again"
    fix += "; if the prompts are correct, the tokenizer or the chat template is at fault"
    return Errand(DataError, "The prompts cannot be read.", where, fix)


class PromptReader:
    """Tokenises prompts that come one after another, in one confined process.

    The constructor starts the process; :meth:`close` ends it.

    Args:
        tokenize: Function that tokenises prompts.
        tokenizer: A Hugging Face tokenizer.

    Raises:
        DataError: The process cannot be started or confined.
    """

    def __init__(self, tokenize: Tokenize, tokenizer: Any) -> None:
        def service(prompts: Sequence[Prompt], note: Note) -> Iterator[Any]:
            return _frames(tokenize(_noted(prompts, note), _WatchedTokenizer(tokenizer, note), None), pictures=False)

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
            DataError: A prompt is not usable; or reading it takes too long, takes too much memory or ends the process.
        """
        answers = self._reader.ask([_bare(prompt) for prompt in prompts], self._errand)
        return list(_rejoined(prompts, answers, self._errand))

    def close(self) -> None:
        """End the process."""
        self._reader.close()


def _bare(prompt: Prompt) -> Prompt:
    """Leave out data that the process does not need, and that may be impossible to send."""
    data = {name: value for name, value in prompt.data.items() if name == RESPONSE}
    return replace(prompt, data=data)


def _rejoined(given: Sequence[Prompt], frames: Iterable[Any], errand: Errand) -> Iterator[TokenizedPrompt]:
    answers: list[TokenizedPrompt] = []
    for frame in frames:
        columns = encoded(_arrays(frame, errand))
        try:
            answers += [columns.prompt(index) for index in range(len(columns))]
        except DataError as error:
            raise errand.failed(f"the reading process wrote an invalid answer: {error.why}") from error
    if len(answers) != len(given):
        raise errand.failed(f"the reading process returned {len(answers)} prompts for {len(given)}")
    for prompt, one in zip(given, answers, strict=True):
        data = prompt.data
        if RESPONSE in data and RESPONSE not in one.data:  # it is among the tokens now
            data = {name: value for name, value in data.items() if name != RESPONSE}
        yield replace(one, data=data, images=tuple(prompt.images))


def _arrays(frame: Any, errand: Errand) -> dict[str, Numbers]:
    try:
        return arrays_of(frame)
    except ValueError as error:
        raise errand.failed(f"the reading process wrote an invalid answer: {error}") from error


def _frames(prompts: Iterable[TokenizedPrompt], *, pictures: bool) -> Iterator[Frame]:
    """Encode prompts in frames of limited size; their pictures only if the driver does not have them."""
    some: list[TokenizedPrompt] = []
    size = 0
    for prompt in prompts:
        some.append(prompt)
        size += size_of(prompt)
        if len(some) == AT_ONCE or size > CHARACTERS:
            yield frame_of(some, pictures=pictures)
            some, size = [], 0
    if some:
        yield frame_of(some, pictures=pictures)


def _noted(prompts: Iterable[Prompt], note: Note) -> Iterator[Prompt]:
    for prompt in prompts:
        note()
        yield prompt


class _WatchedTokenizer:
    """A tokenizer that reports progress between pieces of its work."""

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
    """A vision processor that reports progress before each prompt."""

    def __init__(self, vision: VisionProcessor, note: Note) -> None:
        self._vision, self._note = vision, note

    def expand(self, tokens: Sequence[int], images: Sequence[Any], where: str) -> tuple[int, ...]:
        self._note()
        return self._vision.expand(tokens, images, where)
