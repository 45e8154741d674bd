"""Write ``docs/reference/cli.md`` from the commands themselves.

Run ``python -m anytron.cli.document docs/reference/cli.md`` after a change of a command; a test fails if the page is
not up to date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from anytron.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator

HEADING = """# Command line

<!-- Generated from core/anytron/cli by `python -m anytron.cli.document docs/reference/cli.md`. -->

`anytron`, or `python -m anytron`. Every command has `--help`. Keys of the configuration are set as `section.key=value`
([configuration](config.md)); [errors](errors.md) are printed in four lines, to stderr.

| exit status | after |
|---|---|
| 0 | success; a run that a signal stopped after its checkpoint was saved |
| 1 | an error, or a check that failed |
| 2 | wrong usage |
| 130 | Ctrl-C |
| 143 | SIGTERM before training begins, or where no checkpoint is saved |

| environment variable | says |
|---|---|
| `ANYTRON_PLATFORM` | the platform, where `platform.name` does not |
| `ANYTRON_PLATFORM_OPTIONS` | `platform.options` as a JSON object; a configuration with different options is refused |
| `ANYTRON_SERVE_KEY` | the key of the server of `anytron serve` or of `rollout.endpoint` |
| `ANYTRON_TASK_FILE` | set for the program of `environment.command`: a file with its task, as JSON |
| `ANYTRON_MODEL` | set for the program of `environment.command`: the name of the model in requests |
| `ANYTRON_PLUGINS` | the only plugins that may be loaded, separated by commas |
| `ANYTRON_DISABLE_PLUGINS` | plugins that are not loaded, separated by commas |
| `ANYTRON_ACCELERATOR` | set by the platform `accelerator` for the processes of a run: the device that torch reported |
| `ANYTRON_TRACE_HOOKS` | `1`: every hook call is printed, with its answers |
| `ANYTRON_VERL_REPORT` | a directory, in which each process with a verl engine reports what Anytron changed in it |
| `ANYTRON_SWIFT_REPORT` | a directory, in which each rank of anytron-swift reports what Anytron changed in it |
| `ANYTRON_ASCEND_SIMULATOR_DIR` | where the simulator's built libraries lie; by default in the user's cache |
| `ANYTRON_ASCEND_SIMULATOR_ASYNCHRONOUS` | `1`: the simulator does work when something waits for it, not at once |
| `ANYTRON_ASCEND_SIMULATOR` | `1`: ascend takes its [simulator](../how-to/train-on-ascend.md) for devices |
"""


def render() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEADING, *_sections("anytron", typer.main.get_command(app))]).rstrip() + "\n"


def commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """The subcommands of a command, at any depth, each with the words that call it."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, one in inner.items():
        yield from commands(f"{path} {name}", one)


def _sections(name: str, group: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield _markdown(group.help) + "\n"
    yield from _options(group.params)
    for path, command in commands(name, group):
        parameters = [_signature(one) for one in command.params]
        yield f"## {path}\n\n```text\n{' '.join([path, *filter(None, parameters)])}\n```\n"
        yield _markdown(command.help) + "\n"
        yield from _options(command.params)


def _options(parameters: list[Any]) -> Iterator[str]:
    if not parameters:
        return
    yield "| argument or option | |\n|---|---|"
    for one in parameters:
        text = " ".join((one.help or "").split())
        yield f"| `{_name(one)}` | {text.replace('|', chr(92) + '|')} |"
    yield ""


def _is_option(parameter: Any) -> bool:
    return bool(parameter.opts[0].startswith("-"))


def _name(parameter: Any) -> str:
    """As one writes it: an argument's metavar, or an option with that of its value."""
    if not _is_option(parameter):
        return str(parameter.metavar or parameter.name.upper())
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
    return ", ".join(parameter.opts) + value


def _signature(parameter: Any) -> str:
    name = _name(parameter) + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _markdown(text: str | None) -> str:
    """Paragraphs as they are; an example is code, and Python's double backquotes single ones."""
    text = (text or "").replace("``", "`")
    return re.sub(r"^Example: (anytron .*)$", r"**Example:** `\1`", text, flags=re.MULTILINE)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
