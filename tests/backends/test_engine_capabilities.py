"""What the engines declare is what their classes implement."""

import ast
import importlib.util
from pathlib import Path

import pytest

from anytron.components import EngineInfo
from anytron.engines import protocol
from anytron_megatron.options import MEGATRON, MEGATRON_ROLLOUT
from anytron_rollout.options import TRANSFORMERS
from anytron_vllm.options import VLLM

TRAINING = {
    "critic": protocol.CriticEngine,
    "adapters": protocol.AdapterEngine,
    "checkpoints": protocol.CheckpointEngine,
    "observation": protocol.ObservableEngine,
    "inspection": protocol.InspectableEngine,
    "offload": protocol.OffloadingEngine,
}
ROLLOUT = {
    "observation": protocol.ObservableRollout,
    "comparison": protocol.ComparableRollout,
    "sleep": protocol.SleepingRollout,
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
        (MEGATRON, protocol.TrainingEngine, TRAINING),
        (TRANSFORMERS, protocol.RolloutEngine, ROLLOUT),
        (VLLM, protocol.RolloutEngine, ROLLOUT),
    ],
    ids=["megatron", "transformers", "vllm"],
)
def test_declared_capabilities_are_those_of_the_class(info, base, capabilities):
    methods = methods_of(info)
    assert methods >= public(base)
    with_methods = info.capabilities - {"routing"}
    assert with_methods == {name for name, kind in capabilities.items() if methods >= public(kind)}


def test_a_rollout_engine_that_is_part_of_a_training_engine_has_its_class_which_generates():
    assert MEGATRON_ROLLOUT.part_of == "megatron"
    assert MEGATRON_ROLLOUT.engine == MEGATRON.engine
    assert methods_of(MEGATRON) >= public(protocol.GeneratingEngine)


def test_a_training_engine_starts_with_seven_methods_and_a_rollout_engine_with_five():
    training = {"topology", "score", "update", "export_weights", "save_hf", "describe", "close"}
    assert public(protocol.TrainingEngine) == training
    assert public(protocol.RolloutEngine) == {"submit", "poll", "abort", "load_weights", "describe"}
