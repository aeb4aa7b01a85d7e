#!/bin/bash
# machine.sh NAME: the init (pid 1) of login, n1 or n2. Its death is the machine's power-off.
# From hpc.sh by the environment: ROOT (a tree to enter, or empty), R (the cluster's state), LOGDIR, SHIM,
# HPCUSER, HPCUID, ACCOUNTING, STALE.
set -e
name=$1
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/ LANG=C.UTF-8
cd /
hostname "$name"
mount --make-rprivate /
# The shared home; stale: what a machine has looked at stays as it was for 30 s, as with NFS. Always by the bindfs of
# the host: that of sid (FUSE 3) sets the three timeouts to 0 whatever it is told.
mount_home() {
  mount -t tmpfs tmpfs "$1" # bindfs wants an empty folder
  if [ -n "$STALE" ]; then
    bindfs -o attr_timeout=30,entry_timeout=30,negative_timeout=30 "$R/home" "$1"
  else
    mount --bind "$R/home" "$1"
  fi
}
if [ -n "$ROOT" ]; then
  mount --bind "$ROOT" "$ROOT"
  mkdir -p "$ROOT$R" "$ROOT$LOGDIR" "$ROOT/mnt/old"
  mount --bind "$R" "$ROOT$R"; mount --bind "$LOGDIR" "$ROOT$LOGDIR"
  mount_home "$ROOT/home"
  mount --rbind /dev "$ROOT/dev"; mount --rbind /sys "$ROOT/sys"; mount -t proc proc "$ROOT/proc"
  cd "$ROOT"; pivot_root . mnt/old; cd /; umount -l /mnt/old
else
  mount_home /home
  mount -t proc proc /proc
fi
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs -o mode=1777,size=50% tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir -p /run/munge /run/sshd /run/mysqld /run/lock
chown munge /run/munge; chown mysql /run/mysqld

# An /etc of its own, new at each boot. Bind mounts of single files would vanish as soon as anybody on the
# host renames a new file over the old one (sed -i /etc/hosts).
E=$R/etc.$name
rm -rf "$E"; cp -a /etc "$E"
cp "$R/etc/hosts" "$E/hosts"; chmod 644 "$E/hosts"
rm -f "$E/resolv.conf"; : >"$E/resolv.conf" # no name server: names fail at once, instead of after seconds
rm -rf "$E/slurm"; ln -s "$R/etc/slurm" "$E/slurm"
mkdir -p "$E/munge"; cp "$R/munge.key" "$E/munge/munge.key"; chown munge "$E/munge/munge.key"; chmod 400 "$E/munge/munge.key"
touch "$E/subuid" "$E/subgid"
sed -i "/^$HPCUSER:/d" "$E"/{passwd,shadow,group,subuid,subgid}
echo "$HPCUSER:x:$HPCUID:$HPCUID::/home/$HPCUSER:/bin/bash" >>"$E/passwd"
echo "$HPCUSER:*:19700:0:99999:7:::" >>"$E/shadow" # "!" would be a locked account for sshd without PAM
echo "$HPCUSER:x:$HPCUID:" >>"$E/group"
echo "$HPCUSER:100000:65536" | tee -a "$E/subuid" >>"$E/subgid"
mount --bind "$E" /etc

ready() { # SECONDS WHAT COMMAND...
  local end=$((SECONDS + $1)) what=$2; shift 2
  until "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || { echo "$name: $what did not come up"; exit 1; }
    sleep 0.1
  done
}
running() { local p; for p; do p=$(cat "$p" 2>/dev/null) && kill -0 "$p" 2>/dev/null && return 0; done; return 1; }
stop() { # PIDFILE...: TERM, and wait (read first: slurmdbd removes its pid file itself)
  local p ps=() i
  for p; do p=$(cat "$p" 2>/dev/null) && kill "$p" 2>/dev/null && ps+=("$p"); done
  for ((i = 0; i < 60; i++)); do kill -0 "${ps[@]}" 2>/dev/null || return 0; sleep 0.05; done
}

runuser -u munge -- munged --num-threads=4 --log-file=/run/munge/munged.log --seed-file=/run/munge/seed -f 2>/dev/null

if [ "$name" = login ]; then
  install -d -o "$HPCUSER" -g "$HPCUSER" -m 755 "$SHIM"
  touch "$LOGDIR/slurmctld.log" "$LOGDIR/slurmdbd.log"
  mkdir -p "$R/ctld"; chown slurm "$R/ctld" "$LOGDIR/slurmctld.log" "$LOGDIR/slurmdbd.log"
  if [ -n "$ACCOUNTING" ]; then
    chown slurm "$R/etc/slurm/slurmdbd.conf"; chmod 600 "$R/etc/slurm/slurmdbd.conf"
    if [ ! -e "$R/mysql/knoc-whole" ]; then # an init that was killed half way starts over
      rm -rf "$R/mysql"; install -d -o mysql "$R/mysql"
      mariadb-install-db --no-defaults --user=mysql --datadir="$R/mysql" --auth-root-authentication-method=socket --skip-test-db
      touch "$R/mysql/knoc-whole"
    fi
    mariadbd --no-defaults --user=mysql --datadir="$R/mysql" --socket=/run/mysqld/s --pid-file=/run/mysqld/pid --bind-address=127.0.0.1 \
      --innodb-buffer-pool-size=64M --innodb-log-file-size=32M --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=0 \
      --skip-log-bin --skip-name-resolve --loose-innodb-snapshot-isolation=OFF >>"$LOGDIR/mariadb.log" 2>&1 &
    ready 60 mariadbd mariadb-admin --no-defaults -S /run/mysqld/s ping
    mariadb --no-defaults -S /run/mysqld/s -e "create database if not exists slurm_acct_db; create user if not exists slurm@'127.0.0.1' identified by 'slurm'; grant all on slurm_acct_db.* to slurm@'127.0.0.1';"
    slurmdbd
    ready 60 slurmdbd sacctmgr -n list cluster
  fi
  slurmctld
  /usr/sbin/sshd -f "$R/etc/sshd_config" -E "$LOGDIR/sshd.log"
  trap 'stop /run/slurmctld.pid /run/sshd.pid; stop /run/slurmdbd.pid; stop /run/mysqld/pid; exit 0' TERM
else
  # cgroups of the jobs of before a power loss: their processes are gone
  find /sys/fs/cgroup/*/"slurm_$name" -depth -type d -exec rmdir {} + 2>/dev/null || :
  mkdir -p "$R/spool.$name"
  slurmd -N "$name"
  trap 'stop /run/slurmd.pid; exit 0' TERM
fi
while :; do sleep 1000 & wait $!; done
