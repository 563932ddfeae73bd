#!/usr/bin/env bash
# Runs one vLLM worker on the CPU in the foreground, on loopback.
#
#   serve-vllm.sh PORT EVENTS_PORT REPLAY_PORT [vllm flag...]
#
# BLOCKS (default 256) is the size of its KV cache in blocks of 32 tokens. One of them is never used, and vLLM wants room for
# one request of the full 2048 tokens, so 65 is the least. THREADS (default 1) is for OpenMP.
# Keep the three ports apart from other workers': with data parallelism rank r takes EVENTS_PORT + r and REPLAY_PORT + r.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
port=$1 events=$2 replay=$3
shift 3
ENGINES=${ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/engines}

export OMP_NUM_THREADS=${THREADS:-1} VLLM_CPU_OMP_THREADS_BIND=nobind # two workers bound to the same cores would fight
export VLLM_CPU_KVCACHE_SPACE=1                                       # GiB; BLOCKS takes less
export VLLM_HOST_IP=127.0.0.1                                         # do not look for an outside address
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_SERVER_DEV_MODE=1                                         # POST /reset_prefix_cache, for trying things by hand

publisher='{"enable_kv_cache_events": true, "publisher": "zmq", "topic": "",
  "endpoint": "tcp://*:'$events'", "replay_endpoint": "tcp://*:'$replay'"}'

# --block-size: vLLM's CPU attention takes multiples of 32 only.
# --enable-prompt-tokens-details: without it usage has no cached_tokens.
exec "$ENGINES/venv-vllm/bin/vllm" serve "$ENGINES/model" --served-model-name tiny --host 127.0.0.1 --port "$port" \
  --enforce-eager --max-model-len 2048 --max-num-seqs 8 --block-size 32 --num-gpu-blocks-override "${BLOCKS:-256}" \
  --kv-events-config "$publisher" --enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes "$@"
