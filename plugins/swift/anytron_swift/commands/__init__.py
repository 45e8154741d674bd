"""One script for each command of ms-swift, which starts a command by running a file, on several ranks with torchrun."""
