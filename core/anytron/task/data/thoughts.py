"""Tags around the thoughts of a model (``<think>``): whether a prompt opens one, and how rewards see them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from anytron.base.packed import as_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMES = "(?:think|thinking|thought|reasoning)"
_OPENED = re.compile(rf"<{_NAMES}>\s*\Z")
_MARK = re.compile(rf"</?{_NAMES}>")


def opened(prompt: str) -> str:
    r"""Return the opening tag of thought at the end of a prompt, for example ``<think>\n``; else ""."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def decode_responses(tokenizer: Any, responses: Sequence[Sequence[int]]) -> list[str]:
    """Decode responses without special tokens, but with tags of thought, even if they are special for the tokenizer.

    Args:
        tokenizer: A Hugging Face tokenizer.
        responses: Token ids of each response.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    marks = {number for number in special if _MARK.fullmatch(str(tokenizer.added_tokens_decoder[number]))}
    # Lists of ids take nine times the memory of an array, and the tokenizer looks at each id of a list first.
    ids = map(as_numpy, responses)
    if not marks:
        return [text for one in ids for text in tokenizer.batch_decode([one], skip_special_tokens=True)]
    left_out = np.array(sorted((special | set(tokenizer.all_special_ids)) - marks))
    return [tokenizer.decode(one[~np.isin(one, left_out)]) for one in ids]
