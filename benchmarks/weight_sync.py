"""What it costs to give a rollout process new weights: through shared memory, over the network, and through a file.

One process has the weights of a random model and sends them; gathering them over ranks, which all ways need, is left
out. Another one has the same model of transformers and loads them as the rollout engine does. The ways take turns in
one run, and memcpy of as many bytes is timed between them. The network is the loopback interface: what a real one costs
comes on top. ``peak_extra_bytes`` is what both processes hold at most beyond what they held before, pages of shared
buckets counted once; ``cpu_s`` is what both compute. Streams keep two processors busy, a file one at a time: look at
``load_average`` of the device.

    python benchmarks/weight_sync.py [--json] [--layers 10] [--hidden 2048] [--turns 5] [--bucket-mib 16]
"""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from anytron.workers.weights.buckets import BUCKETS
from anytron.workers.weights.memory import SharedMemory
from anytron.workers.weights.network import LOOPBACK, NetworkMeeting, NetworkReader
from anytron.workers.weights.stream import BUCKET_BYTES, StreamOrigin, WeightStream
from anytron.workers.weights.transfer import WeightFile, WeightManifest
from anytron_rollout.weights import load_verified
from harness import argument_parser, in_turn, progress, report, timed

VOCABULARY = 32_768
TIMEOUT_S = 600.0
MIB = 1 << 20


def build_model(layers, hidden):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    return Qwen3ForCausalLM(config).bfloat16().requires_grad_(requires_grad=False)


def is_optional(_):
    return False


class Memory:
    """What this process holds at most, from now on."""

    def __init__(self):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self._read("VmRSS")

    def extra(self):
        return self._read("VmHWM") - self._before

    @staticmethod
    def _read(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def receive(arguments):
    """The rollout process: for each line of JSON, load from where it says, and answer with what it took."""
    model = build_model(arguments.layers, arguments.hidden)
    print("ready", flush=True)
    for line in sys.stdin:
        given = json.loads(line)
        if "path" in given:
            origin = WeightManifest(given["path"], given["version"], given["checksums"])
        else:
            if "socket" in given:
                carrier = SharedMemory(given["socket"])
            else:
                carrier = NetworkReader(tuple(given["sender"]), bytes.fromhex(given["secret"]))
            origin = StreamOrigin(carrier, 0, TIMEOUT_S, given["bucket_bytes"])
        memory, cpu = Memory(), time.process_time()
        with origin.open() as weights:
            load_verified(model, weights)
        print(json.dumps({"extra": memory.extra(), "cpu": time.process_time() - cpu}), flush=True)


class Sender:
    """The training process, and the rollout process that it talks to."""

    def __init__(self, arguments, folder):
        sizes = ["--layers", str(arguments.layers), "--hidden", str(arguments.hidden)]
        self._reader = subprocess.Popen(
            [sys.executable, __file__, "--receive", *sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._folder, self._bucket_bytes = folder, arguments.bucket_mib * MIB
        self.weights = build_model(arguments.layers, arguments.hidden).state_dict()
        assert self._reader.stdout.readline() == "ready\n"

    def close(self):
        self._reader.stdin.close()
        self._reader.wait()

    def shared_memory(self):
        memory = SharedMemory(str(self._folder / "stream"))
        seconds, cpu, extra = self._timed(
            lambda: self._tell({"socket": memory.path, "bucket_bytes": self._bucket_bytes}),
            lambda: self._stream(memory),
        )
        return seconds, cpu, extra - BUCKETS * self._bucket_bytes

    def network(self):
        with NetworkMeeting(LOOPBACK, LOOPBACK) as meeting, ThreadPoolExecutor() as driver:
            return self._timed(
                lambda: driver.submit(self._tell_when_it_listens, meeting), lambda: self._stream(meeting.sender)
            )

    def file(self):
        path = self._folder / "weights.safetensors"
        manifest = []
        measured = self._timed(
            lambda: manifest.append(WeightFile(str(path)).send(self.weights.items(), 1, is_optional)),
            lambda: self._tell({"path": str(path), "version": 1, "checksums": manifest[0].checksums}),
        )
        path.unlink()
        return measured

    def memcpy(self):
        copies = {name: torch.empty_like(tensor) for name, tensor in self.weights.items()}

        def copy():
            for name, tensor in self.weights.items():
                copies[name].copy_(tensor)

        copy()  # the first time pays for the pages
        return timed(copy)[0]

    def _stream(self, carrier):
        WeightStream(carrier, 1, TIMEOUT_S, self._bucket_bytes).send(self.weights.items(), 1, is_optional)

    def _tell_when_it_listens(self, meeting):
        while (reader := meeting.reader()) is None:
            pass
        told = {"sender": reader.sender, "secret": reader.secret.hex(), "bucket_bytes": self._bucket_bytes}
        self._tell(told)

    def _tell(self, message):
        self._reader.stdin.write(json.dumps(message) + "\n")
        self._reader.stdin.flush()

    def _timed(self, *steps):
        memory, start, cpu = Memory(), time.perf_counter(), time.process_time()
        for step in steps:
            step()
        answer = json.loads(self._reader.stdout.readline())
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return seconds, cpu + answer["cpu"], memory.extra() + answer["extra"]


def measure(arguments, folder):
    progress("both processes build the model")
    sender = Sender(arguments, folder)
    size = sum(tensor.nbytes for tensor in sender.weights.values())
    progress(f"{arguments.turns + 1} turns")
    ways = {"shared_memory": sender.shared_memory, "network": sender.network, "file": sender.file}
    found = in_turn({"memcpy": sender.memcpy, **ways}, arguments.turns)
    copying = statistics.median(found.pop("memcpy"))
    sender.close()
    seconds = {way: statistics.median(result[0] for result in results) for way, results in found.items()}
    cpu = {way: statistics.median(result[1] for result in results) for way, results in found.items()}
    extra = {way: max(result[2] for result in results) for way, results in found.items()}
    return {
        "model_bytes": size,
        "bucket_bytes": arguments.bucket_mib * MIB,
        "memcpy_gb_per_s": size / copying / 1e9,
        "file_by_shared_memory": seconds["file"] / seconds["shared_memory"],
        "file_by_network": seconds["file"] / seconds["network"],
        "ways": {
            way: {
                "transfer_s": seconds[way],
                "gb_per_s": size / seconds[way] / 1e9,
                "cpu_s": cpu[way],
                "peak_extra_bytes": extra[way],
                "peak_extra_by_model": extra[way] / size,
            }
            for way in found
        },
    }


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2048, help="a multiple of 64")
    parser.add_argument("--turns", type=int, default=5, help="transfers of each kind that count")
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_BYTES // MIB, help="size of each of the two buckets")
    parser.add_argument("--folder", help="where the file goes; default: the temporary directory, as in a run")
    parser.add_argument("--receive", action="store_true", help=SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.receive:
        receive(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = measure(arguments, Path(folder))
    report(figures, as_json=arguments.json)


if __name__ == "__main__":
    main()
