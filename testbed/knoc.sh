# shellcheck shell=bash
# knoc itself, on cloud, with a node's identity and a serving certificate of the cluster's CA.

KNOC_BIN=$RUN/bin/knoc ARGS=$RUN/knoc.args

knoc_build() { # leaves KNOC_CHANGED=1 when the binary is another one than before
  KNOC_CHANGED=
  [ -e "$SRC/main/knoc/main.go" ] || { STEP_NOTE="skipped: there is no main/knoc yet"; return 0; }
  mkdir -p "$RUN/bin"
  [ ! -e "$KNOC_BIN" ] || cp "$KNOC_BIN" "$KNOC_BIN.new" # go does not link again what is up to date
  quiet knoc-build go build -C "$SRC" -o "$KNOC_BIN.new" ./main/knoc
  if cmp -s "$KNOC_BIN.new" "$KNOC_BIN"; then rm "$KNOC_BIN.new"; STEP_NOTE=unchanged
  else mv "$KNOC_BIN.new" "$KNOC_BIN"; KNOC_CHANGED=1; fi
}

knoc_args() { # one argument a line
  cat >"$ARGS.new" <<A
--nodename
$NODE
--kubeconfig
$PKI/knoc.kubeconfig
--ssh
$HPCUSER@$LOGIN
--ssh-key
$SSHDIR/key
--ssh-known-hosts
$SSHDIR/known_hosts
--partition
batch
--runtime
apptainer
--internal-ip
$CLOUD
--listen
$CLOUD:10250
--tls-cert
$PKI/knoc-serving.crt
--tls-key
$PKI/knoc-serving.key
--client-ca
$PKI/ca.crt
--insecure-registry
$CLOUD:5000
--insecure-registry
$CLOUD:5001
--log-level
debug
A
  if cmp -s "$ARGS.new" "$ARGS"; then rm "$ARGS.new"; else mv "$ARGS.new" "$ARGS"; KNOC_CHANGED=1; fi
}

knoc_start() {
  local args
  alive knoc && return
  KNOC_STARTED=$EPOCHSECONDS
  mapfile -t args <"$ARGS"
  # a clean environment: what run/env sets (KNOC_SSH_KEY…) are flags to knoc too
  spawn knoc env -i HOME=/root PATH=/usr/bin:/bin nsenter --net=/run/netns/knoc-cloud --uts="$STATE/pid/cloud.uts" "$KNOC_BIN" "${args[@]}"
}
# Ready, and answering. Ready may still be what an earlier knoc said, so its lease must have been renewed since
# the start, or (knoc was alive already) within its 40 s.
knoc_serves() {
  local k=("$TB/bin/kubectl" --kubeconfig "$PKI/admin.kubeconfig" --request-timeout=5s get) t
  curl -s -m 5 -o /dev/null --cacert "$PKI/ca.crt" --cert "$PKI/kubelet-client.crt" --key "$PKI/kubelet-client.key" "https://$CLOUD:10250/pods" || return
  t=$("${k[@]}" -n kube-node-lease lease "$NODE" -o 'jsonpath={.spec.renewTime}') || return
  [ "$(date -d "$t" +%s)" -ge "${KNOC_STARTED:-$((EPOCHSECONDS - 40))}" ] || return
  "${k[@]}" node "$NODE" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}' | grep -qx True
}
knoc_wait() { wait_for "${1:-60}" knoc knoc_serves; }

knoc_up() {
  [ -x "$KNOC_BIN" ] || { STEP_NOTE="skipped: no binary"; return 0; }
  knoc_args
  if alive knoc; then
    if [ -n "$KNOC_CHANGED" ]; then finish TERM 10 knoc; else STEP_NOTE=alive; fi
  fi
  knoc_start
  knoc_wait
}
