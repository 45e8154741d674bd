"""vLLM in the process of the tests: one dense model, whose weights each test replaces."""

from __future__ import annotations

import pytest

from tests.vllm_models import QWEN3, hf_model, run_config, send, vllm_engine, weights_of


class Loaded:
    """An engine, and a Hugging Face model with the weights that it has."""

    def __init__(self, engine, directory):
        self.engine, self.directory, self.model, self.version = engine, directory, None, 0

    def update(self, seed):
        """Give the engine other weights; return their version."""
        self.model, self.version = hf_model(QWEN3, seed), self.version + 1
        return self.engine.load_weights(send(self.weights(), self.directory, self.version))

    def weights(self):
        return weights_of(self.model, self.directory / "model")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory):
    """Batches are smaller than what the tests ask for, in requests and in tokens."""
    directory = tmp_path_factory.mktemp("vllm")
    engine = vllm_engine(run_config(QWEN3, directory, max_batch_size=48, options={"max_num_batched_tokens": 512}))
    yield Loaded(engine, directory)
    engine.close()


@pytest.fixture
def loaded(vllm):
    vllm.update(seed=1)
    return vllm
