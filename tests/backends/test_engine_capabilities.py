"""What the engines declare is what their classes implement."""

import ast
import importlib.util
from pathlib import Path

import pytest

from anytron.base.components import EngineInfo
from anytron.workers.engines import rollout_engine, tracing, training_engine
from anytron_megatron.options import MEGATRON, MEGATRON_ROLLOUT
from anytron_rollout.options import TRANSFORMERS
from anytron_vllm.options import VLLM

TRAINING = {
    "critic": training_engine.CriticEngine,
    "adapters": training_engine.AdapterEngine,
    "checkpoints": training_engine.CheckpointEngine,
    "observation": training_engine.ObservableEngine,
    "gradients": training_engine.DifferentiableEngine,
    "inspection": training_engine.InspectableEngine,
    "tracing": tracing.TraceableEngine,
    "offload": training_engine.OffloadingEngine,
}
ROLLOUT = {
    "observation": rollout_engine.ObservableRollout,
    "adapters": rollout_engine.AdapterRollout,
    "comparison": rollout_engine.ComparableRollout,
    "sleep": rollout_engine.SleepingRollout,
}


def methods_of(info: EngineInfo) -> set[str]:
    """The public methods of an engine's class, read from its file: importing it needs a prepared process."""
    module, _, name = info.engine.partition(":")
    package = importlib.util.find_spec(module.partition(".")[0])
    file = Path(package.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
    classes = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == name]
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}


def public(kind: type) -> set[str]:
    return {name for base in kind.__mro__ for name in vars(base) if callable(vars(base)[name]) and name[0] != "_"}


@pytest.mark.parametrize(
    ("info", "base", "capabilities"),
    [
        (MEGATRON, training_engine.TrainingEngine, TRAINING),
        (TRANSFORMERS, rollout_engine.RolloutEngine, ROLLOUT),
        (VLLM, rollout_engine.RolloutEngine, ROLLOUT),
    ],
    ids=["megatron", "transformers", "vllm"],
)
def test_declared_capabilities_are_those_of_the_class(info, base, capabilities):
    methods = methods_of(info)
    assert methods >= public(base)
    with_methods = info.capabilities - {"bitwise", "language_part", "quantization", "routing", "teacher"}
    assert with_methods == {name for name, kind in capabilities.items() if methods >= public(kind)}


def test_a_rollout_engine_that_is_part_of_a_training_engine_has_its_class_which_generates():
    assert MEGATRON_ROLLOUT.part_of == "megatron"
    assert MEGATRON_ROLLOUT.engine == MEGATRON.engine
    assert methods_of(MEGATRON) >= public(training_engine.GeneratingEngine)


def test_a_training_engine_starts_with_seven_methods_and_a_rollout_engine_with_five():
    training = {"topology", "score", "update", "export_weights", "save_hf", "describe", "close"}
    assert public(training_engine.TrainingEngine) == training
    assert public(rollout_engine.RolloutEngine) == {"submit", "poll", "abort", "load_weights", "describe"}
