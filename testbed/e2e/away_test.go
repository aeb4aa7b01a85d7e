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
