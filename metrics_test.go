package knoc

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// scrape is what Prometheus reads.
func scrape(t *testing.T, h http.Handler, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
	body, err := io.ReadAll(w.Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(body)
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	web := p.works["0f3b3c2e-1111-4222-8333-444455556666"]
	web.pod.Status.Phase, web.status.Phase = v1.PodRunning, v1.PodRunning
	h := metricsHandler(p.metrics, p.ready, false)
	c.Stub("sinfo", "echo no >&2; exit 1")
	if _, err := p.remote.slurm(t.Context(), "sinfo"); err == nil {
		t.Fatal("sinfo worked")
	}
	c.Stub("sinfo", "exit 0")
	if _, err := p.remote.slurm(t.Context(), "sinfo"); err != nil {
		t.Fatal(err)
	}
	p.metrics.command("squeue", &slurmError{"squeue", 124, "no answer"})
	p.metrics.exchange(time.Second, context.Canceled)
	p.metrics.exchange(time.Second, errConnection)
	p.metrics.exchange(time.Second, errors.New("something else"))
	now := time.Unix(1700000010, 0)
	p.metrics.submitted(now.Add(-2*time.Second), now)
	p.metrics.submitted(time.Time{}, now) // one that was there before knoc
	p.metrics.status(parseJournal([]byte("1700000001 pullfailed main 1\n1700000002 pulled main 5\n1700000006 start main 0\n")), now)
	p.metrics.status(nil, now)
	code, text := scrape(t, h, "/metrics")
	if code != 200 {
		t.Fatal(code)
	}
	for _, line := range []string{
		`knoc_pods{phase="Running"} 1`,
		`knoc_pods{phase="Pending"} 0`,
		`knoc_slurm_commands_total{command="sinfo",result="error"} 1`,
		`knoc_slurm_commands_total{command="sinfo",result="ok"} 1`,
		`knoc_slurm_commands_total{command="squeue",result="timeout"} 1`,
		`knoc_slurm_commands_total{command="sbatch",result="ok"} 2`,
		`knoc_ssh_connects_total{result="ok"} 1`,
		`knoc_ssh_exchange_duration_seconds_count{result="ok"} 1`,
		`knoc_ssh_exchange_duration_seconds_count{result="exit"} 1`,
		`knoc_ssh_exchange_duration_seconds_count{result="connection"} 1`,
		`knoc_ssh_exchange_duration_seconds_count{result="error"} 1`,
		`knoc_submit_duration_seconds_sum 2`,
		`knoc_submit_duration_seconds_count 1`,
		`knoc_status_delay_seconds_sum 4`,
		`knoc_status_delay_seconds_count 1`,
		`knoc_image_pulls_total{result="ok"} 1`,
		`knoc_image_pulls_total{result="error"} 1`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("no line %s", line)
		}
	}
	if t.Failed() {
		t.Log(text)
	}
}

func TestHealth(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	p.isReady = make(chan struct{})
	h := metricsHandler(p.metrics, p.ready, false)
	for _, step := range []struct {
		do   func()
		path string
		code int
		text string
	}{
		{nil, "/healthz", 200, "ok"},
		{nil, "/readyz", 503, "not read yet"},
		{func() { close(p.isReady) }, "/readyz", 200, "ok"},
		{func() { p.state.Problem = "no route to host" }, "/readyz", 503, "no route to host"},
		{nil, "/healthz", 200, "ok"},
		{nil, "/debug/pprof/", 404, ""},
		{func() { h = metricsHandler(p.metrics, p.ready, true) }, "/debug/pprof/", 200, "goroutine"},
	} {
		if step.do != nil {
			step.do()
		}
		if code, text := scrape(t, h, step.path); code != step.code || !strings.Contains(text, step.text) {
			t.Errorf("%s: %d %q, want %d %q", step.path, code, text, step.code, step.text)
		}
	}
	if _, err := listenMetrics(Config{Pprof: true}); err == nil || !strings.Contains(err.Error(), "--metrics-listen") {
		t.Errorf("--pprof alone: %v", err)
	}
	if _, err := listenMetrics(Config{MetricsListen: "nowhere"}); err == nil || !strings.Contains(err.Error(), `"nowhere"`) {
		t.Errorf("a wrong address: %v", err)
	}
}

// Every name that the dashboard asks for is one that knoc has.
func TestDashboard(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("deploy/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(data, &board); err != nil {
		t.Fatal(err)
	}
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	p.metrics.connect(nil)
	p.metrics.exchange(0, nil)
	p.metrics.command("squeue", nil)
	p.metrics.status(parseJournal([]byte("1700000002 pulled main 5\n")), time.Now())
	_, text := scrape(t, metricsHandler(p.metrics, p.ready, false), "/metrics")
	names := 0
	for _, panel := range board.Panels {
		for _, target := range panel.Targets {
			found := regexp.MustCompile(`\b(knoc|process|go)_[a-z_]+`).FindAllString(target.Expr, -1)
			if len(found) == 0 {
				t.Errorf("%s: no metric of knoc's in %q", panel.Title, target.Expr)
			}
			for _, name := range found {
				names++
				if !regexp.MustCompile(`(?m)^` + name + `[ {]`).MatchString(text) {
					t.Errorf("%s: knoc has no metric %s", panel.Title, name)
				}
			}
		}
	}
	if names < 8 {
		t.Errorf("the dashboard has %d names", names)
	}
}
