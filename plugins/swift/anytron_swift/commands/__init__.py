"""What each command of ms-swift is started by: files, because ms-swift runs files, with ``torchrun`` for several ranks."""
