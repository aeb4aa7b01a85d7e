package knoc

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

const (
	// usageAge is how long a measurement serves: sstat asks slurmd on every
	// node that has a job, and slurmd itself samples every 30 s by default
	// (JobAcctGatherFrequency).
	usageAge = 10 * time.Second
	// usageLimit bounds one measurement.
	usageLimit = 20 * time.Second
)

// sstatFormat are the columns that parseSstat reads. TRESUsageInTot is the sum
// over a step's tasks, the CPU time since the step began and the memory now.
const sstatFormat = "JobID,TRESUsageInTot"

// measured is what Slurm says of one job: the sum of its batch step, in which
// all its containers run, and of kubectl exec's steps.
type measured struct {
	CPU    time.Duration
	Memory uint64 // resident, in bytes
}

// parseSstat reads sstat --allsteps --parsable2 --noheader --format=sstatFormat.
// A job without a step that was sampled yet is absent.
func parseSstat(out []byte) (map[string]measured, error) {
	jobs := map[string]measured{}
	for line := range strings.Lines(string(out)) {
		line = strings.TrimSuffix(line, "\n")
		if line == "" {
			continue
		}
		id, tres, ok := strings.Cut(line, "|")
		if !ok {
			return nil, fmt.Errorf("sstat: line %q is not %s", line, sstatFormat)
		}
		job, step, ok := strings.Cut(id, ".")
		if !ok || job == "" {
			return nil, fmt.Errorf("sstat: %q is no step id", id)
		}
		if step == "extern" || tres == "" { // extern is Slurm's own (PrologFlags=Contain)
			continue
		}
		m := jobs[job]
		for item := range strings.SplitSeq(tres, ",") {
			name, value, _ := strings.Cut(item, "=")
			var err error
			switch name {
			case "cpu":
				var d time.Duration
				d, err = parseCPUTime(value)
				m.CPU += d
			case "mem":
				var n uint64
				n, err = parseBytes(value)
				m.Memory += n
			}
			if err != nil {
				return nil, fmt.Errorf("sstat: step %s: %w", id, err)
			}
		}
		jobs[job] = m
	}
	return jobs, nil
}

// parseCPUTime reads [days-][[hours:]minutes:]seconds[.fraction].
func parseCPUTime(s string) (time.Duration, error) {
	bad := fmt.Errorf("%q is no CPU time", s)
	rest, days := s, 0.0
	if d, after, ok := strings.Cut(s, "-"); ok {
		n, err := strconv.ParseUint(d, 10, 32)
		if err != nil {
			return 0, bad
		}
		rest, days = after, float64(n)
	}
	seconds := 0.0
	for part := range strings.SplitSeq(rest, ":") {
		n, err := strconv.ParseFloat(part, 64)
		if err != nil || n < 0 || math.IsInf(n, 0) || math.IsNaN(n) {
			return 0, bad
		}
		seconds = seconds*60 + n
	}
	if seconds += days * 86400; seconds > math.MaxInt64/1e9 {
		return 0, bad
	}
	return time.Duration(math.Round(seconds * 1e9)), nil
}

// parseBytes reads a size as Slurm prints it: 2036K, 1.5M, 0.
func parseBytes(s string) (uint64, error) {
	number, scale := s, 1.0
	if i := strings.IndexAny("KMGTP", last(s)); s != "" && i >= 0 {
		number, scale = s[:len(s)-1], math.Pow(1024, float64(i+1))
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !(n >= 0) || n*scale > math.MaxInt64 {
		return 0, fmt.Errorf("%q is no size", s)
	}
	return uint64(math.Round(n * scale)), nil
}

// last is the last byte of s as a string.
func last(s string) string {
	if s == "" {
		return ""
	}
	return s[len(s)-1:]
}

// sample is one pod's measurement.
type sample struct {
	at       time.Time
	jobID    string
	measured measured
	// cores is the CPU use since an earlier sample, nil where there is none.
	cores *float64
}

// usage holds the newest samples. A measurement is taken when somebody asks and
// the last one is old: a cluster that nobody watches pays nothing.
type usage struct {
	mu    sync.Mutex
	taken time.Time
	err   error // of the last measurement
	since time.Time
	pods  map[types.UID]sample
	// gone is the CPU time of pods that are measured no more, so that the
	// node's sum, a counter, never falls.
	gone time.Duration
}

// update takes in a new measurement. The pods given are those with a running
// job, by UID.
func (u *usage) update(now time.Time, jobs map[string]measured, running map[types.UID]string) {
	next := map[types.UID]sample{}
	for uid, jobID := range running {
		m, ok := jobs[jobID]
		old, had := u.pods[uid]
		if had && old.jobID != jobID {
			u.gone, had = u.gone+old.measured.CPU, false
		}
		switch {
		case !ok && had:
			next[uid] = old // sstat did not answer for this one
		case ok:
			s := sample{at: now, jobID: jobID, measured: m}
			if had && m.CPU < old.measured.CPU { // an exec's step has ended
				s.measured.CPU = old.measured.CPU
			}
			if d := now.Sub(old.at); had && d > 0 {
				c := (s.measured.CPU - old.measured.CPU).Seconds() / d.Seconds()
				s.cores = &c
			}
			next[uid] = s
		}
	}
	for uid, old := range u.pods {
		if _, ok := running[uid]; !ok {
			u.gone += old.measured.CPU
		}
	}
	u.pods, u.taken = next, now
	if u.since.IsZero() {
		u.since = now
	}
}

// podUse is what is known of one pod at this moment.
type podUse struct {
	pod *v1.Pod
	sample
}

// measure returns the newest samples of the pods that run, and what all pods
// have used. The error is that of the measurement; old samples may come with it.
func (p *KNOCProvider) measure(ctx context.Context) (pods []podUse, node sample, since time.Time, err error) {
	all, err := p.GetPods(ctx)
	if err != nil {
		return nil, node, since, err
	}
	running, byUID := map[types.UID]string{}, map[types.UID]*v1.Pod{}
	var ids []string
	for _, pod := range all {
		w, err := p.lookup(pod.Namespace, pod.Name)
		if err != nil || w.UID != string(pod.UID) || w.JobID == "" || w.Node == "" || w.JobEnded {
			continue
		}
		running[pod.UID], byUID[pod.UID] = w.JobID, pod
		ids = append(ids, w.JobID)
	}
	slices.Sort(ids)

	u := &p.usage
	u.mu.Lock()
	defer u.mu.Unlock()
	now := time.Now()
	if now.Sub(u.taken) >= usageAge {
		var jobs map[string]measured
		jobs, u.err = p.sstat(ctx, ids)
		if u.err == nil {
			u.update(now, jobs, running)
		}
	}
	node = sample{at: u.taken, measured: measured{CPU: u.gone}}
	for uid, s := range u.pods {
		node.measured.CPU += s.measured.CPU
		node.measured.Memory += s.measured.Memory
		if pod := byUID[uid]; pod != nil {
			pods = append(pods, podUse{pod, s})
		}
	}
	slices.SortFunc(pods, func(a, b podUse) int {
		return strings.Compare(a.pod.Namespace+"/"+a.pod.Name, b.pod.Namespace+"/"+b.pod.Name)
	})
	return pods, node, u.since, u.err
}

// sstat asks for all jobs at once.
func (p *KNOCProvider) sstat(ctx context.Context, ids []string) (map[string]measured, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, usageLimit)
	defer cancel()
	out, err := p.remote.slurm(ctx, "sstat", "--allsteps", "--parsable2", "--noheader", "--format="+sstatFormat, "--jobs="+strings.Join(ids, ","))
	if err != nil {
		return nil, fmt.Errorf("measuring jobs: %w", err)
	}
	return parseSstat(out)
}

// GetStatsSummary tells what pods use, as far as Slurm measures it. Slurm knows
// jobs, not containers: only a pod of a single container has numbers for it.
// The node is the sum of knoc's pods, since the cluster's other work is not
// Kubernetes' to account for. What is not known is left out, never made up.
func (p *KNOCProvider) GetStatsSummary(ctx context.Context) (*stats.Summary, error) {
	pods, node, since, err := p.measure(ctx)
	if err != nil && len(pods) == 0 {
		return nil, err
	}
	s := &stats.Summary{Node: stats.NodeStats{NodeName: p.cfg.NodeName, StartTime: metav1.NewTime(since)}, Pods: []stats.PodStats{}}
	if !node.at.IsZero() {
		s.Node.CPU, s.Node.Memory = node.cpuStats(), node.memoryStats()
		for _, u := range pods {
			if u.cores != nil {
				if node.cores == nil {
					node.cores = new(float64)
				}
				*node.cores += *u.cores
			}
		}
		s.Node.CPU.UsageNanoCores = nanoCores(node.cores)
	}
	for _, u := range pods {
		ps := stats.PodStats{
			PodRef:     stats.PodReference{Name: u.pod.Name, Namespace: u.pod.Namespace, UID: string(u.pod.UID)},
			CPU:        u.cpuStats(),
			Memory:     u.memoryStats(),
			Containers: []stats.ContainerStats{},
		}
		if u.pod.Status.StartTime != nil {
			ps.StartTime = *u.pod.Status.StartTime
		}
		if c := onlyContainer(u.pod); c != nil {
			ps.Containers = append(ps.Containers, stats.ContainerStats{
				Name: c.Name, StartTime: c.State.Running.StartedAt, CPU: u.cpuStats(), Memory: u.memoryStats(),
			})
		}
		s.Pods = append(s.Pods, ps)
	}
	return s, nil
}

// onlyContainer is the pod's single container while it runs, else nil. A pod
// whose init containers ran in the same job has their CPU time in it as well.
func onlyContainer(pod *v1.Pod) *v1.ContainerStatus {
	if len(pod.Spec.Containers) != 1 || len(pod.Spec.InitContainers)+len(pod.Spec.EphemeralContainers) != 0 {
		return nil
	}
	for i := range pod.Status.ContainerStatuses {
		if c := &pod.Status.ContainerStatuses[i]; c.State.Running != nil {
			return c
		}
	}
	return nil
}

func (s sample) cpuStats() *stats.CPUStats {
	total := uint64(s.measured.CPU.Nanoseconds())
	return &stats.CPUStats{Time: metav1.NewTime(s.at), UsageCoreNanoSeconds: &total, UsageNanoCores: nanoCores(s.cores)}
}

// memoryStats gives the resident memory as the working set too: that is what
// the metrics server reads, and Slurm's sampling knows no other.
func (s sample) memoryStats() *stats.MemoryStats {
	rss, set := s.measured.Memory, s.measured.Memory
	return &stats.MemoryStats{Time: metav1.NewTime(s.at), RSSBytes: &rss, WorkingSetBytes: &set}
}

func nanoCores(cores *float64) *uint64 {
	if cores == nil {
		return nil
	}
	n := uint64(math.Round(*cores * 1e9))
	return &n
}

// GetMetricsResource gives the same numbers under the names of a kubelet's
// /metrics/resource (pkg/kubelet/metrics/collectors/resource_metrics.go).
func (p *KNOCProvider) GetMetricsResource(ctx context.Context) ([]*dto.MetricFamily, error) {
	pods, node, _, err := p.measure(ctx)
	if errors.Is(err, context.Canceled) {
		return nil, err
	}
	failed := 0.0
	if err != nil {
		failed = 1
	}
	f := families{}
	if !node.at.IsZero() {
		f.counter("node_cpu_usage_seconds_total", "Cumulative cpu time consumed by the node in core-seconds", node.measured.CPU.Seconds(), node.at)
		f.gauge("node_memory_working_set_bytes", "Current working set of the node in bytes", float64(node.measured.Memory), node.at)
	}
	for _, u := range pods {
		labels := []string{"pod", u.pod.Name, "namespace", u.pod.Namespace}
		if c := onlyContainer(u.pod); c != nil {
			l := append([]string{"container", c.Name}, labels...)
			f.counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed by the container in core-seconds", u.measured.CPU.Seconds(), u.at, l...)
			f.gauge("container_memory_working_set_bytes", "Current working set of the container in bytes", float64(u.measured.Memory), u.at, l...)
			f.gauge("container_start_time_seconds", "Start time of the container since unix epoch in seconds", float64(c.State.Running.StartedAt.Unix()), time.Time{}, l...)
		}
		f.counter("pod_cpu_usage_seconds_total", "Cumulative cpu time consumed by the pod in core-seconds", u.measured.CPU.Seconds(), u.at, labels...)
		f.gauge("pod_memory_working_set_bytes", "Current working set of the pod in bytes", float64(u.measured.Memory), u.at, labels...)
	}
	for _, name := range []string{"scrape_error", "resource_scrape_error"} { // before and since 1.29
		f.gauge(name, "1 if there was an error while getting container metrics, 0 otherwise", failed, time.Time{})
	}
	return f.list(), nil
}

// families collects metrics by name.
type families map[string]*dto.MetricFamily

func (f families) add(kind dto.MetricType, name, help string, m *dto.Metric, at time.Time, labels []string) {
	if f[name] == nil {
		f[name] = &dto.MetricFamily{Name: &name, Help: &help, Type: &kind}
	}
	if !at.IsZero() {
		ms := at.UnixMilli()
		m.TimestampMs = &ms
	}
	for i := 0; i < len(labels); i += 2 {
		m.Label = append(m.Label, &dto.LabelPair{Name: &labels[i], Value: &labels[i+1]})
	}
	f[name].Metric = append(f[name].Metric, m)
}

func (f families) counter(name, help string, v float64, at time.Time, labels ...string) {
	f.add(dto.MetricType_COUNTER, name, help, &dto.Metric{Counter: &dto.Counter{Value: &v}}, at, labels)
}

func (f families) gauge(name, help string, v float64, at time.Time, labels ...string) {
	f.add(dto.MetricType_GAUGE, name, help, &dto.Metric{Gauge: &dto.Gauge{Value: &v}}, at, labels)
}

// list is sorted by name, as Prometheus' text format wants each family once.
func (f families) list() []*dto.MetricFamily {
	var all []*dto.MetricFamily
	for _, m := range f {
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
	return all
}
