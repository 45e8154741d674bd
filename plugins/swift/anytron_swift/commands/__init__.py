"""Files that start each command of ms-swift, which runs files, with ``torchrun`` for several ranks."""
