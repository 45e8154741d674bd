"""A model directory that answers prompts by a rollout engine alone: no training engine is started."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anytron.base.errors import TransferError
from anytron.run.rollout.pool import RolloutPool
from anytron.run.rollout.replica import WeightAnswers
from anytron.task.data.examination import examined
from anytron.task.data.pretrained import end_token_ids, load_hf_config, load_tokenizer, padding_token_id
from anytron.task.data.prompts import Prompt, tokenize
from anytron.task.data.thoughts import decode_responses
from anytron.workers.engines.rollout_engine import PromptInputs, RolloutEngine, SamplingParams
from anytron.workers.remote import submit
from anytron.workers.weights.transfer import Piece, ReceivedWeights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from anytron.config.schema import RunConfig
    from anytron.workers.executor.protocol import Executor, WorkerGroup


@dataclass(frozen=True)
class ModelDirectory:
    """The weights in the safetensors files of a Hugging Face directory: a :class:`WeightOrigin`.

    Attributes:
        path: The directory, readable by the rollout process.
        version: As which weights they count.
    """

    path: str
    version: int = 0

    @contextlib.contextmanager
    def open(self) -> Iterator[ReceivedWeights]:
        """Open the directory.

        Raises:
            TransferError: It has no safetensors file, or one that cannot be read.
        """
        files = sorted(Path(self.path).glob("*.safetensors"))
        if not files:
            fix = "save the model in this format: save_pretrained of transformers does"
            raise TransferError("A model directory has no safetensors file.", where=self.path, fix=fix)
        yield _Tensors(self.version, files)


@dataclass(frozen=True)
class _Tensors:
    version: int
    files: Sequence[Path]

    def __iter__(self) -> Iterator[Piece]:
        from safetensors import SafetensorError, safe_open

        path = None
        try:
            for path in self.files:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        tensor = file.get_tensor(name)
                        yield Piece(name, tuple(tensor.shape), 0, tensor.reshape(-1), optional=False)
        except (OSError, SafetensorError) as error:
            raise TransferError("A file of weights cannot be read.", where=str(path), why=str(error)) from error


class Answers:
    """Gives the answers of a model.

    Args:
        config: With ``model.path`` and section ``rollout``.
        executor: Starts the rollout process; the constructor waits until it has the weights.

    Raises:
        AnytronError: The model cannot be read, or the process does not start.
    """

    def __init__(self, config: RunConfig, executor: Executor) -> None:
        assert config.model.path is not None
        with examined(config.model):
            vocab_size = load_hf_config(config.model).get_text_config().vocab_size
            self._tokenizer: Any = load_tokenizer(config.model)
        self._vocab_size = vocab_size
        ends = end_token_ids(config.model, self._tokenizer, vocab_size)
        self._sampling = SamplingParams(
            max_new_tokens=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            top_p=config.rollout.top_p,
            top_k=config.rollout.top_k,
            stop=tuple(config.rollout.stop),
            end_token_ids=ends,
            pad_token_id=padding_token_id(config.model, self._tokenizer, ends, vocab_size),
        )
        self._pool = RolloutPool(executor, config.rollout, lost=None)
        self._pool.load_weights(partial(_give, ModelDirectory(config.model.path)))

    def __call__(self, texts: Sequence[str], *, system: str | None, seed: int) -> list[str]:
        """Answer each text by itself.

        Args:
            texts: What a user writes; the chat template makes prompts of them. A tokenizer without one reads the text
                as it stands.
            system: The system's message before each of them; None = what the template writes without one.
            seed: Of the sampling.
        """
        if self._tokenizer.chat_template:
            before = [] if system is None else [{"role": "system", "content": system}]
            asked = [Prompt(f"{place}", messages=[*before, user(text)]) for place, text in enumerate(texts)]
        else:
            asked = [Prompt(f"{place}", text=text) for place, text in enumerate(texts)]
        prompts = [PromptInputs(one.tokens) for one in tokenize(asked, self._tokenizer, vocab_size=self._vocab_size)]
        responses = self._pool.finish(self._pool.begin(prompts, self._sampling, 1, seed))
        return decode_responses(self._tokenizer, [one.tokens for (one,) in responses])


def user(text: str) -> dict[str, str]:
    """Make a user's message."""
    return {"role": "user", "content": text}


def _give(origin: ModelDirectory, replicas: Sequence[WorkerGroup]) -> WeightAnswers:
    calls = [submit(replica, RolloutEngine.load_weights, origin) for replica in replicas]
    return WeightAnswers(origin.version, [call.result()[0] for call in calls])
