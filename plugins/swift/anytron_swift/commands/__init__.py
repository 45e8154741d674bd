"""What starts each command of ms-swift: files, because ms-swift runs files, with ``torchrun`` for several ranks."""
