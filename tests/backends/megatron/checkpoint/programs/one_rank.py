"""Hostile files, a full disk and an update while files are written: ``one_rank MODEL OUTPUT PORT``. Prints JSON."""

import json
import os
import pickle
import resource
import shutil
import sys
import threading
from pathlib import Path

from anytron.device.hooks.types import ProcessInfo
from anytron.device.stack import open_device_stack
from anytron.workers.engines.context import EngineContext
from tests.backends.megatron.ranks import engine_config

model, output, port = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
layer = open_device_stack("cpu", engine="megatron")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint.metadata import BytesStorageMetadata  # noqa: E402

from anytron.algorithms.policy_loss import PolicyLoss  # noqa: E402
from anytron.base.errors import AnytronError  # noqa: E402
from anytron.config.algorithm import AlgorithmSection  # noqa: E402
from anytron.sequences.batch import RaggedBatch  # noqa: E402
from anytron.workers.weights.transfer import WeightFile  # noqa: E402
from anytron_megatron.checkpoint import writer  # noqa: E402
from anytron_megatron.engine import MegatronEngine  # noqa: E402

config = engine_config(model, output, optimizer={"name": "adam", "lr": 1e-2})
engine = MegatronEngine(EngineContext(config, layer, ProcessInfo("trainer", 0, 0, world_size=1)))
response = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1]) > 0
recorded = -4.6 * response
batch = RaggedBatch(
    lengths=torch.tensor([5, 3]),
    tokens=torch.arange(3, 11),
    response_mask=response,
    rollout_log_probs=recorded,
    old_log_probs=recorded,
    advantages=torch.tensor([1.0, -1.0]).repeat_interleave(torch.tensor([5, 3])),
    loss_weights=response / response.sum(),
    token_shares=response / response.sum(),
)
loss = PolicyLoss(AlgorithmSection())


def update() -> None:
    engine.update([batch], loss)


def weights() -> dict[str, torch.Tensor]:
    engine.export_weights(WeightFile(str(output / "weights.safetensors")))
    return load_file(output / "weights.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def save(name: str, *, asynchronous: bool = False) -> Path:
    path = output / name
    path.mkdir()
    engine.save_checkpoint(str(path), asynchronous=asynchronous)
    return path


def saved(name: str) -> Path:
    path = save(name)
    engine.written_files(wait=True)
    return path


def failure(call, *arguments, **named) -> dict[str, str]:
    try:
        call(*arguments, **named)
    except AnytronError as error:
        return {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
    return {}


def snapshot(name: str) -> dict[str, bool]:
    """Update while the writer waits. Does the checkpoint hold the state before the update, or after?"""
    begin, run = threading.Event(), writer.PartWriter.run
    writer.PartWriter.run = lambda self: (begin.wait(60), run(self))[1]
    before = weights()
    path = save(name, asynchronous=True)
    update()
    unfinished = engine.written_files(wait=False)
    begin.set()
    engine.written_files(wait=True)
    writer.PartWriter.run = run
    after = weights()
    engine.load_checkpoint(str(path))
    loaded = weights()
    engine.load_checkpoint(str(good))
    return {
        "moved": not same(before, after),
        "unfinished": unfinished is None,
        "before": same(loaded, before),
        "after": same(loaded, after),
    }


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def table_of(path: Path):
    return pickle.loads((path / ".metadata").read_bytes())


def evil_table(path: Path, marker: Path) -> Path:
    (path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    return path / ".metadata"


def evil_beside_a_table(path: Path, marker: Path) -> Path:
    table = table_of(path)
    table.planner_data = Evil(marker)
    (path / ".metadata").write_bytes(pickle.dumps(table))
    return path / ".metadata"


def evil_common(path: Path, marker: Path) -> Path:
    torch.save(Evil(marker), path / "common.pt")
    return path / "common.pt"


def evil_part(path: Path, marker: Path) -> Path:
    part = path / "__0_0.distcp"
    torch.save(Evil(marker), part)
    table = table_of(path)
    for stored in table.storage_data.values():
        stored.offset, stored.length = 0, part.stat().st_size
    (path / ".metadata").write_bytes(pickle.dumps(table))
    return part


def evil_extra_state(path: Path, marker: Path) -> Path:
    part = evil_part(path, marker)
    table = table_of(path)
    name = next(iter(table.state_dict_metadata))
    table.state_dict_metadata[name] = BytesStorageMetadata()
    (path / ".metadata").write_bytes(pickle.dumps(table))
    return part


def evil_part_elsewhere(path: Path, marker: Path) -> Path:
    elsewhere = path.parent / "elsewhere.distcp"
    torch.save(Evil(marker), elsewhere)
    table = table_of(path)
    for stored in table.storage_data.values():
        stored.relative_path = f"../{elsewhere.name}"
    (path / ".metadata").write_bytes(pickle.dumps(table))
    return elsewhere


def attack(plant) -> dict[str, object]:
    path, marker = output / plant.__name__, output / f"{plant.__name__}.ran"
    shutil.copytree(good, path)
    planted = plant(path, marker)
    refused = failure(engine.load_checkpoint, str(path))
    ran = marker.exists()
    # The payload is live: whoever reads it without care runs it.
    if planted.name == ".metadata":
        pickle.loads(planted.read_bytes())
    else:
        torch.load(planted, weights_only=False)
    return {"refused": refused, "ran": ran, "live": marker.exists()}


def damage(name: str, change) -> dict[str, str]:
    path = output / f"damaged{name.replace('/', '-')}"
    shutil.copytree(good, path)
    file = path / name
    content = file.read_bytes()
    file.write_bytes(change(content))
    return failure(engine.load_checkpoint, str(path))


def full_disk() -> dict[str, object]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    found = {}
    for name, asynchronous in (("in-time", False), ("beside", True)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        save(f"full-{name}", asynchronous=asynchronous)
        found[name] = failure(engine.written_files, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    save("given-up", asynchronous=True)  # nobody asks for its files, nor for those of the next
    save("given-up-too", asynchronous=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    update()
    moved = weights()
    engine.load_checkpoint(str(saved("after-full")))
    found["afterwards"] = same(moved, weights())
    engine.load_checkpoint(str(good))
    return found


update()
good, first = saved("good"), weights()
result = {"snapshot": snapshot("snapshot")}
copies = writer.HostCopies.of
writer.HostCopies.of = lambda self, tensors: tensors
result["aliased"] = snapshot("aliased")
writer.HostCopies.of = copies
result["full"] = full_disk()
result["attacks"] = {
    plant.__name__: attack(plant)
    for plant in (evil_table, evil_beside_a_table, evil_common, evil_part, evil_extra_state, evil_part_elsewhere)
}
result["damaged"] = {
    name: damage(name, change)
    for name, change in {
        "__0_0.distcp": lambda content: content[: len(content) // 2],
        ".metadata": lambda content: content[: len(content) // 2],
        "progress.json": lambda content: content[:-3],
        "random-00000.safetensors": lambda content: content[:100],
    }.items()
}
update()
moved = weights()
engine.load_checkpoint(str(good))
result["good"] = same(weights(), first) and not same(moved, first)
engine.close()
layer.undo()
print(json.dumps(result))
