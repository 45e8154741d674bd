"""The schema of a run's YAML file: ranks, processes, hardware, the loop, checkpoints, optimizers, other models."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from anytron.base.traits import ParallelSizes
from anytron.config.section import Section


class ParallelSection(Section):
    """How the model and the work are split over ranks. Names as in Megatron-Core."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Ranks that hold consecutive layers."""
    context_parallel_size: int = Field(1, ge=1)
    """Ranks that share each sequence."""
    data_parallel_size: int = Field(1, ge=1)
    """Copies of the model. Ranks in all: the product of the tensor, pipeline, context and data sizes."""
    expert_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts layer; they are taken from the tensor, context and
    data-parallel ranks of a pipeline stage."""
    expert_tensor_parallel_size: int | None = Field(None, ge=1)
    """Ranks that share each expert; default: 1, or the tensor-parallel size if experts are not divided among ranks."""
    sequence_parallel: bool | None = None
    """Split activations over tensor-parallel ranks outside of attention and MLP; default: true if
    ``tensor_model_parallel_size`` is above 1."""

    def sizes(self) -> ParallelSizes:
        """The parallel sizes as plain numbers, defaults resolved."""
        tensor, experts = self.tensor_model_parallel_size, self.expert_model_parallel_size
        expert_tensor = self.expert_tensor_parallel_size
        return ParallelSizes(
            tensor=tensor,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            data=self.data_parallel_size,
            expert=experts,
            expert_tensor=(tensor if experts == 1 else 1) if expert_tensor is None else expert_tensor,
            sequence_parallel=tensor > 1 if self.sequence_parallel is None else self.sequence_parallel,
        )

    @property
    def world_size(self) -> int:
        """Number of training ranks."""
        return self.sizes().model * self.data_parallel_size


Offloadable = Literal["optimizer", "gradients", "reference", "teacher"]
"""Parts of the training state that can be moved off the device."""


class EngineSection(Section):
    """The training engine."""

    name: str = "megatron"
    """Name of the training engine (entry-point group ``anytron.training_engines``)."""
    sequence_format: Literal["thd", "bshd"] = "thd"
    """``thd`` packs the sequences of a micro-batch without padding between them; ``bshd`` pads them to one length."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Most tokens of a micro-batch (a longer sequence gets a micro-batch to itself). Image tokens count, one for each
    group of patches that the vision tower merges (4, as a rule); computing on these patches needs additional memory."""
    log_prob_chunk_tokens: int = Field(256, ge=1)
    """Log-probs are computed in tiles of the vocabulary, which bounds the memory for logits: a tile has as many logits
    as this many tokens have over the whole vocabulary, but at least 1024 logits for each token of a micro-batch."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations of the language model are recomputed in the backward pass."""
    distributed_optimizer: bool = True
    """Share the optimizer's state between data-parallel ranks."""
    offload: list[Offloadable] = Field(default_factory=list)
    """What is moved off the device while responses are generated: the ``optimizer``'s state and the models of the
    ``reference`` and the ``teacher`` go to the host, the memory of ``gradients`` is freed;
    docs/how-to/share-devices.md."""
    deterministic: bool = False
    """Refuse or avoid operations whose results vary from run to run."""
    on_policy: Literal["close", "bitwise"] = "close"
    """How near the log-probs of training must be to the rollout's for the same weights. ``bitwise``: equal to the bit,
    or the run ends; kernels are company-invariant, and slower: docs/how-to/train-on-policy-to-the-bit.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the engine, which checks them; the options of Anytron's engines are listed below."""

    @property
    def repeatable(self) -> bool:
        """Whether each operation must give the same bits for the same operands: both modes need it."""
        return self.deterministic or self.on_policy == "bitwise"


class ExecutorSection(Section):
    """How and where processes run."""

    kind: str = "local"
    """Name of the executor (entry-point group ``anytron.executors``): ``local`` = processes on this machine,
    ``ray`` = on the machines of a Ray cluster."""
    start_timeout_s: float = Field(300.0, gt=0.0)
    """Seconds within which every engine must be built, counted from when the data are prepared."""
    call_timeout_s: float = Field(3600.0, gt=0.0)
    """Seconds that one call to the workers may take."""
    stall_timeout_s: float = Field(30.0, ge=1.0)
    """Seconds that ranks may wait in a collective that other ranks will never join (they have finished the call, or
    wait in another collective) before the call counts as lost. Waiting for a slow rank does not count:
    docs/how-to/survive-failures.md."""
    heartbeat_timeout_s: float = Field(60.0, ge=2.0)
    """Seconds without a sign of life after which a worker counts as lost: stopped, frozen, or stuck in a library. Each
    worker sends a heartbeat once a second, except while a library holds Python's lock, for example to load another
    library from a slow disk. The driver sends heartbeats too: a worker on another machine ends itself two seconds after
    the driver has been silent for this time."""
    num_threads: int | None = Field(None, ge=1)
    """Processor threads of each training rank; default: ``OMP_NUM_THREADS`` where it is set, else processors divided by
    ranks. Set it for runs that share a machine: waiting threads of two runs slow each other down many times over."""
    pass_variables: list[str] = Field(default_factory=list)
    """Environment variables of the driver that also reach workers on other machines (``ray``), in addition to those
    that configure Anytron, Python, torch, Hugging Face and the device's libraries. ``local`` passes all."""


class PlatformSection(Section):
    """The platform: the hardware and its options."""

    name: str | None = None
    """Platform to use; default: ``ANYTRON_PLATFORM``, else the one whose probe finds its device."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the platform, checked against its own schema; default: ``ANYTRON_PLATFORM_OPTIONS``, a JSON object."""


_RECORDED = 10
"""Most steps that a run records."""


class ProfileSection(Section):
    """Record steps with torch's profiler: a trace of each step and rank in ``profile/`` of the output directory."""

    steps: list[int] = Field(min_length=1, max_length=_RECORDED)
    """Steps to record, ten at most: a list, ``[3, 6]``, or a range with both ends, ``3-6``. A process's first steps are
    slower than later ones."""
    ranks: list[int] = Field(default_factory=lambda: [0], min_length=1)
    """Training ranks that are recorded."""
    stacks: bool = False
    """Also record the Python lines that called each operation; traces become several times as large."""
    memory: bool = False
    """Also record the memory that each operation allocates."""
    max_mib: float = Field(512.0, gt=0.0)
    """A trace that is larger is deleted, and a warning says so."""

    @field_validator("steps", mode="before")
    @classmethod
    def _from_first_to_last(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        ends = re.fullmatch(r"(\d+)\s*-\s*(\d+)", given.strip(), re.ASCII)
        if ends is None or int(ends[1]) > int(ends[2]):
            raise ValueError(
                f"{given!r} is not a range of steps: 3-6 means steps 3, 4, 5 and 6; [3, 6] means steps 3 and 6"
            )
        if (count := int(ends[2]) - int(ends[1]) + 1) > _RECORDED:
            raise ValueError(f"{given!r} selects {count} steps; at most {_RECORDED} can be recorded")
        return list(range(int(ends[1]), int(ends[2]) + 1))


class TrainerSection(Section):
    """The training loop."""

    total_steps: int = Field(100, ge=1)
    """Training steps; one step = one batch of rollouts, or of examples, and its updates."""
    seed: int = 0
    """The seed of all random numbers."""
    output_dir: str = "runs/default"
    """Where the run writes its files; relative to the current directory."""
    overwrite: bool = False
    """Delete the files that an earlier run wrote into ``output_dir``; if false, such files are an error. Other files
    are kept."""
    log_samples: int = Field(4, ge=0)
    """Samples written to ``samples.jsonl`` at each step."""
    max_restarts: int = Field(3, ge=0)
    """Processes that may be lost in a row without a completed step in between. After each loss, the run continues from
    its last checkpoint in new processes or, if a rollout process was lost, in the same step. 0 = the first loss ends
    the run."""
    save_hf: bool = True
    """Write the trained model as ``hf/`` at the end; with ``model.lora`` its adapters as ``adapter/``; the critic, if
    there is one, as ``critic/``."""
    rollout_log_prob_tolerance: float | None = Field(None, gt=0.0)
    """Stop if the mean absolute difference between rollout and training log-probs exceeds this. Without it the run
    goes on, and warns of a difference above 0.1."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What happens to an update whose loss or gradients are NaN or infinite; weights and optimizer are left as they
    were, and its mini-batch is saved for ``anytron replay``. ``stop`` ends the run, ``skip`` continues with the next
    update."""
    max_skipped_updates: int = Field(10, ge=1)
    """``skip``: this number of updates of a model in a row may be skipped; one more ends the run."""
    profile: ProfileSection | None = None
    """Record some steps with torch's profiler; keys below."""


class CheckpointSection(Section):
    """When the state of training is saved for ``resume``; besides these times, it is saved after the last step."""

    every_steps: int | None = Field(None, ge=1)
    """Save after each step whose number is a multiple of this one."""
    every_minutes: float | None = Field(30.0, gt=0.0)
    """Save when this number of minutes has passed since the last save. With ``every_steps``, whichever comes first."""
    keep: int = Field(2, ge=0)
    """Number of checkpoints that are kept, the newest ones; 0 = no checkpoint is written."""
    asynchronous: bool = Field(True, alias="async")
    """Write files while training continues; training waits only while the state is copied."""
    path: str | None = None
    """Directory of the checkpoints, relative to the current directory; default: ``checkpoints/`` in
    ``trainer.output_dir``. Every training rank must be able to write to it."""
    on_signal: bool = True
    """At SIGTERM, SIGHUP or SIGUSR1 (what schedulers send) save a checkpoint and exit with status 0."""


class SinkSection(Section):
    """A place to which metrics go besides ``metrics.jsonl``, which always has all of them."""

    sink: str
    """``tensorboard``, ``wandb``, ``mlflow``, ``swanlab``, or another that is installed (entry-point group
    ``anytron.metric_sinks``), or ``module:Class`` / ``file.py:Class``. Its errors never stop a run."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the sink; docs/how-to/watch-a-run.md lists the options of Anytron's sinks."""


class TrackingSection(Section):
    """How a run is shown, and where its metrics go besides ``metrics.jsonl``."""

    progress: bool = True
    """Show a progress bar (plain lines where the output is not a terminal); if false, only warnings are shown."""
    plot: bool = True
    """Draw ``plots/reward.png`` at the end; with ``algorithm.name=sft``, ``plots/loss.png``."""
    sinks: list[SinkSection] = Field(default_factory=list)
    """Where else metrics go; keys below."""
    close_timeout_s: float = Field(60.0, ge=0.0)
    """Seconds that all sinks together may take to end, after the last step or before a restart."""


class OptimizerSection(Section):
    """The optimizer and its learning rate."""

    name: Literal["adam", "sgd"] = "adam"
    """Adam, or plain SGD (which needs ``engine.distributed_optimizer=false``)."""
    lr: float = Field(1e-6, gt=0.0)
    """Peak learning rate."""
    min_lr: float = Field(0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay from ``lr`` to ``min_lr`` over ``trainer.total_steps``."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0: the first update changes nothing, as in Megatron."""
    weight_decay: float = Field(0.0, ge=0.0)
    """Weight decay: decoupled with Adam, added to the gradient with SGD."""
    beta1: float = Field(0.9, ge=0.0, lt=1.0)
    """Adam's first decay rate."""
    beta2: float = Field(0.999, ge=0.0, lt=1.0)
    """Adam's second decay rate."""
    eps: float = Field(1e-8, gt=0.0)
    """Adam's epsilon."""
    clip_grad: float = Field(1.0, ge=0.0)
    """Largest global L2 norm of the gradient; 0 = no clipping."""


class CriticSection(Section):
    """The critic of PPO, a second model. ``algorithm.advantage=gae`` requires it; your own estimator may use it."""

    path: str | None = None
    """Directory of the Hugging Face causal language model that the critic starts from, or of a ``critic/`` that a
    run has saved; default: the policy's model. Relative paths are relative to the YAML file."""
    optimizer: OptimizerSection = OptimizerSection()
    """The critic's optimizer. A critic often needs a higher learning rate than the policy (verl: 1e-5)."""
    clip_value: float = Field(0.5, ge=0.0)
    """Largest change of the value of a token in a step (default as in verl); 0 = no limit."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first training steps in which only the critic is trained."""


class TeacherSection(Section):
    """A frozen model to learn from, for ``algorithm.distillation_coefficient`` or your own advantage estimator."""

    path: str
    """Directory of a Hugging Face causal language model and its tokenizer, in which every token of the policy has the
    same id. It is split over the ranks as the policy is; the page docs/how-to/distil.md says more. Relative paths are
    relative to the YAML file."""


class RewardModelSection(Section):
    """A model that scores responses, for ``function: reward_model`` in ``rewards``; docs/how-to/use-a-reward-model.md.

    Its ranks are separate processes that share the devices of the training ranks.
    """

    path: str
    """Directory of a Hugging Face model for sequence classification with one label, and of its tokenizer, in which
    every token of the policy has the same id. Relative paths are relative to the YAML file. The reward
    model computes in ``model.dtype``."""
    parallel: ParallelSection = ParallelSection()
    """How the reward model is split, independently of the policy; the keys are the same as in section ``parallel``. Its
    rank i shares the device of training rank i, so that it can have at most as many ranks as training."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Most tokens that the reward model reads at one time, as ``engine.max_tokens_per_micro_batch``."""
    offload: bool = False
    """Keep the reward model's weights on the host, and move them to the device only to score."""
