"""``anytron-swift``: ms-swift's command ``megatron``, on the device stack."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anytron import AnytronError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from typing import NoReturn

COMMANDS = ("pt", "sft", "rlhf", "export")
USAGE = f"""Usage: anytron-swift {{{",".join(COMMANDS)}}} [CONFIG.yaml] [MS-SWIFT OPTIONS]

Run ms-swift's command `megatron` on the platform that ANYTRON_PLATFORM names, or on the only usable platform.
NPROC_PER_NODE sets the number of ranks, as for ms-swift. `megatron` documents all other options.
"""


def main() -> None:
    """Start the command as ms-swift does, with a file of this package in place of one of ms-swift's files.

    Exit with the status of ms-swift; 1 after an :class:`AnytronError`, printed as what, where, why and fix; 2 after
    wrong usage.
    """
    words = sys.argv[1:]
    if not words:
        sys.stderr.write(USAGE)
        raise SystemExit(2)
    command, *options = words
    if command in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        fail(
            ConfigError(
                f"'{command}' is not a command of anytron-swift.",
                why=f"its commands are {known}",
                fix=did_you_mean(command.lower(), COMMANDS) or f"run anytron-swift COMMAND with one of {known}",
            ),
            status=2,
        )
    try:
        _refuse(options)
    except AnytronError as error:
        fail(error)

    from swift.cli.main import cli_main

    cli_main({name: f"anytron_swift.commands.{name}" for name in COMMANDS}, is_megatron=True)


def _refuse(options: list[str]) -> None:
    """Make the checks of each rank beforehand, so that an error is printed once, without ``torchrun``'s traceback.

    Raises:
        PluginError: ms-swift is missing or not supported.
        AnytronError: The platform cannot be used (:func:`anytron.train.open_session`).
    """
    from anytron.train import open_session
    from anytron_swift import installation

    installation.require_supported()
    installation.load("swift.cli.main", "parse_yaml_args")(list(options))  # its ENV may name the platform
    open_session(engine="megatron")


def fail(error: AnytronError, status: int = 1) -> NoReturn:
    """Print an error as ``anytron`` does, and end the process."""
    from anytron.train import print_error

    print_error(error)
    raise SystemExit(status)
