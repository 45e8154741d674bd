#!/usr/bin/env bash
# Collect wheels for a machine without network; benchmarks/on_a_gpu/README.md says how. Needs a package registry.
exec "${PYTHON:-python3}" "$(dirname "$0")/prepare.py" "$@"
