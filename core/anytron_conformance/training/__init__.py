"""Level ``training``: updates of recorded trajectories and steps of whole runs, compared with the platform ``cpu``."""

from anytron_conformance.training.updates import recomputation, recorded_updates, restored_checkpoint
from anytron_conformance.training.whole_runs import resumed_run, sampled_steps

__all__ = ["RULES"]

RULES = (recorded_updates, recomputation, restored_checkpoint, sampled_steps, resumed_run)
