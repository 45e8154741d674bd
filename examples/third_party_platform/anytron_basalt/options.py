"""``platform.options`` of Basalt."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class BasaltOptions(BaseModel):
    """Options of the Basalt platform; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tile: int = Field(8, ge=1, le=1024)
    """Tokens that the device reads at a time: sequences are padded to multiples of it."""
    memory_tokens: int = Field(4096, ge=1)
    """Tokens of a micro-batch that fit into the device's memory."""
