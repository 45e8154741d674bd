"""``python -m anytron``: the command line, where the script ``anytron`` is not on the path."""

from anytron.cli.main import run

if __name__ == "__main__":
    run()
