"""``python -m anytron`` and the script ``anytron``: the command line."""

import sys

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it: 128 + SIGINT."""


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while it is still importing modules."""
    try:
        from anytron.cli.main import run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    # ``python -m`` puts the current directory first on sys.path: a logging.py that lies there would be imported, here
    # and in every process of the run.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # the latter since Python 3.11
        del sys.path[0]
    main()
