#!/usr/bin/env bash
# Proves the router's predictions on real engines: two vLLM workers behind one router, then two SGLang workers behind another.
#
#   run.sh [vllm] [sglang]          both unless named
#
# Per family: start two workers and the router, send many-turn chats through it with the OpenAI SDK, compare the predicted hits
# with the engine's cached_tokens, stop everything. Exits with 1 when a family agrees in fewer than MIN_SHARE of its requests.
#
#   KV_ROUTER   the router's binary (default: target/debug/kv-router)       REQUESTS   per family (default 100)
#   ENGINES     where install.sh puts the engines                           THINK_MS   answer to next question (default 50)
#   OUT         logs and results (default: out/engines)                     MIN_SHARE  that must be equal (default 0.99)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
export ENGINES=${ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/engines} PYTHONDONTWRITEBYTECODE=1
OUT=${OUT:-$root/out/engines}
KV_ROUTER=${KV_ROUTER:-${CARGO_TARGET_DIR:-$root/target}/debug/kv-router}
WORKERS=2
START_SECONDS=420 # two engines importing torch at once on a slow machine
ROUTER_SECONDS=90 # the router's own deadline for a view of every worker is 60

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
die() { printf 'run.sh: %s\n' "$*" >&2; exit 1; }

# Every process started here leads its own group, so that an engine's children end with it.
groups=()
launch() { # launch LOG COMMAND...; sets $launched
  setsid "${@:2}" >"$1" 2>&1 </dev/null &
  launched=$!
  disown # SGLang kills itself when told to stop; bash need not report it
  groups+=("$launched")
}
stop_all() {
  [ ${#groups[@]} -gt 0 ] || return 0
  local group
  for group in "${groups[@]}"; do kill -TERM -- "-$group" 2>/dev/null || true; done
  for _ in $(seq 100); do
    local left=0
    for group in "${groups[@]}"; do if kill -0 -- "-$group" 2>/dev/null; then left=1; fi; done
    [ $left = 1 ] || break
    sleep 0.2
  done
  for group in "${groups[@]}"; do kill -KILL -- "-$group" 2>/dev/null || true; done
  groups=()
}
trap stop_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# free_ports COUNT: below the range from which the kernel serves outgoing connections, so that nobody takes one before we do.
free_ports() {
  "$ENGINES/venv-client/bin/python" - "$1" <<'PY'
import random, socket, sys
wanted, found, held = int(sys.argv[1]), [], []
while len(found) < wanted:
    port = random.randrange(18000, 30000)
    probe = socket.socket()
    try:
        probe.bind(("0.0.0.0", port))
    except OSError:
        continue
    held.append(probe)
    found.append(port)
print(*found)
PY
}

# await WHAT URL SECONDS PID LOG: until URL answers 2xx; fails when the process has ended or the time is over.
await() {
  local began=$SECONDS shown=0
  until curl -fs --max-time 5 -o /dev/null "$2"; do
    if ! kill -0 "$4" 2>/dev/null; then
      { grep -E '(Error|Exception): ' "$5" | head -n 3; tail -n 5 "$5"; } | cut -c1-300 >&2
      say "  $1 ended before it was ready; its log is $5"
      return 1
    fi
    if [ $((SECONDS - began)) -ge "$3" ]; then
      say "  $1 was not ready after $3 s; its log is $5"
      return 1
    fi
    if [ $((SECONDS - began)) -ge $((shown + 15)) ]; then
      shown=$((SECONDS - began))
      say "  waiting for $1 ($shown s)"
    fi
    sleep 1
  done
  say "  $1 is ready after $((SECONDS - began)) s"
}

# start_worker FAMILY NUMBER PORT EVENTS REPLAY LOG. Caches are small on purpose: evictions are half of what is to be proved.
start_worker() {
  case $1 in
    vllm) launch "$6" env BLOCKS="${BLOCKS:-80}" "$here/serve-vllm.sh" "$3" "$4" "$5" ;;
    sglang) launch "$6" env TOKENS="${TOKENS:-2048}" CORES=$(($2 % $(nproc))) "$here/serve-sglang.sh" "$3" "$4" "$5" ;;
  esac
}

run_family() { # run_family FAMILY TITLE ENGINE BLOCK_SIZE READY_PATH
  local family=$1 title=$2 engine=$3 block_size=$4 ready_path=$5
  local out=$OUT/$family number ports workers="" arguments=() pids=() logs=() urls=()
  rm -rf "$out"
  mkdir -p "$out"
  read -ra ports <<<"$(free_ports $((3 + 3 * WORKERS)))"
  local http=${ports[0]} metrics=${ports[1]} admin=${ports[2]}

  say "$title: starting $WORKERS workers"
  for number in $(seq 0 $((WORKERS - 1))); do
    local port=${ports[3 + 3 * number]} events=${ports[4 + 3 * number]} replay=${ports[5 + 3 * number]}
    start_worker "$family" "$number" "$port" "$events" "$replay" "$out/worker-$number.log"
    pids+=("$launched") logs+=("$out/worker-$number.log") urls+=("http://127.0.0.1:$port$ready_path")
    arguments+=(--worker "127.0.0.1:$port=$events,$replay")
    workers+="
    - {url: \"http://127.0.0.1:$port\", kvEvents: {endpoint: \"tcp://127.0.0.1:$events\", replayEndpoint: \"tcp://127.0.0.1:$replay\"}}"
  done
  for number in "${!pids[@]}"; do
    await "$title worker $number" "${urls[number]}" "$START_SECONDS" "${pids[number]}" "${logs[number]}" || return 1
  done

  cat >"$out/router.yaml" <<YAML
schemaVersion: 1
pool: {namespace: default, name: $family}
model: {name: tiny, tokenizer: {path: "$ENGINES/model"}}
blockSize: $block_size
engine: $engine
listen: {http: "127.0.0.1:$http", metrics: "127.0.0.1:$metrics", admin: "127.0.0.1:$admin"}
discovery:
  backend: Static
  workers:$workers
kvEvents: {transport: ZMQ}
policy: KvAware
YAML
  launch "$out/router.log" "$KV_ROUTER" serve --config "$out/router.yaml"
  await "router (block size $block_size)" "http://127.0.0.1:$http/readyz" "$ROUTER_SECONDS" "$launched" "$out/router.log" || return 1

  local verdict=0
  "$ENGINES/venv-client/bin/python" "$here/drive.py" --base "http://127.0.0.1:$http" --admin "http://127.0.0.1:$admin" "${arguments[@]}" \
    --block-size "$block_size" --label "$title" --requests "${REQUESTS:-100}" --think-ms "${THINK_MS:-50}" --min-share "${MIN_SHARE:-0.99}" \
    --out "$out" 2>&1 | tee "$out/table.txt" || verdict=1
  curl -fs --max-time 5 -o "$out/health-report.json" "http://127.0.0.1:$metrics/health/report" || say "  the router's health report could not be read"
  curl -fs --max-time 5 -o "$out/metrics.txt" "http://127.0.0.1:$metrics/metrics" || say "  the router's metrics could not be read"
  return $verdict
}

summarise() {
  "$ENGINES/venv-client/bin/python" - "$OUT" "$@" <<'PY'
import json, pathlib, sys
out, families = pathlib.Path(sys.argv[1]), sys.argv[2:]
print(f"\n{'engine':<16} {'requests':>8} {'equal':>6} {'share':>7} {'with hits':>9} {'same worker':>12} {'cached':>7} {'evicted':>8} {'event lag':>12} verdict")
for family in families:
    path = out / family / "summary.json"
    if not path.exists():
        print(f"{family:<16} did not finish; see {out / family}")
        continue
    s = json.loads(path.read_text())
    later = s["later_turns_on_same_worker"] / s["later_turns"] if s["later_turns"] else 0
    lag = s.get("event_lag_ms", {}).get("max")
    evicted = sum(worker["removed"] for worker in s.get("events", {}).values())
    print(
        f"{s['label']:<16} {s['requests']:>8} {s['equal']:>6} {s['share_equal']:>7.1%} {s['equal_with_hits']:>9} {later:>12.1%} "
        f"{s['cached_tokens'] / max(1, s['prompt_tokens']):>7.1%} {evicted:>8} {'-' if lag is None else f'max {lag} ms':>12} {'ok' if s['passed'] else 'FAILED'}"
    )
print("equal: predicted hit tokens == cached_tokens; same worker: later turns that went where the turn before went; evicted: blocks\n")
PY
}

families=("$@")
[ ${#families[@]} -gt 0 ] || families=(vllm sglang)
for family in "${families[@]}"; do
  case $family in vllm | sglang) ;; *) die "unknown engine '$family'; known are vllm and sglang" ;; esac
done
[ -x "$KV_ROUTER" ] || die "no router at $KV_ROUTER; build it (cargo build --package kvrouter-router) or set KV_ROUTER"
command -v curl >/dev/null || die "curl is missing"
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
"$here/install.sh"
ENGINES=$(cd "$ENGINES" && pwd)

failed=0
for family in "${families[@]}"; do
  # What fails in here returns, and the other family is still tried.
  case $family in
    vllm) run_family vllm vLLM VLLM 32 /health || failed=1 ;;
    sglang) run_family sglang SGLang SGLang 16 /v1/models || failed=1 ;;
  esac
  say "$family: stopping"
  stop_all
done
summarise "${families[@]}"
say "logs, tables (requests.csv), receipts and configuration: $OUT"
exit $failed
