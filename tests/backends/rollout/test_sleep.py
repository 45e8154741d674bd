"""A rollout engine leaves its device, and is what it was when it has weights again."""

import pytest

from anytron.base.errors import EngineError
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from tests.backends.rollout.conftest import generate

SAMPLING = SamplingParams(max_new_tokens=6)
PROMPTS = [PromptInputs((1, 10)), PromptInputs((3, 2, 7))]


def test_it_gives_all_memory_of_its_model_back_and_wakes_with_weights(engine, reference, write):
    manifest = write(reference.state_dict())
    engine.load_weights(manifest)
    before = generate(engine, PROMPTS, SAMPLING, seed=3)
    model = [*engine._model.parameters(), *engine._model.buffers()]
    size = sum(tensor.nbytes for tensor in model)
    assert size > sum(tensor.nbytes for tensor in engine._model.state_dict().values())  # frequencies have no weights

    for _ in range(2):
        for _ in range(2):  # asleep, it sleeps on
            assert engine.sleep().released == size
            assert sum(tensor.untyped_storage().nbytes() for tensor in model) == 0
        engine.submit([])
        with pytest.raises(EngineError, match="no weights yet"):
            engine.poll(1.0)
        assert engine.load_weights(manifest) == manifest.version
        assert generate(engine, PROMPTS, SAMPLING, seed=3) == before
