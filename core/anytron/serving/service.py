"""What the server does with a request, without HTTP: find the conversation, let an engine answer, record the answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

from anytron.base.seeds import derive_seed
from anytron.serving.answers import Written, check_finite, written
from anytron.serving.conversation import Conversation, check_messages
from anytron.serving.limits import Limits
from anytron.serving.memory import TOKEN, bytes_of_prompt
from anytron.serving.pictures import urls_of
from anytron.serving.refusal import Refusal
from anytron.serving.requests import (
    ChatBody,
    CompletionBody,
    TokensBody,
    check_engine,
    check_terms,
    sampling_of,
    template_arguments,
)
from anytron.serving.sessions import bytes_of_turn
from anytron.task.data.decoding import decode_responses
from anytron.task.data.images import joined_images
from anytron.workers.engines.rollout_engine import Response, longer_routing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from contextlib import AbstractContextManager

    from anytron.serving.desk import Desk
    from anytron.serving.rendering import Renderer
    from anytron.serving.requests import Common
    from anytron.serving.sessions import Session, Turn
    from anytron.task.data.images import ImagePatches
    from anytron.task.data.vision import VisionProcessor
    from anytron.workers.engines.rollout_engine import SamplingParams

SLICE = 16
"""Tokens that a stream generates before it passes them on: engines return whole responses."""


@dataclass(frozen=True)
class ServedModel:
    """The model that answers.

    Attributes:
        name: Name of the model in requests.
        tokenizer: A Hugging Face tokenizer, which decodes answers.
        vocab_size: Token ids are below this.
        context: Most tokens of prompt and answer together; None = not known.
        sampling: Sampling parameters of fields that a request does not set.
        is_trained: Whether a run trains the model meanwhile: its engines are set up for the run's temperature and
            longest response, so that no request may have another temperature or a longer answer.
        vision: Image preprocessing; None for a model without image input.
    """

    name: str
    tokenizer: Any
    vocab_size: int
    context: int | None
    sampling: SamplingParams
    is_trained: bool = False
    vision: VisionProcessor | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        return decode_responses(self.tokenizer, [tuple(tokens)])[0]


@dataclass(frozen=True, eq=False)
class Asked:
    """A request that has been checked and tokenised.

    Attributes:
        session: The session that records the answer; None = nothing is recorded.
        before: The recorded turn that the request continues.
        given: Token ids after that turn.
        tokens: All token ids of the prompt.
        sampling: Sampling parameters.
        seed: Seed of the first answer.
        conversation: The messages; None on a route of token ids or text.
        examples: Number of assistant messages that the session accepts as examples, which no engine wrote.
        shown: The images whose tokens are in ``given``.
    """

    session: Session | None
    before: Turn | None
    given: tuple[int, ...]
    tokens: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    conversation: Conversation | None = None
    examples: int = 0
    shown: ImagePatches | None = None

    def size(self, count: int) -> int:
        """Return an upper bound on the bytes that a session needs to record the prompt and its answers.

        Args:
            count: Number of answers; each is counted at its full length.
        """
        earlier = () if self.before is None else (turn.images for turn in self.before.path())
        answered = self.sampling.max_new_tokens
        turn = bytes_of_turn(len(self.given), answered, TOKEN * answered, self.shown)
        return bytes_of_prompt(len(self.tokens), [*earlier, self.shown]) + count * turn

    @cached_property
    def images(self) -> ImagePatches | None:
        """The images of the whole prompt."""
        earlier = () if self.before is None else (turn.images for turn in self.before.path())
        return joined_images([*earlier, self.shown])


class Service:
    """Answers requests with a model.

    Args:
        model: The model.
        renderer: Renders and tokenises requests.
        desk: Passes requests to the rollout engines.
        limits: Limits of the server.
    """

    def __init__(self, model: ServedModel, renderer: Renderer, desk: Desk, limits: Limits | None = None) -> None:
        self.model, self.limits = model, limits or Limits()
        self._renderer, self._desk = renderer, desk
        self._seed, self._number = secrets.randbits(63), itertools.count()

    async def chat(self, body: ChatBody, session: Session | None) -> Asked:
        """Check and tokenise a chat request.

        Raises:
            Refusal: The request cannot be answered, or the session has not recorded its history.
        """
        self._check(body)
        check_messages(body.messages, images=self.model.vision is not None)
        if not self._renderer.templated:
            why = "the tokenizer of this model has no chat template: use /v1/completions"
            raise Refusal(400, "no_chat_template", f"Messages cannot be rendered: {why}.", "messages")
        conversation = Conversation(body.messages, body.tools or [], template_arguments(body))
        before, covered = (None, 0) if session is None else session.find(conversation)
        if before is None:
            given = await self._renderer.prompt(conversation)
            tokens = given
        else:
            self._check_before(before)
            known = before.tokens()
            last = known[-1] if known and known[-1] in self.model.sampling.end_token_ids else None
            given = await self._renderer.continuation(conversation, covered, last)
            tokens = known + given
        sampling, seed = self._sampling(body, tokens, session), self._seed_of(body.seed, session, before)
        written_here = [] if before is None else before.path()
        examples = 0 if session is None else len(conversation.assistants()) - len(written_here)
        urls = urls_of(conversation.messages[covered:])
        shown = await self._renderer.patches(urls) if urls else None
        return Asked(session, before, given, tokens, sampling, seed, conversation, examples, shown)

    async def completion(self, body: CompletionBody, session: Session | None) -> Asked:
        """Check and tokenise a request to continue a text or token ids; without a session, no answer is recorded.

        Raises:
            Refusal: The request cannot be answered, or its prompt is a text and there is a session:
                sessions record only prompts that are token ids or messages.
        """
        self._check(body)
        if isinstance(body.prompt, str):
            if session is not None:
                why = "the tokens of a text need not be those that were sampled"
                fix = "give the prompt as token ids, or use /v1/chat/completions"
                raise Refusal(
                    400, "text_in_session", f"A session records no prompt that is text: {why}; {fix}.", "prompt"
                )
            tokens = await self._renderer.text(body.prompt)
        else:
            tokens = tuple(body.prompt)
        return self._of_tokens(body, tokens, session, body.seed)

    def tokens(self, body: TokensBody, session: Session | None) -> Asked:
        """Check a request to continue token ids.

        Raises:
            Refusal: The request cannot be answered.
        """
        self._check_model(body.model)
        if any(token >= self.model.vocab_size for token in body.sampling_params.stop_token_ids or ()):
            why = f"the vocabulary has {self.model.vocab_size} tokens"
            raise Refusal(400, "invalid_request", f"sampling_params.stop_token_ids has an unknown token: {why}.")
        return self._of_tokens(body.sampling_params, tuple(body.token_ids), session, body.sampling_params.seed)

    async def answers(self, asked: Asked, count: int, *, tools: bool) -> list[Written]:
        """Let engines answer, and record the answers.

        Args:
            asked: The request.
            count: Number of answers.
            tools: Whether tool calls are looked for.

        Raises:
            Refusal: The model's outputs are not finite, or the server ends.
        """
        seeds = [asked.seed, *(derive_seed(asked.seed, "answer", place) for place in range(1, count))]
        with _answering(asked.session, count):
            waiting = [
                asyncio.ensure_future(self._desk.answer(asked.tokens, asked.sampling, seed, asked.images))
                for seed in seeds
            ]
            try:
                responses = await asyncio.gather(*waiting)
            finally:
                for one in waiting:
                    one.cancel()
            found = [self._written(asked, response, tools=tools) for response in responses]
            self._record(asked, found)
        return found

    async def stream(self, asked: Asked, *, tools: bool) -> AsyncIterator[tuple[str, Response, Written | None]]:
        """Let an engine answer in slices, and record the answer when it is complete.

        An answer that may end with a stop string or have tool calls comes in one slice, and so does one to images: an
        image token that the model writes would count as one of them in the next slice.

        Args:
            asked: The request.
            tools: Whether tool calls are looked for.

        Yields:
            New text, the response's new tokens, and at the end the whole answer. No text ends inside a character.

        Raises:
            Refusal: The model's outputs are not finite, or the server ends.
        """
        if tools or asked.sampling.stop or asked.images is not None:
            (whole,) = await self.answers(asked, 1, tools=tools)
            yield whole.text, whole.response, whole
            return
        with _answering(asked.session, 1):
            async for text, response, last in self._slices(asked):
                yield text, response, last

    async def _slices(self, asked: Asked) -> AsyncIterator[tuple[str, Response, Written | None]]:
        parts: list[Response] = []
        shown, left = "", asked.sampling.max_new_tokens
        tokens = asked.tokens
        while left:
            size = min(SLICE, left)
            seed = derive_seed(asked.seed, "slice", len(parts)) if parts else asked.seed
            shortest = min(size, max(0, asked.sampling.min_new_tokens - asked.sampling.max_new_tokens + left))
            sampling = replace(asked.sampling, max_new_tokens=size, min_new_tokens=shortest)
            part = await self._desk.answer(tokens, sampling, seed)
            check_finite(part)
            parts.append(part)
            tokens += tuple(part.tokens)
            left -= len(part.tokens)
            if part.finished or not left or not part.tokens:
                break
            text = _complete(self.model.decode(tokens[len(asked.tokens) :]))
            new = text[len(shown) :] if text.startswith(shown) else ""
            shown += new
            yield new, part, None
        whole = self._written(asked, _joined(parts), tools=False)
        if not whole.text.startswith(shown):
            raise Refusal(500, "not_streamed", "The tokenizer changed text that was streamed; ask without stream.")
        self._record(asked, [whole])
        yield whole.text[len(shown) :], parts[-1], whole

    def _written(self, asked: Asked, response: Response, *, tools: bool) -> Written:
        check_finite(response)
        return written(response, self.model.decode(response.tokens), asked.sampling.stop, tools=tools)

    def _record(self, asked: Asked, found: Sequence[Written]) -> None:
        """Record answers that can all be sent."""
        if asked.session is None:
            return
        if asked.session.ended:
            raise Refusal(404, "no_session", "The session has ended while the model answered.")
        if asked.before is None and asked.examples:
            asked.session.counts["examples"] += asked.examples
        for one in found:
            asked.session.record(asked.before, asked.given, one.response, asked.conversation, one.message, asked.shown)

    def _of_tokens(self, body: Any, tokens: tuple[int, ...], session: Session | None, seed: int | None) -> Asked:
        if any(token >= self.model.vocab_size for token in tokens):
            why = f"the vocabulary has {self.model.vocab_size} tokens"
            raise Refusal(400, "invalid_request", f"The prompt has a token that the model does not know: {why}.")
        before, covered = (None, 0) if session is None else session.find_tokens(tokens)
        if before is not None:
            self._check_before(before)
        if self.model.vision is not None and self.model.vision.stands_for_pictures(tokens[covered:]):
            why = "it has the token of an image or a video, and no image belongs to it; send images in chat requests"
            raise Refusal(400, "image_not_sent", f"The prompt cannot be used: {why}.", "prompt")
        sampling = self._sampling(body, tokens, session)
        seed = self._seed_of(seed, session, before)
        return Asked(session, before, tokens[covered:], tokens, sampling, seed)

    def _sampling(self, body: Any, tokens: tuple[int, ...], session: Session | None) -> SamplingParams:
        context = self.model.context
        longest = (1 << 31) if context is None else context - len(tokens)
        if session is not None and session.terms is not None:
            run = session.terms.sampling
            return check_terms(body, sampling_of(body, run, longest, run.max_new_tokens), run)
        run, trained = self.model.sampling, self.model.is_trained
        found = sampling_of(body, run, longest, run.max_new_tokens if trained else None)
        if trained:
            check_engine(found, run)
        return found

    def _check_before(self, before: Turn) -> None:
        """Refuse to continue a turn with an image token that the model wrote: engines would look for the image."""
        vision = self.model.vision
        if vision is not None and vision.stands_for_pictures(before.response.tokens):
            why = "in its last answer the model wrote the token of an image or a video, to which no picture belongs; "
            why += "begin another session"
            raise Refusal(409, "image_token_written", f"The conversation cannot be continued: {why}.", "messages")

    def _check(self, body: Common) -> None:
        self._check_model(body.model)
        if (body.n or 1) > self.limits.answers:
            raise Refusal(400, "invalid_request", f"n: at most {self.limits.answers} answers are given.", "n")
        if body.stream and (body.n or 1) > 1:
            raise Refusal(400, "invalid_request", "n: a stream has one answer; ask without stream.", "n")

    def _check_model(self, name: str) -> None:
        if name != self.model.name:
            why = f"this server has the model {self.model.name}"
            raise Refusal(404, "model_not_found", f"There is no model {name[:100]!r}: {why}.", "model")

    def _seed_of(self, seed: int | None, session: Session | None, before: Turn | None) -> int:
        if seed is not None:
            return seed % 2**63
        own = None if session is None else session.seed_after(before)
        return derive_seed(self._seed, "request", next(self._number)) if own is None else own


def _answering(session: Session | None, count: int) -> AbstractContextManager[None]:
    return contextlib.nullcontext() if session is None else session.answering(count)


def _complete(text: str) -> str:
    """Leave out the end of a text that later tokens may change: half a character, and spaces."""
    return text.rstrip("\ufffd").rstrip()


def _joined(parts: Sequence[Response]) -> Response:
    """Join the slices of a response."""
    return Response(
        tuple(itertools.chain.from_iterable(part.tokens for part in parts)),
        tuple(itertools.chain.from_iterable(part.log_probs for part in parts)),
        parts[-1].stop_reason,
        tuple(itertools.chain.from_iterable(part.versions for part in parts)),
        reduce(longer_routing, (part.routing for part in parts)),
    )
