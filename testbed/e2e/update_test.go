//go:build testbed

package e2e

import (
	"strings"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// The container writes which image it runs: app sets FOO.
const whichImage = `echo "FOO=$FOO."; trap 'echo bye; exit 4' TERM; while :; do sleep 0.2; done`

// debug is kubectl debug; attaching is another matter.
func (p *pod) debug(name, script string, more ...string) {
	p.t.Helper()
	args := append([]string{"debug", p.name, "--image=" + env("KNOC_IMAGE_BUSYBOX"), "-c", name, "--attach=false", "--quiet"}, more...)
	p.kubectl(append(args, "--", "/bin/sh", "-c", script)...)
}

func (p *pod) setImage(container, image string) {
	p.t.Helper()
	p.kubectl("set", "image", "pod/"+p.name, container+"="+image)
}

func startedAgain(name string, restarts int32) func(*v1.Pod) bool {
	return func(p *v1.Pod) bool { return running(name)(p) && status(p, name).RestartCount == restarts }
}

// A new image and ephemeral containers reach a pod that runs, one that waits in
// the queue, and those that got them while knoc was dead.
func TestUpdate(t *testing.T) {
	t.Parallel()
	k := startKnoc(t, "knoc-update")
	n := newNamespaceOn(t, "knoc-update")
	pods := n.create(
		n.shell("runs", whichImage, counted),
		n.shell("queued", whichImage, counted, flags("--hold")))
	runs, queued := pods[0], pods[1]
	busybox, app := env("KNOC_IMAGE_BUSYBOX"), env("KNOC_IMAGE_APP")
	runs.await("running", running("main"))
	job := queued.awaitJob()

	runs.setImage("main", app)
	o := runs.await("running again", startedAgain("main", 1))
	if s := status(o, "main"); s.Image != app || s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.ExitCode != 4 {
		t.Errorf("main: %+v", s)
	}
	runs.awaitLog("FOO=bar.")
	if before := runs.log("--previous"); before != "FOO=.\nbye\n" {
		t.Errorf("the log before: %q", before)
	}

	// Labels and annotations change nothing that runs.
	runs.kubectl("label", "pod", "runs", "a=b")
	runs.kubectl("annotate", "pod", "runs", "c=d")

	runs.debug("debugger", "echo hello; sleep 1000")
	runs.await("debugger running", running("debugger"))
	until(t, "the debugger's log", func() bool { return runs.log("-c", "debugger") == "hello\n" })
	if out := runs.kubectl("exec", "runs", "-c", "debugger", "--", "echo", "entered"); out != "entered\n" {
		t.Errorf("exec: %q", out)
	}
	runs.debug("ends", "echo $0 $1; exit 3")
	if s := status(runs.await("ended", func(o *v1.Pod) bool { return exitCode(o, "ends") >= 0 }), "ends"); s.State.Terminated.ExitCode != 3 || s.RestartCount != 0 {
		t.Errorf("ends: %+v", s)
	}
	runs.debug("targeted", "echo up; sleep 1000", "--target=main")
	runs.await("targeted running", running("targeted"))

	k.stop(syscall.SIGKILL)
	runs.setImage("main", busybox)
	runs.debug("late", "trap 'exit 6' TERM; echo up; while :; do sleep 0.2; done")
	queued.setImage("main", app)
	queued.debug("early", "exit 5")
	k.start()
	k.awaitServing()
	o = runs.await("running a third time", startedAgain("main", 2))
	if s := status(o, "main"); s.Image != busybox {
		t.Errorf("main: %+v", s)
	}
	runs.awaitLog("up", "-c", "late")
	until(t, "the directory of queued has what was sent", func() bool {
		return strings.Contains(login(t, "cat "+queued.dir()+"/meta"), `"ephemeral":["early"]`)
	})
	login(t, "scontrol release "+job)
	o = queued.await("running", running("main"))
	if s := status(o, "main"); s.Image != app || s.RestartCount != 0 {
		t.Errorf("queued: %+v", s)
	}
	queued.awaitLog("FOO=bar.")
	queued.await("early ended", func(o *v1.Pod) bool { return exitCode(o, "early") == 5 })
	if runs.runs() != 3 || queued.runs() != 1 {
		t.Errorf("runs ran %d times, want 3; queued %d times, want once", runs.runs(), queued.runs())
	}
	until(t, "an event of the kubelet's about the new image", func() bool {
		return strings.Contains(runs.kubectl("get", "events", "-o", "jsonpath={.items[*].message}"), "Container main definition changed, will be restarted")
	})

	runs.kubectl("delete", "pod", "runs", "--wait=true", "--timeout=60s")
	if last := runs.now(); exitCode(last, "late") != 6 || exitCode(last, "debugger") < 0 {
		t.Errorf("ephemeral containers of a pod that was deleted: %+v", last.Status.EphemeralContainerStatuses)
	}
}

// The pod's end does not wait for ephemeral containers, and they do not count.
func TestDebugDoesNotKeepAPod(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "until [ -e /go/on ]; do sleep 0.2; done", emptyDir("go", "/go")))
	p.await("running", running("main"))
	p.debug("debugger", "trap 'exit 6' TERM; echo up; while :; do sleep 0.2; done")
	p.awaitLog("up", "-c", "debugger") // not only started: it has its trap
	login(t, "cd "+p.dir()+" && touch vol/go/on")
	if o := p.awaitPhase("Succeeded"); exitCode(o, "debugger") != 6 {
		t.Errorf("the debugger: %+v", status(o, "debugger"))
	}
}
