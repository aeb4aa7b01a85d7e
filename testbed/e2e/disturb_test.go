//go:build testbed

package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// These are not parallel: each of them hurts everything that runs. As most of
// it is waiting, what can share a disturbance, or does not meet the other's,
// runs side by side.

// While SSH is cut for a minute, n2 loses its power: that test's knoc goes
// another way, and all others' pods are on n1.
func TestDisturbed(t *testing.T) {
	t.Run("SSHIsCut", func(t *testing.T) { t.Parallel(); sshIsCut(t) })
	t.Run("PowerLossOfAComputeNode", func(t *testing.T) { t.Parallel(); powerLoss(t) })
}

// While SSH is cut nothing is decided: what ended meanwhile is found out later,
// and a deleted pod's object stays until its job is gone. A knoc that starts
// then is a node at once, one that says what is wrong, and does its work when
// the network is back.
func sshIsCut(t *testing.T) {
	startKnoc(t, "knoc-cut")
	n, started := newNamespaceOn(t, "knoc-cut"), newNamespace(t)
	on := flags("--nodelist=n1")
	runs := started.createOne(started.shell("runs", "sleep 20; exit 3", counted, on))
	pods := n.create(
		n.shell("ends", "sleep 15; exit 5", counted, on),
		n.shell("goes-on", "sleep 50; exit 6", counted, on),
		n.shell("deleted-running", "trap 'exit 8' TERM; echo up; while :; do sleep 0.2; done", counted, on),
		n.shell("deleted-pending", "true", counted, flags("--hold")))
	ends, goesOn, deletedRunning, deletedPending := pods[0], pods[1], pods[2], pods[3]
	for _, p := range append(pods[:3:3], runs) {
		p.await("Running", running("main"))
	}
	id := deletedPending.awaitJob()
	command(t, "KNOC_STOP")
	command(t, "KNOC_CUT")
	cut := time.Now()
	t.Cleanup(func() { command(t, "KNOC_HEAL") })
	for _, p := range pods[2:] {
		p.kubectl("delete", "pod", p.name, "--grace-period=3", "--wait=false")
	}
	created := n.createOne(n.shell("created", "true", counted, bound, on))
	command(t, "KNOC_START")
	p := started.createOne(started.shell("pod", "true", counted, bound, on))
	node := env("KNOC_NODE")
	told := false
	for time.Since(cut) < 35*time.Second || !told {
		for _, p := range pods[2:] {
			if p.isGone() {
				t.Fatalf("pod %s is gone, its job is not", p.name)
			}
		}
		for _, node := range []string{node, "knoc-cut"} {
			if nodeCondition(node, "Ready") != "True" {
				t.Fatalf("node %s is not Ready", node)
			}
		}
		told = nodeCondition(node, "NetworkUnavailable") == "True" && nodeConditionField(node, "NetworkUnavailable", "message") != ""
		if !told && time.Since(cut) > limit {
			t.Fatal("the node does not say what is wrong")
		}
		time.Sleep(time.Second)
	}
	if o := p.now(); o.Status.Phase != v1.PodPending {
		t.Errorf("phase is %s", o.Status.Phase)
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
	p.ranOnce()
	o := ends.awaitPhase("Failed")
	if end := status(o, "main").State.Terminated; end == nil || end.ExitCode != 5 || end.FinishedAt.After(cut.Add(25*time.Second)) {
		t.Errorf("ends: %+v; want exit code 5, during the cut", end)
	}
	for p, code := range map[*pod]int32{goesOn: 6, runs: 3} {
		if o = p.awaitPhase("Failed"); exitCode(o, "main") != code {
			t.Errorf("%s: %+v, want exit code %d", p.name, status(o, "main"), code)
		}
	}
	for _, p := range []*pod{ends, goesOn, runs} {
		if p.runs() != 1 {
			t.Errorf("%s ran %d times", p.name, p.runs())
		}
	}
	awaitReachable(t, node)
	awaitReachable(t, "knoc-cut")
}

// A compute node loses its power: the pod fails with Slurm's reason, and with
// the condition by which a Job knows that it was not the pod's fault.
func powerLoss(t *testing.T) {
	startKnoc(t, "knoc-power", newProxy(t).args()...)
	n := newNamespaceOn(t, "knoc-power")
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000", counted, flags("--nodelist=n2")))
	mapped := n.createOne(n.shell("users", "mkdir -m 700 /data/private; echo x >/data/private/x; echo up; exec sleep 1000", users, emptyDir("data", "/data"), flags("--nodelist=n2")))
	p.await("Running", running("main"))
	mapped.awaitLog("up")
	command(t, "KNOC_NODE_OFF", "n2")
	on := sync.OnceFunc(func() { command(t, "KNOC_NODE_ON", "n2") })
	t.Cleanup(on)
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
	// What the other one's users left there goes with the next pod on that node.
	mapped.awaitPhase("Failed")
	job := mapped.awaitJob()
	on()
	next := n.createOne(n.shell("next", "true", flags("--nodelist=n2")))
	next.awaitPhase("Succeeded")
	if left := mapped.leftOn("n2", job); left != "" {
		t.Errorf("left on n2: %s", left)
	}
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
