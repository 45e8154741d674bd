"""A rank that stops itself in the middle of a save: ``late_rank MODEL OUTPUT PORT``.

Each line that it reads is a list of JSON: ``["save", PATH, MOMENT]``, where MOMENT is null or one of ``MOMENTS``, or
``["load", PATH]``. It prints a JSON object for each: the files, or the error, or a checksum of the weights.
"""

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from anytron.device.hooks.types import ProcessInfo
from anytron.device.stack import open_device_stack
from anytron.workers.engines.context import EngineContext
from tests.backends.megatron.ranks import engine_config

MOMENTS = ("before the call", "between two files", "before the table of contents")

if __name__ == "__main__":
    model, output, port = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    layer = open_device_stack("cpu", engine="megatron")

    from anytron.base.errors import AnytronError
    from anytron.record.checkpoint.manifest import FileRecord
    from anytron.workers.weights.transfer import WeightFile
    from anytron_megatron.checkpoint import writer
    from anytron_megatron.engine import MegatronEngine

    output.mkdir()
    engine = MegatronEngine(
        EngineContext(engine_config(model, output), layer, ProcessInfo("trainer", 0, 0, world_size=1))
    )
    write_file = writer.write_file
    calls: list[str] = []

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def save(path: str, moment: str | None) -> dict[str, object]:
        def write_and_stop(*arguments):
            record = write_file(*arguments)
            writer.write_file = write_file
            stop()
            return record

        if moment == "before the call":
            stop()
        if moment == "between two files":
            writer.write_file = write_and_stop
        calls.append("save_checkpoint")
        engine.save_checkpoint(path, asynchronous=False)
        if moment == "before the table of contents":
            stop()
        calls.append("written_files")
        files = engine.written_files(wait=True)
        return {"files": {name: asdict(record) for name, record in files.items()}}

    def load(path: str) -> dict[str, object]:
        engine.load_checkpoint(path)
        file = output / "weights.safetensors"
        engine.export_weights(WeightFile(str(file)))
        return {"weights": FileRecord.of(file).sha256}

    for line in sys.stdin:
        action, *arguments = json.loads(line)
        try:
            answer = {"save": save, "load": load}[action](*arguments)
        except AnytronError as error:
            answer = {"what": error.what, "where": error.where, "why": error.why, "in": calls[-1]}
        print(json.dumps(answer), flush=True)
