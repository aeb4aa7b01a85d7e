# shellcheck shell=bash
# What every script of the testbed shares: places, addresses, steps, processes by pid, waits with a limit.
set -euo pipefail
umask 022
PATH=$PATH:/usr/local/go/bin:/usr/local/sbin:/usr/sbin:/sbin

TB=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd) # this folder
SRC=$(dirname "$TB")               # the project
RUN=$TB/run                    # what a test sources or reads: env, log/, bin/
STATE=/var/lib/knoc-testbed    # one testbed a machine: its state is outside of any checkout
CACHE=/var/cache/knoc-testbed  # survives down --purge: binaries, downloads, the sid tree
LOG=$STATE/log
PKI=$STATE/pki
SSHDIR=$STATE/ssh

CLOUD=10.77.0.1 LOGIN=10.77.0.10 HOST=10.77.0.254
NODES="n1 n2"
HPCUSER=hpcuser HPCUID=20077
NODE=knoc                      # the Kubernetes node
SHIM=/run/knoc-shim            # on login only (a tmpfs there): first in PATH of what comes over SSH

export CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false" # the same everywhere: one build cache for all

address() { case $1 in cloud) echo $CLOUD ;; login) echo $LOGIN ;; n*) echo "10.77.0.$((10 + ${1#n}))" ;; esac; }

die() { echo "testbed: $*" >&2; exit 1; }

locked() { # ARGUMENTS of this script: one up or down at a time. -o: what we start does not inherit the lock
  local rc=0
  if [ -n "${KNOC_TESTBED_LOCKED:-}" ]; then unset KNOC_TESTBED_LOCKED; return; fi
  KNOC_TESTBED_LOCKED=1 flock -o -w 1200 -E 75 /run/knoc-testbed.lock "$0" "$@" || rc=$?
  [ $rc != 75 ] || die "another up or down has been at work for 20 minutes"
  exit $rc
}

step() { # WHAT COMMAND...: says what it does, and how long it took
  local t0=${EPOCHREALTIME/./} t
  printf '%-48s ' "$1 ..."; shift
  STEP_NOTE=
  "$@"
  t=$((${EPOCHREALTIME/./} - t0))
  printf '%3d.%01d s%s\n' $((t / 1000000)) $((t / 100000 % 10)) "${STEP_NOTE:+  ($STEP_NOTE)}"
}

# A pid file holds "pid starttime": after a crash the bare pid may belong to somebody else, and a
# zombie (pid 1 may reap late) still answers kill -0.
starttime() {
  local s f
  s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
  read -ra f <<<"${s##*) }"
  [ "${f[0]}" != Z ] && [ "${f[0]}" != X ] && echo "${f[19]}"
}
pid_of() { # NAME: its pid, if that very process lives
  local p s
  read -r p s 2>/dev/null <"$STATE/pid/$1" || return 1
  [ -n "$s" ] && [ "$(starttime "$p")" = "$s" ] && echo "$p"
}
alive() { pid_of "$1" >/dev/null; }

spawn() { # NAME COMMAND...: in the background in a session of its own; output is appended to its log
  local n=$1; shift
  # the process itself writes its pid before it execs: killing this script loses no process. It inherits no other
  # open file: a lock that is held while this script runs would last as long as the daemon
  # shellcheck disable=SC2016
  setsid bash -c 'f=$1; shift; s=$(cat /proc/$$/stat); set -- "${s##*) }" "$@"; read -ra a <<<"$1"; shift
    echo "$$ ${a[19]}" >"$f.new"; mv "$f.new" "$f"
    for f in /proc/$$/fd/*; do f=${f##*/}; if [ "$f" -gt 2 ]; then eval "exec $f>&-"; fi; done
    exec "$@"' spawn "$STATE/pid/$n" "$@" </dev/null >>"$LOG/$n.log" 2>&1 &
  disown
  local i
  for ((i = 0; i < 100; i++)); do alive "$n" && return; sleep 0.02; done
  [ -s "$STATE/pid/$n" ] || die "$n: cannot be started"
}

finish() { # SIGNAL SECONDS NAME...: signals all (of a machine: its init), waits for all; KILL after the limit
  local sig=$1 end=$((SECONDS + $2)) n p; shift 2
  local -A pids=()
  for n; do
    p=$(pid_of "$n") || continue
    pids[$n]=$p
    case $n in login | n[0-9]*) p=$(init_of "$n") || continue ;; esac
    kill -"$sig" "$p" 2>/dev/null || :
  done
  for n in "${!pids[@]}"; do
    while alive "$n"; do
      if ((SECONDS >= end)); then kill -KILL "${pids[$n]}" 2>/dev/null || :; end=$((SECONDS + 2)); fi
      sleep 0.05
    done
  done
  for n; do rm -f "$STATE/pid/$n"; done
}

wait_for() { # SECONDS NAME COMMAND...: NAME is a process of ours with a log; a failing wait shows its end
  local limit=$1 end=$((SECONDS + $1)) n=$2 why=; shift 2
  until "$@" >/dev/null 2>&1; do
    alive "$n" || why="$n died"
    ((SECONDS < end)) || why="$n did not come up within $limit s"
    if [ -n "$why" ]; then
      echo; echo "testbed: $why; the end of $LOG/$n.log:" >&2
      tail -n 15 "$LOG/$n.log" >&2 || :
      exit 1
    fi
    sleep 0.1
  done
}

in_cloud() { nsenter --net=/run/netns/knoc-cloud --uts="$STATE/pid/cloud.uts" -- "$@"; }

init_of() { # MACHINE: the host's pid of its init (the only child of the recorded unshare)
  local p
  p=$(pid_of "$1") && pgrep -P "$p"
}
in_machine() { # MACHINE COMMAND...: as root inside of a running machine, with a clean environment
  local p; p=$(init_of "$1") || { echo "testbed: machine $1 is off" >&2; return 1; }; shift
  nsenter -t "$p" -m -u -i -n -p -T -- /usr/bin/env -i HOME=/root USER=root LOGNAME=root LANG=C.UTF-8 TERM=dumb \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}
