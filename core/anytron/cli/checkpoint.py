"""``anytron checkpoint``: list and verify what a run has saved, and export the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from anytron.record.checkpoint.directory import CheckpointDirectory

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at checkpoints, and export models from them.")

RunPath = Annotated[Path, typer.Argument(metavar="PATH", help="Directory of a run, or of its checkpoints.")]
AnyPath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, the file checkpoints/best of a run, or a run.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


_INCOMPLETE = {True: "interrupted, or being written", False: "damaged"}
"""Whether the manifest of an incomplete checkpoint is missing -> what is the matter."""


@app.command("list")
def list_command(path: RunPath, as_json: AsJson = False) -> None:
    """List the checkpoints in PATH, the oldest first.

    A checkpoint without a manifest, which is written last, is still being written, or its run ended during the save;
    the next start of the run deletes it. To check the files' contents, use `anytron checkpoint verify`.
    --json prints a list of {path, step, complete, bytes, weights_version, best}. complete is false if the manifest is
    missing or cannot be read; bytes and weights_version are null then. best is null, or the validation for which the
    checkpoint is kept: {step, metric, direction, value}.
    """
    rows = _rows(_directory(path))
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        size = f"{row['bytes'] / 1e6:,.1f} MB" if row["complete"] else _INCOMPLETE[row["step"] is None]
        best = f"  best {row['best']['metric']}: {row['best']['value']:.4g}" if row["best"] else ""
        typer.echo(f"{row['path']}  {size}{best}")
    if not rows:
        typer.echo("no checkpoints")


@app.command()
def verify(path: AnyPath, as_json: AsJson = False) -> None:
    """Read every file of a checkpoint, or of all complete ones in PATH, and compare it with the manifest.

    The exit status is 1 if a file is missing, has changed or was added. --json prints a list of {path, problems}.
    """
    from anytron.base.errors import CheckpointError
    from anytron.record.checkpoint.directory import locate

    checkpoints = [locate(path)] if path.is_file() else _directory(path).complete() or [locate(path)]
    results = []
    for checkpoint in checkpoints:
        try:
            problems = checkpoint.manifest().problems(checkpoint.path)
        except CheckpointError as error:
            problems = [f"{error.what.removesuffix('.')}; {error.why}"]
        results.append({"path": str(checkpoint.path), "problems": problems})
    if as_json:
        typer.echo(json.dumps(results, indent=2))
    else:
        for result in results:
            typer.echo(f"{result['path']}  {'; '.join(result['problems']) or 'good'}")
    if any(result["problems"] for result in results):
        raise typer.Exit(1)


@app.command()
def export(
    path: AnyPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Output directory; it must not exist.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys of the run to change, for example platform.name=cpu; paths are relative to here.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory, with its tokenizer.

    If PATH has several checkpoints, the newest is exported; checkpoints/best selects the best one
    (validation.keep_best). One process is enough, whatever the number of ranks that wrote the checkpoint: the run's
    configuration is read from it, with all parallel sizes set to 1.

    Example: anytron checkpoint export runs/grpo_sort model
    """
    from anytron.cli.single_rank import export_model

    export_model(path, out, overrides or [])


def _directory(path: Path) -> CheckpointDirectory:
    from anytron.base.errors import CheckpointError
    from anytron.record.checkpoint.directory import CHECKPOINTS, CheckpointDirectory

    if not path.is_dir():
        raise CheckpointError(
            "No checkpoints were found.",
            where=str(path),
            why="the directory does not exist",
            fix="give the directory of a run, or of its checkpoints",
        )
    inside = path / CHECKPOINTS
    return CheckpointDirectory((inside if inside.is_dir() else path).absolute())


def _rows(directory: CheckpointDirectory) -> list[dict[str, Any]]:
    from anytron.base.errors import CheckpointError

    rows: list[dict[str, Any]] = [
        {"path": str(path), "step": None, "complete": False, "bytes": None, "weights_version": None, "best": None}
        for path in directory.interrupted()
    ]
    best = directory.best()
    for checkpoint in directory.complete():
        try:
            size, version = checkpoint.manifest().size, checkpoint.state().weights_version
        except CheckpointError:
            size, version = None, None
        rows.append(
            {
                "path": str(checkpoint.path),
                "step": checkpoint.step,
                "complete": size is not None,
                "bytes": size,
                "weights_version": version,
                "best": best[0].model_dump() if best is not None and best[1] == checkpoint else None,
            }
        )
    return sorted(rows, key=lambda row: str(row["path"]))
