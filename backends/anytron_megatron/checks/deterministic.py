"""The environment variable that Megatron's deterministic mode asks for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from anytron.config.diagnostics import Diagnostic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anytron.config.schema import RunConfig

NO_NONDETERMINISTIC_ALGORITHM = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
"""Megatron asserts it, whoever supplies Transformer Engine's modules (TEDotProductAttention in
megatron/core/extensions/transformer_engine.py)."""


def deterministic_diagnostics(run: RunConfig) -> Iterator[Diagnostic]:
    """Refuse a deterministic run whose user has set the variable to another value."""
    for name, value in NO_NONDETERMINISTIC_ALGORITHM.items() if run.engine.deterministic else ():
        if os.environ.get(name, value) != value:
            message = f"{name}={os.environ[name]} is set, and Megatron refuses a deterministic run"
            yield Diagnostic("error", "engine.deterministic", message, f"unset {name}, or set it to {value}")
