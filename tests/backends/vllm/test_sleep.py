"""vLLM sleeps, and wakes up in the order that memory allows: a stand-in for vLLM, with the real one's parameters."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest

from anytron.base.errors import EngineError
from anytron_vllm import engine as vllm_engine_module
from anytron_vllm.sleep import SleepMode
from tests.fake_vllm import AsleepError, SleepingEngine, SleepingLLM
from tests.needs_vllm import NEEDS_VLLM
from tests.vllm_models import QWEN3, answers, hf_model, requests, run_config, send, vllm_engine, weights_of

WAKING = ["wake weights", "update", "wake kv_cache"]


class Loaded:
    """An engine on the stand-in, after its first update."""

    def __init__(self, directory):
        self.directory, self.version = directory, 0
        self.engine = vllm_engine(run_config(QWEN3, directory, sleep=True))
        self.vllm = self.engine._llm.llm_engine
        self.update()

    def update(self):
        self.version += 1
        weights = weights_of(hf_model(QWEN3, self.version), self.directory / "model")
        assert self.engine.load_weights(send(weights, self.directory, self.version)) == self.version
        return weights


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=SleepingLLM))
    monkeypatch.setattr(vllm_engine_module, "require_supported", lambda: SimpleNamespace(version="0.32.0"))
    monkeypatch.setattr(vllm_engine_module, "engine_input", lambda prompt, _: prompt.tokens)
    monkeypatch.setattr(vllm_engine_module, "sampling_params", lambda request: request.sampling)
    monkeypatch.setattr(vllm_engine_module.VllmEngine, "_lora_request", lambda self: None)
    return Loaded(tmp_path)


def test_after_each_step_vllm_sleeps_and_wakes_up_with_new_weights(loaded):
    for round_of in (1, 2):
        (one,) = answers(loaded.engine, requests([(3, 1)]))
        assert one.versions == (round_of,)
        loaded.vllm.calls.clear()
        use = loaded.engine.sleep()
        assert (use.peak, use.released) == (None, 10)
        assert loaded.vllm.asleep == {"weights", "kv_cache"}
        sent = loaded.update()
        assert loaded.vllm.calls == ["sleep 2", *WAKING]
        assert loaded.vllm.weights.keys() == sent.keys()


def test_vllm_gets_no_requests_and_makes_no_steps_while_it_sleeps(loaded):
    loaded.engine.sleep()
    with pytest.raises(EngineError, match="vLLM sleeps and takes no requests"):
        loaded.engine.submit(requests([(3, 1)]))
    assert loaded.engine.poll(0.0) == []
    with pytest.raises(EngineError, match="has no weights"):
        loaded.engine.logits([requests([(3, 1)])[0].prompt])
    assert loaded.vllm.requests == []
    loaded.update()
    assert len(answers(loaded.engine, requests([(3, 1)]))) == 1


def test_vllm_does_not_sleep_while_it_generates(loaded):
    loaded.engine.submit(requests([(3, 1)]))
    with pytest.raises(EngineError, match="Cannot sleep while requests are being generated"):
        loaded.engine.sleep()
    assert not loaded.vllm.asleep
    loaded.engine.abort()
    loaded.engine.sleep()


def test_a_refused_update_leaves_vllm_asleep_and_a_failed_one_can_be_repeated_or_slept_over(loaded, monkeypatch):
    loaded.engine.sleep()
    weights = weights_of(hf_model(QWEN3, 5), loaded.directory / "model")
    weights.pop("model.norm.weight")
    with pytest.raises(EngineError, match="is missing"):
        loaded.engine.load_weights(send(weights, loaded.directory, 5))
    assert loaded.vllm.asleep == {"weights", "kv_cache"}

    def broken(self):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(SleepingLLM, "finish_anytron_update", broken)
        with pytest.raises(EngineError, match=r"(?s)could not load the weights.*no memory"):
            loaded.update()
    assert loaded.vllm.asleep == {"kv_cache"}
    loaded.engine.sleep()
    loaded.update()
    assert not loaded.vllm.asleep


@pytest.mark.parametrize(
    ("method", "replacement", "said"),
    [
        ("wake_weights", lambda self: None, "an update began"),
        ("wake_weights", lambda self: self._wake("kv_cache"), "the cache woke up first"),
        ("wake_cache", lambda self: None, "the cache was emptied"),
    ],
)
def test_any_other_order_fails(loaded, monkeypatch, method, replacement, said):
    """The stand-in notices what these tests rely on."""
    loaded.engine.sleep()
    monkeypatch.setattr(SleepMode, method, replacement)
    with pytest.raises((AsleepError, EngineError), match=said):
        loaded.update()


@pytest.mark.parametrize(("call", "says"), [("sleep", False), ("load_weights", True)])
def test_what_vllm_says_of_its_sleep_is_compared(loaded, monkeypatch, call, says):
    if call == "load_weights":
        loaded.engine.sleep()
    monkeypatch.setattr(SleepingEngine, "is_sleeping", lambda self: says)
    with pytest.raises(EngineError, match=f"(?s)is_sleeping.. says {says} after"):
        loaded.engine.sleep() if call == "sleep" else loaded.update()


@pytest.mark.parametrize("pair", ["LLM", "LLMEngine"])
@pytest.mark.vllm
@pytest.mark.skipif(NEEDS_VLLM[1].args[0], reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")
def test_the_stand_in_has_the_parameters_of_the_installed_vllm(pair):
    if pair == "LLM":
        from vllm import LLM

        real, stand_in, names = LLM, SleepingLLM, ("sleep", "wake_up", "collective_rpc")
    else:
        from vllm.v1.engine.llm_engine import LLMEngine

        real, stand_in = LLMEngine, SleepingEngine
        names = ("is_sleeping", "add_request", "abort_request", "step", "reset_prefix_cache", "reset_encoder_cache")
    for name in names:
        ours, theirs = (inspect.signature(getattr(one, name)).parameters.values() for one in (stand_in, real))
        kept = [(one.name, one.default) for one in ours if one.kind is not inspect.Parameter.VAR_KEYWORD]
        given = [(one.name, one.default) for one in theirs]
        assert given[: len(kept)] == kept, name
        assert len(kept) == len(given) or name == "add_request"
