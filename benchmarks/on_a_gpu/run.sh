#!/usr/bin/env bash
# Install the wheels without network, test, train and measure on this machine's GPU; see benchmarks/on_a_gpu/README.md.
exec "${PYTHON:-python3}" "$(dirname "$0")/run.py" "$@"
