"""What every test stands on: one processor thread, and a count of what was skipped and why."""

from __future__ import annotations

import os

# Set before anything imports torch: tests run several processes on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
