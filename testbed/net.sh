# shellcheck shell=bash
# The network: a bridge with the host's own address on it, and one network namespace a machine.
# No namespace has a route out: what the tests send stays between the machines.

net_up() {
  local m
  any_alive || net_down # what a killed testbed left, whoever started it
  if ! ip link show knocbr >/dev/null 2>&1; then
    [ -z "$(ip -4 route show 10.77.0.0/24)" ] || die "10.77.0.0/24 is already in use on this machine: $(ip -4 route show 10.77.0.0/24)"
    ip link add knocbr type bridge
  fi
  ip addr replace "$HOST/24" dev knocbr
  ip link set knocbr up
  allow_bridge
  for m in cloud login $NODES; do
    # half made by a killed run, or its cable pulled: make it anew
    ip -n "knoc-$m" addr show dev eth0 2>/dev/null | grep -q "inet $(address "$m")/24" &&
      ip link show "knoc-$m" 2>/dev/null | grep -q 'master knocbr' && continue
    net_del "$m"
    ip netns add "knoc-$m"
    ip link add "knoc-$m" type veth peer name eth0 netns "knoc-$m"
    ip -n "knoc-$m" link set lo up
    ip -n "knoc-$m" link set eth0 up
    ip link set "knoc-$m" master knocbr up
    ip -n "knoc-$m" addr add "$(address "$m")/24" dev eth0
  done
  # the host name of cloud; cloud is no pid or mount namespace, so that tests see their own files there
  if ! grep -q " $STATE/pid/cloud.uts " /proc/self/mountinfo; then
    : >"$STATE/pid/cloud.uts"
    unshare --uts="$STATE/pid/cloud.uts" hostname cloud
  fi
  net_heal
}

net_del() {
  [ ! -e "/run/netns/knoc-$1" ] || ip netns del "knoc-$1"
  ip link del "knoc-$1" 2>/dev/null || : # the kernel takes it away with its namespace, a moment later
}

any_alive() { local f; for f in "$STATE"/pid/*; do alive "${f##*/}" && return; done; return 1; }

net_down() {
  local m p
  # what is still in our machines, a second knoc of some test for example: by pid, never by name
  for m in cloud login $NODES; do
    for p in $(ip netns pids "knoc-$m" 2>/dev/null || :); do kill -KILL "$p" 2>/dev/null || :; done
  done
  for m in cloud login $NODES; do net_del "$m"; done
  umount "$STATE/pid/cloud.uts" 2>/dev/null || :
  ip link del knocbr 2>/dev/null || :
  iptables -D FORWARD -i knocbr -o knocbr -j ACCEPT 2>/dev/null || :
}

# Where bridged packets pass the host's FORWARD chain (br_netfilter), a policy of DROP (docker's) would eat ours.
allow_bridge() {
  [ "$(cat /proc/sys/net/bridge/bridge-nf-call-iptables 2>/dev/null)" = 1 ] && command -v iptables >/dev/null || return 0
  iptables -C FORWARD -i knocbr -o knocbr -j ACCEPT 2>/dev/null || iptables -I FORWARD -i knocbr -o knocbr -j ACCEPT 2>/dev/null || :
}

# Packets between cloud and login vanish where they arrive. Dropped where they leave, the sender would
# get EPERM; a broken network says nothing.
net_cut() {
  local m peer
  for m in cloud login; do
    peer=$LOGIN; [ $m = cloud ] || peer=$CLOUD
    ip netns exec knoc-$m nft -f - <<N
table ip knoc_cut
delete table ip knoc_cut
table ip knoc_cut {
  chain in {
    type filter hook prerouting priority -300
    ip saddr $peer drop
  }
}
N
  done
}
net_heal() { local m; for m in cloud login; do ip netns exec knoc-$m nft delete table ip knoc_cut 2>/dev/null || :; done; }

