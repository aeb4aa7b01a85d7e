//go:build testbed

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// These are not parallel: each of them hurts everything that runs.

// What happens while knoc is dead is found out when it is back.
func TestBasicKillAndAdopt(t *testing.T) {
	n := newNamespace(t)
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
	during := make(chan *pod)
	go func() {
		time.Sleep(5 * time.Second) // knoc is dead
		deleted.kubectl("delete", "pod", "deleted", "--grace-period=1", "--wait=false")
		forced.kubectl("delete", "pod", "forced", "--grace-period=0", "--force", "--wait=false")
		during <- n.createOne(n.shell("created", "true", counted, bound))
	}()
	killed := time.Now()
	command(t, "KNOC_RESTART", "20")
	created := <-during

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

// A knoc that starts while SSH is cut is a node at once, one that says what is
// wrong, and does its work when the network is back.
func TestStartWhileSSHIsCut(t *testing.T) {
	n := newNamespace(t)
	runs := n.createOne(n.shell("runs", "sleep 20; exit 3", counted))
	runs.await("Running", running("main"))
	command(t, "KNOC_STOP")
	command(t, "KNOC_CUT")
	t.Cleanup(func() { command(t, "KNOC_HEAL") })
	command(t, "KNOC_START")
	p := n.createOne(n.shell("pod", "true", counted, bound))
	node := env("KNOC_NODE")
	until(t, "NetworkUnavailable with a text", func() bool {
		return nodeCondition(node, "NetworkUnavailable") == "True" && nodeConditionField(node, "NetworkUnavailable", "message") != ""
	})
	if nodeCondition(node, "Ready") != "True" {
		t.Error("the node is not Ready")
	}
	if o := p.now(); o.Status.Phase != v1.PodPending {
		t.Errorf("phase is %s", o.Status.Phase)
	}
	command(t, "KNOC_HEAL")
	p.ranOnce()
	if o := runs.awaitPhase("Failed"); exitCode(o, "main") != 3 || runs.runs() != 1 {
		t.Errorf("exit code %d, %d runs", exitCode(o, "main"), runs.runs())
	}
	awaitReachable(t, node)
}

// While SSH is cut nothing is decided: what ended meanwhile is found out later,
// and a deleted pod's object stays until its job is gone.
func TestSSHCutWhilePodsRunEndAndAreDeleted(t *testing.T) {
	n := newNamespace(t)
	pods := n.create(
		n.shell("ends", "sleep 15; exit 5", counted),
		n.shell("goes-on", "sleep 50; exit 6", counted),
		n.shell("deleted-running", "trap 'exit 8' TERM; echo up; while :; do sleep 0.2; done", counted),
		n.shell("deleted-pending", "true", counted, flags("--hold")))
	ends, goesOn, deletedRunning, deletedPending := pods[0], pods[1], pods[2], pods[3]
	for _, p := range pods[:3] {
		p.await("Running", running("main"))
	}
	id := deletedPending.awaitJob()
	command(t, "KNOC_CUT")
	cut := time.Now()
	t.Cleanup(func() { command(t, "KNOC_HEAL") })
	for _, p := range pods[2:] {
		p.kubectl("delete", "pod", p.name, "--grace-period=3", "--wait=false")
	}
	created := n.createOne(n.shell("created", "true", counted, bound))
	for time.Since(cut) < 35*time.Second {
		for _, p := range pods[2:] {
			if p.isGone() {
				t.Fatalf("pod %s is gone, its job is not", p.name)
			}
		}
		if nodeCondition(env("KNOC_NODE"), "Ready") != "True" {
			t.Fatal("the node is not Ready")
		}
		time.Sleep(time.Second)
	}
	if state := login(t, "squeue -h -o %T -j "+id); state != "PENDING" {
		t.Errorf("the held job is %q", state)
	}
	command(t, "KNOC_HEAL")
	for _, p := range pods[2:] {
		p.awaitGone()
		p.noJobAlive()
	}
	if o := deletedRunning.now(); exitCode(o, "main") != 8 {
		t.Errorf("deleted-running: last status %+v, want exit code 8", status(o, "main"))
	}
	created.ranOnce()
	o := ends.awaitPhase("Failed")
	if end := status(o, "main").State.Terminated; end == nil || end.ExitCode != 5 || end.FinishedAt.After(cut.Add(25*time.Second)) {
		t.Errorf("ends: %+v; want exit code 5, during the cut", end)
	}
	if o = goesOn.awaitPhase("Failed"); exitCode(o, "main") != 6 {
		t.Errorf("goes-on: %+v", status(o, "main"))
	}
	for _, p := range []*pod{ends, goesOn} {
		if p.runs() != 1 {
			t.Errorf("%s ran %d times", p.name, p.runs())
		}
	}
	awaitReachable(t, env("KNOC_NODE"))
}

// slurmctld that does not answer still takes what it was sent, later. Pods that
// are submitted to it run once, whoever lost patience and was killed meanwhile.
func TestSlurmctldFrozenAcrossAReconnect(t *testing.T) {
	x := newProxy(t)
	startKnoc(t, "knoc-frozen", x.args()...)
	own, other := newNamespace(t), newNamespaceOn(t, "knoc-frozen")
	ends := own.createOne(own.shell("ends", "sleep 10; exit 5", counted))
	runs := other.createOne(other.shell("runs", "sleep 60; exit 6", counted))
	ends.await("Running", running("main"))
	runs.await("Running", running("main"))
	signal := func(sig string) { loginRoot(t, "kill -"+sig+" $(cat /run/slurmctld.pid)") }
	signal("STOP")
	t.Cleanup(func() { signal("CONT") })
	var pods []*pod
	for _, n := range []*namespace{own, other} {
		for i := range 4 {
			p := n.createOne(n.shell(fmt.Sprintf("pod-%d", i), "true", counted, bound))
			p.jobs = 2 // it may be accepted twice; the claim lets one run
			pods = append(pods, p)
		}
	}
	gone := own.createOne(own.shell("deleted", "true", counted, bound))
	gone.jobs = 2
	time.Sleep(5 * time.Second)
	x.drop()
	command(t, "KNOC_RESTART", "1")
	gone.kubectl("delete", "pod", "deleted", "--wait=false")
	node := env("KNOC_NODE")
	until(t, "NetworkUnavailable with Slurm's text", func() bool {
		return nodeCondition(node, "NetworkUnavailable") == "True" && strings.Contains(strings.ToLower(nodeConditionField(node, "NetworkUnavailable", "message")), "slurm")
	})
	x.drop()
	signal("CONT")
	for _, p := range pods {
		p.ranOnce()
	}
	gone.awaitGone()
	gone.noJobAlive()
	if o := ends.awaitPhase("Failed"); exitCode(o, "main") != 5 {
		t.Errorf("ends: %+v", status(o, "main"))
	}
	if o := runs.awaitPhase("Failed"); exitCode(o, "main") != 6 || runs.runs() != 1 {
		t.Errorf("runs: %+v, %d runs", status(o, "main"), runs.runs())
	}
	awaitReachable(t, node)
}

// A compute node loses its power: the pod fails with Slurm's reason, and with
// the condition by which a Job knows that it was not the pod's fault.
func TestPowerLossOfAComputeNode(t *testing.T) {
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000", counted, flags("--nodelist=n2")))
	p.await("Running", running("main"))
	command(t, "KNOC_NODE_OFF", "n2")
	t.Cleanup(func() { command(t, "KNOC_NODE_ON", "n2") })
	o := p.awaitPhase("Failed")
	if text := o.Status.Reason + " " + o.Status.Message; !strings.Contains(strings.ToLower(text), "node") {
		t.Errorf("reason %q, message %q; want the node's failure", o.Status.Reason, o.Status.Message)
	}
	disrupted := false
	for _, c := range o.Status.Conditions {
		disrupted = disrupted || c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue
	}
	if !disrupted {
		t.Errorf("no condition DisruptionTarget: %+v", o.Status.Conditions)
	}
	if s := status(o, "main"); s.State.Terminated == nil {
		t.Errorf("container is %+v", s.State)
	}
}
