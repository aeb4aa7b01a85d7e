package knoc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
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
	// usageAge is how long what was read serves.
	usageAge = 10 * time.Second
	// usageLimit bounds one reading.
	usageLimit = 20 * time.Second
)

// used is what one run of a container uses: CPU time since it began, and memory
// of its own, which is all but the files that it maps.
type used struct {
	attempt int
	cpu     time.Duration
	memory  uint64
	cores   *float64 // since the reading before; nil where there is none
}

// parseUsage reads one line of usage.sh.tmpl: a pod's UID and what its job has
// written down (weigh in templates/pod.ticker.tmpl).
func parseUsage(line string) (uid types.UID, at time.Time, containers map[string]used, err error) {
	words := strings.Fields(line)
	bad := fmt.Errorf("line %q is not a pod's usage", line)
	if len(words) < 2 || len(words)%4 != 2 {
		return "", at, nil, bad
	}
	hundredths, err := strconv.ParseInt(words[1], 10, 64)
	if err != nil || hundredths < 0 {
		return "", at, nil, bad
	}
	containers = map[string]used{}
	for w := words[2:]; len(w) > 0; w = w[4:] {
		attempt, err1 := strconv.Atoi(w[1])
		ticks, err2 := strconv.ParseUint(w[2], 10, 48)
		kib, err3 := strconv.ParseUint(w[3], 10, 48)
		if err1 != nil || err2 != nil || err3 != nil || attempt < 0 {
			return "", at, nil, bad
		}
		// USER_HZ is 100 on every machine that Slurm runs on (proc(5)).
		containers[w[0]] = used{attempt: attempt, cpu: time.Duration(ticks) * 10 * time.Millisecond, memory: kib << 10}
	}
	return types.UID(words[0]), time.UnixMilli(hundredths * 10), containers, nil
}

// podUsed is what is known of one pod. Gone is the CPU time of runs that have
// ended, so that the pod's sum, a counter, never falls.
type podUsed struct {
	pod        *v1.Pod
	at         time.Time
	containers map[string]used
	gone       time.Duration
}

// sum is the pod's own: all its containers.
func (p *podUsed) sum() used {
	total := used{cpu: p.gone}
	for _, c := range p.containers {
		total.add(c)
	}
	return total
}

func (u *used) add(c used) {
	u.cpu += c.cpu
	u.memory += c.memory
	if c.cores != nil {
		if u.cores == nil {
			u.cores = new(float64)
		}
		*u.cores += *c.cores
	}
}

// update takes in a newer reading of the pod.
func (p *podUsed) update(at time.Time, containers map[string]used) {
	if !at.After(p.at) {
		return
	}
	for name, old := range p.containers {
		c, ok := containers[name]
		if !ok || c.attempt != old.attempt {
			p.gone += old.cpu
			continue
		}
		c.cpu = max(c.cpu, old.cpu) // nobody waited for a child that has ended
		cores := (c.cpu - old.cpu).Seconds() / at.Sub(p.at).Seconds()
		c.cores = &cores
		containers[name] = c
	}
	p.at, p.containers = at, containers
}

// usage holds the newest readings. One is taken when somebody asks and the last
// one is old: a cluster that nobody watches pays nothing but its jobs' notes.
type usage struct {
	mu    sync.Mutex
	taken time.Time
	err   error // of the last reading
	since time.Time
	pods  map[types.UID]*podUsed
	gone  time.Duration // the CPU time of pods that are no more
}

// measure returns what the pods that run use, by namespace and name, and what all
// pods have used. The error is that of the reading; old ones may come with it.
func (p *KNOCProvider) measure(ctx context.Context) (pods []*podUsed, node used, at, since time.Time, err error) {
	all, err := p.GetPods(ctx)
	if err != nil {
		return nil, node, at, since, err
	}
	running := map[types.UID]*v1.Pod{}
	for _, pod := range all {
		if w, err := p.lookup(pod.Namespace, pod.Name); err == nil && w.UID == string(pod.UID) && w.Node != "" && !w.JobEnded {
			running[pod.UID] = pod
		}
	}
	u := &p.usage
	u.mu.Lock()
	defer u.mu.Unlock()
	if now := time.Now(); now.Sub(u.taken) >= usageAge {
		var text []byte
		if text, u.err = p.readUsage(ctx); u.err == nil {
			u.update(now, string(text), running)
		}
	}
	node.cpu = u.gone
	for _, x := range u.pods {
		node.add(x.sum())
		if x.pod = running[x.pod.UID]; x.pod != nil {
			copied := *x // what the next reading finds is another map
			pods = append(pods, &copied)
		}
	}
	slices.SortFunc(pods, func(a, b *podUsed) int {
		return strings.Compare(a.pod.Namespace+"/"+a.pod.Name, b.pod.Namespace+"/"+b.pod.Name)
	})
	return pods, node, u.taken, u.since, u.err
}

// update takes in a reading of all pods.
func (u *usage) update(now time.Time, text string, running map[types.UID]*v1.Pod) {
	u.taken = now
	if u.since.IsZero() {
		u.since, u.pods = now, map[types.UID]*podUsed{}
	}
	for uid, x := range u.pods {
		if running[uid] == nil {
			u.gone += x.sum().cpu
			delete(u.pods, uid)
		}
	}
	for line := range strings.Lines(text) {
		// A line that is being written this moment is read the next time.
		uid, at, containers, err := parseUsage(strings.TrimSpace(line))
		if err != nil || running[uid] == nil {
			continue
		}
		if u.pods[uid] == nil {
			u.pods[uid] = &podUsed{}
		}
		u.pods[uid].pod = running[uid]
		u.pods[uid].update(at, containers)
	}
}

// readUsage reads the notes of all jobs in one exchange, without a Slurm command.
func (p *KNOCProvider) readUsage(ctx context.Context) (out []byte, err error) {
	script, err := render("usage.sh.tmpl", map[string]any{"Dir": p.remote.dir})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, usageLimit)
	defer cancel()
	err = p.ssh.Exchange(ctx, script, nil, func(name string, body []byte) error {
		if name == "usage" {
			out = bytes.Clone(body)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading what pods use: %w", err)
	}
	return out, nil
}

// runningContainers are the names of those that run, with the time of their start.
func runningContainers(pod *v1.Pod) map[string]metav1.Time {
	all := map[string]metav1.Time{}
	for _, c := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses) {
		if c.State.Running != nil {
			all[c.Name] = c.State.Running.StartedAt
		}
	}
	return all
}

// GetStatsSummary tells what pods and their containers use, as their jobs have
// written it down. The node is the sum of knoc's pods, since the cluster's other
// work is not Kubernetes' to account for. What is not known is left out, never
// made up.
func (p *KNOCProvider) GetStatsSummary(ctx context.Context) (*stats.Summary, error) {
	pods, node, at, since, err := p.measure(ctx)
	if err != nil && len(pods) == 0 {
		return nil, err
	}
	s := &stats.Summary{Node: stats.NodeStats{NodeName: p.cfg.NodeName, StartTime: metav1.NewTime(since)}, Pods: []stats.PodStats{}}
	if !at.IsZero() {
		s.Node.CPU, s.Node.Memory = node.cpuStats(at), node.memoryStats(at)
	}
	for _, x := range pods {
		sum := x.sum()
		ps := stats.PodStats{
			PodRef:     stats.PodReference{Name: x.pod.Name, Namespace: x.pod.Namespace, UID: string(x.pod.UID)},
			CPU:        sum.cpuStats(x.at),
			Memory:     sum.memoryStats(x.at),
			Containers: []stats.ContainerStats{},
		}
		if x.pod.Status.StartTime != nil {
			ps.StartTime = *x.pod.Status.StartTime
		}
		started := runningContainers(x.pod)
		for _, name := range slices.Sorted(maps.Keys(x.containers)) {
			if start, ok := started[name]; ok {
				c := x.containers[name]
				ps.Containers = append(ps.Containers, stats.ContainerStats{
					Name: name, StartTime: start, CPU: c.cpuStats(x.at), Memory: c.memoryStats(x.at),
				})
			}
		}
		s.Pods = append(s.Pods, ps)
	}
	return s, nil
}

func (u used) cpuStats(at time.Time) *stats.CPUStats {
	total := uint64(u.cpu.Nanoseconds())
	return &stats.CPUStats{Time: metav1.NewTime(at), UsageCoreNanoSeconds: &total, UsageNanoCores: nanoCores(u.cores)}
}

// memoryStats gives the memory as the working set, which is what the metrics
// server reads.
func (u used) memoryStats(at time.Time) *stats.MemoryStats {
	rss, set := u.memory, u.memory
	return &stats.MemoryStats{Time: metav1.NewTime(at), RSSBytes: &rss, WorkingSetBytes: &set}
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
	pods, node, at, _, err := p.measure(ctx)
	if errors.Is(err, context.Canceled) {
		return nil, err
	}
	failed := 0.0
	if err != nil {
		failed = 1
	}
	f := families{}
	if !at.IsZero() {
		f.counter("node_cpu_usage_seconds_total", "Cumulative cpu time consumed by the node in core-seconds", node.cpu.Seconds(), at)
		f.gauge("node_memory_working_set_bytes", "Current working set of the node in bytes", float64(node.memory), at)
	}
	for _, x := range pods {
		labels := []string{"pod", x.pod.Name, "namespace", x.pod.Namespace}
		started := runningContainers(x.pod)
		for _, name := range slices.Sorted(maps.Keys(x.containers)) {
			start, ok := started[name]
			if !ok {
				continue
			}
			l := append([]string{"container", name}, labels...)
			f.counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed by the container in core-seconds", x.containers[name].cpu.Seconds(), x.at, l...)
			f.gauge("container_memory_working_set_bytes", "Current working set of the container in bytes", float64(x.containers[name].memory), x.at, l...)
			f.gauge("container_start_time_seconds", "Start time of the container since unix epoch in seconds", float64(start.Unix()), time.Time{}, l...)
		}
		sum := x.sum()
		f.counter("pod_cpu_usage_seconds_total", "Cumulative cpu time consumed by the pod in core-seconds", sum.cpu.Seconds(), x.at, labels...)
		f.gauge("pod_memory_working_set_bytes", "Current working set of the pod in bytes", float64(sum.memory), x.at, labels...)
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
