"""Find plugins by entry point, report on each, and choose the active platform.

There are two entry-point groups. Of the plugins in ``anytron.platforms`` exactly one is active; of those in
``anytron.plugins`` (extensions) all are. Nothing here imports torch or an engine; a plugin's module and probe may.
"""

from anytron.device.loading.report import Finding, PluginReport, State, check_requirements, examine_requirements
from anytron.device.loading.session import (
    Session,
    Survey,
    disable_device_autoload,
    hooks_of,
    open_process,
    open_session,
    survey_plugins,
)

__all__ = [
    "Finding",
    "PluginReport",
    "Session",
    "State",
    "Survey",
    "check_requirements",
    "disable_device_autoload",
    "examine_requirements",
    "hooks_of",
    "open_process",
    "open_session",
    "survey_plugins",
]
