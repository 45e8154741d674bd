"""Load verl's plugins as ``import verl`` does, and report the exception of each; ``python -m anytron_verl.loading``.

Run it in a separate process, because plugins change the process that loads them. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import entry_points

from anytron_verl import GROUP, POLICY


def main() -> None:
    """Load the plugins in verl's order, after verl itself."""
    policy = os.environ.get(POLICY, "auto").strip().lower()
    os.environ[POLICY] = "none"
    import verl  # noqa: F401 - plugins expect it
    from verl.plugin.platform import get_platform

    allowed = {name.strip() for name in policy.split(",")}
    found: dict[str, str | None] = {}
    left_out = []
    for one in entry_points(group=GROUP):
        if policy != "auto" and one.name not in allowed:
            left_out.append(one.name)
            continue
        try:
            one.load()
            found[one.name] = None
        except Exception as error:  # noqa: BLE001 - what verl would pass over is what is looked for
            found[one.name] = f"{type(error).__name__}: {error}"
    platform = type(get_platform())
    answer = {"loaded": found, "left_out": left_out, "platform": f"{platform.__module__}.{platform.__name__}"}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
