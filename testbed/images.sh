# shellcheck shell=bash
# Two registries on cloud (:5000 open, :5001 with basic auth), each with busybox, app and static, their requests in
# log/registry-*.log. No image comes from outside.

PRIVATE_USER=alice PRIVATE_PASS=secret

registries_up() {
  local i d=$STATE/registry
  mkdir -p "$d"
  [ -s "$d/htpasswd" ] || { htpasswd -bBn $PRIVATE_USER $PRIVATE_PASS | head -n 1 >"$d/htpasswd.new"; mv "$d/htpasswd.new" "$d/htpasswd"; }
  for i in 5000 5001; do
    alive "registry-$i" && continue
    {
      echo "version: 0.1"
      echo "log: {level: warn, accesslog: {disabled: false}}"
      echo "storage: {filesystem: {rootdirectory: $d/$i}, delete: {enabled: true}}"
      echo "http: {addr: $CLOUD:$i}"
      [ $i = 5000 ] || echo "auth: {htpasswd: {realm: testbed, path: $d/htpasswd}}"
    } >"$d/$i.yml"
    spawn "registry-$i" nsenter --net=/run/netns/knoc-cloud --uts="$STATE/pid/cloud.uts" docker-registry serve "$d/$i.yml"
  done
  for i in 5000 5001; do wait_for 20 "registry-$i" curl -s -m 2 -o /dev/null "http://$CLOUD:$i/v2/"; done
}
registries_down() { finish TERM 5 registry-5000 registry-5001; }

images() {
  local want d=$STATE/images im
  want=$(sha256sum "$TB/images.sh")
  [ "$(cat "$STATE/registry/pushed" 2>/dev/null)" = "$want" ] && { STEP_NOTE="all there"; return 0; }
  rm -rf "$d"; mkdir -p "$d"
  ( cd "$d" && quiet images build_images )
  for im in busybox app static; do
    quiet push skopeo copy -q --dest-tls-verify=false "oci:$d/oci:$im" "docker://$CLOUD:5000/$im:latest"
    quiet push skopeo copy -q --dest-tls-verify=false --dest-creds "$PRIVATE_USER:$PRIVATE_PASS" "oci:$d/oci:$im" "docker://$CLOUD:5001/$im:latest"
  done
  rm -rf "$d"
  echo "$want" >"$STATE/registry/pushed"
}

# busybox: static busybox and nothing else. app: the same with ENTRYPOINT, CMD, ENV, WORKDIR and USER. static: one
# program and a directory, no shell, no /etc/passwd.
build_images() {
  local a
  mkdir -p fs/{bin,dev,etc,proc,sys,tmp,usr/bin,root,home,var/tmp,work}; chmod 1777 fs/tmp fs/var/tmp
  cp /bin/busybox fs/bin/
  for a in $(/bin/busybox --list | grep -vx busybox); do ln -s busybox "fs/bin/$a"; done
  printf 'root:x:0:0:root:/root:/bin/sh\napp:x:1234:1234:app:/home:/bin/sh\n' >fs/etc/passwd
  printf 'root:x:0:\napp:x:1234:\n' >fs/etc/group
  cat >fs/bin/entry <<'S'
#!/bin/sh
echo "entry args=[$*] pwd=$(pwd) id=$(id -u) FOO=$FOO PATH=$PATH HOME=$HOME"
[ $# -gt 0 ] && command -v "$1" >/dev/null && exec "$@"
exit 0
S
  chmod 755 fs/bin/entry
  tar -C fs --owner=0 --group=0 --sort=name -cf layer.tar .
  umoci init --layout oci
  umoci new --image oci:busybox
  umoci unpack --rootless --image oci:busybox b
  rm -rf b/rootfs; mkdir b/rootfs; tar -C b/rootfs -xf layer.tar
  umoci repack --image oci:busybox b
  umoci config --image oci:busybox --config.cmd sh --config.env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
  umoci tag --image oci:busybox app
  umoci config --image oci:app --config.entrypoint /bin/entry --config.cmd hello --config.cmd "two words" \
    --config.env FOO=bar --config.workingdir /work --config.user app
  umoci new --image oci:static
  umoci unpack --rootless --image oci:static s
  mkdir s/rootfs/data; cp /bin/busybox s/rootfs/printf
  umoci repack --image oci:static s
  # shellcheck disable=SC2016
  umoci config --image oci:static --config.entrypoint /printf --config.entrypoint '[%s]' --config.cmd hello --config.cmd '$(id) "two" words' --config.workingdir /data
}
