"""The model of a directory in a rollout engine alone: its weights are read from files, and nothing is trained."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import ConfigError, EngineError, TransferError
from anytron.base.files import exhausted
from anytron.run.rollout.pool import RolloutPool
from anytron.run.rollout.replica import WeightAnswers
from anytron.task.data.examination import examined
from anytron.task.data.model_files import CONFIG_FILE, tensor_names
from anytron.task.data.pretrained import end_token_ids, load_hf_config, load_tokenizer, padding_token_id
from anytron.task.data.vision import load_vision
from anytron.workers.engines.rollout_engine import RolloutEngine, SamplingParams
from anytron.workers.executor.protocol import submit
from anytron.workers.weights.transfer import Piece, ReceivedWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from anytron.config.schema import RunConfig
    from anytron.task.data.composites import TensorNames
    from anytron.task.data.vision import VisionProcessor
    from anytron.workers.executor.protocol import Executor, WorkerGroup


@dataclass(frozen=True)
class DirectoryWeights:
    """The weights in the safetensors files of a Hugging Face directory: a :class:`WeightOrigin`.

    Tensors that the model does not have are left out, as transformers does: directories may hold modules for
    speculative decoding, and buffers.

    Attributes:
        path: The directory, readable by the rollout process.
        version: Version that the rollout engine reports for these weights.
    """

    path: str
    version: int = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[ReceivedWeights]:
        """Yield an iterable that reads the tensors of the directory one by one."""
        yield _Tensors(self.version, sorted(Path(self.path).glob("*.safetensors")), tensor_names(Path(self.path)))


@dataclass(frozen=True)
class _Tensors:
    version: int
    files: Sequence[Path]
    names: TensorNames

    def __iter__(self) -> Iterator[Piece]:
        from safetensors import SafetensorError, safe_open

        for path in self.files:
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        if (own := self.names.inner(name)) is not None:
                            tensor = file.get_tensor(name)
                            yield Piece(own, tuple(tensor.shape), 0, tensor.reshape(-1), optional=True)
            except (OSError, SafetensorError) as error:  # noqa: PERF203 - the error names the file
                raise exhausted(error, str(path)) or TransferError(
                    "A file of weights cannot be read.",
                    where=str(path),
                    why=str(error),
                    fix="copy or download the file again",
                ) from error


class DirectoryModel:
    """The model in a directory, loaded into the rollout processes of a configuration.

    The constructor reads config and tokenizer. :meth:`start` starts the processes and does not wait for them, so that
    several models start at the same time; :meth:`load` waits. The executor ends the processes.

    Args:
        config: Configuration with ``model.path`` and section ``rollout``.

    Attributes:
        directory: The model directory.
        tokenizer: The Hugging Face tokenizer.
        vocab_size: Token ids are below this.
        context: Most tokens of prompt and answer together; None = the model's config does not say.
        sampling: Sampling parameters of the configuration.
        pool: The rollout engines, after :meth:`start`.

    Raises:
        AnytronError: The config or the tokenizer cannot be loaded.
    """

    pool: RolloutPool

    def __init__(self, config: RunConfig) -> None:
        assert config.model.path is not None
        self._settings = config.rollout
        self.directory = config.model.path
        with examined(config.model):
            hf_config = load_hf_config(config.model)
            self.tokenizer: Any = load_tokenizer(config.model)
        text_config = hf_config.get_text_config()
        self._model, self._hf_config = config.model, hf_config
        self.vocab_size: int = text_config.vocab_size
        self.context: int | None = getattr(text_config, "max_position_embeddings", None)
        ends = end_token_ids(config.model, self.tokenizer, self.vocab_size)
        padding = padding_token_id(config.model, self.tokenizer, ends, self.vocab_size)
        self.sampling = SamplingParams.from_config(config.rollout, end_token_ids=ends, pad_token_id=padding)

    def vision(self, tell: Callable[[str], None]) -> VisionProcessor | None:
        """Load the image processor; None for a model without image input.

        Args:
            tell: Called with a line that says why the model gets no images, if it takes images that Anytron cannot
                prepare.
        """
        try:
            return load_vision(self._model, self._hf_config, self.tokenizer, tell)
        except ConfigError as error:
            tell(f"requests must not contain images: {error.what} {error.why}")
            return None

    def start(self, executor: Executor) -> None:
        """Start the rollout processes."""
        self.pool = RolloutPool(executor, self._settings, lost=None)

    def load(self) -> None:
        """Load the weights, and wait until the model can answer.

        Raises:
            AnytronError: A process did not start, or the weights cannot be loaded.
        """
        try:
            self.pool.load_weights(partial(_give, DirectoryWeights(self.directory)))
        except EngineError as error:
            fix = f"download or write the directory again: {CONFIG_FILE} and weights must be of one model"
            fix += f"; or {error.fix}" if error.fix else ""
            where = f"{self.directory}: {error.where}"
            raise EngineError(error.what, where=where, why=error.why, fix=fix) from error


def _give(origin: DirectoryWeights, replicas: Sequence[WorkerGroup]) -> WeightAnswers:
    calls = [submit(replica, RolloutEngine.load_weights, origin) for replica in replicas]
    return WeightAnswers(origin.version, [call.result()[0] for call in calls])
