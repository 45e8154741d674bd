"""One end of a weight transfer: ``PATH READERS TIMEOUT BUCKET send | receive NUMBER``, and where it stands still.

It writes a line for each thing that it does. At ``stand AFTER`` it stands still after so many tensors, for ever.
"""

import sys
import time

import torch

from anytron.engines.weight_stream import WeightStream
from anytron.errors import AnytronError

TENSORS = {f"layer.{number}": torch.full((1500,), float(number)) for number in range(8)}
"""Each is larger than a bucket of 4096 bytes."""


def standing(items, after):
    for count, item in enumerate(items):
        if count == after:
            sys.stdout.write("stands\n")
            sys.stdout.flush()
            time.sleep(600)
        yield item


def main():
    path, readers, timeout_s, bucket_bytes, end, *rest = sys.argv[1:]
    stream = WeightStream(path, int(readers), float(timeout_s), int(bucket_bytes))
    number = int(rest[0]) if end == "receive" else None
    after = int(rest[rest.index("stand") + 1]) if "stand" in rest else None
    try:
        if end == "send":
            version = stream.send(standing(TENSORS.items(), after), 7, lambda name: False).version
        else:
            with stream.origin(number).open() as weights:
                version = weights.version
                for piece in standing(weights, after):
                    assert (piece.values == float(piece.name.rpartition(".")[2])).all()
        sys.stdout.write(f"version {version}\n")
    except AnytronError as error:
        sys.stdout.write(f"{type(error).__name__}: {error.what}\n")


if __name__ == "__main__":
    main()
