# shellcheck shell=bash
# The Kubernetes side, on cloud: etcd, kube-apiserver, kube-controller-manager and kube-scheduler, one multi-call
# binary of testbed/kube. The API is served and advertised on cloud's own address; what only the others need
# (etcd, health of the controllers) listens on cloud's loopback.

KUBE_VERSION=v1.37.2
KUBE_API=https://$CLOUD:6443

# Built once for each go.mod/main.go and Go; a fresh clone on the same machine does not link again.
kube_build() {
  local key out p x="-s -w"
  for p in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    x="$x -X $p.gitVersion=$KUBE_VERSION -X $p.gitMajor=1 -X $p.gitMinor=37 -X $p.gitTreeState=clean"
  done
  key=$({ cd "$TB/kube" && cat go.mod go.sum main.go && go version && echo "$x $GOFLAGS"; } | sha256sum | head -c 16)
  out=$CACHE/kube-$key
  mkdir -p "$CACHE"
  if [ ! -e "$out" ]; then
    rm -rf "$out.new"; mkdir "$out.new"
    quiet kube-build go build -C "$TB/kube" -ldflags "$x" -o "$out.new/kubetest" .
    quiet kubectl-build go build -C "$TB/kube" -ldflags "$x" -o "$out.new/kubectl" k8s.io/kubernetes/cmd/kubectl
    mv "$out.new" "$out"
  else
    STEP_NOTE="cached"
  fi
  KUBE_BIN=$out/kubetest
  ln -sfn "$out/kubectl" "$TB/bin/kubectl"
}

key() { openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$1" 2>/dev/null; }
issue() { # NAME OPENSSL-OPTIONS...: the certificate last and whole, as it says that all is there
  local n=$1; shift
  [ -s "$n.crt" ] && return
  key "$n.key"
  openssl req -x509 -config min.cnf -key "$n.key" -days 3650 "$@" -out "$n.new"
  mv "$n.new" "$n.crt"
}
ca() { # NAME CN
  issue "$1" -subj "/CN=$2" -addext basicConstraints=critical,CA:TRUE \
    -addext keyUsage=critical,keyCertSign,cRLSign,digitalSignature -addext subjectKeyIdentifier=hash
}
leaf() { # CA NAME SUBJECT USAGE [SAN]
  issue "$2" -CA "$1.crt" -CAkey "$1.key" -subj "$3" -addext basicConstraints=critical,CA:FALSE \
    -addext keyUsage=critical,digitalSignature -addext "extendedKeyUsage=$4" ${5:+-addext "subjectAltName=$5"}
}
kubeconfig() { # NAME
  cat >"$PKI/$1.kubeconfig.new" <<C
apiVersion: v1
kind: Config
current-context: testbed
clusters: [{name: testbed, cluster: {server: "$KUBE_API", certificate-authority-data: $(base64 -w0 <"$PKI/ca.crt")}}]
contexts: [{name: testbed, context: {cluster: testbed, user: $1}}]
users: [{name: $1, user: {client-certificate-data: $(base64 -w0 <"$PKI/$1.crt"), client-key-data: $(base64 -w0 <"$PKI/$1.key")}}]
C
  mv "$PKI/$1.kubeconfig.new" "$PKI/$1.kubeconfig"
}

certificates() {
  install -d -m 700 "$PKI"
  (
    cd "$PKI" || exit
    printf '[req]\ndistinguished_name = dn\nprompt = no\n[dn]\n' >min.cnf
    ca ca testbed-ca
    ca front-proxy-ca testbed-front-proxy-ca
    leaf ca apiserver /CN=kube-apiserver serverAuth "IP:127.0.0.1,IP:10.96.0.1,IP:$CLOUD,DNS:cloud,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local"
    leaf ca kcm-serving /CN=kube-controller-manager serverAuth "IP:127.0.0.1,DNS:localhost"
    leaf ca sched-serving /CN=kube-scheduler serverAuth "IP:127.0.0.1,DNS:localhost"
    leaf ca kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client clientAuth
    leaf ca admin /O=system:masters/CN=testbed-admin clientAuth
    leaf ca kcm /CN=system:kube-controller-manager clientAuth
    leaf ca sched /CN=system:kube-scheduler clientAuth
    leaf front-proxy-ca front-proxy-client /CN=front-proxy-client clientAuth
    leaf ca knoc "/O=system:nodes/CN=system:node:$NODE" clientAuth
    leaf ca knoc-serving "/O=system:nodes/CN=system:node:$NODE" serverAuth "IP:$CLOUD,DNS:$NODE,DNS:cloud"
    [ -s sa.pub ] || { openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.new 2>/dev/null; mv sa.new sa.pub; }
  )
  local c
  for c in admin kcm sched knoc; do kubeconfig $c; done
}

kube_start() { # NAME ARGUMENTS...
  local n=$1; shift
  alive "$n" || spawn "$n" nsenter --net=/run/netns/knoc-cloud --uts="$STATE/pid/cloud.uts" "$KUBE_BIN" "$n" "$@"
}
kube_curl() { in_cloud curl -sf -m 5 -o /dev/null --cacert "$PKI/ca.crt" --cert "$PKI/admin.crt" --key "$PKI/admin.key" "$@"; }

kube_up() {
  local P=$PKI
  alive etcd && alive kube-apiserver && alive kube-controller-manager && alive kube-scheduler && STEP_NOTE="alive"
  kube_start etcd --name testbed --data-dir "$STATE/etcd" --unsafe-no-fsync --log-level warn \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
    --initial-cluster testbed=http://127.0.0.1:2380
  # shellcheck disable=SC2086
  kube_start kube-apiserver --bind-address=0.0.0.0 --advertise-address=$CLOUD --secure-port=6443 \
    --etcd-servers=http://127.0.0.1:2379 \
    --tls-cert-file="$P/apiserver.crt" --tls-private-key-file="$P/apiserver.key" --client-ca-file="$P/ca.crt" \
    --authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
    --enable-bootstrap-token-auth=true \
    --service-account-issuer=https://kubernetes.default.svc.cluster.local \
    --service-account-key-file="$P/sa.pub" --service-account-signing-key-file="$P/sa.key" \
    --service-cluster-ip-range=10.96.0.0/16 \
    --kubelet-certificate-authority="$P/ca.crt" --kubelet-client-certificate="$P/kubelet-client.crt" --kubelet-client-key="$P/kubelet-client.key" \
    --kubelet-preferred-address-types=InternalIP,Hostname \
    --requestheader-client-ca-file="$P/front-proxy-ca.crt" --requestheader-allowed-names=front-proxy-client \
    --requestheader-extra-headers-prefix=X-Remote-Extra- --requestheader-group-headers=X-Remote-Group --requestheader-username-headers=X-Remote-User \
    --proxy-client-cert-file="$P/front-proxy-client.crt" --proxy-client-key-file="$P/front-proxy-client.key" \
    ${KT_APISERVER_ARGS:-}
  wait_for 90 kube-apiserver kube_curl "$KUBE_API/readyz"
  # shellcheck disable=SC2086
  kube_start kube-controller-manager --kubeconfig="$P/kcm.kubeconfig" \
    --authentication-kubeconfig="$P/kcm.kubeconfig" --authorization-kubeconfig="$P/kcm.kubeconfig" \
    --bind-address=127.0.0.1 --secure-port=10257 --tls-cert-file="$P/kcm-serving.crt" --tls-private-key-file="$P/kcm-serving.key" \
    --leader-elect=false --use-service-account-credentials=true --kube-api-qps=300 --kube-api-burst=600 --controllers='*' \
    --service-account-private-key-file="$P/sa.key" --root-ca-file="$P/ca.crt" --client-ca-file="$P/ca.crt" \
    --cluster-signing-cert-file="$P/ca.crt" --cluster-signing-key-file="$P/ca.key" --requestheader-client-ca-file="$P/front-proxy-ca.crt" \
    --service-cluster-ip-range=10.96.0.0/16 ${KT_KCM_ARGS:-}
  # shellcheck disable=SC2086
  kube_start kube-scheduler --kubeconfig="$P/sched.kubeconfig" \
    --authentication-kubeconfig="$P/sched.kubeconfig" --authorization-kubeconfig="$P/sched.kubeconfig" \
    --bind-address=127.0.0.1 --secure-port=10259 --tls-cert-file="$P/sched-serving.crt" --tls-private-key-file="$P/sched-serving.key" \
    --client-ca-file="$P/ca.crt" --requestheader-client-ca-file="$P/front-proxy-ca.crt" \
    --leader-elect=false ${KT_SCHED_ARGS:-}
  wait_for 60 kube-controller-manager kube_curl https://127.0.0.1:10257/healthz
  wait_for 60 kube-scheduler kube_curl https://127.0.0.1:10259/healthz
  wait_for 60 kube-controller-manager kube_curl "$KUBE_API/api/v1/namespaces/default/serviceaccounts/default"
}

kube_down() { # in order: etcd last
  finish TERM 5 kube-scheduler kube-controller-manager
  finish TERM 10 kube-apiserver
  finish TERM 10 etcd
}
