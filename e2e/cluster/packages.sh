# shellcheck shell=bash
# The Debian packages that the nodes need, installed if they are missing. Sourced by up.sh.

# PROGRAM=PACKAGE, and a path where it is not a program.
NEEDED=(runc=runc iptables=iptables nft=nftables conntrack=conntrack ethtool=ethtool socat=socat ip=iproute2 openssl=openssl
  nsenter=util-linux flock=util-linux curl=curl /usr/lib/cni/bridge=containernetworking-plugins)

missing_packages() {
  local entry
  for entry in "${NEEDED[@]}"; do
    command -v "${entry%=*}" >/dev/null || echo "${entry#*=}"
  done | sort -u
}

packages() {
  local missing
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "missing, and there is no apt-get to install it: ${missing[*]}"
  say "installing ${missing[*]}"
  # Nothing is to be started by an installation.
  export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -eq 0 ] || die "still missing after apt-get install: ${missing[*]}"
}
