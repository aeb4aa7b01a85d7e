package knoc

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
)

// setImage is kubectl set image.
func (k *knocTest) setImage(pod *v1.Pod, image string) {
	k.api.update(pod.UID, func(p *v1.Pod) { p.Spec.Containers[0].Image, p.Generation = image, p.Generation+1 })
}

// debug is kubectl debug.
func (k *knocTest) debug(pod *v1.Pod, name, command string, change func(*v1.EphemeralContainer)) {
	e := v1.EphemeralContainer{EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: name, Image: "r/debug", Command: []string{"sh", "-c", command}}}
	if change != nil {
		change(&e)
	}
	k.api.update(pod.UID, func(p *v1.Pod) { p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, e) })
}

func ephemeral(pod *v1.Pod, name string) v1.ContainerStatus {
	for _, s := range pod.Status.EphemeralContainerStatuses {
		if s.Name == name {
			return s
		}
	}
	return v1.ContainerStatus{}
}

func endedWith(name string, code int32) func(*v1.Pod) bool {
	return func(pod *v1.Pod) bool {
		t := ephemeral(pod, name).State.Terminated
		return t != nil && t.ExitCode == code
	}
}

// runsImage is true of a pod whose container runs that image, started again so often.
func runsImage(image string, restarts int32) func(*v1.Pod) bool {
	return func(pod *v1.Pod) bool {
		c := pod.Status.ContainerStatuses
		return len(c) > 0 && c[0].State.Running != nil && c[0].Image == image && c[0].RestartCount == restarts
	}
}

const untilTerm4 = "trap 'exit 4' TERM; while :; do sleep 0.1; done"

func TestImageChanges(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("image", k.ran("image")+untilTerm4))
	k.wait(pod.UID, "Running", runsImage("busybox", 0))
	k.awaitRuns("image", 1) // a start is written down before the program is there
	k.setImage(pod, "r/second")
	got := k.wait(pod.UID, "started again with r/second", runsImage("r/second", 1))
	if last := got.Status.ContainerStatuses[0].LastTerminationState.Terminated; last == nil || last.ExitCode != 4 {
		t.Errorf("the last state is %+v, want one that ended with 4", last)
	}
	k.awaitRuns("image", 2)
	// Labels are nobody's business, and what was sent is known to the next knoc.
	k.stop()
	<-k.done
	k.api.update(pod.UID, func(p *v1.Pod) { p.Labels = map[string]string{"a": "b"} })
	k.start()
	k.setImage(pod, "Not An Image") // the container is left as it is
	k.awaitEvent("image InvalidImageName")
	k.stop()
	<-k.done
	k.setImage(pod, "r/third")
	k.start()
	k.wait(pod.UID, "started again with r/third", runsImage("r/third", 2))
	k.awaitRuns("image", 3)
	k.api.remove(pod.UID, 30)
	k.waitGone(pod.UID)
	if n := k.runs("image"); n != 3 {
		t.Errorf("the container ran %d times, want 3", n)
	}
}

// awaitRuns waits until a pod's command has run so often.
func (k *knocTest) awaitRuns(name string, n int) {
	k.Helper()
	k.waitFor(fmt.Sprintf("%s has run %d times", name, n), func() bool { return k.runs(name) >= n })
}

func (k *knocTest) waitFor(what string, done func() bool) {
	k.Helper()
	for end := time.Now().Add(60 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			k.Fatalf("not within a minute: %s; events %q", what, k.api.events)
		}
	}
}

// awaitEvent waits for an event that begins so.
func (k *knocTest) awaitEvent(begin string) {
	k.Helper()
	k.waitFor(begin, func() bool {
		k.api.mu.Lock()
		defer k.api.mu.Unlock()
		return slices.ContainsFunc(k.api.events, func(e string) bool { return strings.HasPrefix(e, begin) })
	})
}

func TestImageOfAPodInTheQueue(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Slurm("hold", "")
	k.start()
	pod := k.api.create(k.pod("queue", k.ran("queue")+untilTerm4))
	k.wait(pod.UID, "in the queue", func(p *v1.Pod) bool { return p.Annotations[AnnotationJobID] != "" })
	k.setImage(pod, "r/second")
	k.debug(pod, "early", k.ran("early")+"exit 3", nil)
	sent := func() bool {
		meta, err := os.ReadFile(filepath.Join(k.dir(), string(pod.UID), "meta"))
		return err == nil && strings.Contains(string(meta), `"busybox","r/second"`) && strings.Contains(string(meta), `"early"`)
	}
	k.waitFor("the new image and the ephemeral container in meta", sent)
	k.stop()
	<-k.done
	k.start()
	k.cluster.NoSlurm("hold")
	k.wait(pod.UID, "Running with r/second", runsImage("r/second", 0))
	k.wait(pod.UID, "early ended", endedWith("early", 3))
	k.once("queue")
	k.once("early")
	if calls := k.cluster.Sh("cat ~/.apptainer-stub/calls"); strings.Contains(calls, "busybox") || !strings.Contains(calls, "docker://r/second") {
		t.Errorf("the runtime was called with the old image, or not with the new one:\n%s", calls)
	}
	k.api.remove(pod.UID, 0)
	k.waitGone(pod.UID)
}

func TestEphemeralContainers(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("debugged", untilTerm4))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.debug(pod, "debug", k.ran("debug")+"echo hello; exit 3", func(e *v1.EphemeralContainer) {
		e.TargetContainerName = "main"
		e.SecurityContext = &v1.SecurityContext{Capabilities: &v1.Capabilities{Add: []v1.Capability{"SYS_PTRACE"}}} // kubectl's own
	})
	k.debug(pod, "root", "true", func(e *v1.EphemeralContainer) {
		yes := true
		e.SecurityContext = &v1.SecurityContext{Privileged: &yes}
	})
	k.debug(pod, "config", "true", func(e *v1.EphemeralContainer) {
		e.EnvFrom = []v1.EnvFromSource{{ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}}}}
	})
	got := k.wait(pod.UID, "debug ended and the others waiting", func(p *v1.Pod) bool {
		root, config := ephemeral(p, "root").State.Waiting, ephemeral(p, "config").State.Waiting
		return endedWith("debug", 3)(p) && root != nil && root.Reason == "UnsupportedField" && config != nil && config.Reason == "CreateContainerConfigError"
	})
	if s := ephemeral(got, "debug"); s.Ready || s.Started != nil || s.RestartCount != 0 || s.Image != "r/debug" || !runsImage("busybox", 0)(got) {
		t.Errorf("the ephemeral container's status is %+v, the pod's %+v", s, got.Status)
	}
	k.awaitEvent("debugged FieldIgnored: spec.ephemeralContainers[debug].targetContainerName")
	k.awaitEvent("debugged FieldIgnored: spec.ephemeralContainers[debug].securityContext.capabilities.add: SYS_PTRACE")
	k.awaitEvent("debugged UnsupportedField: spec.ephemeralContainers[root]")
	k.awaitEvent("debugged Failed: ")
	log, err := k.p.GetContainerLogs(t.Context(), "default", "debugged", "debug", api.ContainerLogOpts{})
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(log); err != nil || string(text) != "hello\n" {
		t.Errorf("the log is %q, %v", text, err)
	}
	log.Close()
	k.stop()
	<-k.done
	k.debug(pod, "late", k.ran("late")+"trap 'exit 6' TERM; while :; do sleep 0.1; done", nil)
	k.start()
	k.wait(pod.UID, "late running", func(p *v1.Pod) bool { return ephemeral(p, "late").State.Running != nil })
	w, err := k.p.lookup("default", "debugged")
	if err != nil || w.canEnter("late") != nil || w.canEnter("debug") == nil {
		t.Errorf("kubectl exec would have late %v, debug %v (%v)", w.canEnter("late"), w.canEnter("debug"), err)
	}
	k.api.remove(pod.UID, 30)
	k.waitGone(pod.UID)
	if gone := k.api.get(pod.UID); !endedWith("late", 6)(gone) {
		t.Errorf("the object went with %+v", gone.Status.EphemeralContainerStatuses)
	}
	k.once("debug")
	k.once("late")
}

// TestCutChange cuts the connection at many places of the exchange that brings an
// ephemeral container and a new image: whatever arrived, each comes once.
func TestCutChange(t *testing.T) {
	for _, at := range []int64{1, 500, 1500, 2500, 3500, 5000, 7000, 9000} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			k := newKnocTest(t)
			k.start()
			pod := k.api.create(k.pod("cut", k.ran("cut")+untilTerm4))
			k.awaitRuns("cut", 1)
			k.cluster.CutAfter(at)
			k.debug(pod, "debug", k.ran("debug")+"exit 3", nil)
			k.setImage(pod, "r/second")
			k.wait(pod.UID, "ended", endedWith("debug", 3))
			k.wait(pod.UID, "started again", runsImage("r/second", 1))
			k.awaitRuns("cut", 2)
			k.api.remove(pod.UID, 0)
			k.waitGone(pod.UID)
			k.once("debug")
			if n := k.runs("cut"); n != 2 {
				t.Errorf("the container ran %d times, want 2", n)
			}
		})
	}
}

func TestBehind(t *testing.T) {
	t.Parallel()
	pod := foldPod(v1.RestartPolicyNever, "i | a b")
	meta := metaOf(pod)
	names := func() (list []string) {
		for _, p := range meta.behind(pod) {
			list = append(list, p.c.Name)
		}
		return list
	}
	if got := names(); got != nil {
		t.Errorf("a pod that was just sent lacks %q", got)
	}
	pod.Spec.InitContainers[0].Image, pod.Spec.Containers[1].Image = "x", "y"
	pod.Spec.EphemeralContainers = []v1.EphemeralContainer{{EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: "e"}}}
	if diff := cmp.Diff([]string{"i", "b", "e"}, names()); diff != "" {
		t.Error(diff)
	}
	old := meta
	for _, p := range meta.behind(pod) {
		meta = meta.with(p)
	}
	if got := names(); got != nil || !slices.Equal(meta.Images["b"], []string{"busybox", "y"}) || len(old.Images["b"]) != 1 || len(old.Ephemeral) != 0 {
		t.Errorf("lacks %q, meta %+v, before %+v", got, meta, old)
	}
	if sent := asSent(pod, &meta); sent.Spec.Containers[1].Image != "busybox" || sent.Spec.EphemeralContainers != nil || pod.Spec.Containers[1].Image != "y" {
		t.Errorf("staged would be %+v", sent.Spec)
	}
	meta.Images = nil // as an earlier version wrote it
	if got := names(); got != nil {
		t.Errorf("lacks %q", got)
	}
}
