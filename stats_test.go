package knoc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestParseUsage(t *testing.T) {
	uid, at, containers, err := parseUsage("u-1 170000000012 main 3 250 2048 side 0 0 0")
	if err != nil || uid != "u-1" || !at.Equal(time.Unix(1700000000, 120e6)) {
		t.Errorf("%q at %v, %v", uid, at, err)
	}
	want := map[string]used{"main": {attempt: 3, cpu: 2500 * time.Millisecond, memory: 2 << 20}, "side": {}}
	if diff := cmp.Diff(want, containers, cmp.AllowUnexported(used{})); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"", "u-1", "u-1 x", "u-1 -5", "u-1 5 main", "u-1 5 main 1 2", "u-1 5 main 1 2 x", "u-1 5 main -1 2 3", "u-1 5 main 1 99999999999999999999 3"} {
		if _, _, got, err := parseUsage(bad); err == nil {
			t.Errorf("%q: %v, want an error", bad, got)
		}
	}
}

// The node's CPU time is a counter: it must not fall when pods or containers go.
func TestUsageNeverFalls(t *testing.T) {
	var u usage
	both := map[types.UID]*v1.Pod{"a": {}, "b": {}}
	onlyB := map[types.UID]*v1.Pod{"b": {}}
	both["a"].UID, both["b"].UID, onlyB["b"].UID = "a", "b", "b"
	for i, step := range []struct {
		text    string
		running map[types.UID]*v1.Pod
		want    time.Duration // the node's, in hundredths
	}{
		{"", both, 0},
		{"a 100 main 0 10 1\n", both, 10},
		{"a 200 main 0 20 1\nb 200 x 0 5 1\n", both, 25},
		{"a 300 main 0 15 1\nb 300 x 0 5 1\n", both, 25},  // a child was not waited for
		{"a 300 main 0 99 1\nb 300 x 0 99 1\n", both, 25}, // nothing new
		{"a 40\nb 400 x 0 6 1\n", both, 26},               // half a line
		{"a 500 main 1 3 1\nb 400 x 0 6 1\n", both, 29},   // started again
		{"a 600\nb 600 x 0 6 1\n", both, 29},              // ended
		{"b 700 x 0 7 1\n", onlyB, 30},                    // a pod is gone
		{"b 700 x 0 7 1\nsomebody else", onlyB, 30},       // not a pod of this node
		{"b 800 x 0 7 1 y 0 4 1\n", onlyB, 34},            // one more container
		{"", nil, 34},
	} {
		u.update(time.Unix(int64(i), 0), step.text, step.running)
		sum := u.gone
		for _, x := range u.pods {
			sum += x.sum().cpu
		}
		if sum != step.want*10*time.Millisecond {
			t.Errorf("after %q: %v, want %v", step.text, sum, step.want*10*time.Millisecond)
		}
	}
}

func TestUsageCores(t *testing.T) {
	var x podUsed
	x.update(time.Unix(100, 0), map[string]used{"main": {cpu: 10 * time.Second}})
	if c := x.sum().cores; c != nil {
		t.Errorf("cores %v of a single reading", *c)
	}
	x.update(time.Unix(110, 0), map[string]used{"main": {cpu: 25 * time.Second}, "side": {cpu: time.Second}})
	if c := x.sum().cores; c == nil || *c != 1.5 {
		t.Errorf("cores %v, want 1.5", c)
	}
}

func TestStats(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, dir := verbsProvider(t, c, runningJournal) // pod web: two containers
	p.remote.dir = filepath.Dir(dir)
	running := v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: metav1.Unix(1700000003, 0)}}
	web := p.works["0f3b3c2e-1111-4222-8333-444455556666"].pod
	web.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "main", State: running}, {Name: "side"}}
	queued := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "queued", UID: "2f3b3c2e-1111-4222-8333-444455556666"},
		Spec:       v1.PodSpec{Containers: []v1.Container{{Name: "only"}}},
	}
	setJournal(p, queued, "43", "")
	at := time.Now().Truncate(10 * time.Millisecond)
	c.writeFile(filepath.Join(dir, "run/pod.usage"), fmt.Sprintf("%d main 0 3000 1024 side 2 50 10\n", at.UnixMilli()/10))
	c.Stub("sstat", `echo called >>"$HOME/slurm.log"`)

	s, err := p.GetStatsSummary(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Pods) != 1 || s.Pods[0].PodRef.Name != "web" {
		t.Fatalf("pods %+v", s.Pods)
	}
	if s.Node.NodeName != "knoc" || *s.Node.CPU.UsageCoreNanoSeconds != 305e8 || *s.Node.Memory.WorkingSetBytes != 1034<<10 {
		t.Errorf("node %+v %+v", s.Node.CPU, s.Node.Memory)
	}
	if s.Node.CPU.UsageNanoCores != nil {
		t.Error("a rate is told after one reading")
	}
	if cs := s.Pods[0].Containers; len(cs) != 1 || cs[0].Name != "main" || *cs[0].CPU.UsageCoreNanoSeconds != 30e9 ||
		*cs[0].Memory.WorkingSetBytes != 1<<20 || cs[0].StartTime.Unix() != 1700000003 || !cs[0].CPU.Time.Time.Equal(at) {
		t.Errorf("containers, of which one runs: %+v", cs)
	}

	c.writeFile(filepath.Join(dir, "run/pod.usage"), fmt.Sprintf("%d main 0 4000 2048 side 2 50 10\n", at.UnixMilli()/10+1000))
	p.usage.taken = time.Now().Add(-time.Minute)
	families, err := p.GetMetricsResource(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, f := range families {
		for _, m := range f.Metric {
			v := m.GetGauge().GetValue() + m.GetCounter().GetValue()
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, l.GetName()+"="+l.GetValue())
			}
			lines = append(lines, fmt.Sprintf("%s{%s} %v", f.GetName(), strings.Join(labels, ","), v))
		}
	}
	want := []string{
		"container_cpu_usage_seconds_total{container=main,pod=web,namespace=default} 40",
		"container_memory_working_set_bytes{container=main,pod=web,namespace=default} 2.097152e+06",
		"container_start_time_seconds{container=main,pod=web,namespace=default} 1.700000003e+09",
		"node_cpu_usage_seconds_total{} 40.5",
		"node_memory_working_set_bytes{} 2.107392e+06",
		"pod_cpu_usage_seconds_total{pod=web,namespace=default} 40.5",
		"pod_memory_working_set_bytes{pod=web,namespace=default} 2.107392e+06",
		"resource_scrape_error{} 0",
		"scrape_error{} 0",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Error(diff)
	}
	if s, err = p.GetStatsSummary(t.Context()); err != nil || *s.Pods[0].Containers[0].CPU.UsageNanoCores != 1e9 {
		t.Errorf("10 s of CPU time in 10 s: %v, %v", s.Pods[0].Containers[0].CPU, err)
	}
	if calls, err := os.ReadFile(filepath.Join(c.Home, "slurm.log")); err == nil {
		t.Errorf("Slurm was asked: %s", calls)
	}

	// A reading that fails is said, and the old numbers stay.
	p.remote.dir = "/nonexistent"
	p.usage.taken = time.Now().Add(-time.Minute)
	families, err = p.GetMetricsResource(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, f := range families {
		switch f.GetName() {
		case "scrape_error":
			if f.Metric[0].GetGauge().GetValue() != 1 {
				t.Error("scrape_error is not 1")
			}
		case "pod_cpu_usage_seconds_total":
			seen = len(f.Metric)
		}
	}
	if seen != 1 {
		t.Errorf("numbers of %d pods are left, want 1", seen)
	}
}

// A job writes down what its containers use.
func TestPodScriptUsage(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyNever, shContainer("busy", "i=0; while [ $i -lt 30000000 ]; do i=$((i+1)); done"), shContainer("quiet", "exec sleep 60"))
		w := stageScript(t, newBase(t), pod, nil)
		s, err := newPodScript(pod, scriptConfig{Dir: w.dir, UsageSeconds: 2})
		if err != nil {
			t.Fatal(err)
		}
		text, err := s.render()
		if err != nil {
			t.Fatal(err)
		}
		w.write("pod.sh", text)
		w.start(shell, "7")
		var at time.Time
		var containers map[string]used
		waitUntil(t, "the busy container's CPU time", func() bool {
			_, at, containers, err = parseUsage("uid " + strings.TrimSpace(w.read("run/pod.usage")))
			return err == nil && containers["busy"].cpu >= 200*time.Millisecond
		})
		if time.Since(at).Abs() > 30*time.Second {
			t.Errorf("it was at %v", at)
		}
		if c := containers["busy"]; c.cpu > 20*time.Second || c.memory == 0 || c.memory > 1<<30 {
			t.Errorf("the busy one: %+v", c)
		}
		if c, ok := containers["quiet"]; !ok || c.cpu > time.Second {
			t.Errorf("the quiet one: %+v", c)
		}
		w.signal(syscall.SIGTERM)
		w.end()
	})
}
