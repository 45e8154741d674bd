"""What users may set under ``platform.options``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AcmeOptions(BaseModel):
    """Options of the Acme platform; unknown keys are errors.

    An option is an attribute with a type and a default, ``streams: int = 2``, and a docstring below it. Users set
    ``platform.options.streams``; hooks read ``self.options.streams``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
