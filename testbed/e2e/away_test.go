//go:build testbed

package e2e

import (
	"syscall"
	"testing"
	"time"
)

// Slurm forgets a job five minutes after its end (MinJobAge). A knoc that was
// away for longer still finds out how the pods ended.
//
// It is the first test by the name of its file: it begins before all others,
// which run while its knoc is away.
func TestAwayForSevenMinutes(t *testing.T) {
	away := 20 * time.Second
	if env("KNOC_E2E_LONG") != "" {
		away = 7 * time.Minute
	}
	k := startKnoc(t, "knoc-away")
	n := newNamespaceOn(t, "knoc-away")
	// Another test switches n2 off.
	pods := n.create(n.shell("ends", "sleep 10; exit 7", counted, patient, flags("--nodelist=n1")),
		n.shell("goes-on", "echo up; until [ -e /go/on ]; do sleep 0.2; done; exit 8", counted, patient, emptyDir("go", "/go"), flags("--nodelist=n1")))
	for _, p := range pods {
		p.await("Running", running("main"))
	}
	k.stop(syscall.SIGKILL)
	killed := time.Now()
	t.Parallel()
	time.Sleep(time.Until(killed.Add(away)))

	created := n.createOne(n.shell("created", "true", counted, bound))
	k.start()
	k.awaitServing()
	o := pods[0].awaitPhase("Failed")
	if end := status(o, "main").State.Terminated; end == nil || end.ExitCode != 7 || end.FinishedAt.After(killed.Add(15*time.Second)) {
		t.Errorf("ends: %+v; want exit code 7, soon after %v", end, killed)
	}
	created.ranOnce()
	if o := pods[1].now(); !running("main")(o) {
		t.Errorf("goes-on: %+v", o.Status)
	}
	login(t, "cd "+pods[1].dir()+" && touch vol/go/on")
	if o := pods[1].awaitPhase("Failed"); exitCode(o, "main") != 8 {
		t.Errorf("goes-on: %+v", o.Status)
	}
	for _, p := range pods {
		if p.runs() != 1 {
			t.Errorf("%s ran %d times", p.name, p.runs())
		}
	}
}

// What happens while knoc is dead is found out when it is back.
func TestBasicKillAndAdopt(t *testing.T) {
	t.Parallel()
	k := startKnoc(t, "knoc-adopts")
	n := newNamespaceOn(t, "knoc-adopts")
	const deaf = "trap '' TERM; echo up; while :; do sleep 0.2; done"
	pods := n.create(
		n.shell("ends", "echo up; sleep 12; echo bye; exit 5", counted),
		n.shell("goes-on", "echo up; sleep 45; exit 6", counted),
		n.shell("deleted", deaf, counted),
		n.shell("forced", deaf, counted),
		n.shell("queued", "true", counted, flags("--hold")))
	ends, goesOn, deleted, forced, queued := pods[0], pods[1], pods[2], pods[3], pods[4]
	for _, p := range pods[:4] {
		p.await("Running", running("main"))
	}
	queued.awaitJob()
	k.stop(syscall.SIGKILL)
	killed := time.Now()
	time.Sleep(5 * time.Second)
	deleted.kubectl("delete", "pod", "deleted", "--grace-period=1", "--wait=false")
	forced.kubectl("delete", "pod", "forced", "--grace-period=0", "--force", "--wait=false")
	created := n.createOne(n.shell("created", "true", counted, bound))
	time.Sleep(time.Until(killed.Add(20 * time.Second)))
	k.start()
	k.awaitServing()

	o := ends.awaitPhase("Failed")
	j := ends.endedJob()
	if end := status(o, "main").State.Terminated; end == nil || end.ExitCode != 5 || end.FinishedAt.After(j.End.Add(time.Second)) || end.FinishedAt.After(killed.Add(18*time.Second)) {
		t.Errorf("ends: %+v; the job ended at %v", end, j.End)
	}
	if o = goesOn.awaitPhase("Failed"); exitCode(o, "main") != 6 || status(o, "main").RestartCount != 0 {
		t.Errorf("goes-on: %+v, want exit code 6 and no restart", status(o, "main"))
	}
	for _, p := range []*pod{ends, goesOn} {
		if p.runs() != 1 {
			t.Errorf("%s ran %d times", p.name, p.runs())
		}
	}
	deleted.awaitGone()
	until(t, "the jobs of deleted pods to end", func() bool {
		jobs := jobsOf(t, deleted, forced)
		return !jobs[deleted.uid][0].alive() && !jobs[forced.uid][0].alive()
	})
	login(t, "scontrol release "+queued.awaitJob())
	queued.ranOnce()
	created.ranOnce()
}
