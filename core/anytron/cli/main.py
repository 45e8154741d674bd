"""The ``anytron`` command. Importing this is light: each command imports what it needs when it runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from anytron.base.errors import AnytronError, WorkerError
from anytron.base.files import exhausted
from anytron.base.terminal import make_output_visible
from anytron.base.version import __version__
from anytron.cli import check_commands, run_commands
from anytron.cli.checkpoint import app as checkpoint_app
from anytron.cli.config import app as config_app
from anytron.cli.data import app as data_app
from anytron.cli.plugins import patches_app, plugins_app
from anytron.device.loading import disable_device_autoload
from anytron.device.loading.report import not_installed

app = typer.Typer(
    name="anytron",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train language models with reinforcement learning, on any accelerator.

    Start with `anytron doctor` (examine this installation) and `anytron train examples/grpo_sort.yaml`.
    The platform is `platform.name` of the configuration, else the variable ANYTRON_PLATFORM, else the
    one whose device is found; the first line of a run says which and why.""",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"anytron {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    del version


# In the order of ``anytron --help``.
app.command()(run_commands.train)
app.command(short_help="Check that a model is computed correctly on this machine.")(check_commands.verify)
app.command(short_help="Find where training's and the rollout's bits part.")(check_commands.compare)
app.command(short_help="Check a platform against the contract.")(check_commands.conformance)
app.command(short_help="Write one HTML file about one or several runs.")(run_commands.report)
app.command(short_help="Show a run live in the terminal.")(run_commands.watch)
app.command(short_help="Add or remove rollout processes of a run.")(run_commands.scale)
app.command(short_help="Find where an update gave NaN or infinity.")(run_commands.replay)
app.command(short_help="Let a model answer prompts.")(run_commands.chat)
app.command(short_help="Serve a model with OpenAI's API.")(run_commands.serve)
app.command("new-platform", short_help="Write the package of a new platform.")(check_commands.new_platform)
app.command()(check_commands.doctor)
app.command(short_help="Estimate the memory of a run.")(check_commands.plan)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data", help="Look at the prompts of a run.")
app.add_typer(checkpoint_app, name="checkpoint", help="Look at checkpoints, and export models from them.")
app.add_typer(plugins_app, name="plugins", help="Look at the installed plugins.")
app.add_typer(patches_app, name="patches", help="Look at the patches of third-party code.")


def run() -> None:
    """Run the command line.

    Exit status: 0, 1 after an :class:`AnytronError` (printed as what, where, why, fix, without traceback), 2 after
    wrong usage, 130 after Ctrl-C, 143 after SIGTERM before training begins or where no checkpoint is saved. Any other
    exception is a bug of Anytron and keeps its traceback.
    """
    disable_device_autoload()
    make_output_visible()
    try:
        app()
    except AnytronError as error:
        print_error(error)
        sys.exit(1)
    except Exception as error:  # safetensors says in its own way that a disk is full
        explained = exhausted(error) or not_installed(error)
        if explained is None:
            raise
        print_error(explained)
        sys.exit(1)


def print_error(error: AnytronError) -> None:
    """Print an error's four parts, and the worker process that it comes from, to stderr."""
    from rich.text import Text

    from anytron.cli.output import error_console

    console = error_console()
    console.print(Text.assemble(("error: ", "bold red"), (error.what, "bold")))
    worker = error.__cause__
    process = f"{worker.what}; its log: {worker.where}" if isinstance(worker, WorkerError) else ""
    for label, text in [*error.details, *([("process", process)] if process else [])]:
        console.print(Text.assemble((f"  {label}: ", "bold"), text))
