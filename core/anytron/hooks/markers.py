"""pluggy's two markers, under the project's name."""

from __future__ import annotations

import pluggy

PROJECT = "anytron"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
