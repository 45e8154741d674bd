"""The schema of a run's YAML file: how responses are made - the rollout, and the environment that answers the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from anytron.config.section import Section, refuse_zero


class RolloutSection(Section):
    """How responses are generated."""

    engine: str = "transformers"
    """Name of the rollout engine (entry-point group ``anytron.rollout_engines``)."""
    samples_per_prompt: int = Field(8, ge=1)
    """Responses for each prompt: the group of GRPO."""
    max_new_tokens: int = Field(256, ge=1)
    """Longest response, in tokens; with an ``environment``, longest turn."""
    min_new_tokens: int = Field(0, ge=0)
    """Shortest response, in tokens: the end token is suppressed before."""
    temperature: float = Field(1.0, gt=0.0)
    """Sampling temperature; training divides logits by it too."""
    _no_zero = field_validator("temperature", mode="before")(refuse_zero)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Nucleus sampling; 1 = off."""
    top_k: int = Field(0, ge=0)
    """Sample among the k most probable tokens; 0 = off."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response, besides the end token."""
    weights: Literal["auto", "shared_memory", "network", "file"] = "auto"
    """How weights come from the training ranks: bucket by bucket, through memory that rank 0 shares with the rollout
    (``shared_memory``) or over TCP (``network``), or through a file in ``TMPDIR``. ``auto`` shares memory where all
    processes are on one machine, takes the network where one is elsewhere, and a file where the engine can do nothing
    else; it says what it chose; docs/explanation/weights.md."""
    lora: Literal["merged", "alone"] = "merged"
    """How adapters of ``model.lora`` come: ``merged`` into all weights, or ``alone``, to an engine that computes with
    adapters by itself and has read the model's own weights, which never change; docs/how-to/train-with-lora.md."""
    check_weights_every: int = Field(0, ge=0)
    """Steps from one comparison to the next of what each replica holds with what the training engine exports, bit for
    bit: at such a step, weights travel twice. A replica that holds others is replaced. 0 = never."""
    placement: Literal["colocated", "separate"] = "colocated"
    """``colocated`` replicas use the devices of the training ranks, in turns with them; each of ``separate`` ones has a
    device of its own beside them; docs/how-to/share-devices.md."""
    sleep: bool = False
    """Rollout engines give their device's memory back while training works; docs/how-to/share-devices.md."""
    replicas: int = Field(1, ge=1)
    """Rollout processes, each with the whole model, that share the prompts of a step; docs/how-to/scale-rollouts.md."""
    replay_routing: bool = False
    """Mixture of experts: training sends each token to the experts to which the rollout engine sent it;
    docs/how-to/train-mixture-of-experts.md."""
    max_staleness: int = Field(0, ge=0)
    """How many steps old the weights may be that a step's responses come from. With 1, the responses of a step are made
    while the step before is trained; more needs ``continue_over_updates``; docs/how-to/scale-rollouts.md."""
    continue_over_updates: bool = False
    """Replicas get new weights as soon as there are some, and responses under way go on with them. Needs
    ``max_staleness``."""
    max_batch_size: int = Field(512, ge=1)
    """Sequences that a replica generates at one time."""
    num_threads: int | None = Field(None, ge=1)
    """Processor threads of a replica; default: ``OMP_NUM_THREADS`` where it is set, else processors divided by
    replicas."""
    python: str | None = None
    """Interpreter of the environment in which the rollout engine runs, for an engine whose packages do not fit beside
    those of the training engine; relative paths are relative to the YAML file. Anytron must be installed there, in the
    same version. Default: the environment of ``anytron train``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, checked against its own model; below, those of the engines that come with Anytron."""


class EnvironmentSection(Section):
    """What answers the model during a response: tools, games, users; docs/how-to/use-tools-and-environments.md."""

    path: str
    """The environment's class: ``module:Class`` or ``file.py:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model in a response; each may have ``rollout.max_new_tokens`` tokens."""
    max_observation_tokens: int = Field(1024, ge=1)
    """Longest observation, in tokens. A longer one ends the response, as one does that finds no room in the model's
    context: the model is never given a part of it."""
    processes: int = Field(1, ge=1)
    """Processes that call environments; each answers one call at a time, and keeps many environments."""
    timeout_s: float = Field(120.0, gt=0.0)
    """Seconds that one call may take. An environment that takes longer costs its sample."""
    memory_gib: float | None = Field(None, gt=0.0)
    """Memory that a process may allocate, in GiB; null = no limit."""
