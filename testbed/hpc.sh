# shellcheck shell=bash
# The HPC side: login (munge, MariaDB, slurmdbd, slurmctld, sshd) and the compute nodes n1 and n2 (munge, slurmd).

declare -A BOOTED # machine → when this script booted it
CLUSTER='' ROOT='' # set by hpc_options
hpc_options() { # "22.05 accounting fresh": version, accounting|none, fresh|stale
  local v; read -r v ACCOUNTING STALE <<<"$1"
  # shellcheck disable=SC2153
  CLUSTER=$STATE/hpc-$v ROOT=""
  [ "$v" = 22.05 ] || ROOT=$CACHE/sid
  [ "$ACCOUNTING" = accounting ] || ACCOUNTING=
  [ "$STALE" = stale ] || STALE=
}

hpc_config() {
  local n slurm=$CLUSTER/etc/slurm
  mkdir -p "$slurm" "$CLUSTER/home" "$SSHDIR"
  {
    echo "127.0.0.1 localhost"
    for n in cloud login $NODES; do echo "$(address "$n") $n"; done
  } >"$CLUSTER/etc/hosts"

  local cg=
  [ ! -d /sys/fs/cgroup/memory ] || cg=1
  cat >"$slurm/slurm.conf" <<C
ClusterName=hpc
SlurmctldHost=login($LOGIN)
AuthType=auth/munge
SlurmUser=slurm
StateSaveLocation=$CLUSTER/ctld
SlurmdSpoolDir=$CLUSTER/spool.%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd.%n.log
ReturnToService=2
ProctrackType=$([ -n "$cg" ] && echo proctrack/cgroup || echo proctrack/linuxproc)
TaskPlugin=$([ -n "$cg" ] && echo task/cgroup || echo task/none)
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SlurmdTimeout=30
KillWait=5
MinJobAge=300
PrologFlags=Contain
GresTypes=gpu
DefMemPerCPU=500
NodeName=DEFAULT CPUs=24 RealMemory=24000 Gres=gpu:2 State=UNKNOWN
$(for n in $NODES; do echo "NodeName=$n NodeAddr=$(address "$n")"; done)
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP
PartitionName=gpu Nodes=ALL MaxTime=1-0 DefaultTime=60 State=UP
C
  [ -z "$ACCOUNTING" ] || printf 'AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=login\nAccountingStorageTRES=gres/gpu\n' >>"$slurm/slurm.conf"
  if [ -n "$cg" ]; then
    printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nConstrainRAMSpace=yes\nConstrainCores=no\nConstrainDevices=no\nConstrainSwapSpace=no\n'
  elif [ -n "$ROOT" ]; then echo 'CgroupPlugin=disabled'; else echo 'CgroupPlugin=autodetect'; fi >"$slurm/cgroup.conf"
  echo "NodeName=n[1-2] Name=gpu File=/dev/knocgpu[0-1]" >"$slurm/gres.conf"
  cat >"$slurm/slurmdbd.conf" <<C
AuthType=auth/munge
DbdHost=login
SlurmUser=slurm
PidFile=/run/slurmdbd.pid
LogFile=$LOG/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
C
  [ -s "$CLUSTER/munge.key" ] || { head -c 128 /dev/urandom >"$CLUSTER/munge.new"; chmod 400 "$CLUSTER/munge.new"; mv "$CLUSTER/munge.new" "$CLUSTER/munge.key"; }

  # one host key and one user key for every cluster
  chmod 700 "$SSHDIR"
  for n in host_key key; do
    [ -s "$SSHDIR/$n.pub" ] || { rm -f "$SSHDIR/$n"; ssh-keygen -q -t ed25519 -N '' -C knoc-testbed -f "$SSHDIR/$n"; }
  done
  cp "$SSHDIR/host_key" "$CLUSTER/etc/ssh_host_key"; chmod 600 "$CLUSTER/etc/ssh_host_key"
  echo "$LOGIN $(<"$SSHDIR/host_key.pub")" >"$SSHDIR/known_hosts"
  # limits (MaxSessions 10, MaxStartups 10:30:100) are sshd's defaults on purpose
  cat >"$CLUSTER/etc/sshd_config" <<C
Port 22
HostKey $CLUSTER/etc/ssh_host_key
PidFile /run/sshd.pid
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
Subsystem sftp internal-sftp
SetEnv PATH=$SHIM:/usr/local/bin:/usr/bin:/bin
C
  local home=$CLUSTER/home/$HPCUSER
  if [ ! -s "$home/.ssh/authorized_keys" ]; then
    install -d -m 755 -o "$HPCUID" -g "$HPCUID" "$home"
    install -d -m 700 -o "$HPCUID" -g "$HPCUID" "$home/.ssh"
    install -m 600 -o "$HPCUID" -g "$HPCUID" "$SSHDIR/key.pub" "$home/.ssh/authorized_keys"
  fi
  [ -e /dev/fuse ] || { modprobe fuse 2>/dev/null || :; mknod /dev/fuse c 10 229; }
  chmod 666 /dev/fuse # apptainer and bindfs mount as the user
  for n in 0 1; do [ -e /dev/knocgpu$n ] || mknod -m 666 /dev/knocgpu$n c 1 3; done # Slurm wants device nodes
}

boot() { # MACHINE
  BOOTED[$1]=$EPOCHSECONDS
  # a time namespace: the machine's own uptime starts at 0. Slurm knows by it that a node has booted
  spawn "$1" env ROOT="$ROOT" R="$CLUSTER" LOGDIR="$LOG" SHIM="$SHIM" HPCUSER="$HPCUSER" HPCUID="$HPCUID" \
    ACCOUNTING="$ACCOUNTING" STALE="$STALE" \
    nsenter --net="/run/netns/knoc-$1" unshare --time --boottime "-$(cut -d. -f1 /proc/uptime)" --mount --uts --ipc --pid --fork --kill-child bash "$TB/machine.sh" "$1"
}

slurm_answers() { timeout 5 bash -c "</dev/tcp/$LOGIN/22" && in_machine login timeout 5 sinfo -h >/dev/null; }
serves() { # NODE...: Slurm says idle, or busy, without a "*" (does not answer)
  local n
  for n; do in_machine login timeout 5 sinfo -h -N -n "$n" -p batch -o %T | grep -qxE 'idle|mixed|allocated|completing' || return 1; done
}
registered() { # NODE TIME: its slurmd of after TIME has registered (what sinfo says may be of before a power loss)
  local t
  t=$(in_machine login timeout 5 scontrol show node "$1" | grep -oP 'SlurmdStartTime=\K\S+') && [ "$(date -d "$t" +%s)" -ge "$2" ]
}
serve() { # wait until the given nodes serve; a node that was drained in an earlier life is resumed
  local n
  for n; do
    wait_for 60 "$n" registered "$n" "${BOOTED[$n]:-0}"
    ( wait_for 15 "$n" serves "$n" ) 2>/dev/null >&2 ||
      { in_machine login scontrol update "nodename=$n" state=resume 2>/dev/null || :; wait_for 60 "$n" serves "$n"; }
  done
}

hpc_up() {
  local m
  # a login machine without a controller is of no use: boot it again
  if alive login && ! slurm_answers && ! slurm_answers; then finish TERM 15 login; fi
  alive login && alive n1 && alive n2 && { serve n1 n2; STEP_NOTE="alive"; return 0; }
  hpc_config
  for m in login $NODES; do alive "$m" || boot "$m"; done
  wait_for 120 login slurm_answers
  # shellcheck disable=SC2086
  serve $NODES
}

hpc_down() {
  if alive login; then # jobs would come back with the cluster, in tests that know nothing of them
    in_machine login timeout 5 scancel --quiet -u "$HPCUSER" 2>/dev/null || :
    local i
    for ((i = 0; i < 60; i++)); do
      [ -n "$(in_machine login timeout 3 squeue -h -t R,CG 2>/dev/null)" ] || break
      sleep 0.1
    done
  fi
  # shellcheck disable=SC2086
  finish TERM 15 login $NODES
}
