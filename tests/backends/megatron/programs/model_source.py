"""An engine over a source with the members of ``ModelSource`` and no others: ``model_source MODEL OUTPUT PORT``."""

import os
import sys
from pathlib import Path
from typing import Any

from anytron.device.hooks.types import ProcessInfo
from anytron.device.stack import open_device_stack
from anytron.workers.engines.context import EngineContext
from tests.backends.megatron.ranks import engine_config

model, output, port = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
layer = open_device_stack("cpu", engine="megatron")

import torch  # noqa: E402

from anytron.sequences.batch import RaggedBatch  # noqa: E402
from anytron.workers.weights.transfer import WeightFile  # noqa: E402
from anytron_megatron.engine import MegatronEngine  # noqa: E402
from anytron_megatron.models.source import ModelSource  # noqa: E402

MEMBERS = {name for name in vars(ModelSource) if not name.startswith("_")}


class Source:
    def __init__(self, bridge: ModelSource) -> None:
        self._bridge = bridge

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise AttributeError(f"a source has no {name}")
        opened.append(name)
        return getattr(self._bridge, name)


class Engine(MegatronEngine):
    def open_source(self, directory: Path, *, policy: bool) -> ModelSource:
        return Source(super().open_source(directory, policy=policy))


opened: list[str] = []
config = engine_config(model, output, algorithm={"advantage": "gae"}, critic={})
engine = Engine(EngineContext(config, layer, ProcessInfo("trainer", 0, 0, world_size=1)))
batch = RaggedBatch(
    lengths=torch.tensor([5, 3]), tokens=torch.arange(3, 11), response_mask=torch.ones(8, dtype=torch.bool)
)
(scores,) = engine.score([batch])
(values,) = engine.values([batch])
engine.attention_conformance()
manifest = engine.export_weights(WeightFile(str(output / "weights.safetensors")))
engine.save_hf(str(output / "hf"))
engine.close()
layer.undo()
torch.save({"tokens": batch.tokens, "log_probs": scores.log_probs, "values": values}, output / "found.pt")
print("unused:", *sorted(MEMBERS - set(opened)))
