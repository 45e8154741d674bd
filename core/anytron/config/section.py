"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values do not change after reading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        validate_by_name=True,  # `async` cannot be the name of an attribute
        serialize_by_alias=True,
    )


def refuse_zero(temperature: Any) -> Any:
    """Return the temperature; raise ValueError if it is 0, by which other tools mean greedy decoding.

    The error says what to set for greedy decoding.
    """
    if isinstance(temperature, (int, float)) and temperature == 0:
        raise ValueError("must be above 0, because logits are divided by it; for greedy decoding, set top_k=1")
    return temperature
