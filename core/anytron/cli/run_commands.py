"""The commands that train a model, show a run, replay one of its updates, and let a model answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anytron.cli.arguments import ConfigPath, ModelPath, Overrides  # noqa: TC001 - typer reads the annotations
from anytron.cli.signals import INTERRUPTED, handle_signals


def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a model as CONFIG says.

    The configuration, the data and the machine are checked before an engine is built. The run writes into
    trainer.output_dir: metrics.jsonl, samples.jsonl, config.yaml, patches.json, plots/, checkpoints/, hf/ (the trained
    model), logs/ (what each process wrote). If the configuration has stages, each stage has its own directory.

    resume=auto continues the run in trainer.output_dir from its newest checkpoint, and starts a new run if there is
    none. SIGTERM, SIGHUP or SIGUSR1 save a checkpoint and end the run with status 0 (checkpoint.on_signal); a
    second one ends it at once. Ctrl-C ends all processes and keeps the checkpoints that are there.

    Example: anytron train examples/grpo_sort.yaml parallel.tensor_model_parallel_size=2
    """
    from anytron.cli.train import CONTINUE, run_training

    handle_signals()
    try:
        run_training(config, overrides or [])
    except KeyboardInterrupt:
        typer.echo(f"interrupted: all processes have ended; {CONTINUE}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directory of a run: its trainer.output_dir.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="HTML file to write; an earlier report is replaced."),
    ] = Path("report.html"),
) -> None:
    """Write one HTML file about one or several runs, to look at in a browser. It needs no network.

    The file shows plots of all metrics, each with all runs; where the time goes; samples with their rewards, from the
    first steps and the last; what differs in the configurations; platform, versions, patches; restarts, failures and
    warnings. A run need not have ended. Only you have permission to read the file: check its samples and configurations
    before you pass it on. Values of keys that are named like a secret are hidden.

    Example: anytron report runs/grpo_sort --output sort.html
    """
    from anytron.cli.report import run_report

    run_report(runs, output)


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: its trainer.output_dir.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run once, and exit.")] = False,
    interval: Annotated[
        float,
        typer.Option("--interval", metavar="SECONDS", min=0.1, help="Seconds between two updates of the view."),
    ] = 1.0,
) -> None:
    """Show a run live in the terminal, from another shell or another machine that sees its files.

    The view has small plots of reward and other metrics, the step, the time that is left, where the time goes, the last
    samples, and warnings. It ends when the run ends; Ctrl-C ends the view, not the run. If the output is not a
    terminal, the command prints one line per step.

    Example: anytron watch runs/grpo_sort
    """
    from anytron.cli.watch import run_watch

    try:
        run_watch(run, interval, once=once)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def scale(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Directory of a run that goes on: its trainer.output_dir.")
    ],
    replicas: Annotated[int, typer.Argument(metavar="REPLICAS", min=1, help="Number of rollout replicas from now on.")],
) -> None:
    """Give a run another number of rollout replicas while it goes on, from another shell or another machine.

    The run takes the number before its next step. New replicas get weights and generate when their engines are built;
    the run does not wait for them. If replicas leave, the others generate their unfinished responses, with the same
    tokens. If the devices do not suffice, the run prints a warning and goes on as before. A run that is resumed begins
    with rollout.replicas of its configuration.

    Example: anytron scale runs/grpo_sort 2
    """
    from anytron.cli.scale import ask_for_replicas

    typer.echo(ask_for_replicas(run, replicas))


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

    The update runs on one rank, with the run's configuration. It starts from the weights that were saved with the
    mini-batch, from a checkpoint, or from the initial model. The output names the module (or the loss, or the saved
    data), the micro-batch, the sequence and the token. The exit status is 1 if some number is not finite.

    Example: anytron replay runs/default/bad_batches/step-000012-update-1
    """
    from anytron.cli.single_rank import run_replay

    handle_signals()
    if not run_replay(batch, overrides or [], checkpoint=checkpoint, as_json=as_json):
        raise typer.Exit(1)


def chat(
    path: ModelPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys to set, for example platform.name=cpu or rollout.stop=[END]; paths are relative to here.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Let the model that the run began with answer too, for comparison.")
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest answer, in tokens. Default: rollout.max_new_tokens of the run; without a run 256, or half of "
            "a shorter context.",
            show_default=False,
        ),
    ] = None,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, metavar="T", help="Sampling temperature; 0 always takes the most probable token."),
    ] = 0.0,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="System message before each prompt. Default: data.options.system of the run, if it is set.",
            show_default=False,
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Give prompts to the model as they are, without its chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the sampling, if the temperature is not 0.")] = 0,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print an object for each prompt: {prompt, answer} or {prompt, before, after}."),
    ] = False,
) -> None:
    """Let a model answer prompts, so that you see what it has learnt.

    Prompts come from the standard input, one a line; at a terminal you type them, and Ctrl-D ends. Each prompt is
    answered by itself: the model does not see earlier prompts and answers. Its chat template is applied if it has one;
    other models read the prompt as it is. With a template, a line that begins with [{ is a conversation, as data files
    have it: a JSON list of messages, for example [{"role": "user", "content": "2 + 2 ="}].

    PATH may be a run: then hf/ answers, or the newest checkpoint if the run has not written hf/. A checkpoint is first
    exported to a temporary directory, for which a training engine is started; in all other cases none is started.

    Answers go to stdout, everything else to stderr. The exit status is 0 at the end of the input and 130 after Ctrl-C.

    Example: anytron chat runs/grpo_sort --compare
    """
    from anytron.cli.chat import run_chat

    handle_signals()
    try:
        run_chat(
            path,
            overrides or [],
            compare=compare,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            system=system,
            plain=plain,
            seed=seed,
            as_json=as_json,
        )
    except KeyboardInterrupt:
        typer.echo(err=True)  # the prompt's line is left
        raise typer.Exit(INTERRUPTED) from None


def serve(
    path: ModelPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys to set, for example rollout.engine=vllm or rollout.replicas=2; paths are relative to here.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen at. Only programs on this machine reach the default.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="TCP port; 0 takes a free one.")] = 8000,
    key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with the server's key, readable by you only. Default: the variable ANYTRON_SERVE_KEY, else a "
            "new key, which is printed.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the model. Default: the name of PATH.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Longest answer, in tokens, to a request without max_tokens. Default: rollout.max_new_tokens of the "
            "run; without a run 256, or half of a shorter context.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Serve a model with OpenAI's API, until Ctrl-C.

    Programs that use this API talk to the model: chat completions, completions, streams, tools, log-probs, prompts as
    token ids, and POST /inference/v1/generate, vLLM's route of token ids. Each request needs the key. Sessions record
    conversations as token ids: POST /v1/sessions begins one.

    PATH is read as anytron chat reads it. Temperature, top_p, top_k and stop strings of the run apply to requests that
    do not set them; without a run the temperature is 1. It needs the packages of anytron[serve].

    Everything is written to stderr. The exit status is 130 after Ctrl-C.

    Example: anytron serve runs/grpo_sort --port 8001
    """
    from anytron.cli.serve import run_serve

    handle_signals()
    try:
        run_serve(
            path,
            overrides or [],
            host=host,
            port=port,
            key_file=key_file,
            name=name,
            max_new_tokens=max_new_tokens,
        )
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
