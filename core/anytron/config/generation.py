"""The schema of a run's YAML file: how responses are made - the rollout, and the environment that answers the model."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from anytron.config.section import Section, refuse_zero

RUN_COMMAND = "anytron.task.environments.command:run_command"
"""The agent that runs ``environment.command``."""


class EndpointSection(Section):
    """An OpenAI-compatible server over the rollout engines, while a run goes on; docs/how-to/serve-a-model.md."""

    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = Field(0, ge=0, le=65535)
    """TCP port; 0 = a free one."""
    key_file: str | None = None
    """File with the server's key, which only you can read; default: the environment variable ``ANYTRON_SERVE_KEY``.
    An agent needs neither: it gets the key of its session."""


class EndpointLimits(Section):
    """How much memory clients of the model may use: agents, and clients of an endpoint or of ``anytron serve``."""

    request_mib: int = Field(16, ge=1)
    """Largest body of a request, in MiB: messages, and images in base64."""
    session_mib: int = Field(256, ge=1)
    """What a session may hold, in MiB: recorded tokens, messages and prepared images, and requests that are being
    answered. A run with agents has ``environment.processes`` sessions at one time."""
    memory_mib: int = Field(4096, ge=1)
    """What all clients together may hold, in MiB, besides the sessions of a run's agents."""


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
    """How weights are sent from the training ranks: bucket by bucket, through memory that rank 0 shares with the
    rollout (``shared_memory``) or over TCP (``network``), or through a file in ``TMPDIR``. ``auto`` chooses shared
    memory if all processes are on one machine, the network if one is on another machine, and a file if the engine
    supports nothing else; a run prints the choice; docs/explanation/weights.md."""
    lora: Literal["merged", "alone"] = "merged"
    """How adapters of ``model.lora`` are sent: ``merged`` into all weights, or ``alone``, to an engine that computes
    with adapters itself and has loaded the model's weights, which never change; docs/how-to/train-with-lora.md."""
    check_weights_every: int = Field(0, ge=0)
    """Steps between comparisons, bit for bit, of each replica's weights with those that the training engine exports.
    Such a step sends weights twice, and a replica with other weights is replaced. 0 = never."""
    placement: Literal["colocated", "separate"] = "colocated"
    """``colocated`` replicas use the devices of the training ranks, in turns with them; each ``separate`` replica has
    its own device; docs/how-to/share-devices.md."""
    sleep: bool = False
    """Free the device memory of rollout engines during training; docs/how-to/share-devices.md."""
    replicas: int = Field(1, ge=1)
    """Rollout processes, each with the whole model, that share the prompts of a step; docs/how-to/scale-rollouts.md."""
    replay_routing: bool = False
    """Mixture of experts: training sends each token to the experts to which the rollout engine sent it;
    docs/how-to/train-mixture-of-experts.md."""
    quantization: Literal["fp8"] | None = None
    """``fp8``: the rollout engine rounds the weights of linear layers to 8-bit floats, and training does not;
    docs/how-to/quantize-rollouts.md."""
    max_staleness: int = Field(0, ge=0)
    """How many steps old the weights may be that generate a step's responses. With 1, the responses of a step are
    generated while the previous step is trained; more needs ``continue_over_updates``;
    docs/how-to/scale-rollouts.md."""
    continue_over_updates: bool = False
    """Replicas get new weights as soon as they exist, and continue unfinished responses with them. Needs
    ``max_staleness``."""
    max_batch_size: int = Field(512, ge=1)
    """Sequences that a replica generates at one time."""
    num_threads: int | None = Field(None, ge=1)
    """Processor threads of a replica; default: ``OMP_NUM_THREADS`` where it is set, else processors divided by
    replicas."""
    python: str | None = None
    """Interpreter of the environment in which the rollout engine runs, for an engine whose packages conflict with the
    training engine's; relative paths are relative to the YAML file. Anytron must be installed there, in the same
    version. Default: the environment of ``anytron train``."""
    endpoint: EndpointSection | None = None
    """Serve the model to programs while it is trained. An environment that is an agent has an endpoint in any case."""
    endpoint_limits: EndpointLimits = EndpointLimits()
    """Limits of memory of an endpoint's clients."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, which checks them; the options of Anytron's engines are listed below."""


class EnvironmentSection(Section):
    """The environment that replies to the model (a tool, a game, a user); docs/how-to/use-tools-and-environments.md."""

    path: str | None = Field(None, min_length=1)
    """The environment's class: ``module:Class`` or ``file.py:Class``."""
    agent: str | None = Field(None, min_length=1)
    """In place of ``path``: an agent, a program that reaches the model by OpenAI's API: ``module:function`` or
    ``file.py:function``; docs/how-to/train-an-agent.md."""
    command: list[str] = Field(default_factory=list)
    """In place of ``path``: the program of an agent, and its arguments. The program is looked up in ``PATH``, or
    beside the YAML file if it has a directory; arguments stay as they are."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or of the agent's function."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model in a response; each may have ``rollout.max_new_tokens`` tokens."""
    max_observation_tokens: int = Field(1024, ge=1)
    """Longest observation, in tokens; not for agents. A longer observation ends the response, and so does one that is
    too long for the model's context: the model never gets a part of it."""
    processes: int = Field(1, ge=1)
    """Processes that call environments; each makes one call at a time, and holds many environments, or runs one agent
    after another."""
    timeout_s: float = Field(120.0, gt=0.0)
    """Seconds that one call may take; the call of an agent is its whole work. If a call takes longer, its sample is not
    trained on."""
    attempts: int = Field(1, ge=1)
    """How often an agent that fails is started for one response, the first time included."""
    memory_gib: float | None = Field(None, gt=0.0)
    """Memory that a process may allocate, in GiB; null = no limit."""

    @model_validator(mode="after")
    def _one_of_three(self) -> EnvironmentSection:
        given = [name for name in ("path", "agent", "command") if getattr(self, name)]
        if len(given) != 1:
            said = f"it has {' and '.join(given)}" if given else "it has none of them"
            raise ValueError(f"an environment has exactly one of path, agent and command, and {said}")
        if self.command and self.options:
            raise ValueError(
                "options are keyword arguments of a class or a function: remove them, and write the arguments of a "
                "program into command, after the program"
            )
        if self.is_agent and self.max_observation_tokens != type(self).model_fields["max_observation_tokens"].default:
            raise ValueError("max_observation_tokens does not limit the messages of an agent: remove it")
        if self.attempts > 1 and not self.is_agent:
            raise ValueError("attempts applies to agents only: remove it, or name an agent")
        return self

    @property
    def is_agent(self) -> bool:
        """Whether the environment is a program that reaches the model by OpenAI's API."""
        return self.path is None

    @property
    def called(self) -> tuple[str, str]:
        """The configuration key that names the environment or agent, and the import path of its class or function."""
        if self.path is not None:
            return "environment.path", self.path
        return ("environment.command", RUN_COMMAND) if self.agent is None else ("environment.agent", self.agent)

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of the class or the function."""
        return {"command": self.command} if self.command else self.options
