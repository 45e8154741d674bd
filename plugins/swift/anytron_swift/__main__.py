"""``python -m anytron_swift``, which does the same as ``anytron-swift``."""

from anytron_swift.cli import main

main()
