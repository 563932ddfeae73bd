#!/usr/bin/env bash
# Runs the end-to-end scenarios on a real cluster: builds, starts the cluster where there is none, loads images, goes.
#
#   e2e/run.sh             all scenarios but j
#   e2e/run.sh a c         these; j installs real vLLM first (8 GB, 4 minutes)
#   KUBECONFIG=… e2e/run.sh    on a cluster that has the images already (KVROUTER_E2E_TAG names their tag)
#
# KVROUTER_E2E_DOWN=1 takes the cluster down at the end.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(dirname "$here")
cache=${XDG_CACHE_HOME:-$HOME/.cache}/kvrouter
# Newer releases are no reason for another result.
sdk=openai==3.57.0

say() { printf '== %s\n' "$*"; }

# A cluster that is not up.sh's, whose KUBECONFIG may be exported. In a shell of its own: lib.sh has names of this file too.
foreign() { (
    # shellcheck source=cluster/lib.sh
    . "$here/cluster/lib.sh"
    foreign_kubeconfig
); }

# The official SDK, in a virtual environment of its own.
install_sdk() {
    venv=$cache/tools/e2e-$sdk
    [[ -x $venv/bin/python ]] && "$venv/bin/python" -c 'import openai' 2>/dev/null && return
    say "install $sdk"
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$sdk"
}

# Images of what was built, under a tag of their own.
load_images() {
    local built=${CARGO_TARGET_DIR:-$root/target}/debug tag=${KVROUTER_E2E_TAG:-e2e}
    local image="$here/cluster/image.sh"
    "$image" "kvrouter.local/kv-router:$tag" "$built/kv-router"
    "$image" "kvrouter.local/kv-router:$tag-next" "$built/kv-router"
    "$image" "kvrouter.local/kv-router-operator:$tag" "$built/kv-router-operator"
    # What an upgrade goes to: other images, the same programs.
    "$image" "kvrouter.local/kv-router:$tag-upgraded" "$built/kv-router"
    "$image" "kvrouter.local/kv-router-operator:$tag-upgraded" "$built/kv-router-operator"
    "$image" "kvrouter.local/engine-sim:$tag" "$built/engine-sim"
    "$image" "kvrouter.local/nats-server:$tag" "$cache/tools/bin/nats-server"
    local files=() file
    for file in "$root"/tests/fixtures/tokenizer/*.json "$root"/tests/fixtures/tokenizer/*.jinja; do
        [[ ! -e $file ]] || files+=("$file:/$(basename "$file")")
    done
    "$image" "kvrouter.local/tokenizer-fixture:$tag" "$built/engine-sim" "${files[@]}"
}

# vLLM itself is mounted from this machine; its tokenizer goes into an image, as a user would do it.
load_real_engines() {
    "$here/engines/install.sh"
    local model=${ENGINES:-$cache/engines}/model
    chmod -R a+rX "$model" # pods run as another user
    "$here/cluster/image.sh" "kvrouter.local/real-model:${KVROUTER_E2E_TAG:-e2e}" "${CARGO_TARGET_DIR:-$root/target}/debug/engine-sim" \
        "$model/tokenizer.json:/tokenizer.json" "$model/tokenizer_config.json:/tokenizer_config.json"
}

main() {
    install_sdk
    if foreign; then
        say "scenarios, on the cluster of KUBECONFIG"
        "$venv/bin/python" "$here/scenarios/run.py" "$@"
        return
    fi
    say "build"
    cargo build --workspace --bins
    "$here/cluster/up.sh"
    say "images"
    load_images
    [[ " $* " != *" j "* ]] || load_real_engines
    say "scenarios"
    local status=0
    KVROUTER_E2E_APISERVER="$here/cluster/apiserver.sh" PYTHONDONTWRITEBYTECODE=1 \
        "$here/cluster/exec.sh" "$venv/bin/python" "$here/scenarios/run.py" "$@" || status=$?
    [[ -z ${KVROUTER_E2E_DOWN:-} ]] || "$here/cluster/down.sh"
    return "$status"
}

main "$@"
