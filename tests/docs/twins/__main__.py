"""Run twins and say of each whether its test notices."""

import sys

from tests.docs.twins import TWINS
from tests.docs.twins.twin import notices

blind = 0
for twin in TWINS:
    if sys.argv[1:] and not any(word in twin.test for word in sys.argv[1:]):
        continue
    found = notices(twin)
    blind += not found
    print("noticed" if found else "NOT NOTICED", twin.test, flush=True)
sys.exit(min(blind, 1))
