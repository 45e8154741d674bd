"""Run a program in a sandbox and print how it ended: for tests, which do so in an interpreter of their own.

A sabotage takes away one border, to show that a test of this border would notice.
"""

import json
import os
import sys

from anytron.isolation import allowed, namespaces
from anytron.isolation.sandbox import Sandbox, Unavailable

settings, program, given, files, sabotage = json.loads(sys.argv[1])
if sabotage == "one user for all":
    namespaces._STRANGERS = range(65534, 65535)
if sabotage == "larger buffers":
    whole = allowed.program
    allowed.program = lambda **profile: {**whole(**profile), "fcntl": ()}
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(files)]
try:
    ending = Sandbox(**settings).run(program, given)
    print(json.dumps({"status": ending.status, "output": ending.output.decode(), "late": ending.late}))
except Unavailable as error:
    print(json.dumps({"unavailable": str(error)}))
