package knoc

import (
	"os"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// The node's directory is taken away while knoc runs: it says so, makes it again
// and goes on; what ran is not run again.
func TestDirectoryTakenAway(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("runs", k.ran("runs")+"while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.1; done"))
	id := k.wait(pod.UID, "Running", inPhase(v1.PodRunning)).Annotations[AnnotationJobID]
	stopped := k.api.create(k.pod("stopped", k.ran("stopped")+"sleep 1000"))
	k.wait(stopped.UID, "Running", inPhase(v1.PodRunning))
	epoch := k.p.remote.currentEpoch()
	k.cluster.Sh("rm -rf .knoc/knoc-c1")
	waitUntil(t, "a word about it", func() bool {
		return strings.Contains(k.p.nodeState().Problem, "knoc-c1 on the login node is gone or cannot be used")
	})
	k.api.remove(stopped.UID, 1)
	k.leap(healAfter)
	waitUntil(t, "the directory", func() bool { return k.p.nodeState().Problem == "" })
	if now := k.p.remote.currentEpoch(); now <= epoch || len(now) != len(epoch) {
		t.Errorf("epoch %s after %s", now, epoch)
	}
	other := k.api.create(k.pod("later", k.ran("later")))
	k.wait(other.UID, "Succeeded", inPhase(v1.PodSucceeded))
	k.cluster.Sh("touch go")
	k.cluster.WaitState(id, "COMPLETED", "FAILED")
	k.leapUntil(40*time.Second, func() bool { return inPhase(v1.PodFailed)(k.api.get(pod.UID)) })
	k.waitGone(stopped.UID)
	for _, name := range []string{"runs", "stopped", "later"} {
		k.once(name)
	}
	select {
	case err := <-k.done:
		t.Errorf("knoc ended: %v", err)
	default:
	}
}

// Where the directory around it is gone too, a file system may be missing:
// nothing is made.
func TestRootTakenAway(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Sh("mv .knoc away")
	waitUntil(t, "a word about it", func() bool { return k.p.nodeState().Problem != "" })
	for range 4 {
		k.leap(healEvery)
		time.Sleep(300 * time.Millisecond)
	}
	if _, err := os.Stat(k.cluster.Home + "/.knoc"); !os.IsNotExist(err) {
		t.Errorf("it was made: %v", err)
	}
	k.cluster.Sh("mv away .knoc")
	pod := k.api.create(k.pod("later", k.ran("later")))
	k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	k.once("later")
}
