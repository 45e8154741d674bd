"""``python -m anytron_swift``."""

from anytron_swift.cli import main

main()
