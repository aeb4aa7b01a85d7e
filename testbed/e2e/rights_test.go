//go:build testbed

package e2e

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// deploy/rbac.yaml is all that a ServiceAccount needs.
func TestServiceAccountRights(t *testing.T) {
	t.Parallel()
	kubectl(t, "apply", "-f", "../../deploy/rbac.yaml")
	t.Cleanup(func() { tryKubectl(nil, "delete", "-f", "../../deploy/rbac.yaml", "--wait=false") })
	token := strings.TrimSpace(kubectl(t, "-n", "knoc", "create", "token", "knoc"))
	ca, err := os.ReadFile(env("KNOC_PKI") + "/ca.crt")
	if err != nil {
		t.Fatal(err)
	}
	server := kubectl(t, "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
current-context: c
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: c, user: {token: %s}}]
contexts: [{name: c, context: {cluster: c, user: c}}]
`, server, base64.StdEncoding.EncodeToString(ca), token), 0o600); err != nil {
		t.Fatal(err)
	}
	node := "knoc-account"
	os.Remove(ownLog(node))
	startKnoc(t, node, "--kubeconfig", kubeconfig)
	n := newNamespaceOn(t, node)
	n.configMap("words", map[string]string{"word": "configured"}, nil)
	n.object(map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "hidden"}, "stringData": map[string]any{"word": "hidden"}})
	p := n.createOne(n.shell("pod", `cat /words/word /hidden/word; echo; [ -s /var/run/secrets/kubernetes.io/serviceaccount/token ] && echo token; exec sleep 1000`, func(p *v1.Pod) {
		p.Spec.Volumes = []v1.Volume{
			{Name: "words", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "words"}}}},
			{Name: "hidden", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "hidden"}}},
		}
		p.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "words", MountPath: "/words"}, {Name: "hidden", MountPath: "/hidden"}}
	}))
	p.awaitLog("token")
	if got := p.log(); got != "configuredhidden\ntoken\n" {
		t.Errorf("log %q", got)
	}
	if out := p.kubectl("exec", "pod", "--", "echo", "entered"); out != "entered\n" {
		t.Errorf("exec printed %q", out)
	}
	until(t, "an event of knoc's", func() bool {
		out, err := tryKubectl(nil, "-n", n.name, "get", "events", "-o", "jsonpath={.items[*].reason}")
		return err == nil && strings.Contains(out, "Started")
	})
	p.kubectl("delete", "pod", "pod", "--grace-period=1", "--timeout=120s")
	log, err := os.ReadFile(ownLog(node))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(log)) {
		if strings.Contains(strings.ToLower(line), "forbidden") {
			t.Errorf("knoc's log: %s", line)
		}
	}
}
