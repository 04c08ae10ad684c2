#!/bin/bash
# smartcomp_quality.sh OUT [STEPS [SEEDS [RECIPE]]] [-- FLAGS]: validation losses with compressed
# gradients beside those without, from scratch and going on from a run that was half done without
# compression. One line of JSON per run in OUT/scratch.jsonl and OUT/continue.jsonl; started again it goes on where it stopped.
#
#   bench/smartcomp_quality.sh quality 3000 1,2,3
#   bench/smartcomp_quality.sh quality-50M 3000 1,2,3 recipes/quickstart.toml -- \
#       --model.layers 12 --model.width 576 --model.heads 9 --model.kv_heads 3 --model.mlp_width 1728
#   python3 bench/loss_curves.py table quality/scratch.jsonl
#   python3 bench/loss_curves.py plot quality/scratch.jsonl --out curves.svg
#
# On a GPU nothing changes: the trainer finds it (train.accelerator = "auto"). SMARTINF names the program,
# DENSITIES the shares of elements sent [0.08 0.01].
# AGAIN="--train.lr 1.0001e-3", a change too small to matter, adds runs of dense gradients with it: how far
# they end from the first ones is how far a run's end can be trusted.
set -euo pipefail
positional=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do positional+=("$1"); shift; done
[ $# -eq 0 ] || shift
out=${positional[0]:?OUT: a folder for runs and rows}
steps=${positional[1]:-3000}
seeds=${positional[2]:-1,2,3}
root=$(cd "$(dirname "$0")/.." && pwd)
recipe=${positional[3]:-$root/recipes/quickstart.toml}
smartinf=${SMARTINF:-$root/build/release/bin/smartinf}
densities=${DENSITIES:-0.08 0.01}
flags=(--train.steps "$steps" --train.validate_every "$((steps / 10))" "$@")
mkdir -p "$out"

variants=(--variant dense=)
[ -z "${AGAIN:-}" ] || variants+=(--variant "again=$AGAIN")
for density in $densities; do
  compress="--compress.density $density --compress.residual_every 0"
  variants+=(--variant "signs-$density=$compress")
  variants+=(--variant "bf16-$density=$compress --compress.values bf16")
  variants+=(--variant "paper-$density=$compress --compress.error_feedback false")
done

curves() {  # NAME SEEDS: all variants, runs below OUT/NAME
  python3 "$root/bench/loss_curves.py" run "$recipe" --out "$out/$1.jsonl" --work "$out" --seeds "$2" \
    --smartinf "$smartinf" "${variants[@]}" -- "${flags[@]}"
}

curves scratch "$seeds"

# Going on: every variant begins with a copy of the same run, stopped half-way through its schedule.
for seed in ${seeds//,/ }; do
  half=$out/half-$seed
  if [ ! -e "$half/done" ]; then
    # Stopped by a signal after the step: the learning rate's schedule is that of all steps.
    rm -rf "$half"
    "$smartinf" train "$recipe" --json --train.run "$half" --train.seed "$seed" --data.seed "$seed" \
      --train.sample_tokens 0 "${flags[@]}" > "$half.log" &
    pid=$!
    until grep -q "\"step\":$((steps / 2))," "$half.log" 2>/dev/null; do
      kill -0 "$pid" 2>/dev/null || { wait "$pid"; exit 1; }
      sleep 0.05
    done
    kill -INT "$pid"
    wait "$pid" || [ $? -eq 130 ]
    stopped=$(grep -o '"step":[0-9]*,"loss"' "$half.log" | tail -1 | tr -dc 0-9)
    if [ "$stopped" -gt "$((steps * 6 / 10))" ]; then
      echo "$0: $half was to be stopped after step $((steps / 2)) and was at $stopped before it could be;" \
        "its steps are too short: more steps, or a larger model" >&2
      exit 1
    fi
    touch "$half/done"
  fi
  for ((i = 1; i < ${#variants[@]}; i += 2)); do
    folder=$out/continue/${variants[i]%%=*}-$seed
    [ ! -e "$folder" ] || continue
    mkdir -p "$out/continue"
    rm -rf "$folder.partial"
    cp -r "$half" "$folder.partial"
    mv "$folder.partial" "$folder"
  done
  curves continue "$seed"
done
for name in scratch continue; do
  echo; echo "$name"; python3 "$root/bench/loss_curves.py" table "$out/$name.jsonl"
done
