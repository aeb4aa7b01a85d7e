//go:build testbed

package e2e

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// probe makes a probe that runs every second.
func probe(h v1.ProbeHandler, failures int32) *v1.Probe {
	return &v1.Probe{ProbeHandler: h, PeriodSeconds: 1, TimeoutSeconds: 5, FailureThreshold: failures}
}

func shProbe(script string, failures int32) *v1.Probe {
	return probe(v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"sh", "-c", script}}}, failures)
}

func inMain(change func(*v1.Container)) func(*v1.Pod) {
	return func(p *v1.Pod) { change(&p.Spec.Containers[0]) }
}

func isReady(p *v1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == v1.PodReady {
			return c.Status == v1.ConditionTrue && status(p, "main").Ready
		}
	}
	return false
}

func notReady(p *v1.Pod) bool { return !isReady(p) && !status(p, "main").Ready }

// Readiness goes both ways with what the probe finds in the container, within a
// period and what it takes to carry the news.
func TestProbeReadinessExec(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000", inMain(func(c *v1.Container) {
		c.ReadinessProbe = shProbe("echo looked; test -e /tmp/ready", 1)
	})))
	p.awaitLog("up")
	p.awaitEvent("Warning Unhealthy spec.containers{main}: Readiness probe failed: looked")
	if o := p.now(); !notReady(o) || status(o, "main").State.Running == nil || !*status(o, "main").Started {
		t.Errorf("before it is ready: %+v", o.Status)
	}
	for range 2 {
		began := time.Now()
		p.kubectl("exec", "pod", "--", "touch", "/tmp/ready")
		p.await("readiness", isReady)
		up := time.Since(began)
		began = time.Now()
		p.kubectl("exec", "pod", "--", "rm", "/tmp/ready")
		p.await("no readiness", notReady)
		down := time.Since(began)
		t.Logf("ready after %v, not ready after %v, with kubectl exec", up, down)
		if up > 15*time.Second || down > 15*time.Second {
			t.Error("that is too long for a period of 1 s")
		}
	}
	if n := status(p.now(), "main").RestartCount; n != 0 {
		t.Errorf("%d restarts", n)
	}
}

// A pod that is being deleted is not ready, and its liveness is nobody's concern.
func TestProbesWhileTerminating(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "trap 'rm /tmp/up; sleep 8; exit 3' TERM; touch /tmp/up; echo up; while :; do sleep 0.1; done", restart(v1.RestartPolicyAlways), inMain(func(c *v1.Container) {
		c.ReadinessProbe = shProbe("true", 1)
		c.LivenessProbe = shProbe("test -e /tmp/up || test ! -e /tmp/started; touch /tmp/started; test -e /tmp/up", 3)
	})))
	p.await("readiness", isReady)
	p.kubectl("delete", "pod", "pod", "--wait=false", "--grace-period=30")
	p.await("no readiness", notReady)
	p.awaitGone()
	for _, o := range p.history() {
		if s := status(o, "main"); s.RestartCount > 0 || s.State.Terminated != nil && s.State.Terminated.ExitCode != 3 {
			t.Errorf("the container was restarted or ended by its liveness probe: %+v", s)
		}
	}
}

func TestProbeHTTPAndTCP(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	serve := "mkdir -p /tmp/w; echo ok >/tmp/w/ok; echo up; exec httpd -f -p $PORT -h /tmp/w"
	port := func(number int32) func(*v1.Pod) {
		return inMain(func(c *v1.Container) {
			c.Ports = []v1.ContainerPort{{Name: "web", ContainerPort: number}}
			c.Command[2] = strings.Replace(c.Command[2], "$PORT", strconv.Itoa(int(number)), 1)
		})
	}
	get := &v1.HTTPGetAction{Port: intstr.FromString("web"), Path: "/ok?x=1", HTTPHeaders: []v1.HTTPHeader{{Name: "Host", Value: "example.org"}}}
	pods := n.create(
		n.shell("http", serve, port(18311), inMain(func(c *v1.Container) { c.ReadinessProbe = probe(v1.ProbeHandler{HTTPGet: get}, 2) })),
		n.shell("tcp", serve, port(18312), inMain(func(c *v1.Container) {
			c.ReadinessProbe = probe(v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(18312)}}, 2)
		})),
		n.shell("refused", "echo up; exec sleep 1000", inMain(func(c *v1.Container) {
			c.ReadinessProbe = probe(v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(18313)}}, 1)
		})),
		// As under a kubelet, probes go to the pod's address.
		n.shell("loopback", strings.Replace(serve, "$PORT", "127.0.0.1:18314", 1), inMain(func(c *v1.Container) {
			c.ReadinessProbe = probe(v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(18314)}}, 1)
		})),
		n.shell("loopback-host", strings.Replace(serve, "$PORT", "127.0.0.1:18315", 1), inMain(func(c *v1.Container) {
			c.ReadinessProbe = probe(v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Host: "127.0.0.1", Path: "/ok", Port: intstr.FromInt32(18315)}}, 1)
		})))
	for _, i := range []int{0, 1, 4} {
		pods[i].await("readiness", isReady)
	}
	ip := pods[2].await("an address", func(o *v1.Pod) bool { return o.Status.PodIP != "" }).Status.PodIP
	pods[2].awaitEvent("Warning Unhealthy spec.containers{main}: Readiness probe failed: dial tcp " + ip + ":18313: connect: connection refused")
	pods[3].awaitEvent(":18314: connect: connection refused")
	if isReady(pods[2].now()) || isReady(pods[3].now()) {
		t.Error("a pod that nobody can connect to is ready")
	}
	pods[0].kubectl("exec", "http", "--", "rm", "/tmp/w/ok")
	pods[0].await("no readiness", notReady)
	pods[0].awaitEvent("Warning Unhealthy spec.containers{main}: Readiness probe failed: HTTP probe failed with statuscode: 404")
}

func TestProbeGRPC(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	server := filepath.Join(t.TempDir(), "health")
	if out, err := execute(nil, "env", "CGO_ENABLED=0", "go", "build", "-C", "../kube", "-ldflags=-s -w", "-o", server, "./health"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	p := n.createOne(n.shell("pod", "echo up; until [ -e /tmp/go ]; do sleep 0.2; done; exec /tmp/health :18321 /tmp/serving", inMain(func(c *v1.Container) {
		c.ReadinessProbe = probe(v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: 18321}}, 1)
	})))
	p.awaitLog("up")
	p.awaitEvent("Warning Unhealthy spec.containers{main}: Readiness probe failed: error: failed to connect service at")
	p.kubectl("cp", server, "pod:/tmp/health")
	p.kubectl("exec", "pod", "--", "sh", "-c", "chmod +x /tmp/health; touch /tmp/serving /tmp/go")
	p.await("readiness", isReady)
	p.kubectl("exec", "pod", "--", "rm", "/tmp/serving")
	p.await("no readiness", notReady)
	p.awaitEvent(`Warning Unhealthy spec.containers{main}: Readiness probe failed: service unhealthy (responded with "NOT_SERVING")`)
}

// A liveness probe that fails has the container started again, with a new grace
// period of its own; one that hangs is a failure too, and is ended.
func TestProbeLiveness(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	one := int64(1)
	dies := "echo run; trap '' TERM; touch /tmp/alive; sleep 4; rm /tmp/alive; while :; do sleep 0.1; done"
	pods := n.create(
		n.shell("fails", dies, restart(v1.RestartPolicyAlways), inMain(func(c *v1.Container) {
			c.LivenessProbe = shProbe("cat /tmp/alive", 2)
			c.LivenessProbe.InitialDelaySeconds, c.LivenessProbe.TerminationGracePeriodSeconds = 2, &one
		})),
		n.shell("never", "echo run; exec sleep 1000", inMain(func(c *v1.Container) {
			c.LivenessProbe = shProbe("exit 1", 3)
			c.LivenessProbe.TerminationGracePeriodSeconds = &one
		})),
		n.shell("hangs", "echo run; exec sleep 1000", emptyDir("d", "/d"), inMain(func(c *v1.Container) {
			c.LivenessProbe = shProbe("echo x >>/d/probes; trap '' TERM; sleep 4321; sleep 4321", 100)
			c.LivenessProbe.TimeoutSeconds = 1
		})))
	p := pods[0]
	o := p.await("a restart", func(o *v1.Pod) bool { return status(o, "main").RestartCount >= 1 && running("main")(o) })
	if last := status(o, "main").LastTerminationState.Terminated; last == nil || last.ExitCode != 137 || last.FinishedAt.Sub(last.StartedAt.Time) > 25*time.Second {
		t.Errorf("the run that its probe has ended: %+v", last)
	}
	p.awaitEvent("Warning Unhealthy spec.containers{main}: Liveness probe failed: cat: ")
	p.awaitEvent("Normal Killing spec.containers{main}: Container main failed liveness probe, will be restarted")

	o = pods[1].awaitPhase(v1.PodFailed)
	if s := status(o, "main"); s.RestartCount != 0 || exitCode(o, "main") != 143 && exitCode(o, "main") != 137 {
		t.Errorf("never: %+v", s)
	}

	p = pods[2]
	p.awaitEvent("Warning Unhealthy spec.containers{main}: Liveness probe failed: command timed out: ")
	until(t, "three probes that hang", func() bool {
		out, err := tryKubectl(nil, "-n", n.name, "exec", "hangs", "--", "cat", "/d/probes")
		return err == nil && strings.Count(out, "x") >= 3
	})
	left := 0 // of one that is running just now
	ps := p.kubectl("exec", "hangs", "--", "ps")
	for line := range strings.Lines(ps) {
		if strings.HasSuffix(line, " sleep 4321\n") && !strings.Contains(line, "sh -c") {
			left++
		}
	}
	if left > 1 {
		t.Errorf("probes that were ended left processes in the container:\n%s", ps)
	}
}

// No other probe runs until the startup probe has passed; one that fails ends the
// container.
func TestProbeStartup(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	one := int64(1)
	pods := n.create(
		n.shell("slow", "echo run; sleep 6; touch /tmp/up; exec sleep 1000", restart(v1.RestartPolicyAlways), inMain(func(c *v1.Container) {
			c.StartupProbe = shProbe("test -e /tmp/up", 60)
			c.LivenessProbe = shProbe("test -e /tmp/up", 1)
			c.ReadinessProbe = shProbe("true", 1)
		})),
		n.shell("never", "echo run; exec sleep 1000", inMain(func(c *v1.Container) {
			c.StartupProbe = shProbe("echo not yet; exit 1", 2)
			c.StartupProbe.TerminationGracePeriodSeconds = &one
		})))
	p := pods[0]
	o := p.await("the container to run", running("main"))
	if s := status(o, "main"); *s.Started || s.Ready {
		t.Errorf("before its startup probe has passed: %+v", s)
	}
	o = p.await("readiness", isReady)
	if s := status(o, "main"); !*s.Started || s.RestartCount != 0 {
		t.Errorf("after its startup probe has passed: %+v", s)
	}
	for _, o := range p.history() {
		if s := status(o, "main"); s.Ready && !*s.Started {
			t.Errorf("ready before it had started: %+v", s)
		}
	}
	o = pods[1].awaitPhase(v1.PodFailed)
	if code := exitCode(o, "main"); code != 143 && code != 137 {
		t.Errorf("never: %+v", status(o, "main"))
	}
	pods[1].awaitEvent("Warning Unhealthy spec.containers{main}: Startup probe failed: not yet")
	pods[1].awaitEvent("Normal Killing spec.containers{main}: Container main failed startup probe")
}

// Where the compute node has no curl the probe has failed, and an event says why.
// The job is held until its PATH leads to a directory without curl.
func TestProbeWithoutCurl(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec httpd -f -p 18331 -h /tmp", flags("--hold"), inMain(func(c *v1.Container) {
		c.ReadinessProbe = probe(v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Port: intstr.FromInt32(18331)}}, 1)
	})))
	job := p.awaitJob()
	login(t, `cd ~/.knoc/*/`+string(p.uid)+` && mkdir run/bin && for f in sh sleep setsid timeout cat head tr mv rm date; do ln -s "$(command -v $f)" run/bin/; done &&
		sed "s|^PATH=.*|PATH=$PWD/run/bin|" run/probe.sh >run/probe.sh.new && chmod 700 run/probe.sh.new && mv run/probe.sh.new run/probe.sh && scontrol release `+job)
	p.awaitEvent("Warning Unhealthy spec.containers{main}: Readiness probe failed: curl is not installed on the compute node ")
	if isReady(p.now()) {
		t.Error("it is ready")
	}
}
