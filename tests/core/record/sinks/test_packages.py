"""Each sink with its real package, without a network: what it wrote is read back by the package's own reader."""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import struct
import threading
import time
from pathlib import Path

from tests.core.record.sinks.needs import needs

STEPS = 3
HOSTILE = {"env/../x\n\u2028\ud800": 1.0, "nan": math.nan, "inf": math.inf, "huge": 10**400}


def record(step):
    return {"step": step, "reward/mean": step / 4, **HOSTILE}


def write(sinks, steps):
    for step in steps:
        sinks.write(record(step))


def continued(with_sinks, tmp_path, sink):
    """Three steps, and then, after the first of them, the second and third again, and a fourth."""
    with with_sinks(sink) as sinks:
        write(sinks, (1, 2, 3))
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    with with_sinks(sink, after=1) as sinks:
        write(sinks, (2, 3, 4))
    return tmp_path / "run" / "tracking" / sink["sink"]


class TestTensorBoard:
    pytestmark = needs("tensorboard")

    def test_it_reads_what_was_written_and_repeated_steps_once(self, with_sinks, tmp_path, told):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = continued(with_sinks, tmp_path, {"sink": "tensorboard"})
        events = EventAccumulator(str(folder))
        events.Reload()
        assert [(one.step, one.value) for one in events.Scalars("reward/mean")] == [(n, n / 4) for n in (1, 2, 3, 4)]
        assert all(math.isnan(one.value) for one in events.Scalars("nan"))
        assert {one.value for name in ("inf", "huge") for one in events.Scalars(name)} == {math.inf}
        assert told.warnings == []

    def test_validations_stand_beside_steps(self, with_sinks, tmp_path, told):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with with_sinks({"sink": "tensorboard"}) as sinks:
            for step in (0, 2):
                sinks.write({"step": step, "validation/a/mean@1": step / 8}, validation=True)
        events = EventAccumulator(str(tmp_path / "run" / "tracking" / "tensorboard"))
        events.Reload()
        assert [(one.step, one.value) for one in events.Scalars("validation/a/mean@1")] == [(0, 0.0), (2, 0.25)]
        assert told.warnings == []

    def test_a_full_disk_is_told_of_once(self, with_sinks, tmp_path, told, monkeypatch):
        """No file may grow beyond a size: what the kernel answers goes the way of a full disk's answer."""
        ended = []  # TensorBoard's own thread meets the answer first, and dies of it
        monkeypatch.setattr(threading, "excepthook", lambda raised: ended.append(raised.exc_type))
        before = threading.enumerate()
        many = {f"{'n' * 200}{number}": 0.0 for number in range(1000)}  # a step has 300 kB
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        with with_sinks({"sink": "tensorboard"}, timeout=60.0) as sinks:
            sinks.write(record(1))
            while not list((tmp_path / "run").glob("tracking/*/*")):
                time.sleep(0.05)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
            try:
                for step in range(2, 12):
                    sinks.write({"step": step, **many})
                sinks.close()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        for thread in set(threading.enumerate()) - set(before):
            thread.join(60)
        assert told.warnings[0].startswith("the sink tensorboard failed: OSError: [Errno 27]")
        assert "lacks" in told.warnings[-1]
        assert ended == [OSError]


class TestWandb:
    pytestmark = needs("wandb")

    def test_a_run_that_continues_has_the_same_id(self, with_sinks, tmp_path, told):
        sink = {"sink": "wandb", "options": {"mode": "offline", "tags": ["a"]}}
        folder = continued(with_sinks, tmp_path, sink)
        files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
        name = (folder / "run_id").read_text()
        assert [path.stem for path in files] == [f"run-{name}"] * 2
        assert told.warnings == []
        assert [history(path) for path in files] == [[1, 2, 3], [2, 3, 4]]
        assert b"topsecret" not in b"".join(path.read_bytes() for path in files)

    def test_a_service_that_is_killed_ends_no_run_and_no_import(self, with_sinks, told, tmp_path, monkeypatch):
        (tmp_path / "fastai.py").touch()  # one of those of which W&B tells its service that they were imported
        monkeypatch.syspath_prepend(tmp_path)
        with with_sinks({"sink": "wandb", "options": {"mode": "offline"}}, timeout=20.0) as sinks:
            sinks.write(record(1))
            deadline = time.monotonic() + 120
            while not told.notes and time.monotonic() < deadline:
                time.sleep(0.2)
                sinks.write(record(1))
            for child in services():
                os.kill(child, signal.SIGKILL)
            time.sleep(0.5)
            importlib.import_module("fastai")
            write(sinks, range(2, 6))
        assert any("the sink wandb failed" in one or "has not closed" in one for one in told.warnings)


def services():
    """The processes that W&B has started from this one."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    for pid in pids:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"wandb-core" in command and parent == os.getpid():
            yield pid


def messages(data):
    """The messages in a file of W&B: after 7 bytes a log as LevelDB writes it, in blocks of 32 KiB."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)  # 1 whole, 2 first, 3 middle, 4 last
        parts = (b"" if kind in (1, 2) else parts) + data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield parts


def history(path):
    """The steps in a file of W&B."""
    from wandb.proto import wandb_internal_pb2

    steps = []
    for data in messages(path.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(data)
        if message.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in message.history.item}
            steps.append(int(json.loads(items["step"])))
    return steps


class TestMlflow:
    pytestmark = needs("mlflow")

    def test_a_run_that_continues_is_the_same_one(self, with_sinks, tmp_path, told):
        import mlflow

        address = f"sqlite:///{tmp_path}/all.db"
        sink = {"sink": "mlflow", "options": {"tracking_uri": address, "experiment": "e"}}
        continued(with_sinks, tmp_path, sink)
        assert told.warnings == []
        client = mlflow.MlflowClient(tracking_uri=address)
        (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
        steps = [one.step for one in client.get_metric_history(run.info.run_id, "reward/mean")]
        assert sorted(steps) == [1, 2, 2, 3, 3, 4]
        assert run.data.metrics["reward/mean"] == 1.0
        assert "env/_/x___" in run.data.metrics
        assert (run.info.status, run.data.params["data.options.api_key"]) == ("FINISHED", "(hidden)")


class TestSwanLab:
    pytestmark = needs("swanlab")

    def test_it_writes_offline(self, with_sinks, tmp_path, told):
        with with_sinks({"sink": "swanlab", "options": {"mode": "offline"}}) as sinks:
            write(sinks, (1, 2, 3))
        assert told.warnings == []
        assert any(path.is_file() and path.stat().st_size for path in (tmp_path / "run" / "tracking").rglob("*"))
