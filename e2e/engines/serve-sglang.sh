#!/usr/bin/env bash
# Runs one SGLang worker on the CPU in the foreground, on loopback.
#
#   serve-sglang.sh PORT EVENTS_PORT REPLAY_PORT [sglang flag...]
#
# TOKENS (default 8192) is the size of its KV cache, PAGE_SIZE (default 16) its page, CORES (default 0-1) what it is bound to.
# Keep the three ports apart from other workers': with data parallelism rank r takes EVENTS_PORT + r and REPLAY_PORT + r.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
port=$1 events=$2 replay=$3
shift 3
ENGINES=${ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/engines}

export SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND=${CORES:-0-1}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export PATH=$ENGINES/venv-sglang/bin:$ENGINES/venv-vllm/bin:$PATH # ninja and friends live in vLLM's

publisher='{"publisher": "zmq", "topic": "kv", "endpoint": "tcp://*:'$events'", "replay_endpoint": "tcp://*:'$replay'"}'

# torch_native and pytorch: the backends that need no kernel package.
# --sleep-on-idle: else an idle worker keeps its core busy, and the router has to share it.
# --enable-cache-report: without it usage has no cached_tokens.
exec "$ENGINES/venv-sglang/bin/python" -m sglang.launch_server --model-path "$ENGINES/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
  --device cpu --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule --skip-server-warmup \
  --context-length 2048 --page-size "${PAGE_SIZE:-16}" --max-total-tokens "${TOKENS:-8192}" --mem-fraction-static 0.3 \
  --kv-events-config "$publisher" --enable-cache-report --enable-metrics --sleep-on-idle --tool-call-parser qwen "$@"
