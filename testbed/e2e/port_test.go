//go:build testbed

package e2e

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The kubelet port knows its callers by certificate or token, and asks the API
// server for their rights.
func TestKubeletPort(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo secret words; sleep 1000"))
	p.awaitLog("secret")
	address := kubectl(t, "get", "node", env("KNOC_NODE"), "-o", "jsonpath={.status.addresses[?(@.type=='InternalIP')].address}")
	port := kubectl(t, "get", "node", env("KNOC_NODE"), "-o", "jsonpath={.status.daemonEndpoints.kubeletEndpoint.Port}")
	pem, err := os.ReadFile(env("KNOC_PKI") + "/ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(pem)
	get := func(path, token string, certs ...tls.Certificate) string {
		client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}}, Timeout: 30 * time.Second}
		defer client.CloseIdleConnections()
		r, err := http.NewRequest("GET", "https://"+net.JoinHostPort(address, port)+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		answer, err := client.Do(r)
		if err != nil {
			return err.Error()
		}
		defer answer.Body.Close()
		body, _ := io.ReadAll(answer.Body)
		return answer.Status + " " + string(body)
	}
	log := "/containerLogs/" + n.name + "/pod/main"
	kubectl(t, "-n", n.name, "create", "serviceaccount", "reader")
	token := strings.TrimSpace(kubectl(t, "-n", n.name, "create", "token", "reader"))
	admin, err := tls.LoadX509KeyPair(env("KNOC_PKI")+"/kubelet-client.crt", env("KNOC_PKI")+"/kubelet-client.key")
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		who, path, token, want string
		certs                  []tls.Certificate
	}{
		{"nobody", log, "", "401 ", nil},
		{"nobody", "/stats/summary", "", "401 ", nil},
		{"a made-up token", log, "abc", "401 ", nil},
		{"a service account without rights", log, token, "403 ", nil},
		{"a service account without rights", "/stats/summary", token, "403 ", nil},
		{"the API server", log, "", "200 OK secret words", []tls.Certificate{admin}},
	} {
		if got := get(test.path, test.token, test.certs...); !strings.HasPrefix(got, test.want) {
			t.Errorf("%s at %s got %q, want %q", test.who, test.path, got, test.want)
		}
	}
	meta := metav1.ObjectMeta{Name: n.name + "-stats"}
	n.object(&rbacv1.ClusterRole{
		TypeMeta: metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRole"}, ObjectMeta: meta,
		Rules: []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"nodes/stats"}, Verbs: []string{"get"}}},
	})
	t.Cleanup(func() { tryKubectl(nil, "delete", "clusterrole,clusterrolebinding", meta.Name) })
	n.object(&rbacv1.ClusterRoleBinding{
		TypeMeta: metav1.TypeMeta{APIVersion: "rbac.authorization.k8s.io/v1", Kind: "ClusterRoleBinding"}, ObjectMeta: meta,
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Name: "reader", Namespace: n.name}},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
	})
	until(t, "the right to be seen", func() bool { return strings.HasPrefix(get("/stats/summary", token), "200 ") })
	if got := get(log, token); !strings.HasPrefix(got, "403 ") {
		t.Errorf("with the right to nodes/stats the log is answered by %q, want 403", got)
	}
}
