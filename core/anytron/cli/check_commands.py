"""The commands that check models, platforms and installations, that estimate memory, and that begin a platform."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from anytron.base.errors import ConfigError
from anytron.cli.arguments import RESULTS, ConfigPath, Overrides
from anytron.cli.signals import INTERRUPTED, handle_signals


def verify(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG",
            help="YAML file; paths in it are relative to it. With --shrink also a config.json, or its directory.",
        ),
    ],
    overrides: Overrides = None,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Check a tiny model of the same shape with random weights; only the model's config.json is needed.",
        ),
    ] = False,
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
    """Check, before a run, that its model is computed correctly on this machine in the run's parallel layout.

    The run's own model, prompts and parallel sizes are used. The command compares logits with Hugging Face's, packed
    with padded sequences, the parallel layout with one rank, exported weights with the checkpoint (bit for bit), the
    rollout's log-probs with those of training, and the platform's masks and attention with their definition. The output
    also says which plugin supplied which kernel. The exit status is 1 if a check fails; a check that cannot be made
    here is skipped, with the reason.

    With --shrink no weights are read. Layers, widths, heads, experts and vocabulary of the model's published
    config.json are cut; its flags, ratios and layer patterns stay. The run keeps its parallel sizes and engines, and
    gets prompts for the tiny model. The results are about the tiny model: its shape, not its size or weights. A
    config.json in place of the YAML file is checked on one rank in float32, with default settings; overrides apply.

    Example: anytron verify examples/grpo_sort.yaml parallel.tensor_model_parallel_size=2
    """
    if of_verl and shrink:
        raise ConfigError(
            "A configuration of verl cannot be shrunk.",
            where="--verl --shrink",
            why="--shrink changes a configuration of Anytron, or takes a config.json",
            fix="remove --verl and give the model's config.json, or remove --shrink",
        )
    from anytron.cli.checks import run_verification, run_verification_of

    handle_signals()
    if of_verl:
        passed = run_verification_of("verl", config, overrides or [], as_json=as_json)
    else:
        passed = run_verification(config, overrides or [], shrink=shrink, as_json=as_json)
    if not passed:
        raise typer.Exit(1)


def compare(
    config: ConfigPath,
    overrides: Overrides = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help=f"Print one object: {{kernels, on_policy, sequences, tokens, {RESULTS}}}."),
    ] = False,
) -> None:
    """Find the first operation whose bits depend on how a token is computed.

    A few responses to the run's prompts are sampled with the initial weights. The training ranks compute the same
    tokens in several ways: all sequences together, each sequence alone, and, with rollout.engine=megatron, token by
    token as in generation. What each module computes for each token is compared to the bit. The output names the first
    module that differs, its layer, the first such token and both numbers, in the order of computation, inner modules
    before outer ones. Modules that have no row for each token, such as sorted experts, are left out. With another
    rollout engine, its log-probs are compared with those of training.

    With engine.on_policy=bitwise the exit status is 1 if anything differs; otherwise the output shows where.

    Example: anytron compare examples/grpo_sort.yaml engine.on_policy=bitwise rollout.engine=megatron
    """
    from anytron.cli.checks import run_comparison

    handle_signals()
    if not run_comparison(config, overrides or [], as_json=as_json):
        raise typer.Exit(1)


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
    """Check, on its device, that a platform keeps every rule of Anytron's platform contract.

    No configuration is needed. A failure names the rule, shows the smallest case that fails and how far off it is,
    and says where the rule is explained. Rules for features that the platform says it lacks, and rules that this
    machine cannot check, are skipped and counted. The exit status is 1 if a rule is broken. Ctrl-C ends all processes
    and shows what was checked.

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

    handle_signals()
    try:
        passed = run_conformance(platform, options or [], levels or [], as_json=as_json)
    except KeyboardInterrupt:
        typer.echo("interrupted: the other rules were not checked", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if not passed:
        raise typer.Exit(1)


def new_platform(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the platform, as users write it in platform.name.")
    ],
    into: Annotated[Path, typer.Option("--into", metavar="DIR", help="Parent of the new directory.")] = Path(),
) -> None:
    """Write the package of a new platform, anytron-NAME, which can be installed and computes on the host's CPU.

    Comments in the package say what to implement for your device. `anytron conformance NAME` checks it.

    Example: anytron new-platform acme && pip install ./anytron-acme && anytron conformance acme --level device
    """
    from anytron.cli.new_platform import new_platform as write

    write(name, into)


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG", help="YAML file of a run. Default: examine the default engines.", show_default=False
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help=f"Print one object: {{{RESULTS}}}.")] = False,
) -> None:
    """Examine this installation and suggest fixes.

    The examination covers versions and where modules come from, what is installed twice, version ranges, plugins,
    platform, patches, devices, executors, which kernels are in use and why no faster ones are, and a few results of
    these kernels on the device, compared with float64. With CONFIG, it covers the engines of that run, all checks of
    the run, and an estimate of its memory.

    The status of an entry is passed, warning, failed or skipped. The exit status is 1 if one failed.

    Example: anytron doctor examples/grpo_sort.yaml parallel.tensor_model_parallel_size=2
    """
    from anytron.cli.checks import run_doctor

    if not run_doctor(config, overrides or [], as_json=as_json):
        raise typer.Exit(1)


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Memory of each device, e.g. 80GiB. Default: the memory of this machine's devices.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate the memory of a run, part by part, before anything starts, and suggest settings that need less.

    The estimate has parameters, gradients, optimizer, activations, logits and the KV cache of generation, for the
    device that needs the most memory. No model is built, so that the command works on a machine without devices.
    Settings that would need less memory are tried one by one, and then together until the run fits. The exit status is
    1 if it does not fit.

    Example: anytron plan examples/npu/grpo_qwen3_8b.yaml --memory 64GiB
    """
    from anytron.cli.plan import run_plan

    if not run_plan(config, overrides or [], memory=memory, as_json=as_json):
        raise typer.Exit(1)
