# Sourced by run.sh of e2e/vllm and e2e/sglang. $dir is the directory of install.sh, $logs of the servers' logs; pids has the process group of
# each server by name.
declare -A pids=()

say() { echo "run.sh: $*" >&2; }

# stop_all SIGNAL asks politely, once, and after 10 s not.
stop_all() {
  trap '' INT TERM
  local pid
  for pid in "${pids[@]}"; do kill "-$1" -- "-$pid" 2>/dev/null || true; done
  for _ in $(seq 100); do
    local left=0
    for pid in "${pids[@]}"; do if kill -0 -- "-$pid" 2>/dev/null; then left=1; fi; done
    [ $left = 0 ] && return
    sleep 0.1
  done
  for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null || true; done
}

# stop_at_exit SIGNAL: what was started ends with the script. Nothing is started without what install.sh installs.
stop_at_exit() {
  [ -e "$dir/stamp" ] || { say "nothing in $dir: run install.sh first"; exit 1; }
  mkdir -p "$logs"
  # shellcheck disable=SC2064 # the signal of now
  trap "stop_all $1" EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
}

# unused PORT: ends the script if something listens there, which would be taken for the server that cannot.
unused() {
  if (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; then
    say "port $1 is taken: stop what listens there, or set PORT"
    exit 1
  fi
}

# wait_ready NAME PORT PATH SECONDS: until it answers PATH, so many seconds after the script began at most.
wait_ready() {
  local name=$1 port=$2
  until curl -sf -o /dev/null "http://127.0.0.1:$port$3"; do
    kill -0 "${pids[$name]}" 2>/dev/null || { say "$name ended:"; tail -n 5 "$logs/$name.log" >&2; exit 1; }
    [ "$SECONDS" -lt "$4" ] || { say "$name is not ready after $SECONDS s: $logs/$name.log"; exit 1; }
    sleep 0.5
  done
}

# run_or_wait [command [argument...]]: runs the command, or waits for Ctrl-C.
run_or_wait() {
  if [ $# -gt 0 ]; then
    "$@"
  else
    say "Ctrl-C stops them"
    sleep infinity & wait $!
  fi
}
