"""A Python environment beside the one of the tests."""

import sys
import venv
from pathlib import Path


def make_environment(directory: Path, *, anytron: str | None) -> Path:
    """Make an environment.

    Args:
        directory: Where; made.
        anytron: The version that Anytron says it has there; None = it is not installed. What else is installed for
            the tests is there too, if it is.

    Returns:
        Its interpreter.
    """
    venv.create(directory, symlinks=True)
    (site,) = directory.glob("lib/python3*/site-packages")
    if anytron is not None:
        paths = [path for path in sys.path if path and Path(path).is_dir()]
        # Not a sitecustomize.py: some distributions' Python has one of its own, which comes first.
        said = f"import anytron.base.version as said; said.__version__ = {anytron!r}"
        (site / "tests.pth").write_text("\n".join([*paths, said]))
    return directory / "bin" / "python"
