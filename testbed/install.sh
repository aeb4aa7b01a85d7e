# shellcheck shell=bash
# What the machine needs, once: packages of bookworm, Apptainer of sid, and (for --slurm 26.05) a tree of sid.

PACKAGES="slurmctld slurmd slurm-client slurmdbd munge mariadb-server openssh-server openssh-client tcsh fish
  uidmap squashfuse squashfs-tools fuse2fs fuse-overlayfs fuse3 bindfs e2fsprogs fakeroot patchelf
  busybox-static umoci skopeo docker-registry apache2-utils
  iproute2 nftables procps util-linux openssl curl ca-certificates debootstrap"
SID_PACKAGES="slurmctld slurmd slurm-client slurmdbd munge mariadb-server openssh-server openssh-client tcsh fish
  apptainer uidmap squashfuse squashfs-tools fuse2fs fuse-overlayfs fuse3 bindfs e2fsprogs fakeroot
  busybox-static iproute2 procps util-linux"

quiet() { # NAME COMMAND...: output to a log, shown only when the command fails
  local n=$1; shift
  "$@" </dev/null >"$LOG/$n.log" 2>&1 || { echo; tail -n 10 "$LOG/$n.log" >&2; die "$n failed: $*"; }
}

check_machine() {
  [ "$(dpkg --print-architecture 2>/dev/null)" = amd64 ] || die "needs Debian on amd64"
  grep -q '^VERSION_CODENAME=bookworm' /etc/os-release || die "needs Debian 12 (bookworm): Slurm 22.05 is that of the machine"
  command -v go >/dev/null || die "needs Go 1.26 or later on PATH"
  [ -d /sys/fs/cgroup/memory ] || echo "testbed: no memory controller of cgroup v1 here: Slurm will not enforce memory limits" >&2
}

packages() {
  local missing
  # shellcheck disable=SC2086
  missing=$(dpkg-query -W -f '${db:Status-Abbrev}${Package}\n' $PACKAGES 2>/dev/null | awk '$1=="ii"{print $2}' | sort |
    comm -13 - <(tr -s ' \n' '\n' <<<"$PACKAGES" | sort | grep .) || :)
  [ -n "$missing" ] || { STEP_NOTE="all there"; return 0; }
  # the packages must not start their daemons
  local policy=/usr/sbin/policy-rc.d made=
  [ -e $policy ] || { printf '#!/bin/sh\nexit 101\n' >$policy; chmod 755 $policy; made=1; trap 'rm -f /usr/sbin/policy-rc.d' EXIT; }
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q -o Acquire::Check-Valid-Until=false >"$LOG/apt-update.log" 2>&1 || : # some source of the machine's may be out of reach
  # shellcheck disable=SC2086
  quiet apt-install apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=120 -o Acquire::Check-Valid-Until=false $missing
  [ -z "$made" ] || { rm -f $policy; trap - EXIT; }
  STEP_NOTE=$(wc -w <<<"$missing")" installed"
}

mirror() { # the Debian mirror that this machine uses already
  local m
  m=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -n 1)
  [ -n "$m" ] || m=$(grep -hoE '^deb (\[[^]]*\] )?[^ ]+' /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | grep -i debian | awk 'NR==1{print $NF}')
  [ -n "$m" ] || die "no Debian mirror in this machine's apt sources"
  echo "$m"
}

# Debian 12 has no Apptainer. sid's package wants a newer C library: it goes to its natural places (it finds its
# files relative to them), sid's libraries go beside it, and its two programs are told to use those.
apptainer_of_sid() {
  apptainer --version >/dev/null 2>&1 && { STEP_NOTE=$(apptainer --version); return 0; }
  local S=$CACHE/sidapt L=/opt/apptainer/lib b f
  mkdir -p "$S"/{state/lists/partial,cache/archives/partial,etc/sources.list.d,etc/preferences.d,debs}; : >"$S/status"
  if ! compgen -G "$S/debs/apptainer_*.deb" >/dev/null; then
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) sid main" >"$S/etc/sources.list"
    # an apt state of its own: the machine's package lists stay as they are
    cat >"$S/apt.conf" <<C
Dir::State "$S/state"; Dir::State::status "$S/status"; Dir::Cache "$S/cache";
Dir::Etc::sourcelist "$S/etc/sources.list"; Dir::Etc::sourceparts "$S/etc/sources.list.d"; Dir::Etc::preferencesparts "$S/etc/preferences.d";
APT::Architecture "amd64"; APT::Get::List-Cleanup "false"; Acquire::Languages "none"; Acquire::Check-Valid-Until "false"; APT::Sandbox::User "root";
C
    rm -rf "$S/new"; mkdir "$S/new"
    quiet sid-update env APT_CONFIG="$S/apt.conf" apt-get update -q
    quiet sid-download env -C "$S/new" APT_CONFIG="$S/apt.conf" apt-get download -q apptainer libc6 libseccomp2 libsqlite3-0
    rm -rf "$S/debs"; mv "$S/new" "$S/debs"
  fi
  rm -rf "$S/x"; mkdir "$S/x"; for f in "$S"/debs/lib*.deb; do dpkg -x "$f" "$S/x"; done
  mkdir -p $L
  cp -a "$S"/x/usr/lib/x86_64-linux-gnu/{ld-linux-x86-64.so.2,libc.so.6,libm.so.6,libresolv.so.2,libnss_files.so.2,libnss_dns.so.2,libseccomp.so*,libsqlite3.so*} $L/
  dpkg-deb --fsys-tarfile "$S"/debs/apptainer_*.deb | tar -x -C / --no-overwrite-dir --keep-directory-symlink --exclude=./usr/share
  for b in /usr/lib/x86_64-linux-gnu/apptainer/bin/starter /usr/bin/apptainer; do
    quiet patchelf patchelf --set-interpreter $L/ld-linux-x86-64.so.2 --force-rpath --set-rpath $L $b
  done
  STEP_NOTE=$(apptainer --version) || die "apptainer of sid does not run here"
}

# The tree of --slurm 26.05: everything of the HPC side from sid. Made aside and renamed when it is whole.
sid_tree() {
  local T=$CACHE/sid N=$CACHE/sid.new
  [ -e "$T" ] && { STEP_NOTE=$(chroot "$T" slurmd -V); return 0; }
  umount "$N/proc" 2>/dev/null || :
  rm -rf "$N"
  quiet debootstrap debootstrap --variant=minbase --include=ca-certificates sid "$N" "$(mirror)"
  printf '#!/bin/sh\nexit 101\n' >"$N/usr/sbin/policy-rc.d"; chmod 755 "$N/usr/sbin/policy-rc.d"
  cp /etc/resolv.conf "$N/etc/"
  mount -t proc proc "$N/proc"
  # shellcheck disable=SC2086
  quiet sid-install env DEBIAN_FRONTEND=noninteractive chroot "$N" apt-get -q -o Acquire::Check-Valid-Until=false \
    -o APT::Keep-Downloaded-Packages=false install -y --no-install-recommends $SID_PACKAGES
  umount "$N/proc"
  rm -rf "$N"/var/cache/apt/archives/*.deb "$N"/var/lib/apt/lists/*
  mv "$N" "$T"
  STEP_NOTE=$(chroot "$T" slurmd -V)
}
