package knoc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// says is a shell command that writes a journal line as pod.sh does.
func (k *knocTest) says(uid, fact string) string {
	dir := k.dir() + "/" + uid
	return "echo \"$(date +%s) " + fact + "\" >>" + dir + "/journal.0; : >" + k.dir() + "/changed/" + uid + ".0-9.$(date +%N); "
}

// leaves is one that leaves a text in msg/.
func (k *knocTest) leaves(uid, file, text string) string {
	return "printf '" + text + "' >" + k.dir() + "/" + uid + "/msg/" + file + "; "
}

func lastMessage(pod *v1.Pod) string {
	if t := pod.Status.ContainerStatuses[0].State.Terminated; t != nil {
		return t.Message
	}
	return "(not terminated)"
}

func TestTerminationMessage(t *testing.T) {
	for name, poll := range map[string]time.Duration{"held": 0, "polled": 200 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			k := newKnocTest(t)
			k.poll = poll
			k.start()
			said := k.pod("said", k.leaves("uid-said", "main.0", `1 done 0\n\377\nwhy`)+k.says("uid-said", "message main 0")+"exit 3")
			k.api.create(said)
			long := k.pod("long", "head -c 9000 /dev/zero | tr '\\0' x >"+k.dir()+"/uid-long/msg/main.0;"+k.says("uid-long", "message main 0")+"exit 3")
			k.api.create(long)
			lost := k.pod("lost", k.says("uid-lost", "message main 0")+"exit 3") // and leaves none
			k.api.create(lost)
			began := time.Now()
			if got := lastMessage(k.wait(said.UID, "Failed", inPhase(v1.PodFailed))); got != "1 done 0\n?\nwhy" {
				t.Errorf("message %q", got)
			}
			if got := lastMessage(k.wait(long.UID, "Failed", inPhase(v1.PodFailed))); got != strings.Repeat("x", textLimit) {
				t.Errorf("a message of %d bytes, want %d", len(got), textLimit)
			}
			if got := lastMessage(k.wait(lost.UID, "Failed", inPhase(v1.PodFailed))); got != "" {
				t.Errorf("message %q, and there is none", got)
			}
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("a text that is not there held the status up for %v", took)
			}
		})
	}
}

// A text that the cluster shows later than the journal is not lost.
func TestTerminationMessageComesLate(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("late", "while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.05; done; "+k.says("uid-late", "message main 0")+"exit 3"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.cluster.Sh("touch go; sleep 0.8; printf late >.knoc/knoc-c1/uid-late/msg/main.0")
	if got := lastMessage(k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))); got != "late" {
		t.Errorf("message %q, want late", got)
	}
}

// Readiness that changes all the time is in a file, which is read again at each
// marker, and when knoc starts again.
func TestReadinessInAFile(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	p := k.pod("turns", k.leaves("uid-turns", "main.0.turn", `0\n`)+k.says("uid-turns", "ready main 0 1")+k.says("uid-turns", "turns main 0")+
		"while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.05; done; exit 3")
	p.Spec.Containers[0].ReadinessProbe = shProbe("true")
	pod := k.api.create(p)
	ready := func(want bool) func(*v1.Pod) bool {
		return func(p *v1.Pod) bool {
			return p.Status.Phase == v1.PodRunning && len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].Ready == want
		}
	}
	k.wait(pod.UID, "not ready", ready(false))
	for i, want := range []bool{true, false, true} {
		k.cluster.Sh(fmt.Sprintf("cd .knoc/knoc-c1; echo %d >uid-turns/msg/new; mv uid-turns/msg/new uid-turns/msg/main.0.turn; : >changed/uid-turns.0-p.%d", map[bool]int{true: 1}[want], i+100))
		k.wait(pod.UID, fmt.Sprint("ready: ", want), ready(want))
	}
	k.cluster.Sh("touch go")
	k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
}

func TestTerminationMessageAfterARestart(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("away", "while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.05; done; "+
		k.leaves("uid-away", "main.0", "goodbye")+k.says("uid-away", "message main 0")+"exit 3"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.restart(func() {
		k.cluster.Sh("touch go; while ! grep -q done .knoc/knoc-c1/uid-away/journal.0; do sleep 0.05; done")
	})
	if got := lastMessage(k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))); got != "goodbye" {
		t.Errorf("message %q, want goodbye", got)
	}
}

// Slurm runs a job again as the pod allows: the same job, its runs kept apart.
func TestRequeue(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.pod("again", k.ran("again")+"echo run $(cat "+k.cluster.Home+"/ran-again | wc -l); [ ! -e "+k.cluster.Home+"/go ] || exit 0; sleep 1000")
	pod.Annotations = map[string]string{requeueAnnotation: "true"}
	k.api.create(pod)
	other := k.api.create(k.pod("once", k.ran("once")))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	waitUntil(t, "a run", func() bool { return k.runs("again") == 1 })
	k.cluster.Slurm("hold", "")
	k.cluster.Sh("scontrol requeue " + id)
	k.cluster.WaitState(id, "PENDING")
	for range 3 {
		k.leap(30 * time.Second)
		time.Sleep(300 * time.Millisecond)
	}
	got = k.wait(pod.UID, "Pending", inPhase(v1.PodPending))
	if w := got.Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != slurmPending || !strings.Contains(w.Message, "BeginTime") {
		t.Errorf("while it waits again: %+v", got.Status.ContainerStatuses[0].State)
	}
	k.cluster.Sh("touch go")
	k.cluster.NoSlurm("hold")
	got = k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	c := got.Status.ContainerStatuses[0]
	if c.RestartCount != 1 || got.Annotations[AnnotationJobID] != id || !strings.HasSuffix(c.ContainerID, "/main/1") {
		t.Errorf("restarted %d times as job %s: %s", c.RestartCount, got.Annotations[AnnotationJobID], c.ContainerID)
	}
	if last := c.LastTerminationState.Terminated; last == nil || last.ExitCode != 137 || !strings.HasSuffix(last.ContainerID, "/main/0") {
		t.Errorf("the run before: %+v", last)
	}
	if logs := k.cluster.Sh("cd .knoc/knoc-c1/uid-again/log && cat main.0 main.1"); logs != "run 1\nrun 2\n" {
		t.Errorf("logs %q", logs)
	}
	k.wait(other.UID, "Succeeded", inPhase(v1.PodSucceeded))
	for uid, flag := range map[types.UID]string{pod.UID: "--requeue", other.UID: "--no-requeue"} {
		if n := strings.Count(strings.Join(k.cluster.SlurmCalls("sbatch"), "\n"), flag+" --export=NONE --chdir="+k.dir()+"/"+string(uid)); n != 1 {
			t.Errorf("pod %s: %q", uid, k.cluster.SlurmCalls("sbatch"))
		}
	}
}

// Slurm runs a job again twice while the login node cannot be reached.
func TestRequeuedTwiceWhileAway(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.pod("twice", k.ran("twice")+"sleep 1000")
	pod.Annotations = map[string]string{requeueAnnotation: "true"}
	k.api.create(pod)
	id := k.wait(pod.UID, "Running", inPhase(v1.PodRunning)).Annotations[AnnotationJobID]
	k.cluster.Refuse(true)
	k.cluster.Cut()
	for n := 1; n <= 2; n++ {
		waitUntil(t, "a run", func() bool { return k.runs("twice") == n })
		k.cluster.Sh("scontrol requeue " + id)
	}
	waitUntil(t, "the last run", func() bool { return k.runs("twice") == 3 })
	k.cluster.Sh("rm -f .knoc/knoc-c1/changed/*") // and its markers are lost
	k.cluster.Refuse(false)
	k.wait(pod.UID, "restarted twice", func(pod *v1.Pod) bool {
		return pod.Status.Phase == v1.PodRunning && pod.Status.ContainerStatuses[0].RestartCount == 2
	})
}
