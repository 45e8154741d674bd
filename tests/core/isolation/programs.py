"""Run a program in a sandbox and print how it ended: for tests, which do so in an interpreter of their own."""

import json
import os
import sys

from anytron.isolation.sandbox import Sandbox, Unavailable

settings, program, given, files = json.loads(sys.argv[1])
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(files)]
try:
    ending = Sandbox(**settings).run(program, given)
    print(json.dumps({"status": ending.status, "output": ending.output.decode(), "late": ending.late}))
except Unavailable as error:
    print(json.dumps({"unavailable": str(error)}))
