"""Run a program in a sandbox and print how it ended: for tests, which do so in an interpreter of their own.

A sabotage takes away one border, to show that a test of this border would notice.
"""

import json
import os
import sys

from anytron.task.isolation import allowed, namespaces, refusals, seccomp
from anytron.task.isolation.sandbox import Sandbox, Unavailable

settings, program, given, files, sabotage = json.loads(sys.argv[1])
if sabotage.startswith("one user for all: "):
    user = int(sabotage.rpartition(" ")[2])
    namespaces._STRANGERS = range(user, user + 1)
if sabotage == "larger buffers":
    whole = allowed.program
    allowed.program = lambda **profile: {**whole(**profile), "fcntl": ()}
if sabotage == "nobody is asked":
    seccomp._ASK = seccomp._REFUSE | 1
if sabotage == "answers for ever":
    refusals.MOST = 1 << 60
opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(files)]
try:
    ending = Sandbox(**settings).run(program, given)
    refused = {"refused": ending.refused} if ending.refused else {}
    print(json.dumps({"status": ending.status, "output": ending.output.decode(), "late": ending.late, **refused}))
except Unavailable as error:
    print(json.dumps({"unavailable": str(error)}))
