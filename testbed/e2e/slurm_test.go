//go:build testbed

package e2e

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// job is Slurm's record of one.
type job struct {
	ID, Name, State, Node string
	Start, End            time.Time // zero: not yet
}

func (j job) alive() bool {
	switch word, _, _ := strings.Cut(j.State, " "); word {
	case "PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "STOPPED", "SIGNALING", "STAGE_OUT":
		return true
	}
	return false
}

// jobsOf are all jobs that Slurm ever had for the pods, by name: from the
// accounting database, and what squeue says of jobs that it still knows.
func jobsOf(t testing.TB, pods ...*pod) map[types.UID][]job {
	t.Helper()
	var names []string
	for _, p := range pods {
		names = append(names, "knoc-"+string(p.uid))
	}
	all := strings.Join(names, ",")
	line := "export SLURM_TIME_FORMAT=%s; squeue -h -t all -o '%i|%j|%T|%S|%e|%N' -n " + all
	if accounting() {
		line += " && sacct -n -X -P -S $(date -d '2 days ago' +%F) -o JobIDRaw,JobName,State,Start,End,NodeList --name=" + all
	}
	jobs := map[types.UID][]job{}
	known := map[string]bool{}
	for l := range strings.Lines(login(t, line)) {
		f := strings.Split(strings.TrimSpace(l), "|")
		if len(f) != 6 {
			t.Fatalf("no line of squeue or sacct: %q", l)
		}
		uid := types.UID(strings.TrimPrefix(f[1], "knoc-"))
		if known[f[0]] {
			continue
		}
		known[f[0]] = true
		j := job{ID: f[0], Name: f[1], State: f[2], Node: f[5]}
		if !j.alive() || j.State == "RUNNING" || j.State == "COMPLETING" {
			j.Start = unix(f[3])
		}
		if !j.alive() {
			j.End = unix(f[4])
		}
		jobs[uid] = append(jobs[uid], j)
	}
	return jobs
}

func unix(s string) time.Time {
	if n, err := strconv.ParseInt(s, 10, 64); err == nil && n > 0 {
		return time.Unix(n, 0)
	}
	return time.Time{}
}

// job waits until Slurm has one job for the pod that has ended, and gives it.
// That it is the only one is checked for all pods, when the namespace goes.
func (p *pod) endedJob() job {
	p.t.Helper()
	var j job
	until(p.t, "the job of pod "+p.name+" to end", func() bool {
		jobs := jobsOf(p.t, p)[p.uid]
		if len(jobs) != 1 {
			p.t.Fatalf("pod %s has %d jobs: %v", p.name, len(jobs), jobs)
		}
		j = jobs[0]
		return !j.alive() && !j.End.IsZero()
	})
	return j
}

// noJobAlive fails when Slurm still has a job of the pod that has not ended.
func (p *pod) noJobAlive() {
	p.t.Helper()
	for _, j := range jobsOf(p.t, p)[p.uid] {
		if j.alive() {
			p.t.Errorf("pod %s is gone, its job is not: %v", p.name, j)
		}
	}
}

// scontrol is what `scontrol show job` says, by field.
func scontrol(t testing.TB, id string) map[string]string {
	t.Helper()
	fields := map[string]string{}
	for _, f := range strings.Fields(login(t, "scontrol -o show job "+id)) {
		key, value, _ := strings.Cut(f, "=")
		fields[key] = value
	}
	return fields
}

// dir is the pod's directory on the cluster, as a word for a shell there.
func (p *pod) dir() string { return "~/.knoc/*/" + string(p.uid) }

// runs counts how often the pod's first container was started (see counted).
func (p *pod) runs() int {
	p.t.Helper()
	n, err := strconv.Atoi(login(p.t, fmt.Sprintf("cat %s/vol/runs/runs 2>/dev/null | wc -l", p.dir())))
	if err != nil {
		p.t.Fatal(err)
	}
	return n
}

// ranOnce waits for the pod to succeed and checks that it did so once.
func (p *pod) ranOnce() {
	p.t.Helper()
	p.awaitPhase("Succeeded")
	if n := p.runs(); n != 1 {
		p.t.Errorf("pod %s ran %d times", p.name, n)
	}
}

// remains lists what is left of the pods on the cluster.
func remains(t testing.TB, pods []*pod) string {
	t.Helper()
	found := login(t, "cd ~/.knoc && ls -d */*-*-*-*-* */changed/* 2>/dev/null || :")
	var left []string
	for name := range strings.Lines(found) {
		for _, p := range pods {
			if strings.Contains(name, string(p.uid)) {
				left = append(left, strings.TrimSpace(name))
			}
		}
	}
	return strings.Join(left, " ")
}

func shimDir() string { return env("KNOC_SHIM_DIR") }

// shim puts a script in front of a Slurm command, for all that comes over SSH,
// and takes it away at the end. The script finds the real one in $real.
func shim(t testing.TB, command, script string) (remove func()) {
	t.Helper()
	path := shimDir() + "/" + command
	text := fmt.Sprintf("#!/bin/sh\nreal=$(PATH=/usr/local/bin:/usr/bin:/bin command -v %s)\n%s", command, script)
	if out, err := run([]byte(text), "KNOC_LOGIN", fmt.Sprintf("cat >%[1]s.new && chmod 755 %[1]s.new && mv %[1]s.new %[1]s", path)); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	remove = func() { login(t, "rm -f "+path) }
	t.Cleanup(remove)
	return remove
}
