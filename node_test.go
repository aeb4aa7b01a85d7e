package knoc

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func TestParseTaints(t *testing.T) {
	knoc := v1.Taint{Key: "virtual-kubelet.io/provider", Value: "knoc", Effect: v1.TaintEffectNoSchedule}
	for _, c := range []struct {
		words []string
		want  []v1.Taint
		err   string
	}{
		{nil, []v1.Taint{knoc}, ""},
		{[]string{"none"}, nil, ""},
		{[]string{"hpc:NoExecute"}, []v1.Taint{{Key: "hpc", Effect: v1.TaintEffectNoExecute}}, ""},
		{[]string{"a/b=c:PreferNoSchedule", defaultTaint}, []v1.Taint{{Key: "a/b", Value: "c", Effect: v1.TaintEffectPreferNoSchedule}, knoc}, ""},
		{[]string{"hpc"}, nil, "no effect"},
		{[]string{"hpc=x:Never"}, nil, `"Never" is not`},
		{[]string{"=x:NoSchedule"}, nil, "bad key"},
		{[]string{"a=b c:NoSchedule"}, nil, "bad value"},
		{[]string{"a=1:NoSchedule", "a=2:NoSchedule"}, nil, "given twice"},
		{[]string{"none", "a=1:NoSchedule"}, nil, "no effect"},
	} {
		got, err := parseTaints(c.words)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) || !strings.Contains(err.Error(), "--taint") {
				t.Errorf("%q: error %v, want %s", c.words, err, c.err)
			}
			continue
		}
		if d := cmp.Diff(c.want, got); err != nil || d != "" {
			t.Errorf("%q: %v %s", c.words, err, d)
		}
	}
}

func TestNewVirtualNodeRefuses(t *testing.T) {
	for _, c := range []struct {
		change func(*Config)
		want   string
	}{
		{func(c *Config) { c.NodeName = "Big_Node" }, `--nodename "Big_Node"`},
		{func(c *Config) { c.OS = "windows" }, `--os "windows"`},
		{func(c *Config) { c.InternalIP = "login" }, `--internal-ip "login"`},
		{func(c *Config) { c.Labels = []string{"x"} }, `--label "x"`},
		{func(c *Config) { c.Labels = []string{"a b=x"} }, `--label "a b=x": bad key`},
		{func(c *Config) { c.Labels = []string{"a=x y"} }, `--label "a=x y": bad value`},
		{func(c *Config) { c.Taints = []string{"x"} }, `--taint "x"`},
	} {
		cfg := Config{}.withDefaults()
		c.change(&cfg)
		if _, err := newVirtualNode(cfg, NodeConfig{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
}

func TestNodeIdentityMayNotSetEveryLabel(t *testing.T) {
	for label, forbidden := range map[string]bool{
		"team=a":                             false,
		"example.org/team=a":                 false,
		"node.kubernetes.io/team=a":          false,
		"kubelet.kubernetes.io/x=a":          false,
		"topology.kubernetes.io/zone=a":      false,
		"kubernetes.io/arch=arm64":           false,
		"kubernetes.io/role=agent":           true,
		"node-role.kubernetes.io/hpc=":       true,
		"x.k8s.io/y=a":                       true,
		"node-restriction.kubernetes.io/x=a": true,
	} {
		n, err := newVirtualNode(Config{Labels: []string{label}}.withDefaults(), NodeConfig{})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.allowedTo("knoc"); (err != nil) != forbidden {
			t.Errorf("%s as a node: %v", label, err)
		}
		if err := n.allowedTo(""); err != nil {
			t.Errorf("%s as a service account: %v", label, err)
		}
	}
	n, _ := newVirtualNode(Config{}.withDefaults(), NodeConfig{})
	if err := n.allowedTo("other"); err == nil || !strings.Contains(err.Error(), "--nodename other") {
		t.Errorf("another node's kubeconfig: %v", err)
	}
}

func TestNodeObject(t *testing.T) {
	cfg := Config{Labels: []string{"kubernetes.io/arch=arm64"}, Version: "v1.2.3"}.withDefaults()
	cfg.SSH.Address = "alice@login"
	n, err := newVirtualNode(cfg, NodeConfig{KNOCConfig{Memory: "1Gi"}})
	if err != nil {
		t.Fatal(err)
	}
	n.port, n.addresses = 10250, []v1.NodeAddress{{Type: v1.NodeInternalIP, Address: "10.0.0.1"}}
	var state nodeState
	n.state = func() nodeState { return state }

	quantities := func(l v1.ResourceList) map[string]string {
		m := map[string]string{}
		for k, q := range l {
			m[string(k)] = q.String()
		}
		return m
	}
	// Until Slurm answers nothing may be scheduled here: no pods in the capacity.
	got := n.object()
	if d := cmp.Diff(map[string]string{"memory": "1Gi"}, quantities(got.Status.Capacity)); d != "" {
		t.Fatal(d)
	}
	state = nodeState{Known: true, Resources: nodeResources{CPUs: 64, MemoryMB: 2048, GPUs: map[string]int64{"a100": 2, "v100": 3}}}
	got = n.object()
	want := map[string]string{"cpu": "64", "memory": "1Gi", "pods": "110", "nvidia.com/gpu": "5"}
	if d := cmp.Diff(want, quantities(got.Status.Allocatable)); d != "" {
		t.Fatal(d)
	}
	wantLabels := map[string]string{
		"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64", "kubernetes.io/hostname": "knoc",
		"type": "virtual-kubelet", "node.kubernetes.io/exclude-from-external-load-balancers": "true",
	}
	if d := cmp.Diff(wantLabels, got.Labels); d != "" {
		t.Fatal(d)
	}
	if v := got.Status.NodeInfo; v.KubeletVersion != kubernetesVersion+"-knoc-v1.2.3" || v.Architecture != "arm64" || v.OperatingSystem != "linux" {
		t.Fatalf("nodeInfo %+v", v)
	}
	if got.Status.DaemonEndpoints.KubeletEndpoint.Port != 10250 {
		t.Fatalf("endpoints %+v", got.Status.DaemonEndpoints)
	}

	// What Slurm said last stays while it cannot be asked.
	state = nodeState{Problem: "ssh: dial tcp:\n no route to host"}
	got = n.object()
	if d := cmp.Diff(want, quantities(got.Status.Allocatable)); d != "" {
		t.Fatal(d)
	}
	conditions := map[v1.NodeConditionType]v1.NodeCondition{}
	for _, c := range got.Status.Conditions {
		conditions[c.Type] = c
	}
	if c := conditions[v1.NodeNetworkUnavailable]; c.Status != v1.ConditionTrue || c.Message != "ssh: dial tcp: no route to host" {
		t.Fatalf("network %+v", c)
	}
	if c := conditions[v1.NodeReady]; c.Status != v1.ConditionTrue {
		t.Fatalf("ready %+v", c)
	}
}

func TestNodeConditionsKeepTransitionTimes(t *testing.T) {
	at := func(s int64) metav1.Time { return metav1.Unix(s, 0) }
	first := nodeConditions(nodeState{}, nil, at(1))
	second := nodeConditions(nodeState{Problem: "down"}, first, at(2))
	third := nodeConditions(nodeState{Problem: "down still"}, second, at(3))
	for i, want := range []struct{ heart, network, ready int64 }{{1, 1, 1}, {2, 2, 1}, {3, 2, 1}} {
		for _, c := range [][]v1.NodeCondition{first, second, third}[i] {
			transition := want.ready
			if c.Type == v1.NodeNetworkUnavailable {
				transition = want.network
			}
			if c.LastTransitionTime.Unix() != transition || c.LastHeartbeatTime.Unix() != want.heart {
				t.Errorf("step %d: %+v", i, c)
			}
		}
	}
}

func TestAdoptNode(t *testing.T) {
	ctx := context.Background()
	cfg := Config{}.withDefaults()
	for _, c := range []struct {
		name string
		old  *v1.Node
		want string
	}{
		{"none", nil, ""},
		{"the first KNoC's", &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "knoc", Labels: map[string]string{"type": "virtual-kubelet"}}}, ""},
		{"a real kubelet's", &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "knoc"}, Status: v1.NodeStatus{NodeInfo: v1.NodeSystemInfo{KubeletVersion: "v1.37.2"}}}, "not a virtual node"},
	} {
		client := fake.NewClientset()
		if c.old != nil {
			client = fake.NewClientset(c.old)
		}
		n, err := newVirtualNode(cfg, NodeConfig{})
		if err != nil {
			t.Fatal(err)
		}
		err = n.adopt(ctx, client, slog.New(slog.DiscardHandler))
		if (c.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestNodeListen(t *testing.T) {
	files := newTestCerts(t)
	for _, c := range []struct {
		name, ip, listen, api string
		closed                bool
		want                  string
	}{
		{name: "asked for", ip: "10.9.8.7", listen: "127.0.0.1:0", want: "10.9.8.7"},
		{name: "the port's", listen: "127.0.0.1:0", want: "127.0.0.1"},
		{name: "towards the API server", listen: ":0", api: "https://127.0.0.1:6443", want: "127.0.0.1"},
		{name: "closed", closed: true, api: "https://127.0.0.1:6443", want: "127.0.0.1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := Config{InternalIP: c.ip, Listen: c.listen, Logger: slog.New(slog.DiscardHandler)}
			if !c.closed {
				cfg.TLSCert, cfg.TLSKey, cfg.ClientCA = files.cert, files.key, files.ca
			}
			files, err := newKubeletFiles(cfg)
			if err != nil {
				t.Fatal(err)
			}
			n := &virtualNode{}
			l, err := n.listen(cfg, files, c.api)
			if err != nil {
				t.Fatal(err)
			}
			if (l == nil) != c.closed || (n.port == 0) != c.closed {
				t.Fatalf("listener %v, port %d", l, n.port)
			}
			if l != nil {
				l.Close()
			}
			if d := cmp.Diff([]v1.NodeAddress{{Type: v1.NodeInternalIP, Address: c.want}}, n.addresses); d != "" {
				t.Fatal(d)
			}
		})
	}
}

// The node claims the Kubernetes version that its libraries are of.
func TestKubernetesVersionIsThatOfGoMod(t *testing.T) {
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if want := "k8s.io/client-go v0" + strings.TrimPrefix(kubernetesVersion, "v1"); !strings.Contains(string(mod), want) {
		t.Fatalf("go.mod has no %s", want)
	}
}

func TestKubeletVersion(t *testing.T) {
	for in, want := range map[string]string{
		"":                          "devel",
		"(devel)":                   "devel",
		"v0.3.0":                    "v0.3.0",
		"v0.0.0-20260801-abc+dirty": "v0.0.0-20260801-abc-dirty",
	} {
		if got := kubeletVersion(in); got != kubernetesVersion+"-knoc-"+want {
			t.Errorf("%q: %s", in, got)
		}
	}
}
