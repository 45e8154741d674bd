"""Use the device in a separate process, so that a crash, a hang or an abort there is only an error here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from anytron.base.errors import AnytronError
from anytron.base.files import PrivateDirectory
from anytron.base.results import REPORT
from anytron.task.isolation.process import Gone, IsolatedProcess, ProcessSettings

if TYPE_CHECKING:
    from typing_extensions import Self

    from anytron.proof.doctor.subject import Subject

CALL_S = 300.0
"""Seconds that one probe may take: the first one initialises the device, and kernels may be compiled."""
START_S = 300.0
"""Seconds in which the process must have started."""
_LOG = "anytron-doctor-"


class ProbeError(AnytronError):
    """A probe gave no answer: it raised, or its process ended or hung."""


class Live:
    """Runs probes in a separate process, which is started for the first probe, and again after a probe that ended it.

    Args:
        subject: What is examined; without a session in it, no probe can run.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._process: IsolatedProcess | None = None
        self._directory: PrivateDirectory | None = None
        self._answers: dict[str, dict[str, Any]] = {}

    def ask(self, probe: str) -> dict[str, Any]:
        """Run a probe of :mod:`anytron.proof.doctor.worker` and return its answer; the answer is cached.

        Raises:
            Inapplicable: No session could be opened.
            ProbeError: The probe failed; ``where`` names the kernels' suppliers, as far as they were known.
        """
        if probe not in self._answers:
            self._answers[probe] = self._asked(probe)
        answer = self._answers[probe]
        if "error" in answer:
            suppliers = ", ".join(f"{kernel} from {plugin}" for kernel, plugin in answer.get("suppliers", {}).items())
            raise ProbeError(answer["error"], where=suppliers, why=answer.get("why", ""), fix=answer.get("fix", ""))
        return answer

    def _asked(self, probe: str) -> dict[str, Any]:
        try:
            process = self._running()
            process.send([probe])
            while (message := process.receive()) is None:
                remaining = max(0.0, process.deadline - time.monotonic())
                process.connection.poll(remaining)
        except AnytronError as error:
            self._process = None
            return {"error": error.what, "why": error.why, "fix": REPORT}
        if isinstance(message, Gone):
            self._process = None
            what = (
                "The process that used the device hung." if message.late else "The process that used the device died."
            )
            return {"error": what, "why": message.why, "suppliers": self.suppliers()}
        return dict(message)

    def suppliers(self) -> dict[str, str]:
        """Return the plugin that supplies each kernel, as far as the probes have answered."""
        kernels = self._answers.get("kernels", {}).get("kernels", {})
        return {name: row["supplier"] for name, row in kernels.items()}

    def _running(self) -> IsolatedProcess:
        if self._process is None:
            self._directory = self._directory or PrivateDirectory(_LOG)
            run, session = self._subject.run, self._subject.opened
            start = {
                "platform": session.platform.name,
                "engine": self._subject.engine,
                "run": None if run is None else run.model_dump(mode="json"),
            }
            settings = ProcessSettings(
                "The probe", "anytron doctor", "anytron.proof.doctor.worker", start, CALL_S, None, START_S
            )
            self._process = IsolatedProcess(settings, self._directory.path / "probe.log")
        return self._process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.end()
        if self._directory is not None:
            self._directory.delete()
