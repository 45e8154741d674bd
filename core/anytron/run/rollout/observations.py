"""Turn what an environment says into the tokens that the model reads next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytron.config.plain import is_writable
from anytron.task.data.processor_time import processor_time
from anytron.task.data.prompts import TEMPLATE_SECONDS
from anytron.task.isolation.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anytron.task.environments.protocol import Message, Observation

TURN = "anytron stands for a turn"
"""In the place of the model's turns, whose tokens are known: the template is only asked for what follows them."""


def observation_tokens(
    observation: Observation, last: int | None, tokenizer: Any, vocab_size: int, chat_template_kwargs: Mapping[str, Any]
) -> tuple[int, ...] | Failure:
    """Tokenise an observation by itself.

    Args:
        observation: With text, messages or tokens.
        last: The token that the model wrote last; None if it wrote none. Where it is the end token that the chat
            template writes behind a turn, it is not written twice.
        tokenizer: A Hugging Face tokenizer.
        vocab_size: Token ids are below this.
        chat_template_kwargs: Further arguments of the chat template.
    """
    try:
        if observation.messages is not None:
            tokens = _encoded(_rendered(observation.messages, tokenizer, chat_template_kwargs), tokenizer)
            tokens = tokens[1:] if tokens and tokens[0] == last else tokens
        elif observation.text is not None:
            tokens = _encoded(observation.text, tokenizer)
        else:
            tokens = tuple(observation.tokens or ())
    except Exception as error:  # noqa: BLE001 - the template is a program of the model's, and reads what it is given
        fix = "give each message a role and a content that the template knows"
        return Failure("An observation cannot be tokenised.", f"{type(error).__name__}: {error}", fix)
    if not tokens:
        why = "the model would go on as if it had not stopped"
        return Failure("An observation has no tokens.", why, "let the environment say something, or end")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        why = f"ids from {min(tokens)} to {max(tokens)}, the model's vocabulary has {vocab_size}"
        return Failure("An observation has a token that the model does not know.", why, "give text, or the model's ids")
    return tokens


def _encoded(text: str, tokenizer: Any) -> tuple[int, ...]:
    if not is_writable(text):
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is no letter")
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rendered(messages: Sequence[Message], tokenizer: Any, template: Mapping[str, Any]) -> str:
    """Render what follows a turn of the model's, up to where its next turn begins."""
    before = [{"role": "user", "content": TURN}, {"role": "assistant", "content": TURN}]
    with processor_time(TEMPLATE_SECONDS):
        text: str = tokenizer.apply_chat_template(
            [*before, *messages], add_generation_prompt=True, tokenize=False, **template
        )
    if text.count(TURN) != 2:
        raise ValueError(f"the chat template does not show an assistant's turn once, as it stands: {text!r}")
    return text.rpartition(TURN)[2]
