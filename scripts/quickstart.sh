#!/usr/bin/env bash
# From a fresh checkout to a trained small language model: sets up, trains, shows what came out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/steps.sh disable=SC2154  # root is set there
source scripts/steps.sh

help() {
  cat <<'TEXT'
Usage: scripts/quickstart.sh [options] [-- flags of smartinf train]

Runs scripts/setup.sh, then trains recipes/quickstart.toml: a language model of about 5 million
parameters on the Python standard library's sources (three minutes on two cores with AVX-512, seven
without). Its master weights, momentum and variance live in files under runs/quickstart/ and are
updated there.

Stop it with Ctrl-C and run it again: it resumes after the last committed step. Once the run is
complete it only shows the result; rm -r runs/quickstart starts over.

  --python PATH, --no-system   as in scripts/setup.sh
  --help                       this text

Examples:
  scripts/quickstart.sh
  scripts/quickstart.sh -- --train.steps 1000
TEXT
}

setup_options=() train_flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --no-system | --python=*) setup_options+=("$1") ;;
    --python) [ $# -ge 2 ] || usage_error "--python needs a path"; setup_options+=("$1" "$2"); shift ;;
    --) shift; train_flags=("$@"); break ;;
    -h | --help) help; exit 0 ;;
    *) usage_error "unknown option '$1' (flags of smartinf train come after --)" ;;
  esac
  shift
done

scripts/setup.sh "${setup_options[@]}"
say "Training: build/release/bin/smartinf train recipes/quickstart.toml ${train_flags[*]}"
# The trainer handles Ctrl-C itself: it stops at a committed step and says how to go on.
trap - INT TERM
exec build/release/bin/smartinf train recipes/quickstart.toml "${train_flags[@]}"
