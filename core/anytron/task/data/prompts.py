"""A prompt before and after tokenisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, DataError
from anytron.config.json_files import is_writable
from anytron.task.data.processor_time import processor_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from anytron.task.data.images import ImagePatches
    from anytron.task.data.vision import Picture, VisionProcessor

TEMPLATE_SECONDS = 4.0
"""Most seconds of processor time for one call of a chat template, which takes milliseconds unless it loops. Less than
:data:`anytron.task.isolation.reader.COMPUTE_S`, since otherwise the error would not name the prompt."""
RENDERED_AT_ONCE = 64
"""Conversations that are rendered in one call, within :data:`TEMPLATE_SECONDS`."""
AT_ONCE = 1024
"""Most prompts that are tokenised in one call."""
LETTERS_AT_ONCE = 2**24
"""Letters and bytes of pictures after which a batch takes no more prompts: a row with pictures has megabytes."""


@dataclass(frozen=True)
class Prompt:
    """A prompt of a source, given as exactly one of ``text``, ``messages`` and ``tokens``.

    Attributes:
        id: Names the prompt in errors and samples.
        text: The prompt, tokenised as is. Leading special tokens (BOS) are added, and not duplicated if they are there;
            trailing ones (EOS) are not added, because the response starts here.
        messages: Instead of ``text``: a conversation, each turn with ``role`` and ``content``, which the
            tokenizer's chat template turns into text that ends where the answer begins.
        tokens: Instead of ``text``: token ids.
        images: Pictures for a vision-language model, in memory (Pillow) or as paths, in the order of
            their image tokens: one token for each, whatever its size.
        data: Data for rewards, for example the right answer; for supervised fine-tuning the ``response``, a text
            or token ids.
        tools: Tools that the chat template offers the model, with ``messages``: for each tool
            ``{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}``.
    """

    id: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    images: Sequence[Picture] = ()
    data: Mapping[str, Any] = field(default_factory=dict)  # it travels to the processes of rewards
    tools: Sequence[Mapping[str, Any]] = ()

    def __post_init__(self) -> None:
        given = [value is not None for value in (self.text, self.messages, self.tokens)]
        if sum(given) != 1:
            raise DataError(
                "A prompt must have exactly one of text, messages and tokens.",
                where=f"prompt {self.id}",
                why=f"it has {sum(given) or 'none'} of them",
                fix="give one of them, and leave the others None",
            )
        if self.tools and self.messages is None:
            why = "only the chat template writes tools into a prompt, and it is used only for messages"
            fix = "give the prompt as messages, or remove its tools"
            raise DataError("A prompt has tools and no messages.", where=f"prompt {self.id}", why=why, fix=fix)
        if not isinstance(self.images, (list, tuple)):
            raise DataError(
                "A prompt's images must be a list.",
                where=f"prompt {self.id}",
                why=f"their type is {type(self.images).__name__}",
                fix="give a list, also for a single image",
            )


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt that has been checked against the model.

    Attributes:
        id: As in :class:`Prompt`.
        text: Text of the prompt, as given by the source or decoded.
        tokens: Token ids, at least one; each image token is repeated once for each embedding of its image.
        data: As in :class:`Prompt`.
        images: As in :class:`Prompt`; all of them have been read successfully.
        patches: The images in the form that the model reads; None without images, and before the prompt is drawn.
        response_mask: For an example of supervised fine-tuning, whose tokens are prompt and response: which tokens
            are trained, never the first; None for a prompt.
    """

    id: str
    text: str
    tokens: tuple[int, ...]
    data: Mapping[str, Any]
    images: tuple[Picture, ...] = ()
    patches: ImagePatches | None = None
    response_mask: tuple[bool, ...] | None = None


def batched(prompts: Iterable[Prompt], most: int = AT_ONCE, size: int = LETTERS_AT_ONCE) -> Iterator[list[Prompt]]:
    """Yield lists of at most ``most`` prompts; a list ends earlier if its prompts exceed ``size`` (:func:`size_of`)."""
    some: list[Prompt] = []
    found = 0
    for prompt in prompts:
        some.append(prompt)
        found += size_of(prompt)
        if len(some) == most or found > size:
            yield some
            some, found = [], 0
    if some:
        yield some


def size_of(prompt: Prompt | TokenizedPrompt) -> int:
    """Count the letters and bytes of a prompt's text, messages, data and pictures in memory, at any depth."""
    held: list[Any] = [prompt.text, getattr(prompt, "messages", None), *prompt.images, *prompt.data.values()]
    size = 0
    while held:
        part = held.pop()
        if isinstance(part, (str, bytes)):
            size += len(part)
        elif isinstance(part, dict):
            held.extend(part.values())
        elif isinstance(part, (list, tuple)):
            held.extend(part)
    return size


def tokenize(
    prompts: Iterable[Prompt],
    tokenizer: Any,
    vision: VisionProcessor | None = None,
    *,
    vocab_size: int,
    chat_template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    continue_final_message: bool = False,
) -> Iterator[TokenizedPrompt]:
    """Tokenise prompts and check them against the model. Only some prompts are in memory at a time.

    Args:
        prompts: Prompts of the source.
        tokenizer: A Hugging Face tokenizer.
        vision: Image preprocessing; None for a model without image input.
        vocab_size: Token ids are below this.
        chat_template_kwargs: Further arguments of the chat template.
        continue_final_message: Whether the response continues the assistant's message at the end of a conversation.

    Raises:
        ConfigError: There are images and no image processor, or messages and no chat template.
        DataError: A prompt is empty, has a token that the model does not know, or images that cannot be read or do not
            fit its image tokens.
    """
    for some in batched(prompts):
        texts = _texts(some, tokenizer, chat_template_kwargs, continue_final_message)
        for prompt, text in zip(some, texts, strict=True):
            check_text(f"prompt {prompt.id!a}", prompt.id, text or "")
        for prompt, given, tokens in zip(some, texts, _encode_all(some, texts, tokenizer), strict=True):
            where = f"prompt {prompt.id}"
            check_tokens(where, tokens, vocab_size)
            expanded = _expand(prompt, tokens, vision, where)
            text = tokenizer.decode(list(tokens)) if given is None else given
            yield TokenizedPrompt(prompt.id, text, expanded, prompt.data, tuple(prompt.images))


def _texts(some: Sequence[Prompt], tokenizer: Any, template: Mapping[str, Any], continued: bool) -> list[Any]:
    """Return the text of each prompt, rendered if it is a conversation; None for token ids.

    Ordinary conversations are rendered in one call, which takes half the time. If that fails, each is rendered by
    itself, so that the error names the prompt.
    """
    texts: list[Any] = [one.text for one in some]
    asked = [index for index, one in enumerate(some) if one.messages is not None]
    plain = [index for index in asked if not some[index].tools and _role(some[index]) != "assistant"]
    for begin in range(0, len(plain) if tokenizer.chat_template else 0, RENDERED_AT_ONCE):
        places = plain[begin : begin + RENDERED_AT_ONCE]
        conversations = [some[index].messages for index in places]
        try:
            with processor_time(TEMPLATE_SECONDS):
                rendered = tokenizer.apply_chat_template(
                    conversations, tools=None, add_generation_prompt=True, tokenize=False, **template
                )
        except Exception:  # noqa: BLE001 - the template is a program of the model directory
            break
        for index, text in zip(places, rendered, strict=True):
            texts[index] = text
    for index in asked:
        if texts[index] is None:
            texts[index] = _asked(some[index], tokenizer, template, continued)
    return texts


def _role(prompt: Prompt) -> Any:
    """Return the role of the last message of a conversation."""
    return (prompt.messages or [{}])[-1].get("role")


def _asked(prompt: Prompt, tokenizer: Any, template: Mapping[str, Any], continued: bool) -> Any:
    """Render a conversation up to where the response begins."""
    last = (prompt.messages or [{}])[-1]
    if _role(prompt) != "assistant":
        return render(prompt, tokenizer, template, add_generation_prompt=True, tokenize=False)
    if continued:
        return render(prompt, tokenizer, template, continue_final_message=True, tokenize=False)
    raise DataError(
        "A prompt ends with an assistant's message.",
        where=f"prompt {prompt.id}",
        why=f"the template would begin a second answer after {str(last.get('content'))[:60]!r}",
        fix="remove the message if it is the reference answer, or let responses continue it with "
        "data.continue_final_message=true",
    )


def render(prompt: Prompt, tokenizer: Any, template: Mapping[str, Any], **wanted: bool) -> Any:
    """Apply the chat template to a prompt's messages, and its tools.

    Args:
        prompt: A prompt with messages.
        tokenizer: A Hugging Face tokenizer.
        template: Further arguments of the template (``data.chat_template_kwargs``).
        wanted: Further arguments of ``apply_chat_template``, which select the form of its result.

    Raises:
        ConfigError: The tokenizer has no chat template.
        DataError: The template refuses the messages.
    """
    if not tokenizer.chat_template:
        raise ConfigError(
            "A prompt has messages, and the tokenizer has no chat template.",
            where=f"prompt {prompt.id}",
            why=f"{tokenizer.name_or_path or 'model.tokenizer'} has no chat_template",
            fix="set model.tokenizer to the tokenizer of an instruction-tuned model, or give the prompt as text",
        )
    try:
        with processor_time(TEMPLATE_SECONDS):
            return tokenizer.apply_chat_template(
                prompt.messages, tools=list(prompt.tools) or None, **wanted, **template
            )
    except Exception as error:  # the template is a program of the model directory
        raise DataError(
            "The chat template refuses a prompt's messages.",
            where=f"prompt {prompt.id}",
            why=f"{type(error).__name__}: {error}",
            fix="give each message a role and a content that the template knows",
        ) from error


def _encode_all(prompts: Sequence[Prompt], texts: Sequence[str | None], tokenizer: Any) -> list[tuple[int, ...]]:
    """Tokenise in two calls: plain texts, and texts that a chat template has finished."""
    encoded = [prompt.tokens or () for prompt in prompts]
    for rendered in (False, True):
        chosen = [
            index
            for index, prompt in enumerate(prompts)
            if texts[index] is not None and (prompt.messages is not None) == rendered
        ]
        if chosen:
            where = f"prompts {prompts[chosen[0]].id} to {prompts[chosen[-1]].id}"
            chosen_texts = [texts[index] or "" for index in chosen]
            tokens = encode(chosen_texts, tokenizer, where)
            start = () if rendered else _beginning(chosen_texts, tokens, tokenizer, where)
            for index, ids in zip(chosen, tokens, strict=True):
                begun = not ids or ids[: len(start)] == start
                encoded[index] = ids if begun else start + ids
    return encoded


def _beginning(texts: Sequence[str], tokens: Sequence[tuple[int, ...]], tokenizer: Any, where: str) -> tuple[int, ...]:
    """Find the special tokens with which the tokenizer begins a text: what stands before a text's own tokens."""
    for text, own in zip(texts, tokens, strict=True):
        if own:
            (whole,) = encode([text], tokenizer, where, special=True)
            places = range(len(whole) - len(own) + 1)
            return whole[: next((place for place in places if whole[place : place + len(own)] == own), 0)]
    return ()


def encode(texts: Sequence[str], tokenizer: Any, where: str, *, special: bool = False) -> list[tuple[int, ...]]:
    """Tokenise texts.

    Args:
        texts: At least one.
        tokenizer: A Hugging Face tokenizer.
        where: Name of the texts in errors.
        special: Whether to add the special tokens that the tokenizer puts around a text.

    Raises:
        DataError: The tokenizer fails.
    """
    try:
        tokens = tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False)["input_ids"]
    except Exception as error:  # the library tokenizers raises nothing narrower
        raise DataError(
            "The tokenizer fails on the prompts.",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="use the tokenizer that belongs to the model (model.tokenizer)",
        ) from error
    return [tuple(ids) for ids in tokens]


def _expand(prompt: Prompt, tokens: tuple[int, ...], vision: VisionProcessor | None, where: str) -> tuple[int, ...]:
    if vision is not None:
        return vision.expand(tokens, prompt.images, where)
    if prompt.images:
        raise DataError(
            "A prompt has images, and the model takes text only.",
            where=where,
            why=f"it has {len(prompt.images)} image(s), but the run gives its model none",
            fix="use data without images, or a vision-language model that Anytron trains with images",
        )
    return tokens


def check_text(where: str, *written: object) -> None:
    """Refuse text that cannot be encoded as UTF-8.

    Raises:
        DataError: A text has half of a surrogate pair.
    """
    if not all(is_writable(one) for one in written if isinstance(one, str)):
        raise DataError(
            "A prompt has text that is not valid Unicode.",
            where=where,
            why="it has half of a surrogate pair (\\ud800 to \\udfff), which is not a character and cannot be encoded",
            fix="write the whole pair, or remove it",
        )


def check_tokens(where: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse a sequence that is empty or has tokens outside of the vocabulary.

    Raises:
        DataError: The sequence is empty, or has such a token.
    """
    if not tokens:
        raise DataError(
            "A prompt has no tokens.",
            where=where,
            why="its text, or its list of ids, is empty",
            fix="remove it from the data",
        )
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise DataError(
            "A prompt has a token outside of the model's vocabulary.",
            where=where,
            why=f"its ids are from {min(tokens)} to {max(tokens)}, but the vocabulary has {vocab_size} tokens",
            fix="use the tokenizer that belongs to the model (model.tokenizer)",
        )
