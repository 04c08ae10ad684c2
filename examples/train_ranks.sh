#!/usr/bin/env bash
# Trains a recipe in two processes of this machine, each with a device of its own (docs/ranks.md).
#
#     examples/train_ranks.sh RECIPE DEVICE_A DEVICE_B [flags of smartinf train]
#
# The losses are those of one process with the same recipe, ranks.order = "fixed" and both devices, to the last bit.
# Run again, it goes on.
# SMARTINF is the command, if it is not in PATH; torchrun comes with torch.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
recipe=$1 a=$2 b=$3
shift 3
exec torchrun --no-python --nproc-per-node 2 "${SMARTINF:-smartinf}" train "$recipe" \
  --device.0.path "$a" --device.1.path "$b" "$@"
