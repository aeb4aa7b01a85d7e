package knoc

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestParseSstat(t *testing.T) {
	// Slurm 22.05, jobacct_gather/linux.
	out := `19.extern|energy=0
19.batch|cpu=00:01:05,energy=0,fs/disk=180020995,mem=64532K,pages=0,vmem=67360K
19.3|cpu=00:00:02,energy=0,fs/disk=4149,mem=1976K,pages=0,vmem=3036K
20.batch|cpu=1-02:03:04,energy=0,mem=1.50G
21.batch|
`
	got, err := parseSstat([]byte(out))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]measured{
		"19": {67 * time.Second, (64532 + 1976) << 10},
		"20": {26*time.Hour + 3*time.Minute + 4*time.Second, 3 << 29},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"19.batch", "19|cpu=00:00:01", "19.batch|cpu=soon", "19.batch|mem=much", "sstat: error|x", "1.batch|cpu=99999999999999:00:00", "1.batch|mem=-1K", "1.batch|mem="} {
		if got, err := parseSstat([]byte(bad + "\n")); err == nil {
			t.Errorf("%q: %v, want an error", bad, got)
		}
	}
}

func TestParseCPUTime(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"00:00:00": 0, "25:02.000": 1502 * time.Second, "00:01.250": 1250 * time.Millisecond, "7": 7 * time.Second,
		"1-00:00:01": 86401 * time.Second, "100:00:00": 360000 * time.Second,
	} {
		if got, err := parseCPUTime(text); err != nil || got != want {
			t.Errorf("%q: %v, %v, want %v", text, got, err, want)
		}
	}
	for _, bad := range []string{"", "x", "-1", "1:-1", "1-", "NaN", "inf", "213503982334-14:25:51"} {
		if got, err := parseCPUTime(bad); err == nil {
			t.Errorf("%q: %v, want an error", bad, got)
		}
	}
}

// The node's CPU time is a counter: it must not fall when pods, jobs or steps go.
func TestUsageNeverFalls(t *testing.T) {
	var u usage
	at := time.Unix(1700000000, 0)
	sum := func() (d time.Duration) {
		d = u.gone
		for _, s := range u.pods {
			d += s.measured.CPU
		}
		return d
	}
	seconds := func(a, b int) map[string]measured {
		m := map[string]measured{}
		if a > 0 {
			m["1"] = measured{CPU: time.Duration(a) * time.Second}
		}
		if b > 0 {
			m["2"] = measured{CPU: time.Duration(b) * time.Second}
		}
		return m
	}
	both := map[types.UID]string{"a": "1", "b": "2"}
	for _, step := range []struct {
		jobs    map[string]measured
		running map[types.UID]string
		want    time.Duration
	}{
		{seconds(0, 0), both, 0},
		{seconds(10, 0), both, 10},
		{seconds(20, 5), both, 25},
		{seconds(15, 5), both, 25}, // an exec's step has ended
		{seconds(0, 6), both, 26},  // no answer for job 1
		{seconds(0, 7), map[types.UID]string{"b": "2"}, 27},
		{map[string]measured{"3": {CPU: time.Second}}, map[types.UID]string{"b": "3"}, 28}, // requeued
		{seconds(0, 0), nil, 28},
	} {
		at = at.Add(10 * time.Second)
		u.update(at, step.jobs, step.running)
		if got := sum(); got != step.want*time.Second {
			t.Errorf("after %v of %v: %v, want %v", step.jobs, step.running, got, step.want*time.Second)
		}
	}
}

func TestUsageCores(t *testing.T) {
	var u usage
	at := time.Unix(1700000000, 0)
	running := map[types.UID]string{"a": "1"}
	u.update(at, map[string]measured{"1": {CPU: 100 * time.Second}}, running)
	if u.pods["a"].cores != nil {
		t.Errorf("cores %v of a single sample", *u.pods["a"].cores)
	}
	u.update(at.Add(10*time.Second), map[string]measured{"1": {CPU: 115 * time.Second}}, running)
	if c := u.pods["a"].cores; c == nil || *c != 1.5 {
		t.Errorf("cores %v, want 1.5", c)
	}
}

func TestStats(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal) // pod web: two containers
	one := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "batch", Name: "one", UID: "1f3b3c2e-1111-4222-8333-444455556666"},
		Spec:       v1.PodSpec{Containers: []v1.Container{{Name: "only"}}},
		Status: v1.PodStatus{ContainerStatuses: []v1.ContainerStatus{{Name: "only",
			State: v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: metav1.Unix(1700000003, 0)}}}}},
	}
	setJournal(p, one, "42", "1700000000 claim 42\n1700000000 host n2 10.0.0.6\n1700000003 start only 0\n")
	queued := one.DeepCopy()
	queued.Name, queued.UID = "queued", "2f3b3c2e-1111-4222-8333-444455556666"
	setJournal(p, queued, "43", "")
	c.Stub("sstat", `
echo "$*" >>"$HOME/sstat.log"
echo "41.batch|cpu=00:00:30,mem=1024K"
echo "42.extern|energy=0"
echo "42.batch|cpu=00:01:00,mem=2048K"`)

	s, err := p.GetStatsSummary(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Pods) != 2 || s.Pods[0].PodRef.Name != "one" || s.Pods[1].PodRef.Name != "web" {
		t.Fatalf("pods %+v", s.Pods)
	}
	if s.Node.NodeName != "knoc" || *s.Node.CPU.UsageCoreNanoSeconds != 90e9 || *s.Node.Memory.WorkingSetBytes != 3<<20 {
		t.Errorf("node %+v %+v", s.Node.CPU, s.Node.Memory)
	}
	if s.Node.CPU.UsageNanoCores != nil {
		t.Error("a rate is told after one sample")
	}
	if cs := s.Pods[0].Containers; len(cs) != 1 || cs[0].Name != "only" || *cs[0].CPU.UsageCoreNanoSeconds != 60e9 || *cs[0].Memory.RSSBytes != 2<<20 || cs[0].StartTime.Unix() != 1700000003 {
		t.Errorf("containers of a pod with one: %+v", cs)
	}
	if cs := s.Pods[1].Containers; len(cs) != 0 {
		t.Errorf("containers of a pod with two: %+v, though Slurm cannot tell them apart", cs)
	}

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
		"container_cpu_usage_seconds_total{container=only,pod=one,namespace=batch} 60",
		"container_memory_working_set_bytes{container=only,pod=one,namespace=batch} 2.097152e+06",
		"container_start_time_seconds{container=only,pod=one,namespace=batch} 1.700000003e+09",
		"node_cpu_usage_seconds_total{} 90",
		"node_memory_working_set_bytes{} 3.145728e+06",
		"pod_cpu_usage_seconds_total{pod=one,namespace=batch} 60",
		"pod_cpu_usage_seconds_total{pod=web,namespace=default} 30",
		"pod_memory_working_set_bytes{pod=one,namespace=batch} 2.097152e+06",
		"pod_memory_working_set_bytes{pod=web,namespace=default} 1.048576e+06",
		"resource_scrape_error{} 0",
		"scrape_error{} 0",
	}
	if diff := cmp.Diff(want, lines); diff != "" {
		t.Error(diff)
	}
	calls, _ := os.ReadFile(filepath.Join(c.Home, "sstat.log"))
	if got := string(calls); strings.Count(got, "\n") != 1 || !strings.Contains(got, "--jobs=41,42\n") {
		t.Errorf("sstat was called with:\n%s", got)
	}

	// A failing sstat is said, and the old numbers stay.
	c.Stub("sstat", `echo "sstat: error: no" >&2; exit 1`)
	p.usage.taken = time.Now().Add(-time.Minute)
	families, err = p.GetMetricsResource(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		switch f.GetName() {
		case "scrape_error":
			if f.Metric[0].GetGauge().GetValue() != 1 {
				t.Error("scrape_error is not 1")
			}
		case "pod_cpu_usage_seconds_total":
			if len(f.Metric) != 2 {
				t.Errorf("%v", f)
			}
		}
	}
}
