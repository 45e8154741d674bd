"""What a run will take of its devices, before anything is started, and what to change if that is too much.

:mod:`anytron.proof.planning.plan` adds up the engines' estimates (:mod:`anytron.workers.engines.memory`);
:mod:`anytron.proof.planning.remedies` tries other settings. ``anytron plan`` and ``anytron doctor`` show the results.
"""
