#!/bin/bash
@SBATCH@
# One Ray node on every Slurm node, one driver in the batch step. Rendered by `megarl launch slurm`; each word between
# at-signs is put in by it, a copy of this file named by `template` in your cluster's YAML must have them all.
set -uo pipefail
cd -- @WORK_DIR@ || exit 1
@ENVIRONMENT@
unset RAY_ADDRESS  # on a shared node it may be a neighbour's
export RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1
export MEGARL_PYTHON=@PYTHON@ MEGARL_SCRATCH=@SCRATCH@ MEGARL_DEVICE=@DEVICE@
export MEGARL_NODE_SLOTS
slots=@SLOTS@  # of each node, in the order of the step's tasks
MEGARL_NODE_SLOTS=${slots[*]}
try=${SLURM_RESTART_COUNT:-0}
export MEGARL_JOB=$SLURM_JOB_ID.$try
logs=@LOG_DIR@
export MEGARL_LOGS=$logs/job-$MEGARL_JOB
mkdir -p -- "$MEGARL_LOGS" || exit 1

say() { echo "[$((SECONDS / 60))m$((SECONDS % 60))s] $*"; }

# On every node. Task 0 is Ray's head: it draws a free port and says where it is in a file of this job and try.
node() {
  local name=${SLURMD_NODENAME:-$(hostname)} ip port attempt began code slots=($MEGARL_NODE_SLOTS)
  local log=$MEGARL_LOGS/node-$name.log mine=${slots[$SLURM_PROCID]}
  exec >>"$log" 2>&1
  ip=$(getent ahostsv4 "$name" | cut -d' ' -f1 | grep -v '^127\.' | head -n 1)
  [ -n "$ip" ] || { echo "node $name: its name has no address that other nodes could reach (getent ahostsv4)"; exit 1; }
  local own=(--block --disable-usage-stats --node-ip-address="$ip" --num-cpus=1 --min-worker-port=0
    --max-worker-port=0 --dashboard-agent-listen-port=0)
  case $MEGARL_DEVICE in
    cuda) own+=(--num-gpus="$mine") ;;
    *) own+=(--num-gpus=0 --resources="{\"slot\": $mine}") ;;
  esac
  for attempt in 1 2 3; do
    began=$SECONDS
    if [ "$SLURM_PROCID" = 0 ]; then
      port=$("$MEGARL_PYTHON" -c 'from megarl.backends.host import free_port; print(free_port())') || exit 1
      echo "$ip:$port" >"$MEGARL_LOGS/head.new" && mv -- "$MEGARL_LOGS/head.new" "$MEGARL_LOGS/head"
      "$MEGARL_PYTHON" -m ray.scripts.scripts start --head --port="$port" --include-dashboard=false \
        --temp-dir="$MEGARL_SCRATCH/r$MEGARL_JOB" "${own[@]}"
    else
      until [ -s "$MEGARL_LOGS/head" ]; do sleep 0.2; done
      "$MEGARL_PYTHON" -m ray.scripts.scripts start --address="$(cat "$MEGARL_LOGS/head")" "${own[@]}"
    fi
    code=$?
    echo "node $name: Ray ended with $code after $((SECONDS - began)) s (attempt $attempt)"
    [ $((SECONDS - began)) -gt 60 ] && exit "$code"  # it had been up: starting again is another try's business
  done
  exit 1
}

ended() {
  kill -TERM "$step" 2>/dev/null
  wait "$step" 2>/dev/null
}

last_words() { for file in "$MEGARL_LOGS"/node-*.log; do say "end of $file"; tail -n 20 -- "$file"; done; }

say "job $SLURM_JOB_ID, try $try: @NODES@ nodes, logs in $MEGARL_LOGS"
@SRUN@ @INSIDE@ bash -c "$(declare -f node); node" &
step=$!
driver=
trap ended EXIT
trap '[ -n "$driver" ] && kill -TERM "$driver" 2>/dev/null' TERM

until [ -s "$MEGARL_LOGS/head" ]; do
  kill -0 "$step" 2>/dev/null || { say "the nodes' step ended before Ray's head was up"; last_words; exit 1; }
  [ "$SECONDS" -lt @FORM_TIMEOUT_S@ ] || { say "no Ray head within @FORM_TIMEOUT_S@ s"; last_words; exit 1; }
  sleep 0.2
done
say "Ray's head is at $(cat "$MEGARL_LOGS/head")"
@INSIDE@ "$MEGARL_PYTHON" @TRAIN@ "cluster.address='$(cat "$MEGARL_LOGS/head")'" \
  cluster.start_timeout_s=@FORM_TIMEOUT_S@.0 &
driver=$!
while :; do
  wait "$driver"
  code=$?
  kill -0 "$driver" 2>/dev/null || break  # wait also returns where a signal came
done
[ "$code" = 0 ] || last_words
say "the run ended with $code"
exit "$code"
