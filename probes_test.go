package knoc

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

func execProbe(command ...string) *v1.Probe {
	return &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: command}}}
}

func shProbe(script string) *v1.Probe { return execProbe("sh", "-c", script) }

// probedPod has every kind of probe and hook, with values that a mistake in
// quoting would run.
func probedPod() *v1.Pod {
	const nasty = "it's \"$(id)\" `id` \\ \n# END"
	pod := scriptPod(v1.RestartPolicyAlways, shContainer("a", ""), shContainer("b", ""))
	a, b := &pod.Spec.Containers[0], &pod.Spec.Containers[1]
	a.Ports = []v1.ContainerPort{{Name: "web", ContainerPort: 8080}}
	a.Env = []v1.EnvVar{{Name: "FILE", Value: "/tmp/up"}, {Name: "SECRET", ValueFrom: &v1.EnvVarSource{}}}
	a.StartupProbe = execProbe("cat", "$(FILE)", "$(SECRET)", "$(NONE)", "$$(FILE)", nasty)
	a.StartupProbe.FailureThreshold, a.StartupProbe.PeriodSeconds = 30, 2
	a.ReadinessProbe = &v1.Probe{
		ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{
			Scheme: v1.URISchemeHTTPS, Port: intstr.FromString("web"), Path: "/a b?c=\"d\" $(id)#part",
			HTTPHeaders: []v1.HTTPHeader{{Name: "host", Value: "example.org"}, {Name: "X-A", Value: `a\n"$(id)'`}, {Name: "x-empty"}, {Name: "Accept"}},
		}},
		InitialDelaySeconds: 5, TimeoutSeconds: 3, SuccessThreshold: 2,
	}
	grace := int64(7)
	a.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: 9000, Service: &[]string{"it's"}[0]}}, TerminationGracePeriodSeconds: &grace}
	a.Lifecycle = &v1.Lifecycle{
		PostStart: &v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Host: "192.0.2.1", Port: intstr.FromInt32(80), Path: "started"}},
		PreStop:   &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"true"}}},
	}
	b.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(81)}}}
	b.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(81)}}}
	return pod
}

func TestNoProbeScript(t *testing.T) {
	pod := scriptPod(v1.RestartPolicyAlways, shContainer("a", ""))
	pod.Spec.Containers[0].Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{}}, PostStart: &v1.LifecycleHandler{Sleep: &v1.SleepAction{}}}
	if s, err := newProbeScript(pod, "/d"); s != nil || err != nil {
		t.Fatalf("a pod without probes has %v, %v", s, err)
	}
}

func TestCheckProbes(t *testing.T) {
	get := func(change func(*v1.HTTPGetAction)) v1.ProbeHandler {
		g := &v1.HTTPGetAction{Port: intstr.FromInt32(80)}
		change(g)
		return v1.ProbeHandler{HTTPGet: g}
	}
	other, tls := v1.HTTPProtocol("HTTP3"), v1.GRPCProbeMode("mTLS")
	for _, tc := range []struct {
		h    v1.ProbeHandler
		want string // in the error; "" for none
	}{
		{v1.ProbeHandler{Exec: &v1.ExecAction{}}, ""},
		{v1.ProbeHandler{}, "it has no handler"},
		{get(func(g *v1.HTTPGetAction) {}), ""},
		{get(func(g *v1.HTTPGetAction) { g.Port = intstr.FromString("http") }), ""},
		{get(func(g *v1.HTTPGetAction) { g.Port = intstr.FromString("81") }), ""},
		{get(func(g *v1.HTTPGetAction) { g.Port = intstr.FromString("web") }), `port: "web" is neither`},
		{get(func(g *v1.HTTPGetAction) { g.Port = intstr.FromInt32(65536) }), `port: "65536" is neither`},
		{get(func(g *v1.HTTPGetAction) { g.Host = "::1" }), ""},
		{get(func(g *v1.HTTPGetAction) { g.Host = "a@b" }), `host: "a@b"`},
		{get(func(g *v1.HTTPGetAction) { g.Scheme = "FTP" }), `scheme: "FTP"`},
		{get(func(g *v1.HTTPGetAction) { g.Protocol = &other }), `protocol: "HTTP3"`},
		{get(func(g *v1.HTTPGetAction) { g.HTTPHeaders = []v1.HTTPHeader{{Name: "X-A", Value: "a\r\nX-B: b"}} }), `httpHeaders: "X-A"`},
		{get(func(g *v1.HTTPGetAction) { g.HTTPHeaders = []v1.HTTPHeader{{Name: "@file", Value: "a"}} }), `httpHeaders: "@file"`},
		{v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(0)}}, `port: "0"`},
		{v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(1), Host: "-o /etc/passwd"}}, `host: "-o`},
		{v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: -1}}, `port: "-1"`},
		{v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: 1, Mode: &tls}}, `mode: "mTLS"`},
	} {
		k := checker{}
		pod := scriptPod(v1.RestartPolicyAlways, shContainer("c", ""))
		pod.Spec.Containers[0].Ports = []v1.ContainerPort{{Name: "http", ContainerPort: 80}}
		pod.Spec.Containers[0].ReadinessProbe = &v1.Probe{ProbeHandler: tc.h}
		k.probes(pod)
		got := strings.Join(k.refused, ";")
		if tc.want == "" && got != "" || tc.want != "" && !strings.HasPrefix(got, "container c: readinessProbe: ") || !strings.Contains(got, tc.want) {
			t.Errorf("%v: %q, want %q", tc.h, got, tc.want)
		}
	}
}

func TestRequestTarget(t *testing.T) {
	for in, want := range map[string]string{
		"": "/", "/": "/", "healthz": "/healthz", "/a/../b": "/a/../b", "/a b?c d": "/a%20b?c%20d", "?q": "/?q", "/x#y": "/x",
		"/%zz": "/%25zz", "/é?é": "/%C3%A9?%C3%A9", `/?"\`: "/?%22%5C", "/{a,b}[1-2]": "/%7Ba,b%7D%5B1-2%5D", "http://elsewhere/x": "/x", "//elsewhere/x": "/x",
	} {
		if got := requestTarget(in); got != want {
			t.Errorf("requestTarget(%q) = %q, want %q", in, got, want)
		}
	}
}

// probeRun is a pod's directory with the scripts of its probes, and a process
// that stands for the runtime of its container, one for its supervisor.
type probeRun struct {
	*scriptRun
	shell      []string
	env        []string
	runtime    *exec.Cmd
	supervisor *exec.Cmd
}

// probeTools are the programs that run/probe.sh needs of a compute node.
var probeTools = []string{"cat", "date", "head", "mv", "rm", "setsid", "sleep", "timeout", "tr"}

// enterStub stands for run/enter.sh: the program runs on this machine.
const enterStub = `! cat refuse 2>/dev/null || exit 125
shift 2
exec "$@"
`

// newProbeRun stages a pod with one container c; a second is that many hundredths.
func newProbeRun(t *testing.T, shell []string, c v1.Container, second int, curl bool) *probeRun {
	t.Helper()
	b := newBase(t)
	r := &probeRun{scriptRun: &scriptRun{t: t, base: b, dir: filepath.Join(b.dir, "0b9f4b2e-0001")}, shell: shell}
	for _, d := range []string{"run", "msg", "bin"} {
		if err := os.MkdirAll(filepath.Join(r.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s, err := newProbeScript(scriptPod(v1.RestartPolicyAlways, c), r.dir)
	if err != nil {
		t.Fatal(err)
	}
	s.Second = second
	text, err := s.render()
	if err != nil {
		t.Fatal(err)
	}
	r.write("run/probe.sh", text)
	r.write("run/enter.sh", enterStub)
	bin := filepath.Join(r.dir, "bin")
	tools := probeTools
	if curl {
		tools = append([]string{"curl"}, tools...)
	}
	for _, tool := range tools {
		r.link(tool, filepath.Join(bin, tool))
	}
	r.link(shell[0], filepath.Join(bin, "sh"))
	r.env = []string{"PATH=" + bin, "KNOC_POD_IP=127.0.0.1", "http_proxy=http://192.0.2.1:1", "HTTPS_PROXY=http://192.0.2.1:1", "ALL_PROXY=http://192.0.2.1:1"}
	return r
}

func (r *probeRun) link(tool, at string) {
	r.t.Helper()
	path, err := exec.LookPath(tool)
	if err != nil {
		r.t.Fatal(err)
	}
	if err := os.Symlink(path, at); err != nil {
		r.t.Fatal(err)
	}
}

// needCurl skips a test on a machine without curl; where the shells are named,
// as in CI, it has to be there.
func needCurl(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("curl"); err != nil {
		if os.Getenv("KNOC_TEST_SHELLS") != "" {
			t.Fatal(err)
		}
		t.Skip("curl is not installed: only that the probes say so is tested")
	}
}

// begin starts the script for attempt 0 of container a.
func (r *probeRun) begin() {
	r.t.Helper()
	r.runtime = exec.Command("sleep", "1000")
	r.supervisor = exec.Command("sh", "-c", `trap 'echo x >>"$0/called"' USR1; echo >"$0/waits"; while :; do sleep 0.05; done`, r.dir)
	for _, c := range []*exec.Cmd{r.runtime, r.supervisor} {
		if err := c.Start(); err != nil {
			r.t.Fatal(err)
		}
		r.t.Cleanup(func() { c.Process.Kill(); c.Wait() })
	}
	for since := time.Now(); r.read("waits") == "" && time.Since(since) < 20*time.Second; {
		time.Sleep(time.Millisecond)
	}
	r.write("run/a", fmt.Sprintln(r.runtime.Process.Pid))
	r.cmd = exec.Command(r.shell[0], append(slices.Clone(r.shell[1:]), filepath.Join(r.dir, "run/probe.sh"), "a", "0", strconv.Itoa(r.runtime.Process.Pid))...)
	r.cmd.Env = append(r.env, "KNOC_RESTART_COUNT=0", fmt.Sprint("KNOC_SUPERVISOR=", r.supervisor.Process.Pid))
	r.cmd.Stderr = &r.stderr
	r.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := r.cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL) })
}

// stop ends the container's runtime, and then the script has to end by itself.
func (r *probeRun) stop() []string {
	r.t.Helper()
	r.runtime.Process.Kill()
	r.runtime.Wait()
	r.end()
	text := r.read("journal.0")
	var facts []string
	for line := range strings.Lines(text) {
		seconds, fact, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if _, err := strconv.Atoi(seconds); err != nil {
			r.t.Errorf("%q is no line of a journal", line)
		}
		facts = append(facts, fact)
	}
	return facts
}

// called waits until the supervisor got that many signals. Two that are close
// together are one.
func (r *probeRun) called(times int) {
	r.t.Helper()
	for since := time.Now(); strings.Count(r.read("called"), "x") < times; time.Sleep(5 * time.Millisecond) {
		if time.Since(since) > 30*time.Second {
			r.t.Fatalf("the supervisor was called %q, want %d times; journal:\n%s\nstderr: %s", r.read("called"), times, r.read("journal.0"), r.stderr.String())
		}
	}
}

// once runs one check and returns its exit code and text.
func (r *probeRun) once(args ...string) (int, string) {
	r.t.Helper()
	os.Remove(filepath.Join(r.dir, "run/a.readiness"))
	c := exec.Command(r.shell[0], append(slices.Clone(r.shell[1:]), append([]string{filepath.Join(r.dir, "run/probe.sh")}, args...)...)...)
	c.Env = r.env
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	if err := c.Run(); c.ProcessState == nil {
		r.t.Fatal(err)
	}
	if errs.Len() > 0 {
		r.t.Errorf("stderr: %s", &errs)
	}
	return c.ProcessState.ExitCode(), out.String() + r.read("run/a.readiness")
}

func with(change func(*v1.Container)) v1.Container {
	c := shContainer("a", "")
	change(&c)
	return c
}

// quick is a probe every second, of those that are shorter in a test, with time
// enough for a busy machine.
func quick(p *v1.Probe) *v1.Probe {
	p.PeriodSeconds, p.TimeoutSeconds = 1, 50
	return p
}

func TestProbeReadiness(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.ReadinessProbe = quick(shProbe(`echo "out $(cat up)" >&2; [ -e up ]`))
			c.ReadinessProbe.SuccessThreshold, c.ReadinessProbe.FailureThreshold = 2, 2
		}), 20, false)
		r.begin()
		r.await("unhealthy a 0 readiness 2")
		r.write("up", "yes")
		r.await("ready a 0 1")
		os.Remove(filepath.Join(r.dir, "up"))
		r.await("ready a 0 0")
		r.write("up", "yes")
		for since := time.Now(); strings.Count(r.read("journal.0"), "ready a 0 1") < 2 && time.Since(since) < 20*time.Second; {
			time.Sleep(10 * time.Millisecond)
		}
		r.write("run/pod.stop", "30\n") // the pod terminates
		for since := time.Now(); strings.Count(r.read("journal.0"), "ready a 0 0") < 2 && time.Since(since) < 20*time.Second; {
			time.Sleep(10 * time.Millisecond)
		}
		var ready []string
		for _, f := range r.stop() {
			if strings.HasPrefix(f, "ready") {
				ready = append(ready, f)
			}
		}
		if diff := cmp.Diff([]string{"ready a 0 1", "ready a 0 0", "ready a 0 1", "ready a 0 0"}, ready); diff != "" {
			t.Errorf("readiness (-want +got):\n%s\n%s", diff, r.read("journal.0"))
		}
		if got := r.read("msg/a.0.readiness"); !strings.HasPrefix(got, "cat: ") || !strings.HasSuffix(got, "out \n") {
			t.Errorf("the probe's output is %q", got)
		}
	})
}

func TestProbeLiveness(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		grace := int64(3)
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			// It passes now and then: failures must be in a row.
			c.LivenessProbe = quick(shProbe(`echo x >>n; case $(cat n | tr -d '\n') in xx | xxxx) ;; *) exit 9 ;; esac`))
			c.LivenessProbe.TerminationGracePeriodSeconds = &grace
		}), 20, false)
		r.begin()
		r.called(1)
		if got := r.read("run/a.kill"); got != "3 liveness\n" {
			t.Errorf("run/a.kill is %q", got)
		}
		time.Sleep(500 * time.Millisecond)
		if got := r.read("n"); len(got) != 2*7 {
			t.Errorf("%d probes, want 7: none after the threshold", len(got)/2)
		}
		r.runtime.Process.Kill()
		want := "unhealthy a 0 liveness 1; unhealthy a 0 liveness 1; unhealthy a 0 liveness 1"
		if got := strings.Join(r.stop(), "; "); got != want {
			t.Errorf("journal %q, want %q: no more than three a minute", got, want)
		}
	})
}

// A probe that comes and goes all the time does not make the journal grow without
// end, and its last word is known all the same.
func TestProbeTurns(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.ReadinessProbe = quick(shProbe(`if [ -e stay ]; then [ -e good ]; exit; fi; if [ -e up ]; then rm up; else : >up; exit 1; fi`))
			c.ReadinessProbe.FailureThreshold = 1
		}), 2, false)
		r.begin()
		r.await("turns a 0")
		turn := func(want string) {
			t.Helper()
			for since := time.Now(); r.read("msg/a.0.turn") != want; time.Sleep(5 * time.Millisecond) {
				if time.Since(since) > 20*time.Second {
					t.Fatalf("msg/a.0.turn is %q, want %q", r.read("msg/a.0.turn"), want)
				}
			}
		}
		turn("0\n")
		turn("1\n")
		turn("0\n")
		r.write("good", "")
		r.write("stay", "")
		turn("1\n")
		os.Remove(filepath.Join(r.dir, "good"))
		turn("0\n")
		time.Sleep(200 * time.Millisecond)
		turn("0\n")
		turns := 0
		for _, f := range r.stop() {
			if strings.HasPrefix(f, "ready") {
				turns++
			}
		}
		if turns != 20 {
			t.Errorf("%d turns are in the journal, want 20", turns)
		}
	})
}

func TestProbeStartup(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.StartupProbe = quick(shProbe("echo startup >>order; [ -e up ]"))
			c.StartupProbe.FailureThreshold = 100
			c.ReadinessProbe = quick(shProbe("echo readiness >>order"))
			c.LivenessProbe = quick(shProbe("echo liveness >>order; exit 1"))
			c.LivenessProbe.FailureThreshold = 1
		}), 20, false)
		r.begin()
		r.await("unhealthy a 0 startup 3")
		if got := r.read("order"); strings.Contains(got, "ness") || r.read("run/a.started") != "" {
			t.Errorf("before the startup probe passed: %q", got)
		}
		r.write("up", "")
		r.await("started a 0")
		r.await("ready a 0 1")
		for since := time.Now(); r.read("run/a.kill") == "" && time.Since(since) < 30*time.Second; {
			time.Sleep(5 * time.Millisecond)
		}
		r.called(1)
		if _, err := os.Lstat(filepath.Join(r.dir, "run/a.started")); err != nil {
			t.Error(err)
		}
		if got := r.read("run/a.kill"); got != "30 liveness\n" {
			t.Errorf("run/a.kill is %q", got)
		}
		order := r.read("order")
		if strings.LastIndex(order, "startup") > strings.Index(order, "ness") {
			t.Errorf("a startup probe after it had passed: %q", order)
		}
		r.stop()

		r = newProbeRun(t, shell, with(func(c *v1.Container) {
			c.StartupProbe = quick(shProbe("exit 1"))
			c.LivenessProbe = quick(shProbe("true"))
			c.ReadinessProbe = quick(shProbe("true"))
		}), 20, false)
		r.begin()
		r.called(1)
		want := []string{"unhealthy a 0 startup 1", "unhealthy a 0 startup 2", "unhealthy a 0 startup 3"}
		if diff := cmp.Diff(want, r.stop()); diff != "" || r.read("run/a.kill") != "30 startup\n" {
			t.Errorf("run/a.kill is %q, the journal (-want +got):\n%s", r.read("run/a.kill"), diff)
		}
	})
}

// A probe that hangs fails after its timeout with all that it started, and
// neither holds up the other probes nor shifts its own.
func TestProbeTimeout(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.LivenessProbe = quick(shProbe("trap '' TERM; sleep 77.7 & echo $$$$ $! >>pids; sleep 77.7; sleep 77.7"))
			c.LivenessProbe.FailureThreshold = 1000
			c.LivenessProbe.PeriodSeconds, c.LivenessProbe.TimeoutSeconds = 2, 1
			c.ReadinessProbe = quick(shProbe("echo x >>readiness"))
		}), 20, false)
		r.begin()
		r.await("unhealthy a 0 liveness 3")
		r.stop()
		if got, want := r.read("msg/a.0.liveness"), `command timed out: "sh -c trap '' TERM; sleep 77.7 & echo $$ $! >>pids; sleep 77.7; sleep 77.7" timed out after 1s`+"\n"; got != want {
			t.Errorf("the message is %q, want %q", got, want)
		}
		// Three probes are four seconds, but at least three, of which two fell to the first.
		if n := strings.Count(r.read("readiness"), "x"); n < 4 {
			t.Errorf("%d readiness probes beside three liveness probes that hung", n)
		}
		for _, pid := range strings.Fields(r.read("pids")) {
			for since := time.Now(); ; time.Sleep(10 * time.Millisecond) {
				stat, err := os.ReadFile("/proc/" + pid + "/stat")
				if err != nil || strings.Contains(string(stat), ") Z ") {
					break
				}
				if time.Since(since) > 30*time.Second {
					t.Fatalf("process %s of a probe is left", pid)
				}
			}
		}
	})
}

// TERM, which pod.sh sends when the container has ended, ends all at once, also
// in the middle of a probe.
func TestProbeTerm(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.ReadinessProbe = shProbe("true")
			c.LivenessProbe = shProbe("echo $$$$ >pid; sleep 88.8; true")
			c.LivenessProbe.TimeoutSeconds = 60
		}), 100, false)
		r.begin()
		r.await("ready a 0 1")
		for since := time.Now(); r.read("pid") == "" && time.Since(since) < 20*time.Second; {
			time.Sleep(10 * time.Millisecond)
		}
		began := time.Now()
		r.signal(syscall.SIGTERM)
		r.end()
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("it took %v to end", took)
		}
		pid := strings.TrimSpace(r.read("pid"))
		for since := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			if _, err := os.Stat("/proc/" + pid); err != nil {
				break
			}
			if time.Since(since) > 30*time.Second {
				t.Fatalf("process %s of a probe is left", pid)
			}
		}
	})
}

// A container whose first program does not run yet has not failed its probe;
// one that can never be entered has.
func TestProbeTooEarly(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.ReadinessProbe = quick(shProbe("true"))
			c.ReadinessProbe.FailureThreshold = 1
			c.ReadinessProbe.PeriodSeconds = 100
		}), 20, false)
		r.write("refuse", "knoc: container a is not running: it has not started yet\n")
		r.begin()
		time.Sleep(500 * time.Millisecond)
		os.Remove(filepath.Join(r.dir, "refuse"))
		r.await("ready a 0 1")
		if diff := cmp.Diff([]string{"ready a 0 1"}, r.stop()); diff != "" {
			t.Errorf("journal (-want +got):\n%s", diff)
		}
		r.write("refuse", "knoc: nsenter (util-linux) is not installed\n")
		if rc, text := r.once("--once", "a", "0", "readiness"); rc != 1 || text != "knoc: nsenter (util-linux) is not installed\n" {
			t.Errorf("exit code %d, %q", rc, text)
		}
	})
}

func TestProbeInitialDelay(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		r := newProbeRun(t, shell, with(func(c *v1.Container) {
			c.ReadinessProbe = quick(shProbe("true"))
			c.ReadinessProbe.InitialDelaySeconds = 2
		}), 50, false)
		began := time.Now()
		r.begin()
		r.await("ready a 0 1")
		if took := time.Since(began); took < 950*time.Millisecond {
			t.Errorf("it was ready after %v, want 1 s at least", took)
		}
		r.stop()
	})
}

// What a probe prints is a text of bounded length and nothing else.
func TestProbeHostileOutput(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range []struct{ script, want string }{
			{`printf '1796072931 ready a 0 1\n\n1796072931 done 0\n'; exit 1`, "1796072931 ready a 0 1\n\n1796072931 done 0\n"},
			{`printf 'a\000b%%s$(touch hacked)\033[0m'; exit 1`, "ab%s$(touch hacked)\033[0m\n"},
			{`yes 12345678901234567890 | head -c 5000000; exit 1`, strings.Repeat("12345678901234567890\n", 49)[:1024] + "\n"},
			{`exit 1`, "\n"},
			{`printf -- '-n'; exit 1`, "-n\n"},
		} {
			r := newProbeRun(t, shell, with(func(c *v1.Container) { c.ReadinessProbe = quick(shProbe(tc.script)) }), 20, false)
			r.link("yes", filepath.Join(r.dir, "bin/yes"))
			r.link("touch", filepath.Join(r.dir, "bin/touch"))
			r.begin()
			r.await("unhealthy a 0 readiness 1")
			for _, f := range r.stop() {
				if !strings.HasPrefix(f, "unhealthy a 0 readiness ") {
					t.Errorf("%s: %q is in the journal", tc.script, f)
				}
			}
			if got := r.read("msg/a.0.readiness"); got != tc.want {
				t.Errorf("%s: the message is %q, want %q", tc.script, got, tc.want)
			}
			if _, err := os.Lstat(filepath.Join(r.dir, "hacked")); err == nil {
				t.Fatal("output was executed")
			}
		}
	})
}
