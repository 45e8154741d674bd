"""One end of a weight transfer, a stream or an origin, as a pickle in standard input: send, or receive.

It writes a line for each thing that it does. With the argument AFTER it stands still after so many tensors, for ever.
"""

import base64
import pickle
import sys
import time

import torch

from anytron.base.errors import AnytronError
from anytron.workers.weights.stream import WeightStream

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
    after = int(sys.argv[1]) if len(sys.argv) > 1 else None
    end = pickle.loads(base64.b64decode(sys.stdin.readline()))
    try:
        if isinstance(end, WeightStream):
            version = end.send(standing(TENSORS.items(), after), 7, lambda name: False).version
        else:
            with end.open() as weights:
                version = weights.version
                for piece in standing(weights, after):
                    assert (piece.values == float(piece.name.rpartition(".")[2])).all()
        sys.stdout.write(f"version {version}\n")
    except AnytronError as error:
        sys.stdout.write(f"{type(error).__name__}: {error.what}\n")


if __name__ == "__main__":
    main()
