"""Run another program of this folder on a simulated NPU: simulated.py PROGRAM ARGUMENTS.

Where there is an NPU verl has imported torch_npu before plugins are loaded. So it is here.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from anytron_ascend_simulator import activate

if __name__ == "__main__":
    activate()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(__file__).parent)
    runpy.run_path(str(Path(__file__).parent / sys.argv[0]), run_name="__main__")
