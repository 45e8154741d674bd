"""``anytron data``: look at the prompts of a run as its model reads them."""

from __future__ import annotations

import itertools
import json
import statistics
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anytron.base.terminal import one_line
from anytron.cli.arguments import ConfigPath  # noqa: TC001 - typer reads the annotations

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.task.data.mixture import Mixture
    from anytron.task.data.prompts import TokenizedPrompt

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Look at the prompts of a run.")

RUN_OF_TOKENS = 4
"""Runs of at least this many equal tokens, as an image has, are shown as one token and a count."""


@app.callback()
def _group() -> None:
    """Group the commands."""


@app.command()
def show(
    config: ConfigPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Keys to set, for example data.max_prompt_tokens=512. Values are YAML.",
            show_default=False,
        ),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=0, help="How many prompts to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object: {sources, clock, prompts}.")] = False,
) -> None:
    """Show the tokens of the first prompts that a run would draw, decoded, with their lengths.

    All prompts are read, tokenised and filtered as the run would; for each source a line has the number of prompts,
    the number left out, and the lengths of prompts. If the chat template reads the clock, the output says so and
    names the time that prompts show; with resume=auto, that is the time at which the run in trainer.output_dir began.
    Bars separate tokens. With algorithm.name=sft, whole examples are shown, each with its learned part below it. No
    model is built; no platform is needed.

    Example: anytron data show examples/grpo_sort.yaml data.shuffle=false
    """
    from anytron.config.load import load_config
    from anytron.record.checkpoint.resume import first_beginning
    from anytron.run.preflight.prepare import prepare_prompts

    run = load_config(config, overrides or [])
    prepared = prepare_prompts(run, lambda text: typer.echo(text, err=True))
    sources = [_summary(prepared.sampler, index) for index in range(len(prepared.sampler.tables))]
    prompts = [_described(prompt, prepared.tokenizer) for prompt in prepared.sampler.draw(count)]
    clock = {
        "moment": prepared.beginning.now.isoformat(timespec="seconds"),
        "of": "this command" if first_beginning(run) is None else "the run",
        "shown": prepared.beginning.shown,
    }
    if as_json:
        shown = {"sources": sources, "clock": clock if prepared.beginning.reads_the_clock else None, "prompts": prompts}
        typer.echo(json.dumps(shown, indent=2, default=str))
        return
    _print_table(sources)
    if prepared.beginning.reads_the_clock:
        said = "".join(f": {form} is {text}" for form, text in prepared.beginning.shown.items())
        typer.echo(
            f"\nThe chat template reads the clock (strftime_now){one_line(said)}. Prompts show the time at which "
            f"{clock['of']} began, {clock['moment']}. All prompts of a run show the same time, also after resume=auto."
        )
    for prompt in prompts:
        images = f", {prompt['images']} image{'s' * (prompt['images'] != 1)}" if prompt["images"] else ""
        typer.echo(f"\n{one_line(prompt['id'])}: {prompt['length']} tokens{images}")
        typer.echo("|".join(_shortened([one_line(piece) for piece in prompt["pieces"]])))
        if learnt := prompt["response"]:
            typer.echo("learnt: " + "|".join(_shortened([one_line(piece) for piece in learnt])))
        if prompt["data"]:
            typer.echo(f"data: {one_line(json.dumps(prompt['data'], ensure_ascii=False, default=str))}")


@app.command()
def check(
    config: ConfigPath,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys to set. Values are YAML.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one object: by stage and set, {tried, left_out, findings, notes, scores, example}."
        ),
    ] = False,
) -> None:
    """Check that a run's rewards tell right answers from wrong ones.

    For each prompt, the right answer is scored in the forms that models write. The best of these must score more than
    an empty response, "None", another prompt's answer and the prompt itself. The prompts are also checked as the model
    reads them. Reward functions run in separate processes, as in a run. judge, reward_model and environment are not
    called, because calls cost time or money. All prompts of training and validation are tried; anytron train tries a
    few. The output is a table of findings, with rows and remedies, and for each reward the score of every form of
    response.

    The exit status is 1 if there are findings.

    Example: anytron data check examples/grpo_sort.yaml
    """
    from anytron.cli.data_check import run_check

    if not run_check(config, overrides or [], as_json=as_json):
        raise typer.Exit(1)


def _summary(sampler: Mixture, index: int) -> dict[str, Any]:
    table = sampler.tables[index]
    lengths = table.lengths
    return {
        "name": table.name,
        "share": float(sampler.shares[index]),
        "read": table.read,
        "kept": len(table),
        "too_long": table.too_long,
        "duplicates": table.duplicates,
        "tokens": {
            "min": min(lengths),
            "mean": statistics.fmean(lengths),
            "median": statistics.median(lengths),
            "max": max(lengths),
            "sum": sum(lengths),
        },
    }


def _described(prompt: TokenizedPrompt, tokenizer: Any) -> dict[str, Any]:
    pieces = [tokenizer.decode([token]) for token in prompt.tokens]
    return {
        "id": prompt.id,
        "length": len(prompt.tokens),
        "text": prompt.text,
        "tokens": list(prompt.tokens),
        "pieces": pieces,
        "response": [piece for piece, learnt in zip(pieces, prompt.response_mask or (), strict=False) if learnt],
        "images": len(prompt.images),
        "data": dict(prompt.data),
    }


def _shortened(pieces: Sequence[str]) -> Iterator[str]:
    for piece, same in itertools.groupby(pieces):
        number = len(list(same))
        yield from [piece] * number if number < RUN_OF_TOKENS else [f"{piece} * {number}"]


def _print_table(sources: Sequence[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from anytron.cli.output import print_table

    table = Table(box=None, pad_edge=False)  # with lines between columns, headings do not fit 80 columns
    table.add_column("prompts of", overflow="fold")
    headings = ("share", "read", "kept", "too\nlong", "dupli-\ncates", "tokens\nmin", "\nmean", "\nmedian", "\nmax")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in sources:
        counts = [str(one[name]) for name in ("read", "kept", "too_long", "duplicates")]
        tokens = [f"{one['tokens'][name]:,.10g}" for name in ("min", "mean", "median", "max")]
        tokens[1] = f"{one['tokens']['mean']:,.1f}"
        table.add_row(Text(one_line(one["name"])), f"{one['share']:.1%}", *counts, *tokens)
    print_table(table)
