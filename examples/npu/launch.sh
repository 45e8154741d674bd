#!/usr/bin/env bash
# Train on the NPUs of this machine:
#
#   launch.sh CONFIG MODEL PROMPTS [key=value ...]
#
# CONFIG is one of the YAML files beside this script, MODEL a Hugging Face directory, PROMPTS a JSON Lines file; any
# key of the configuration can follow. SOURCES names the folder with the checkouts MindSpeed-LLM, MindSpeed and
# Megatron-LM (docs/how-to/train-with-mindspeed-llm.md), unless PYTHONPATH has them already.
set -euo pipefail

if [ $# -lt 3 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
config=$1 model=$2 prompts=$3
shift 3

if [ -z "${ASCEND_HOME_PATH:-}" ] && [ "${ANYTRON_ASCEND_SIMULATOR:-}" != 1 ]; then
    echo "CANN is not set up in this shell: source its set_env.sh (/usr/local/Ascend/cann/set_env.sh)" >&2
    exit 1
fi
if [ -n "${SOURCES:-}" ]; then
    export PYTHONPATH="$SOURCES/MindSpeed-LLM:$SOURCES/MindSpeed:$SOURCES/Megatron-LM${PYTHONPATH:+:$PYTHONPATH}"
fi

# Ranks of a large model read their weights for minutes before they meet.
exec anytron train "$config" \
    "model.path=$(realpath "$model")" \
    "data.options.path=$(realpath "$prompts")" \
    executor.start_timeout_s=1800 \
    platform.options.hccl_connect_timeout_s=1800 \
    "$@"
