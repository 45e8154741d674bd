"""``anytron-swift``: ms-swift's command ``megatron``, on the layer."""

from __future__ import annotations

import sys

COMMANDS = ("pt", "sft", "rlhf", "export")
USAGE = f"""Usage: anytron-swift {{{",".join(COMMANDS)}}} [CONFIG.yaml] [OPTIONS OF ms-swift'S]

Runs ms-swift's `megatron` on the platform that ANYTRON_PLATFORM names, else on the one device that is usable.
NPROC_PER_NODE says how many ranks there are, as it does for ms-swift. `megatron` documents everything else.
"""


def main() -> None:
    """Start the command as ms-swift does, with one of our files in the place of its own."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command not in COMMANDS:
        asked = command in ("-h", "--help")
        (sys.stdout if asked else sys.stderr).write(USAGE)
        raise SystemExit(0 if asked else 2)

    from swift.cli.main import cli_main

    cli_main({name: f"anytron_swift.commands.{name}" for name in COMMANDS}, is_megatron=True)
