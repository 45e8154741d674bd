"""Examples of supervised fine-tuning: prompts together with the responses to learn.

A prompt is tokenised as in reinforcement learning, and its response separately, as a model would write it, so that the
model learns the same tokens that it samples. In a conversation, the chat template determines the text after a prompt:
the answer and its end token.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, DataError
from anytron.task.data.prompts import batched, check_text, check_tokens, encode, render, tokenize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from anytron.task.data.prompts import Prompt, TokenizedPrompt
    from anytron.task.data.vision import VisionProcessor

RESPONSE = "response"
"""The entry of a prompt's data that holds the response to learn."""
ASSISTANT = "assistant"
"""Role of the messages that are learnt."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag before text of the assistant in a chat template, by the same pattern as in transformers."""


@dataclass(frozen=True)
class _Divided:
    """An example in two parts.

    Attributes:
        prompt: What is read: everything before the response.
        response: What is learnt after it: a text that is not tokenised yet, or token ids.
        mask: For a whole conversation without a separate response: which of the prompt's tokens are learnt.
    """

    prompt: Prompt
    response: str | tuple[int, ...] = ()
    mask: tuple[bool, ...] | None = None


def tokenize_examples(
    prompts: Iterable[Prompt],
    tokenizer: Any,
    vision: VisionProcessor | None = None,
    *,
    vocab_size: int,
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[TokenizedPrompt]:
    """Tokenise prompts and their responses; arguments as in :func:`anytron.task.data.prompts.tokenize`.

    The response is the entry ``response`` of a prompt's data: a text or token ids. After a prompt of messages, the
    chat template writes the text as the assistant's answer; after another prompt, the text gets an end token if it
    has none. Without the entry, messages must have the assistant's answers, and end with one: the model learns the
    answers that the template marks (``{% generation %}``), or the only answer.

    Returns:
        Whole sequences, with their ``response_mask``.

    Raises:
        ConfigError: The tokenizer has no end token, or the chat template does not say which tokens are answers.
        DataError: An example has no usable response.
    """
    for some in batched(prompts):
        divided = [_divide(one, tokenizer, chat_template_kwargs) for one in some]
        before = tokenize(
            (one.prompt for one in divided),
            tokenizer,
            vision,
            vocab_size=vocab_size,
            chat_template_kwargs=chat_template_kwargs,
        )
        for one, prompt, response in zip(divided, before, _encoded(divided, tokenizer), strict=True):
            yield _joined(one, prompt, response, vocab_size)


def _divide(prompt: Prompt, tokenizer: Any, template: Mapping[str, Any]) -> _Divided:
    where = f"prompt {prompt.id}"
    if RESPONSE not in prompt.data:
        return _conversation(prompt, tokenizer, template, where)
    response = prompt.data[RESPONSE]
    prompt = replace(prompt, data={name: value for name, value in prompt.data.items() if name != RESPONSE})
    if isinstance(response, (list, tuple)) and response and all(type(token) is int for token in response):
        return _Divided(prompt, tuple(response))
    if not isinstance(response, str):
        raise DataError(
            "A response is neither a text nor a list of token ids.",
            where=where,
            why=f"its type is {type(response).__name__}" + ("" if response else ", and it is empty"),
            fix="name the right column in the source's option `columns`: {response: COLUMN}"
            + ("" if response else "; or remove the rows without a response"),
        )
    check_text(where, response)
    if prompt.messages and prompt.messages[-1].get("role") == ASSISTANT:
        raise DataError(
            "An example has two answers: the last message and the response.",
            where=where,
            why=f"the last message is the assistant's, and there is a column {RESPONSE!r}",
            fix=f"remove the last message, or the column {RESPONSE}",
        )
    if prompt.messages is not None:
        return _answered(prompt, {"role": ASSISTANT, "content": response}, tokenizer, template)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "The tokenizer has no end token, so responses cannot be ended.",
            where="model.tokenizer",
            why=f"{tokenizer.name_or_path or 'the tokenizer'} has no eos_token",
            fix="set eos_token in tokenizer_config.json, or give responses as lists of token ids",
        )
    return _Divided(prompt, response)


def _conversation(prompt: Prompt, tokenizer: Any, template: Mapping[str, Any], where: str) -> _Divided:
    """Find the answers in messages."""
    messages = list(prompt.messages or ())
    if not messages or messages[-1].get("role") != ASSISTANT:
        raise DataError(
            "An example has no response.",
            where=where,
            why=f"its last message has the role {messages[-1].get('role')!r}"
            if messages
            else f"there is no column {RESPONSE!r}",
            fix=(
                f"name its column in the source's option `columns`, {{{RESPONSE}: COLUMN}}, or end the messages with "
                "the answer"
            ),
        )
    if _MARKS.search(str(tokenizer.chat_template)) and not prompt.images:
        return _marked(prompt, tokenizer, template)
    if sum(message.get("role") == ASSISTANT for message in messages) == 1:
        return _answered(replace(prompt, messages=messages[:-1]), messages[-1], tokenizer, template)
    if prompt.images:
        raise DataError(
            "A conversation with images must have a single answer.",
            where=where,
            why="it has several; Anytron repeats image tokens for each patch, which would shift the loss mask",
            fix=f"write one example for each answer: the messages before it as prompt, the answer as {RESPONSE}",
        )
    raise ConfigError(
        "The chat template does not mark the assistant's tokens in a conversation.",
        where=where,
        why=f"the template of {tokenizer.name_or_path or 'model.tokenizer'} has no {{% generation %}}, which a "
        "conversation with several answers needs",
        fix="in the template, put the assistant's text between {% generation %} and {% endgeneration %}; or make one "
        f"example for each answer: the messages before it as prompt, and the answer as {RESPONSE}",
    )


def _marked(prompt: Prompt, tokenizer: Any, template: Mapping[str, Any]) -> _Divided:
    """Divide a conversation: the model learns the text that the template marks."""
    found: Any = render(prompt, tokenizer, template, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    whole = replace(prompt, messages=None, tools=(), tokens=tuple(found["input_ids"]))
    return _Divided(whole, mask=tuple(map(bool, found["assistant_masks"])))


def _answered(prompt: Prompt, answer: Mapping[str, Any], tokenizer: Any, template: Mapping[str, Any]) -> _Divided:
    """Divide a conversation with one answer: the model learns the text that the template adds for the answer."""
    asked = render(prompt, tokenizer, template, add_generation_prompt=True, tokenize=False)
    whole = render(
        replace(prompt, messages=[*(prompt.messages or ()), answer]),
        tokenizer,
        template,
        add_generation_prompt=False,
        tokenize=False,
    )
    if not whole.startswith(asked):
        same = next(
            (place for place, pair in enumerate(zip(asked, whole, strict=False)) if pair[0] != pair[1]), len(whole)
        )
        raise DataError(
            "The chat template writes the prompt differently when the answer follows.",
            where=f"prompt {prompt.id}",
            why=(
                f"without the answer it writes {asked[same : same + 40]!r}, with the answer {whole[same : same + 40]!r}"
            ),
            fix="use a template that writes the same prompt with and without the answer (data.chat_template_kwargs "
            "may help), or one with {% generation %} around answers",
        )
    return _Divided(prompt, whole.removeprefix(asked))


def _encoded(divided: Sequence[_Divided], tokenizer: Any) -> list[tuple[int, ...]]:
    """Tokenise responses that are texts, in one call; add the end token unless the chat template ends the response."""
    found = [() if isinstance(one.response, str) else one.response for one in divided]
    texts = [index for index, one in enumerate(divided) if isinstance(one.response, str)]
    if texts:
        name = f"responses to prompts {divided[texts[0]].prompt.id} to {divided[texts[-1]].prompt.id}"
        tokens = encode([str(divided[index].response) for index in texts], tokenizer, name)
        for index, ids in zip(texts, tokens, strict=True):
            ended = divided[index].prompt.messages is not None or ids[-1:] == (tokenizer.eos_token_id,)
            found[index] = ids if ended else (*ids, tokenizer.eos_token_id)
    return found


def _joined(one: _Divided, prompt: TokenizedPrompt, response: tuple[int, ...], vocab_size: int) -> TokenizedPrompt:
    before = one.mask or (False,) * len(prompt.tokens)
    # Nothing stands before the first token, from which it could be predicted.
    mask = (False, *before[1:], *(True,) * len(response))
    where = f"prompt {prompt.id}"
    if not any(mask):
        why, fix = "its response is empty", "remove it from the data"
        if one.mask is not None:
            why = "the template marks none of its tokens as the assistant's"
            fix += ", or put the assistant's text in the template between {% generation %} and {% endgeneration %}"
        raise DataError("An example has nothing to learn.", where=where, why=why, fix=fix)
    tokens = prompt.tokens + response
    check_tokens(where, tokens, vocab_size)
    text = prompt.text + (one.response if isinstance(one.response, str) else "")
    return replace(prompt, text=text, tokens=tokens, response_mask=mask)
