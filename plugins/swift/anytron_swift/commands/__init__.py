"""One script for each command: ms-swift starts a command by running a file, on several ranks with torchrun."""
