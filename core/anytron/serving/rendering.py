"""Tokenise requests in a confined process: chat templates and tokenizers are not trusted."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from anytron.base.errors import AnytronError, DataError
from anytron.serving.conversation import Conversation, rendered
from anytron.serving.limits import Limits
from anytron.serving.pictures import decoded, urls_of
from anytron.serving.refusal import Refusal
from anytron.task.data.processor_time import processor_time
from anytron.task.data.prompts import TEMPLATE_SECONDS, Prompt, check_tokens, encode, tokenize
from anytron.task.data.reading import MEMORY
from anytron.task.data.vision import pixels_of
from anytron.task.isolation.reader import ConfinedReader, Errand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anytron.task.data.images import ImagePatches
    from anytron.task.data.vision import VisionProcessor

_log = logging.getLogger(__name__)
TURN = "anytron stands for a turn"
"""Stands for the model's last turn when the text after it is rendered."""


class Renderer:
    """Renders and tokenises requests in a confined process, which the constructor starts and :meth:`close` ends.

    Args:
        tokenizer: A Hugging Face tokenizer.
        vocab_size: Token ids are below this.
        template: Further arguments of the chat template (``data.chat_template_kwargs``), before those of a request.
        vision: Image preprocessing; None for a model without image input.
        pixels: Most pixels of the new images of a request.

    Attributes:
        templated: Whether there is a chat template.

    Raises:
        DataError: The process cannot be started or confined.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        template: Mapping[str, Any],
        vision: VisionProcessor | None = None,
        pixels: int = Limits.pixels,
    ) -> None:
        self._vision = vision
        self.templated = bool(tokenizer.chat_template)
        where = str(tokenizer.name_or_path)
        fix = "shorten the request; if it is short, the tokenizer or the chat template is at fault"
        self._errand = Errand(DataError, "The request cannot be tokenised.", where, fix)
        self._reader = ConfinedReader(_service(tokenizer, vocab_size, template, vision, pixels), memory=MEMORY)
        self._lock = asyncio.Lock()
        try:
            list(self._reader.ask(("text", "a"), self._errand))
        except BaseException:
            self.close()
            raise

    async def text(self, text: str) -> tuple[int, ...]:
        """Tokenise a text as it is, after the special tokens with which the tokenizer begins a text.

        Raises:
            Refusal: It cannot be tokenised, or the confined process has ended.
        """
        return await self._tokens(("text", text))

    async def prompt(self, conversation: Conversation) -> tuple[int, ...]:
        """Tokenise a whole conversation, up to the beginning of the assistant's answer.

        Raises:
            Refusal: It cannot be tokenised, or the confined process has ended.
        """
        return await self._tokens(("prompt", conversation))

    async def continuation(self, conversation: Conversation, covered: int, last: int | None) -> tuple[int, ...]:
        """Tokenise only what follows a turn of the model, up to the beginning of the assistant's next answer.

        Args:
            conversation: The whole conversation.
            covered: Number of messages up to and including the turn.
            last: End token with which the turn ended: if the template writes it there, it is not repeated. None = the
                turn ended without one.

        Raises:
            Refusal: Because of the later messages, the template renders the earlier ones in another way than before; or
                the conversation cannot be tokenised; or the confined process has ended.
        """
        return await self._tokens(("continuation", conversation, covered, last))

    async def patches(self, urls: Sequence[str]) -> ImagePatches | None:
        """Prepare the images of a request that the confined process has tokenised; None for a model without images."""
        vision = self._vision
        if vision is None:
            return None
        async with self._lock:  # decoded pictures are large: one request at a time
            return await asyncio.to_thread(lambda: vision.patches([decoded(url) for url in urls], "the request"))

    def close(self) -> None:
        """End the confined process."""
        self._reader.close()

    async def _tokens(self, call: tuple[Any, ...]) -> tuple[int, ...]:
        async with self._lock:  # one process, one call at a time; a call that was begun is finished
            asked = asyncio.ensure_future(asyncio.to_thread(self._ask, call))
            try:
                found = await asyncio.shield(asked)
            except asyncio.CancelledError:
                await asyncio.wait([asked])
                raise
        if isinstance(found, str):
            raise Refusal(409, "template_rerenders", found)
        return found

    def _ask(self, call: tuple[Any, ...]) -> tuple[int, ...] | str:
        try:
            (answer,) = self._reader.ask(call, self._errand)
        except AnytronError as error:
            if self._reader.alive:
                raise Refusal(400, "not_tokenised", f"{error.what} {error.why}") from error
            _log.error("%s", error)
            why = "the process that tokenises has ended, and the server's log says why"
            raise Refusal(503, "not_tokenised", f"The request cannot be tokenised: {why}; ask again.") from error
        match answer:
            case {"tokens": [*tokens]} if all(type(token) is int for token in tokens):
                return tuple(tokens)
            case {"refused": str(why)}:
                return why
        raise Refusal(400, "not_tokenised", "The request cannot be tokenised: the process wrote an invalid answer.")


def _service(
    tokenizer: Any, vocab_size: int, template: Mapping[str, Any], vision: VisionProcessor | None, pixels: int
) -> Callable[..., Iterator[Any]]:
    """Make the function that answers calls in the confined process."""

    def expanded(tokens: tuple[int, ...], messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Repeat the image tokens of messages, whose images are decoded if they have not too many pixels."""
        if vision is None:
            return tokens
        pictures = [decoded(url) for url in urls_of(messages)]
        if (found := sum(pixels_of(picture, "the request") for picture in pictures)) > pixels:
            raise DataError(
                "The images of the request are too large.",
                where="the request",
                why=f"they have more than {pixels} pixels in all: {found}",
                fix="make them smaller, or send them in several requests of the session",
            )
        return vision.expand(tokens, pictures, "the request")

    def service(call: tuple[Any, ...], note: Callable[[], None]) -> Iterator[Any]:
        del note
        kind, *arguments = call
        if kind == "text":
            (found,) = tokenize([Prompt("request", text=arguments[0])], tokenizer, vocab_size=vocab_size)
            yield {"tokens": found.tokens}
            return
        make = prompt_tokens if kind == "prompt" else continuation_tokens
        tokens = make(tokenizer, template, *arguments)
        if not isinstance(tokens, str):
            check_tokens("the request", tokens, vocab_size)
            covered = arguments[1] if kind == "continuation" else 0
            tokens = expanded(tokens, arguments[0].messages[covered:])
        yield {"refused": tokens} if isinstance(tokens, str) else {"tokens": tokens}

    return service


def prompt_tokens(tokenizer: Any, template: Mapping[str, Any], conversation: Conversation) -> tuple[int, ...]:
    """Tokenise a whole conversation, up to the beginning of the assistant's answer.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        template: Keyword arguments of the chat template; the conversation's own (``conversation.template``) override
            them.
        conversation: The conversation.

    Raises:
        DataError: The template refuses the messages.
    """
    messages = [rendered(message) for message in conversation.messages]
    text = _renderer(tokenizer, template, conversation)(messages, begin=True)
    return encode([text], tokenizer, "the request")[0]


def continuation_tokens(
    tokenizer: Any, template: Mapping[str, Any], conversation: Conversation, covered: int, last: int | None
) -> tuple[int, ...] | str:
    """Tokenise what follows a turn of the model; arguments as in :meth:`Renderer.continuation`.

    Returns:
        The tokens; or, if the template now renders the earlier messages in another way, a text that says how.
    """
    render = _renderer(tokenizer, template, conversation)
    messages = [rendered(message) for message in conversation.messages]
    before, turn, after = messages[: covered - 1], messages[covered - 1], messages[covered:]
    whole = render([*before, {"role": "assistant", "content": TURN}, *after], begin=True)
    if whole.count(TURN) != 1:
        return "The chat template does not render an assistant's message exactly once. Begin another session."
    head, _, rest = whole.partition(TURN)
    if why := _rerendered(render, before, head):
        return why
    actual = render([*before, turn, *after], begin=True)
    inside = "".join(actual[len(head) : len(actual) - len(rest)].split())
    wrote = [turn["content"], *(call["function"]["name"] for call in turn.get("tool_calls", ()))]
    kept = all("".join(part.split()) in inside for part in wrote)
    if not (kept and actual.startswith(head) and actual.endswith(rest)):
        return (
            f"Because of messages[{covered}], the chat template drops or changes what the model wrote in "
            f"messages[{covered - 1}], for example its thoughts. A conversation whose tokens are kept cannot be "
            "continued so: begin another session, or use chat_template_kwargs that keep the thoughts."
        )
    (tokens,) = encode([rest], tokenizer, "the request")
    return tokens[1:] if tokens and tokens[0] == last else tokens


def _rerendered(render: Callable[..., str], before: list[dict[str, Any]], head: str) -> str | None:
    """Check that messages are rendered as they were for the turn after them; return what differs.

    What a template adds where an answer begins, such as an empty thought, may be missing: the recorded tokens have it.
    """
    then, begun = render(before, begin=False), render(before, begin=True)
    if begun.startswith(then) and head.startswith(then) and begun[len(then) :].startswith(head[len(then) :]):
        return None
    place = next((at for at, pair in enumerate(zip(then, head, strict=False)) if len(set(pair)) > 1), len(head))
    return (
        f"The chat template renders the earlier messages in another way than before, from character {place} on: "
        f"{head[place : place + 60]!r} instead of {begun[place : place + 60]!r}. A conversation whose tokens are kept "
        "cannot be continued so: begin another session, or use chat_template_kwargs that keep the messages."
    )


def _renderer(tokenizer: Any, template: Mapping[str, Any], conversation: Conversation) -> Callable[..., str]:
    """Make a function ``(messages, begin)`` that applies the chat template; ``begin`` = the answer is begun."""
    arguments = {**template, **conversation.template}
    return partial(_rendered, tokenizer, list(conversation.tools) or None, arguments)


def _rendered(
    tokenizer: Any, tools: Any, arguments: Mapping[str, Any], messages: list[dict[str, Any]], *, begin: bool
) -> str:
    try:
        with processor_time(TEMPLATE_SECONDS):
            text: str = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=begin, tokenize=False, **arguments
            )
    except Exception as error:  # the template is a program of the model directory
        raise DataError(
            "The chat template refuses the messages.",
            where="messages",
            why=f"{type(error).__name__}: {error}",
            fix="give each message a role and a content that the template knows",
        ) from error
    return text
