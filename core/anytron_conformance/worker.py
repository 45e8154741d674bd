"""A process that checks rules, one after another, for the driver of the kit.

Importing this module imports no torch: the platform's environment is set before anything heavy is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import PluginError
from anytron.device.hooks.types import ProcessInfo
from anytron.device.loading import open_process
from anytron.task.isolation.worker import calls, enter
from anytron_conformance.levels import find_rule
from anytron_conformance.subject import Source, Subject

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anytron.task.isolation.worker import Answer
    from anytron_conformance.rules import Case


def main(channel: int, lifeline: int) -> None:
    """Check the rules that the driver names: (level, name), each answered with a result as JSON.

    Arguments as for :func:`anytron.task.isolation.worker.enter`.
    """
    connection, start = enter(channel, lifeline)
    subject = open_subject(start, ProcessInfo("trainer"))

    from anytron_conformance.checking import check_rule

    for (level, name), give in calls(connection, start):

        def tell(case: Case, give: Answer = give) -> None:
            give({"at": case.name})

        give(check_rule(find_rule(level, name), subject, tell).as_json())
    subject.close()


def open_subject(start: Mapping[str, Any], process: ProcessInfo) -> Subject:
    """Open the platform in this process, in the environment that its plugins want.

    Args:
        start: ``platform``, ``options`` and ``scratch``.
        process: What the plugins are told of this process.
    """
    source = Source(start["platform"], start["options"])
    try:
        session = open_process(process, source.config(), platform=source.platform, engine=None)
    except PluginError:  # of runtime_env: a rule of its own says so
        session = source.open()

    import torch

    torch.set_num_threads(start["threads"])
    return Subject(source, session, Path(start["scratch"]))
