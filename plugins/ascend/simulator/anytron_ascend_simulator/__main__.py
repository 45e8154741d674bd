"""``python -m anytron_ascend_simulator build|status``: build the simulator's libraries, or look for them."""

from __future__ import annotations

import argparse
import sys

from anytron_ascend_simulator.build import SimulatorError, build, library_directory, library_paths, torch_npu_version


def main() -> int:
    """Run the command line; return 1 after an error that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m anytron_ascend_simulator", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="compile the libraries for the installed torch_npu (seconds; needs g++)")
    commands.add_parser("status", help="print whether the libraries are built, and their directory")
    arguments = parser.parse_args()
    try:
        if arguments.command == "build":
            print(f"built for torch_npu {torch_npu_version()}: {build()}")
            print("use: ANYTRON_ASCEND_SIMULATOR=1 ANYTRON_PLATFORM=ascend anytron train ...")
            return 0
        built = all(path.is_file() for path in library_paths())
        print(f"torch_npu {torch_npu_version()}; {'built' if built else 'not built'}: {library_directory()}")
    except SimulatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main())
