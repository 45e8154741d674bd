"""What a reward function sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.data.images import ImagePatches
    from anytron.data.vision import Picture


@dataclass(frozen=True)
class Sample:
    """One prompt with one response.

    Attributes:
        prompt_id: The prompt's name in its source.
        prompt_text: As given, or decoded if the source gave token ids.
        response_text: Decoded without special tokens.
        prompt_tokens: Token ids, at least one.
        response_tokens: Token ids, the end token included if there is one; may be empty.
        log_probs: Log-prob of each response token as the rollout engine saw it, in nats.
        finished: True if an end token or a stop string ended it, False if the length limit did.
        data: What the source said of the prompt, for example the right answer.
        images: The prompt's pictures as the source gave them.
        patches: The same as the model reads them; None without images.
    """

    prompt_id: str
    prompt_text: str
    response_text: str
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    finished: bool
    data: Mapping[str, Any]
    images: tuple[Picture, ...] = ()
    patches: ImagePatches | None = None
