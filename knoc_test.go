package knoc

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Bad input is refused in one line that names it, before anything is made.
func TestRunRefuses(t *testing.T) {
	const nobody = `{"kind":"Status","status":"Failure","code":404,"reason":"NotFound"}`
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	// What the API server answers, by path; 404 otherwise.
	answers := func(user string) map[string]string {
		return map[string]string{
			"POST /apis/authentication.k8s.io/v1/selfsubjectreviews": fmt.Sprintf(
				`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview","status":{"userInfo":{"username":%q,"groups":["system:nodes"]}}}`, user),
			"GET /api/v1/namespaces/default/services/kubernetes": `{"apiVersion":"v1","kind":"Service","metadata":{"uid":"c1"}}`,
			"GET /api/v1/pods": `{"apiVersion":"v1","kind":"PodList","items":[]}`,
		}
	}
	for _, c := range []struct {
		name   string
		cfg    func(*Config)
		server func(map[string]string)
		want   string
	}{
		{"node name", func(c *Config) { c.NodeName = "No" }, nil, `--nodename "No"`},
		{"provider config", func(c *Config) { c.ProviderConfig = write("p", `{"knoc":{"cpu":"x"}}`) }, nil, `cpu "x"`},
		{"half a TLS", func(c *Config) { c.TLSCert = "c" }, nil, "--tls-key is missing"},
		{"kubeconfig", func(c *Config) { c.Kubeconfig = filepath.Join(dir, "none") }, nil, filepath.Join(dir, "none")},
		{"another node's identity", nil, func(m map[string]string) {
			m["POST /apis/authentication.k8s.io/v1/selfsubjectreviews"] = answers("system:node:other")["POST /apis/authentication.k8s.io/v1/selfsubjectreviews"]
		}, "--nodename other"},
		{"a label that a node may not set", func(c *Config) { c.Labels = []string{"kubernetes.io/role=x"} }, nil, "--label kubernetes.io/role"},
		{"a real node", nil, func(m map[string]string) {
			m["GET /api/v1/nodes/knoc"] = `{"apiVersion":"v1","kind":"Node","metadata":{"name":"knoc"},"status":{"nodeInfo":{"kubeletVersion":"v1.37.2"}}}`
		}, "not a virtual node"},
		{"no cluster id", nil, func(m map[string]string) { delete(m, "GET /api/v1/namespaces/default/services/kubernetes") }, "--cluster-id"},
		{"a bad cluster id", func(c *Config) { c.ClusterID = "../x" }, nil, `--cluster-id "../x"`},
		{"no right to list pods", nil, func(m map[string]string) { delete(m, "GET /api/v1/pods") }, "listing the pods of node knoc"},
	} {
		t.Run(c.name, func(t *testing.T) {
			says := answers("system:node:knoc")
			if c.server != nil {
				c.server(says)
			}
			var made []string
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				key := r.Method + " " + r.URL.Path
				if r.Method != http.MethodGet && !strings.HasSuffix(key, "selfsubjectreviews") {
					made = append(made, key)
				}
				w.Header().Set("Content-Type", "application/json")
				if says[key] == "" {
					w.WriteHeader(http.StatusNotFound)
					fmt.Fprint(w, nobody)
					return
				}
				fmt.Fprint(w, says[key])
			}))
			defer server.Close()
			kubeconfig, err := json.Marshal(map[string]any{
				"current-context": "x",
				"clusters":        []any{map[string]any{"name": "x", "cluster": map[string]any{"server": server.URL}}},
				"contexts":        []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "x"}}},
			})
			if err != nil {
				t.Fatal(err)
			}
			cfg := Config{Kubeconfig: write("kubeconfig", string(kubeconfig)), Logger: slog.New(slog.DiscardHandler)}
			if c.cfg != nil {
				c.cfg(&cfg)
			}
			err = Run(context.Background(), cfg)
			if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want %s", err, c.want)
			}
			if len(made) > 0 {
				t.Errorf("made something: %v", made)
			}
		})
	}
}
