"""The images of chat requests: parts of the type ``image_url`` with a ``data:`` URL, checked before one is decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import TYPE_CHECKING, Any

from anytron.serving.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)
ROLES = frozenset({"user", "tool"})
"""Roles whose messages may have images."""
SHOWN = 40
"""Most letters of a URL that an error shows."""


def is_image(part: object) -> bool:
    """Return whether a part of a message's content is an image."""
    return isinstance(part, dict) and part.get("type") == "image_url"


def urls_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the URLs of all images of checked messages, in order."""
    contents = [message.get("content") for message in messages]
    return [
        part["image_url"]["url"] for parts in contents if isinstance(parts, list) for part in parts if is_image(part)
    ]


def digests_of(message: Mapping[str, Any]) -> list[str]:
    """Return a digest of each image of a checked message."""
    return [hashlib.sha256(url.encode()).hexdigest() for url in urls_of([message])]


def decoded(url: str) -> bytes:
    """Return the bytes of the picture's file in a checked URL."""
    return base64.b64decode(url.partition(",")[2], validate=True)


def check_image(part: Mapping[str, Any], role: str, where: str) -> None:
    """Check a part of a message that is an image; nothing but its base64 is decoded.

    Args:
        part: The part.
        role: Role of its message.
        where: The field of the request, for errors.

    Raises:
        Refusal: The role has no images, or the URL is not a ``data:`` URL of an image in base64.
    """
    if role not in ROLES:
        text = (
            f"{where}: a message of the role {role} must not contain images; send them in one of the role user or tool."
        )
        raise Refusal(400, "invalid_image", text, where)
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(image, dict) or not isinstance(url, str):
        raise Refusal(400, "invalid_image", f'{where}: an image is {{"image_url": {{"url": "data:..."}}}}.', where)
    if image.get("detail") not in (None, "auto") or image.keys() > {"url", "detail"}:
        why = "the model's own processor chooses the size of images"
        raise Refusal(400, "invalid_image", f"{where}: only url and detail=auto are known: {why}.", where)
    if not DATA_URL.match(url):
        why = "the server fetches nothing and reads no files"
        fix = "send the picture itself: data:image/png;base64,..."
        raise Refusal(400, "image_not_sent", f"{where}: {url[:SHOWN]!r} cannot be used: {why}; {fix}.", where)
    try:
        decoded(url)
    except (binascii.Error, ValueError) as error:
        raise Refusal(400, "invalid_image", f"{where}: the picture is not valid base64: {error}.", where) from None
