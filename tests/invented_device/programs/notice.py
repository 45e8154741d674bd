"""Make the device faulty in one way after the other, and check the rule that must notice; print the results as JSON.

usage: notice.py SCRATCH [FAULT...]
"""

import json
import os
import sys
from pathlib import Path

from anytron.base.errors import AnytronError
from anytron_conformance.rules import LEVELS, rules_of
from anytron_conformance.subject import Source, Subject
from anytron_conformance.worker import check_rule
from tests.invented_device.faults import FAULTS

scratch, names = Path(sys.argv[1]), sys.argv[2:]
scratch.mkdir(exist_ok=True)
source = Source("accelerator")
session = source.open()
rules = {rule.title: rule for level in LEVELS for rule in rules_of(level)}


def check(fault, rule):
    import torch

    subject = Subject(source, session, scratch)
    os.environ["INVENTED_FAULT"] = fault  # for ranks, which are processes of their own
    torch.ops.invented.set_fault(fault)
    try:
        result = check_rule(rules[rule], subject)
        return {"fault": fault, "rule": rule, "status": result.status, "says": result.explanation or result.detail}
    except AnytronError as error:
        return {"fault": fault, "rule": rule, "status": "failed", "says": str(error)}
    finally:
        torch.ops.invented.set_fault("")
        subject.close()


session.platform.runtime()
for fault in FAULTS:
    if not names or fault.name in names:
        print(json.dumps(check(fault.name, fault.rule)), flush=True)
for rule in sorted({fault.rule for fault in FAULTS}) if not names else ():
    print(json.dumps(check("", rule)), flush=True)
