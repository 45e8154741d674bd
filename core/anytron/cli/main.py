"""The ``anytron`` command. Importing this is light: each command imports what it needs when it runs."""

from __future__ import annotations

import contextlib
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from anytron.base.errors import AnytronError, ConfigError, WorkerError
from anytron.base.files import exhausted
from anytron.base.terminal import make_output_visible
from anytron.base.version import __version__
from anytron.cli.checkpoint import app as checkpoint_app
from anytron.cli.data import app as data_app
from anytron.cli.plugins import patches_app, plugins_app
from anytron.device.loading import disable_device_autoload
from anytron.device.loading.report import not_installed

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
RESULTS = "versions, results: [{name, status, detail, fix, ...}], counts, interrupted"
"""In the JSON object of every command that makes checks."""

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
config_app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at configurations.")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data", help="Look at the prompts of a run.")
app.add_typer(checkpoint_app, name="checkpoint", help="Look at checkpoints, and export models from them.")
app.add_typer(plugins_app, name="plugins", help="Look at the installed plugins.")
app.add_typer(patches_app, name="patches", help="Look at the patches of third-party code.")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; paths in it are relative to it.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys to set, for example trainer.total_steps=10. Values are YAML.",
        show_default=False,
    ),
]


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


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a model as CONFIG says.

    The configuration, the data and the machine are checked before a process starts.
    The run writes into trainer.output_dir: metrics.jsonl, samples.jsonl,
    config.yaml, patches.json, plots/, checkpoints/, hf/ (the trained model), logs/ (what each process wrote); of a
    configuration with stages, in a directory for each.

    resume=auto continues the run in trainer.output_dir from its newest checkpoint, and begins one where there is
    none. SIGTERM, SIGHUP or SIGUSR1 save a checkpoint and end the run with status 0 (checkpoint.on_signal); a
    second one ends it at once. Ctrl-C ends all processes and keeps the checkpoints that are there.

    Example: anytron train examples/grpo_sort.yaml parallel.tensor_model_parallel_size=2
    """
    from anytron.cli.train import CONTINUE, run_training

    _handle_signals()
    try:
        run_training(config, overrides or [])
    except KeyboardInterrupt:
        typer.echo(f"interrupted: all processes have ended; {CONTINUE}", err=True)
        raise typer.Exit(INTERRUPTED) from None


@app.command(short_help="Check that a model is computed correctly on this machine.")
def verify(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help=f"Print one object: {{kernels, {RESULTS}}}."),
    ] = False,
    of_verl: Annotated[
        bool,
        typer.Option(
            "--verl", help="Read CONFIG and overrides as verl does, and check verl's engine (needs anytron-verl)."
        ),
    ] = False,
) -> None:
    """Check that this model, in this layout, is computed correctly on this machine, before a run.

    With the run's own model, prompts and parallel sizes: logits against Hugging Face, packed against
    padded sequences, the parallel layout against one rank, exported weights against the checkpoint bit
    for bit, log-probs of the rollout against training's, and the platform's masks and attention against
    their definition. It also says which plugin supplied which kernel. The exit status is 1 if a check
    fails; one that cannot be made here is skipped with its reason.

    Example: anytron verify examples/grpo_sort.yaml parallel.tensor_model_parallel_size=2
    """
    from anytron.cli.checks import run_verification, run_verification_of

    _handle_signals()
    if of_verl:
        passed = run_verification_of("verl", config, overrides or [], as_json=as_json)
    else:
        passed = run_verification(config, overrides or [], as_json=as_json)
    if not passed:
        raise typer.Exit(1)


@app.command(short_help="Check a platform against the contract.")
def conformance(
    platform: Annotated[str, typer.Argument(metavar="NAME", help="A platform, as in platform.name.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of platform.options to set.", show_default=False),
    ] = None,
    levels: Annotated[
        list[str] | None,
        typer.Option(
            "--level",
            metavar="LEVEL",
            help="device, sequences, kernels, model or training; may be repeated. Default: all.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help=f"Print one object: {{platform, {RESULTS}}}.")] = False,
) -> None:
    """Check a platform against the contract, rule by rule, on its device.

    No configuration is needed. A failure names the rule, shows the smallest case that fails and how far off it is,
    and says where the rule is explained. Rules that the platform declares not to support, or that this machine cannot
    check, are skipped and counted. The exit status is 1 if a rule is broken. Ctrl-C ends all processes and shows what
    was checked.

    Example: anytron conformance cpu --level device --level sequences
    """
    if find_spec("anytron_conformance") is None:
        raise ConfigError(
            "The conformance kit is not installed.",
            where="anytron conformance",
            why="it is a separate distribution, anytron-conformance",
            fix='pip install "anytron[conformance]"',
        )
    from anytron_conformance.run import run_conformance

    _handle_signals()
    try:
        passed = run_conformance(platform, options or [], levels or [], as_json=as_json)
    except KeyboardInterrupt:
        typer.echo("interrupted: the other rules were not checked", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not passed:
        raise typer.Exit(1)


@app.command(short_help="Write one HTML file about one or several runs.")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directory of a run: its trainer.output_dir.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="HTML file to write; an earlier report is replaced."),
    ] = Path("report.html"),
) -> None:
    """Write one HTML file about one or several runs, to look at in a browser. It needs no network.

    Plots of all metrics, of all runs in one; where the time goes; samples with their rewards, of the first steps
    and of the last; what differs in the configurations; platform, versions, patches; restarts, failures and warnings.
    A run may still be going on. Only you have permission to read the file: check its samples and configurations before
    you pass it on. Values of keys that are named like a secret are hidden.

    Example: anytron report runs/grpo_sort --output sort.html
    """
    from anytron.cli.report import run_report

    run_report(runs, output)


@app.command(short_help="Show a run live in the terminal.")
def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: its trainer.output_dir.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run once, and exit.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, help="Seconds between two updates of the view."),
    ] = 1.0,
) -> None:
    """Show a run live in the terminal, from another shell or another machine that sees its files.

    Reward and other metrics as small plots, the step, the time that is left, where the time goes, the last samples,
    and warnings. It ends when the run ends, and Ctrl-C ends it without touching the run. Where the output is not a
    terminal it is one line per step.

    Example: anytron watch runs/grpo_sort
    """
    from anytron.cli.watch import run_watch

    try:
        run_watch(run, interval, once=once)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


@app.command(short_help="Find where an update gave NaN or infinity.")
def replay(
    batch: Annotated[Path, typer.Argument(metavar="BATCH", help="Directory below bad_batches/ in a run's directory.")],
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", metavar="PATH", help="Checkpoint to take the weights from.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Repeat an update that gave NaN or infinity, and say where the first such number appears.

    On one rank, with the run's configuration, from the weights that were saved with the mini-batch, from a
    checkpoint, or from the initial model. It names the module (or the loss, or the saved data), the micro-batch, the
    sequence and the token. The exit status is 1 if some number is not finite.

    Example: anytron replay runs/default/bad_batches/step-000012-update-1
    """
    from anytron.cli.single_rank import run_replay

    _handle_signals()
    if not run_replay(batch, overrides or [], checkpoint=checkpoint, as_json=as_json):
        raise typer.Exit(1)


@app.command(short_help="Let a model answer prompts.")
def chat(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="Directory of a run or of a Hugging Face model, or a checkpoint."),
    ],
    overrides: Overrides = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show beside it the answers of the model that the run began with.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Longest answer, in tokens. Default: the run's; 256 without a run."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most probable token.")] = 0.0,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system's message.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt.")] = False,
) -> None:
    """Let a model answer the prompts on the standard input, one a line. At a terminal it answers as you type.

    Each prompt is answered by itself, in the chat template of the model if it has one. Of a run the model is the one
    after its last step, hf/, or that of its newest checkpoint; checkpoints/best stands for the best one.

    Example: echo "What is 3 + 4? Reply with the number only." | anytron chat runs/grpo_smollm2 --compare
    """
    from anytron.cli.chat import run_chat

    _handle_signals()
    try:
        run_chat(
            path,
            overrides or [],
            compare=compare,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            system=system,
            seed=seed,
            as_json=as_json,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _handle_signals() -> None:
    """Unwind at signals that would end the process, so that neither processes nor exchanged weights are left.

    SIGHUP stays ignored under nohup. While steps are trained, the run handles these signals itself.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def _terminate(number: int, frame: object) -> NoReturn:
    del frame
    with contextlib.suppress(OSError):  # a terminal that is gone
        typer.echo(f"terminated by {signal.Signals(number).name}: what was written so far is kept", err=True)
    raise SystemExit(128 + number)


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None) -> None:
    """Print CONFIG as a run would use it.

    Overrides, defaults and the edits of plugins are applied, and paths are absolute. Those edits, with
    their reasons, and the warnings of plugins go to stderr.
    """
    from anytron.cli.train import show_config

    show_config(config, overrides or [])


@app.command("new-platform", short_help="Write the package of a new platform.")
def new_platform(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the platform, as users write it in platform.name.")
    ],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Parent of the new directory.")] = Path(),
) -> None:
    """Write the package of a new platform, anytron-NAME, which installs and computes on the host's processor.

    Comments in the package say what to implement for your device. `anytron conformance NAME` checks it.

    Example: anytron new-platform acme && pip install ./anytron-acme && anytron conformance acme --level device
    """
    from anytron.cli.new_platform import new_platform as write

    write(name, into)


@app.command()
def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="YAML file of a run; without it, the default engines.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help=f"Print one object: {{{RESULTS}}}.")] = False,
) -> None:
    """Examine this installation and suggest fixes.

    Versions and where modules come from, what is installed twice, version ranges, plugins, platform, patches, devices,
    executors, which kernels are in use and why not faster ones, and a few numbers that they compute on the device
    against float64. With CONFIG: for its engines, with all checks of the run and an estimate of its memory.

    The status of an entry is passed, warning, failed or skipped. The exit status is 1 if one failed.

    Example: anytron doctor examples/grpo_sort.yaml parallel.tensor_model_parallel_size=2
    """
    from anytron.cli.checks import run_doctor

    if not run_doctor(config, overrides or [], as_json=as_json):
        raise typer.Exit(1)


@app.command(short_help="Estimate the memory of a run.")
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory of a device, e.g. 80GiB; default: what the devices here have.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the memory of a run, part by part, before anything starts, and suggest settings that need less.

    Parameters, gradients, optimizer, activations, logits and the cache of generation on the device that has the most;
    nothing is built, so that it works on a machine without devices. Settings that would make it smaller are tried one
    by one, and together until the run fits. The exit status is 1 if it does not fit.

    Example: anytron plan examples/npu/grpo_qwen3_8b.yaml --memory 64GiB
    """
    from anytron.cli.plan import run_plan

    if not run_plan(config, overrides or [], memory=memory, as_json=as_json):
        raise typer.Exit(1)


def run() -> None:
    """Run the command line.

    Exit status: 0, 1 after an :class:`AnytronError` (printed as what, where, why, fix, without
    traceback), 2 after wrong usage, 130 after Ctrl-C, 143 after SIGTERM before training
    begins or where no checkpoint is saved. Any other exception is our bug and keeps
    its traceback.
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
    for label, text in (("where", error.where), ("why", error.why), ("fix", error.fix), ("process", process)):
        if text:
            console.print(Text.assemble((f"  {label}: ", "bold"), text))
