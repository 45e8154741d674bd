"""Command-line arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RESULTS = "versions, results: [{name, status, detail, fix, ...}], counts, interrupted"
"""Keys in the JSON object that every command that makes checks prints with ``--json``."""

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; paths in it are relative to it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys to set, for example trainer.total_steps=10. Values are YAML.",
        show_default=False,
    ),
]
ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A run, a directory of a Hugging Face model, a checkpoint, or checkpoints/best of a run.",
    ),
]
