//go:build testbed

package e2e

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

func TestBasicDeletePendingCancelsTheJob(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "true", flags("--hold")))
	p.awaitJob()
	p.kubectl("delete", "pod", "pod", "--timeout=60s")
	p.noJobAlive()
	if j := p.endedJob(); j.State[:9] != "CANCELLED" {
		t.Errorf("job is %s, want CANCELLED", j.State)
	}
}

// The container's own way to end counts, and the object outlives the job.
func TestBasicDeleteRunningLetsTheContainerEnd(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "trap 'echo got TERM; sleep 3; echo bye; exit 7' TERM; echo up; while :; do sleep 0.2; done"))
	p.awaitLog("up")
	p.kubectl("delete", "pod", "pod", "--wait=false")
	p.awaitLog("got TERM")
	if p.isGone() {
		t.Error("the object was gone while the container was ending")
	}
	p.awaitGone()
	p.noJobAlive()
	if o := p.now(); exitCode(o, "main") != 7 {
		t.Errorf("the last status was %+v, want exit code 7", status(o, "main"))
	}
}

func TestDeleteKillsAfterTheGracePeriod(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	deaf := "trap '' TERM; echo up; while :; do sleep 0.2; done"
	pods := n.create(n.shell("one", deaf), n.shell("shortened", deaf))
	for _, p := range pods {
		p.awaitLog("up")
	}
	pods[1].kubectl("delete", "pod", "shortened", "--grace-period=300", "--wait=false")
	time.Sleep(5 * time.Second)
	start := time.Now()
	for _, p := range pods {
		p.kubectl("delete", "pod", p.name, "--grace-period=1", "--wait=false")
	}
	for _, p := range pods {
		p.awaitGone()
	}
	for _, p := range pods {
		p.noJobAlive()
		if took := p.endedJob().End.Sub(start); took > 30*time.Second {
			t.Errorf("%s: its job ended after %v", p.name, took)
		}
		if o := p.now(); exitCode(o, "main") != 137 {
			t.Errorf("%s: the last status was %+v, want exit code 137", p.name, status(o, "main"))
		}
	}
}

// --force takes the object away without asking anybody: knoc has to find out.
func TestDeleteByForceLeavesNoJob(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	pods := n.create(n.shell("running", "trap '' TERM; echo up; while :; do sleep 0.2; done"), n.shell("pending", "true", flags("--hold")))
	pods[0].awaitLog("up")
	pods[1].awaitJob()
	for _, p := range pods {
		p.kubectl("delete", "pod", p.name, "--grace-period=0", "--force", "--timeout=60s")
	}
	for _, p := range pods {
		until(t, "the job of pod "+p.name+" to be gone", func() bool {
			jobs := jobsOf(t, p)[p.uid]
			return len(jobs) == 1 && !jobs[0].alive()
		})
	}
}

// A pod of the same name is another pod, though the old one's job still runs.
func TestBasicRecreatedUnderTheSameName(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	old := n.createOne(n.shell("pod", "trap '' TERM; echo up; while :; do sleep 0.2; done", counted))
	old.awaitLog("up")
	old.kubectl("delete", "pod", "pod", "--grace-period=0", "--force", "--timeout=60s")
	p := n.createOne(n.shell("pod", "echo new", counted))
	p.ranOnce()
	if got := p.log(); got != "new\n" {
		t.Errorf("log is %q", got)
	}
	until(t, "the old pod's job to be gone", func() bool { return !jobsOf(t, old)[old.uid][0].alive() })
}

// All that is in a namespace goes with it, and the namespace too.
func TestBasicNamespaceIsDeleted(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	pods := n.create(n.shell("running", "trap 'exit 3' TERM; echo up; while :; do sleep 0.2; done"), n.shell("ended", "true"), n.shell("pending", "true", flags("--hold")))
	pods[0].awaitLog("up")
	pods[1].awaitPhase("Succeeded")
	pods[2].awaitJob()
	kubectl(t, "delete", "namespace", n.name, "--timeout=180s")
	for _, p := range pods {
		p.noJobAlive()
	}
	if o := pods[0].now(); exitCode(o, "main") != 3 {
		t.Errorf("the last status was %+v, want exit code 3", status(o, "main"))
	}
}

// Only some of these are deleted while knoc submits them; none may leave a job.
func TestDeleteWhileSubmitting(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	var manifests []*v1.Pod
	for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
		manifests = append(manifests, n.shell(name, "sleep 300"))
	}
	pods := n.create(manifests...)
	for i, p := range pods {
		time.Sleep(time.Duration(i) * 100 * time.Millisecond)
		p.kubectl("delete", "pod", p.name, "--grace-period=2", "--wait=false")
	}
	for _, p := range pods {
		p.awaitGone()
	}
	time.Sleep(5 * time.Second) // a job that was accepted late would be here now
	for _, p := range pods {
		p.noJobAlive()
	}
}
