"""A wire between two network devices, which it makes: each frame arrives late, and some never.

python slow_wire.py DEVICE DEVICE SECONDS PART_THAT_IS_LOST
"""

import collections
import fcntl
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
LONGEST_FRAME = 65536


def device(name: str) -> int:
    """Make a network device; return the descriptor through which its frames come and go."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return descriptor


def main() -> None:
    """Pass frames on for ever."""
    ends = [device(name) for name in sys.argv[1:3]]
    delay_s, loss = map(float, sys.argv[3:5])
    other = dict(zip(ends, reversed(ends), strict=True))
    chance = random.Random(0)
    travelling = collections.deque()  # in the order of their arrival, because all take as long
    while True:
        wait_s = max(0.0, travelling[0][0] - time.monotonic()) if travelling else None
        for end in select.select(ends, [], [], wait_s)[0]:
            frame = os.read(end, LONGEST_FRAME)
            if chance.random() >= loss:
                travelling.append((time.monotonic() + delay_s, other[end], frame))
        while travelling and travelling[0][0] <= time.monotonic():
            _, end, frame = travelling.popleft()
            try:
                os.write(end, frame)
            except OSError:
                continue  # the device is down: the frame is lost


if __name__ == "__main__":
    main()
