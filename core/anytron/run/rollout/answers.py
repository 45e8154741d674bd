"""Let the model of a directory answer prompts with a rollout engine alone: no training engine is started."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, DataError, EngineError
from anytron.base.seeds import response_seed
from anytron.config.json_files import parse_json
from anytron.run.rollout.directory_model import DirectoryModel
from anytron.run.rollout.pool import Generation
from anytron.task.data.decoding import decode_responses
from anytron.task.data.prompts import Prompt, tokenize
from anytron.task.data.reading import PromptReader
from anytron.task.data.records import conversation, user_message
from anytron.workers.engines.rollout_engine import PromptInputs

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.config.schema import RunConfig
    from anytron.workers.engines.rollout_engine import Response
    from anytron.workers.executor.protocol import Executor


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
        text: The answer, without special tokens.
        finished: Whether the model ended it; False = it was cut at ``rollout.max_new_tokens``.
    """

    text: str
    finished: bool


class Answers:
    """Lets the model of a directory answer prompts.

    The constructor starts the rollout process and does not wait for it, so that several models start at the same time;
    :meth:`load` waits. Prompts are tokenised in a confined process, which :meth:`close` ends.

    Args:
        config: Configuration with ``model.path`` and section ``rollout``.
        executor: Starts the rollout process.
        system: Text of the system message before each prompt, unless the prompt is a conversation that begins with one;
            None = no message, or the default system message of the chat template.
        plain: Whether prompts are given to the model as they are, without its chat template.
        seed: Seed of the sampling.

    Raises:
        AnytronError: The config or the tokenizer cannot be loaded, or there is a system message and no chat template.
    """

    def __init__(self, config: RunConfig, executor: Executor, *, system: str | None, plain: bool, seed: int) -> None:
        self._model = DirectoryModel(config)
        tokenizer = self._model.tokenizer
        self._templated = bool(tokenizer.chat_template) and not plain
        if system is not None and not self._templated:
            raise ConfigError(
                "A system message needs a chat template.",
                where=config.model.tokenizer or config.model.path or "",
                why="--plain leaves out the chat template" if plain else "the tokenizer has no chat template",
                fix="remove --system, and write the text at the beginning of each prompt",
            )
        self._system, self._seed = system, seed
        template = config.data.chat_template_kwargs
        self._reader = PromptReader(
            partial(tokenize, vocab_size=self._model.vocab_size, chat_template_kwargs=template), tokenizer
        )
        self._model.start(executor)

    def load(self) -> None:
        """Load the weights, and wait until the model can answer.

        Raises:
            AnytronError: The process did not start, or the weights cannot be loaded.
        """
        self._model.load()

    def __call__(self, prompts: Mapping[int, str]) -> list[Answer]:
        """Answer each prompt by itself.

        Args:
            prompts: Prompts by number. Errors name the number, and the seed of an answer follows from it. A prompt
                that begins with ``[{`` is a conversation, if there is a chat template: a JSON list of messages, each
                with role and content.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            DataError: A prompt is empty, is too long for the model, is refused by the chat template, or is a
                conversation that cannot be read.
            EngineError: The model computes numbers that are not finite.
        """
        read = self._reader.read([self._prompt(number, text) for number, text in prompts.items()])
        questions = []
        for number, one in zip(prompts, read, strict=True):
            self._check_length(number, len(one.tokens))
            questions.append((PromptInputs(one.tokens), self._model.sampling, response_seed(self._seed, number)))
        responses = [one for (one,) in self._model.pool.finish(Generation(tuple(self._model.pool.ask(questions)), 1))]
        for number, response in zip(prompts, responses, strict=True):
            self._check_finite(number, response)
        texts = decode_responses(self._model.tokenizer, [one.tokens for one in responses])
        return [Answer(text, one.finished) for text, one in zip(texts, responses, strict=True)]

    def close(self) -> None:
        """End the process that tokenises prompts; the executor ends the rollout process."""
        self._reader.close()

    def _prompt(self, number: int, text: str) -> Prompt:
        if not self._templated:
            return Prompt(str(number), text=text)
        messages = messages_of(text, number) or [user_message(text, 0)]
        return Prompt(str(number), messages=conversation(messages, self._system, f"prompt {number}"))

    def _check_length(self, number: int, tokens: int) -> None:
        answer, context = self._model.sampling.max_new_tokens, self._model.context
        if context is not None and tokens + answer > context:
            raise DataError(
                "A prompt is too long for the model.",
                where=f"prompt {number}",
                why=f"it has {tokens} tokens, and an answer may have {answer}, but the model's context has {context}",
                fix="shorten the prompt, or lower --max-new-tokens",
            )

    def _check_finite(self, number: int, response: Response) -> None:
        """Raise an error if a log-prob is not finite: engines choose some token even if all log-probs are NaN."""
        wrong = next((one for one in response.log_probs if not math.isfinite(one)), None)
        if wrong is not None:
            raise EngineError(
                "The model's outputs are not finite.",
                where=f"{self._model.directory}, prompt {number}",
                why=f"the log-prob of a token of its answer is {wrong}: weights are probably NaN or infinite",
                fix="give an earlier checkpoint of the run, or another model directory",
            )


def messages_of(text: str, number: int) -> list[dict[str, Any]] | None:
    """Read the messages of a prompt that begins with ``[{``; None for any other prompt, which is text.

    Raises:
        DataError: The text is not a JSON list of objects whose ``content`` is a text.
    """
    if not text.lstrip().startswith("[{"):
        return None
    try:
        messages = parse_json(text)
    except ValueError as error:
        why = f"a prompt that begins with [{{ must be a JSON list of messages: {error}"
    else:
        if all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages):
            found: list[dict[str, Any]] = messages
            return found
        why = "it is not a list of objects whose content is text"
    raise DataError(
        "A conversation cannot be read.",
        where=f"prompt {number}",
        why=why,
        fix='write it in one line: [{"role": "user", "content": "PROMPT"}]',
    )
