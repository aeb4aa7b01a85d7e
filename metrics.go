package knoc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	v1 "k8s.io/api/core/v1"
)

// metrics are knoc's own, for Prometheus (--metrics-listen). Names and units follow
// its conventions: base units, totals end in _total.
type metrics struct {
	registry *prometheus.Registry

	exchanges *prometheus.HistogramVec // by result: ok, exit (the script's own), connection, error
	connects  *prometheus.CounterVec   // by result: ok, error
	slurm     *prometheus.CounterVec   // by command and result: ok, error, timeout
	submits   prometheus.Histogram     // from the first sight of a pod to its job's id
	delays    prometheus.Histogram     // from the newest fact of a journal to the status that is made of it
	pulls     *prometheus.CounterVec   // by result: ok, error
}

// seconds are the buckets of what takes from a blink to a queue's minutes.
var seconds = []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}

func newMetrics(p *KNOCProvider) *metrics {
	m := &metrics{
		registry:  prometheus.NewRegistry(),
		exchanges: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "knoc_ssh_exchange_duration_seconds", Help: "Scripts run on the login node, by result.", Buckets: seconds}, []string{"result"}),
		connects:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "knoc_ssh_connects_total", Help: "Connections made to the login node, by result."}, []string{"result"}),
		slurm:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "knoc_slurm_commands_total", Help: "Slurm commands run on the login node, by command and result."}, []string{"command", "result"}),
		submits:   prometheus.NewHistogram(prometheus.HistogramOpts{Name: "knoc_submit_duration_seconds", Help: "From the pod being known to knoc to the id of its job.", Buckets: seconds}),
		delays:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "knoc_status_delay_seconds", Help: "From the newest line of a pod's journal (whole seconds) to the status that is made of it.", Buckets: seconds}),
		pulls:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "knoc_image_pulls_total", Help: "Image pulls on the cluster, by result."}, []string{"result"}),
	}
	m.registry.MustRegister(m.exchanges, m.connects, m.slurm, m.submits, m.delays, m.pulls,
		podsByPhase{p}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "knoc_watch_lag_seconds", Help: "Since the cluster was last looked at without an error.",
	}, func() float64 {
		if at := p.looked.Load(); at != 0 {
			return time.Since(time.Unix(0, at)).Seconds()
		}
		return 0
	}))
	return m
}

// exchange takes down one script's run.
func (m *metrics) exchange(took time.Duration, err error) {
	if m == nil {
		return
	}
	result := "ok"
	var exit *exitError
	switch {
	case errors.Is(err, context.Canceled):
		return // knoc did not want it any more
	case errors.As(err, &exit):
		result = "exit"
	case errors.Is(err, errConnection):
		result = "connection"
	case err != nil:
		result = "error"
	}
	m.exchanges.WithLabelValues(result).Observe(took.Seconds())
}

// connect takes down one try to reach the login node.
func (m *metrics) connect(err error) {
	if m == nil {
		return
	}
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.connects.WithLabelValues(result).Inc()
}

// submitted takes down that a pod, known since then, has a job.
func (m *metrics) submitted(known, now time.Time) {
	if m == nil {
		return
	}
	if !known.IsZero() {
		m.submits.Observe(now.Sub(known).Seconds())
	}
	m.slurm.WithLabelValues("sbatch", "ok").Inc()
}

// status takes down the facts that a new status is made of, but for those that
// were there when knoc started: old news say nothing of delays.
func (m *metrics) status(facts []event, now time.Time) {
	if m == nil {
		return
	}
	for i, e := range facts {
		switch e.Word {
		case "pulled":
			m.pulls.WithLabelValues("ok").Inc()
		case "pullfailed":
			m.pulls.WithLabelValues("error").Inc()
		}
		if i == len(facts)-1 {
			m.delays.Observe(max(0, now.Sub(e.Time).Seconds()))
		}
	}
}

// command takes down one Slurm command.
func (m *metrics) command(name string, err error) {
	if m == nil {
		return
	}
	result := "ok"
	var failed *slurmError
	switch {
	case errors.As(err, &failed) && (failed.Status == 124 || failed.Status == 137):
		result = "timeout"
	case err != nil:
		result = "error"
	}
	m.slurm.WithLabelValues(name, result).Inc()
}

// podsByPhase counts pods when it is asked.
type podsByPhase struct{ p *KNOCProvider }

var podsDesc = prometheus.NewDesc("knoc_pods", "Pods of the node, by phase.", []string{"phase"}, nil)

func (c podsByPhase) Describe(to chan<- *prometheus.Desc) { to <- podsDesc }

func (c podsByPhase) Collect(to chan<- prometheus.Metric) {
	count := map[v1.PodPhase]int{v1.PodPending: 0, v1.PodRunning: 0, v1.PodSucceeded: 0, v1.PodFailed: 0}
	pods, err := c.p.GetPods(context.Background())
	if err != nil {
		return
	}
	for _, pod := range pods {
		count[pod.Status.Phase]++
	}
	for phase, n := range count {
		if phase != "" {
			to <- prometheus.MustNewConstMetric(podsDesc, prometheus.GaugeValue, float64(n), string(phase))
		}
	}
}

// metricsHandler answers --metrics-listen: knoc's metrics, /healthz while the
// process lives, /readyz while it serves pods and reaches the cluster.
func metricsHandler(m *metrics, ready func() error, withPprof bool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, "ok")
	})
	if withPprof {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// ready is nil when the node's pods are served and the cluster answers.
func (p *KNOCProvider) ready() error {
	select {
	case <-p.isReady:
	default:
		return errors.New("the remote directories were not read yet")
	}
	if state := p.nodeState(); state.Problem != "" {
		return errors.New(strings.TrimSpace(state.Problem))
	}
	return nil
}

// listenMetrics opens --metrics-listen; nil when that is not given.
func listenMetrics(cfg Config) (net.Listener, error) {
	if cfg.MetricsListen == "" {
		if cfg.Pprof {
			return nil, errors.New("--pprof needs --metrics-listen, where it is served")
		}
		return nil, nil
	}
	l, err := net.Listen("tcp", cfg.MetricsListen)
	if err != nil {
		return nil, fmt.Errorf("--metrics-listen %q: %w", cfg.MetricsListen, err)
	}
	return l, nil
}
