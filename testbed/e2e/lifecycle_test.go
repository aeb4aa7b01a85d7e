//go:build testbed

package e2e

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// sidecar is an init container that is restarted whenever it ends.
func sidecar(name, script string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		initContainer(name, script)(p)
		always := v1.ContainerRestartPolicyAlways
		p.Spec.InitContainers[len(p.Spec.InitContainers)-1].RestartPolicy = &always
	}
}

// main changes the container main.
func mainContainer(f func(*v1.Container)) func(*v1.Pod) {
	return func(p *v1.Pod) { f(&p.Spec.Containers[0]) }
}

func grace(seconds int64) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.TerminationGracePeriodSeconds = &seconds }
}

func execHook(script string) *v1.LifecycleHandler {
	return &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"/bin/sh", "-c", script}}}
}

// Everything in its order, the sidecar beside it and stopped at last.
func TestBasicLifeOfAPod(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo main >>/out/all; sleep 2; exit 42",
		initContainer("first", "sleep 1; echo first >>/out/all"),
		sidecar("side", "trap 'echo side ends >>/out/all; exit 0' TERM; echo side >>/out/all; : >/out/side; while :; do sleep 0.2; done"),
		initContainer("second", "until [ -e /out/side ]; do sleep 0.1; done; echo second >>/out/all"),
		appContainer("b", "sleep 3"), appContainer("c", "sleep 1"), emptyDir("out", "/out")))
	o := p.awaitEnd()
	for name, code := range map[string]int32{"first": 0, "second": 0, "side": 0, "main": 42, "b": 0, "c": 0} {
		if got := exitCode(o, name); got != code {
			t.Errorf("%s ended with %d, want %d", name, got, code)
		}
	}
	if o.Status.Phase != v1.PodFailed {
		t.Errorf("phase %s, want Failed", o.Status.Phase)
	}
	end := func(name string) v1.ContainerStateTerminated {
		if s := status(o, name).State.Terminated; s != nil {
			return *s
		}
		return v1.ContainerStateTerminated{}
	}
	for _, order := range [][2]time.Time{
		{end("first").FinishedAt.Time, status(o, "side").State.Terminated.StartedAt.Time},
		{end("side").StartedAt.Time, end("second").StartedAt.Time},
		{end("second").FinishedAt.Time, end("main").StartedAt.Time},
		{end("b").FinishedAt.Time, end("side").FinishedAt.Time},
	} {
		if order[1].Before(order[0]) {
			t.Errorf("times are out of order: %+v %+v", o.Status.InitContainerStatuses, o.Status.ContainerStatuses)
		}
	}
}

// A pod whose work is done has succeeded, however its sidecars end; they are
// restarted until then.
func TestLifeSidecars(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	pods := n.create(
		n.shell("done", "sleep 14", sidecar("ends", "exit 3"), sidecar("deaf", "trap '' TERM; while :; do sleep 0.2; done"), grace(2)),
		n.shell("deleted", "trap 'sleep 2; exit 0' TERM; echo up; while :; do sleep 0.2; done",
			sidecar("side", "trap 'exit 5' TERM; while :; do sleep 0.2; done")))
	pods[1].awaitLog("up")
	pods[1].kubectl("delete", "pod", "deleted", "--wait=false")
	o := pods[0].awaitPhase(v1.PodSucceeded)
	if s := status(o, "ends"); s.RestartCount < 1 {
		t.Errorf("the sidecar that ends was restarted %d times", s.RestartCount)
	}
	if got := exitCode(o, "deaf"); got != 137 {
		t.Errorf("the deaf sidecar ended with %d, want 137", got)
	}
	pods[1].awaitGone()
	o = pods[1].now()
	app, side := status(o, "main").State.Terminated, status(o, "side").State.Terminated
	if app == nil || side == nil || app.ExitCode != 0 || side.ExitCode != 5 || side.FinishedAt.Before(&app.FinishedAt) {
		t.Errorf("ended with %+v and the sidecar with %+v", app, side)
	}
}

func TestLifeHooks(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	pods := n.create(
		n.shell("both", "trap '[ -e /out/bye ] && exit 4; exit 5' TERM; until [ -e /out/hello ]; do sleep 0.1; done; cat /out/hello; while :; do sleep 0.1; done", emptyDir("out", "/out"),
			mainContainer(func(c *v1.Container) {
				c.Lifecycle = &v1.Lifecycle{PostStart: execHook("echo hello >/out/hello"), PreStop: execHook("sleep 2; echo bye >/out/bye")}
			})),
		n.shell("fails", "trap 'exit 6' TERM; while :; do sleep 0.1; done", mainContainer(func(c *v1.Container) {
			c.Lifecycle = &v1.Lifecycle{PostStart: execHook("echo not today; exit 3")}
		})),
		n.shell("long", "trap 'exit 8' TERM; echo up; while :; do sleep 0.1; done", grace(3), mainContainer(func(c *v1.Container) {
			c.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 3}}}
		})))
	pods[0].awaitLog("hello")
	pods[2].awaitLog("up")
	for _, p := range []*pod{pods[0], pods[2]} {
		p.kubectl("delete", "pod", p.name, "--wait=false")
	}
	o := pods[1].awaitPhase(v1.PodFailed)
	if got := exitCode(o, "main"); got != 6 {
		t.Errorf("a container whose postStart failed ended with %d, want 6", got)
	}
	until(t, "event FailedPostStartHook", func() bool {
		return strings.Contains(pods[1].kubectl("get", "events", "--field-selector=involvedObject.name=fails"), "FailedPostStartHook")
	})
	for i, code := range map[int]int32{0: 4, 2: 8} {
		pods[i].awaitGone()
		if got := exitCode(pods[i].now(), "main"); got != code {
			t.Errorf("%s ended with %d, want %d", pods[i].name, got, code)
		}
	}
}

func TestLifeDeadline(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	deadline := func(seconds int64) func(*v1.Pod) {
		return func(p *v1.Pod) { p.Spec.ActiveDeadlineSeconds = &seconds }
	}
	const script = "trap 'exit 0' TERM; echo up; while :; do sleep 0.1; done"
	pods := n.create(n.shell("set", script, deadline(6), restart(v1.RestartPolicyAlways)), n.shell("lowered", script, deadline(1000)))
	pods[1].awaitLog("up")
	pods[1].kubectl("patch", "pod", "lowered", "--type=merge", "-p", `{"spec": {"activeDeadlineSeconds": 10}}`)
	for i, seconds := range []int{6, 10} {
		o := pods[i].awaitPhase(v1.PodFailed)
		if o.Status.Reason != "DeadlineExceeded" {
			t.Errorf("%s: reason %s: %s", pods[i].name, o.Status.Reason, o.Status.Message)
		}
		end := status(o, "main").State.Terminated
		if end == nil || end.ExitCode != 0 {
			t.Errorf("%s: ended with %+v", pods[i].name, end)
			continue
		}
		if took := end.FinishedAt.Sub(o.Status.StartTime.Time); i == 0 && (took < 5*time.Second || took > 9*time.Second) || took > 120*time.Second {
			t.Errorf("%s: ran for %v, want %d s", pods[i].name, took, seconds)
		}
	}
}

// A site's time limit: TERM comes early enough for an end of the container's own.
func TestLifeTimeLimit(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "trap 'echo ending; sleep 2; exit 9' TERM; echo up; while :; do sleep 0.1; done", grace(5), flags("--time=1")))
	o := p.awaitPhase(v1.PodFailed)
	if got := exitCode(o, "main"); o.Status.Reason != "SlurmTimeLimit" || got != 9 {
		t.Errorf("reason %s: %s, exit code %d; want SlurmTimeLimit and 9", o.Status.Reason, o.Status.Message, got)
	}
	if j := p.endedJob(); j.State == "TIMEOUT" {
		t.Errorf("the job is %s: TERM came too late", j.State)
	}
}

// devicesWork ends with 9 unless a container's devices are there.
const devicesWork = `
	echo x >/dev/null && [ "$(head -c 3 /dev/zero | wc -c)" = 3 ] && [ "$(head -c 3 /dev/urandom | wc -c)" = 3 ] && echo x >/dev/shm/w && rm /dev/shm/w &&
	echo out >/dev/stdout && echo err >/dev/stderr && exec 5<>/dev/ptmx && [ -e /dev/pts/0 ] && [ -e /dev/fd/5 ] && [ -d /dev/mqueue ] || exit 9
	[ ! -e /dev/fuse ] && [ ! -e /dev/kmsg ] && [ ! -e /dev/.d/fuse ] || exit 8
`

func TestLifeTerminationMessages(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	fallback := func(c *v1.Container) { c.TerminationMessagePolicy = v1.TerminationMessageFallbackToLogsOnError }
	readOnly := true
	at := func(path string) func(*v1.Pod) {
		return mainContainer(func(c *v1.Container) { c.TerminationMessagePath = path })
	}
	pods := n.create(
		n.shell("file", `printf "it's me" >/var/say; exit 3`, at("/var/say")),
		n.shell("path", "echo there >/new/folder/say; exit 0", at("/new/folder/say")),
		n.shell("readonly", "echo small >/var/say; exit 0", at("/var/say"), mainContainer(func(c *v1.Container) {
			c.SecurityContext = &v1.SecurityContext{ReadOnlyRootFilesystem: &readOnly}
		})),
		n.shell("log", "echo the log; exit 1", mainContainer(fallback)),
		n.shell("none", "echo the log; exit 1"),
		n.shell("default", devicesWork+"echo end >/dev/termination-log; exit 4", at("")),
		n.shell("below", devicesWork+"echo below >/dev/sub/say; echo x >/dev/shm/x && ls /dev/shm /data/x || exit 9; exit 0", at("/dev/sub/say"), emptyDir("data", "/data"),
			mainContainer(func(c *v1.Container) {
				c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: "data", MountPath: "/dev/shm"})
			})),
		n.shell("volume", "echo inside >/data/new/say; exit 0", at("/data/new/say"), emptyDir("data", "/data")),
		n.shell("again", "[ -e /data/x ] || { : >/data/x; echo first >/dev/termination-log; exit 5; }; [ ! -s /dev/termination-log ] && echo second >/dev/termination-log", emptyDir("data", "/data"), restart(v1.RestartPolicyOnFailure)),
		n.shell("user", devicesWork+"echo mine >/dev/termination-log; rm -f /dev/termination-log; exit 0", users),
		n.shell("readonlydev", devicesWork+"echo fixed >/dev/termination-log; exit 0", mainContainer(func(c *v1.Container) {
			c.SecurityContext = &v1.SecurityContext{ReadOnlyRootFilesystem: &readOnly}
		})),
		n.shell("long", "i=0; while [ $i -lt 5000 ]; do echo 123456789; i=$((i + 10)); done >/var/say; exit 0", at("/var/say"), mainContainer(fallback)))
	for i, want := range []string{"it's me", "there\n", "small\n", "the log\n", "", "end\n", "below\n", "inside\n", "second\n", "mine\n", "fixed\n", strings.Repeat("123456789\n", 410)[:4096]} {
		o := pods[i].awaitEnd()
		end := status(o, "main").State.Terminated
		if end == nil || end.Message != want {
			t.Errorf("%s: ended with %+v, want message %q; its log: %q", pods[i].name, end, want, pods[i].log())
		}
	}
}

// Containers with a policy and rules of their own.
func TestLifeOwnPolicies(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	never := v1.ContainerRestartPolicyNever
	once := "if [ -e /out/$0 ]; then exit %; fi; : >/out/$0; exit 42"
	o := n.createOne(n.shell("pod", strings.ReplaceAll(strings.ReplaceAll(once, "$0", "main"), "%", "0"), emptyDir("out", "/out"), restart(v1.RestartPolicyAlways),
		mainContainer(func(c *v1.Container) {
			c.RestartPolicy = &never
			c.RestartPolicyRules = []v1.ContainerRestartRule{{
				Action:    v1.ContainerRestartRuleActionRestart,
				ExitCodes: &v1.ContainerRestartRuleOnExitCodes{Operator: v1.ContainerRestartRuleOnExitCodesOpIn, Values: []int32{42}},
			}}
		}))).awaitPhase(v1.PodSucceeded)
	if s := status(o, "main"); s.RestartCount != 1 || exitCode(o, "main") != 0 {
		t.Errorf("status %+v, want one restart and exit code 0", s)
	}
}

// HTTP hooks ask a server of the pod.
func TestLifeHTTPHooks(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	get := func(path string) *v1.LifecycleHandler {
		return &v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Path: path, Port: intstr.FromInt32(18341)}}
	}
	pods := n.create(
		n.shell("asks", `trap 'sleep 6; exit 0' TERM; while :; do sleep 0.2; done`, grace(30),
			sidecar("server", "exec httpd -f -vv -p 18341 -h /tmp"), func(p *v1.Pod) {
				p.Spec.InitContainers[0].StartupProbe = probe(v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(18341)}}, 60)
			}, mainContainer(func(c *v1.Container) {
				c.Lifecycle = &v1.Lifecycle{PostStart: get("/post?a=b"), PreStop: get("/pre")}
			})),
		n.shell("nobody", "exec sleep 1000", mainContainer(func(c *v1.Container) {
			c.Lifecycle = &v1.Lifecycle{PostStart: &v1.LifecycleHandler{HTTPGet: &v1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(18342)}}}
		})))
	pods[0].await("running", running("main"))
	pods[0].awaitLog("url:/post", "-c", "server") // it leaves the query out
	pods[0].kubectl("delete", "pod", "asks", "--wait=false")
	pods[0].awaitLog("url:/pre", "-c", "server")
	pods[1].awaitPhase(v1.PodFailed)
	pods[1].awaitEvent("FailedPostStartHook")
	pods[0].awaitGone()
}

// A container is stopped by the signal that it names.
func TestLifeStopSignal(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	signal := func(s v1.Signal) func(*v1.Pod) {
		return func(p *v1.Pod) {
			p.Spec.OS = &v1.PodOS{Name: v1.Linux}
			p.Spec.Containers[0].Lifecycle = &v1.Lifecycle{StopSignal: &s}
		}
	}
	const script = `trap 'exit 4' TERM; trap 'exit 5' INT; trap 'exit 6' USR1; echo up; while :; do sleep 0.2; done`
	pods := n.create(
		n.shell("int", script, signal("SIGINT")),
		n.shell("usr1", script, signal("SIGUSR1"), users),
		n.shell("kill", script, signal("SIGKILL")))
	for i, want := range []int32{5, 6, 137} {
		p := pods[i]
		p.awaitLog("up")
		if p.now().Spec.Containers[0].Lifecycle == nil || p.now().Spec.Containers[0].Lifecycle.StopSignal == nil {
			t.Skip("the API server has no stopSignal")
		}
		began := time.Now()
		p.kubectl("delete", "pod", p.name, "--wait=true", "--timeout=60s")
		if code := exitCode(p.now(), "main"); code != want || time.Since(began) > 20*time.Second {
			t.Errorf("%s: exit code %d after %v, want %d", p.name, code, time.Since(began), want)
		}
	}
}

// Probes and ephemeral containers of a pod with users.
func TestLifeUsers(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "trap 'exit 5' TERM; touch /tmp/mine; echo up; while :; do sleep 0.2; done", users, mainContainer(func(c *v1.Container) {
		c.StartupProbe = shProbe("test -e /tmp/mine", 30)
		c.ReadinessProbe = shProbe("test -O /tmp/mine && test -e /tmp/ready", 1)
		c.LivenessProbe = shProbe("test $(id -u) = 1234", 1)
	})))
	p.await("started", func(o *v1.Pod) bool { s := status(o, "main").Started; return s != nil && *s })
	p.kubectl("exec", "pod", "--", "touch", "/tmp/ready")
	p.await("ready", isReady)
	p.debug("debugger", "id -u; id -G; cd /proc/self && echo entered; sleep 1000")
	p.await("debugger running", running("debugger"))
	until(t, "the debugger's log", func() bool { return p.log("-c", "debugger") == "1234\n5678 77 88 1000620000\nentered\n" })
	if out := p.kubectl("exec", "pod", "-c", "debugger", "--", "id", "-u"); out != "1234\n" {
		t.Errorf("exec: %q", out)
	}
	p.kubectl("exec", "pod", "--", "rm", "/tmp/ready")
	p.await("not ready", notReady)
	if s := status(p.now(), "main"); s.RestartCount != 0 {
		t.Errorf("its liveness probe ended it: %+v", s)
	}
}
