package knoc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// vanish kills a job and has slurmctld forget it, so that its journal has no end.
func (k *knocTest) vanish(id string) {
	k.Helper()
	k.cluster.Sh(". bin/slurm.lib; for p in $(processes " + id + "); do kill -9 $p; done; sleep 0.3; " +
		"until rm -rf .slurm/job/" + id + " 2>/dev/null; do sleep 0.1; done") // its slurm-run may still write there
}

// While accounting answers errors a pod says what cannot be told, and by one
// event; when it answers again the pod ends.
func TestUnclear(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("unclear", "sleep 1000"))
	id := k.wait(pod.UID, "Running", inPhase(v1.PodRunning)).Annotations[AnnotationJobID]
	k.cluster.Slurm("sacct.error", "sacct: error: slurm_persist_conn_open_without_init: failed to open persistent connection to slurmdbd\n")
	k.vanish(id)
	k.leapUntil(time.Minute, func() bool { return k.api.get(pod.UID).Status.Reason == "SlurmJobUnclear" })
	got := k.api.get(pod.UID)
	if want := "job " + id + " is not in squeue any more"; got.Status.Phase != v1.PodRunning || !strings.HasPrefix(got.Status.Message, want) || !strings.Contains(got.Status.Message, "connection to slurmdbd") {
		t.Errorf("%s: %s", got.Status.Phase, got.Status.Message)
	}
	for range 5 {
		k.leap(time.Minute)
		time.Sleep(200 * time.Millisecond)
	}
	if n := strings.Count(strings.Join(k.eventsAbout("unclear"), "\n"), "SlurmJobUnclear"); n != 1 {
		t.Errorf("%d events: %q", n, k.eventsAbout("unclear"))
	}
	k.cluster.NoSlurm("sacct.error")
	k.leapUntil(time.Minute, func() bool { return inPhase(v1.PodFailed)(k.api.get(pod.UID)) })
	if got := k.api.get(pod.UID); got.Status.Reason != "JobLost" {
		t.Errorf("%s: %s", got.Status.Reason, got.Status.Message)
	}
}

// A job that accounting shows as running for ever while slurmctld does not know it.
func TestRunaway(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	going := k.api.create(k.pod("going", "sleep 1000"))
	staying := k.api.create(k.pod("staying", "sleep 1000"))
	var rows string
	for _, pod := range []*v1.Pod{going, staying} {
		id := k.wait(pod.UID, "Running", inPhase(v1.PodRunning)).Annotations[AnnotationJobID]
		rows += fmt.Sprintf("echo '%s|RUNNING|0:0|1700000000|Unknown|batch|n1|knoc-%s'\n", id, pod.UID)
		k.vanish(id)
	}
	k.cluster.Stub("sacct", "#!/bin/sh\n"+rows)
	k.api.remove(going.UID, 1)
	began := k.p.now()
	gone := func() bool {
		k.api.mu.Lock()
		defer k.api.mu.Unlock()
		return k.api.pods[going.UID] == nil
	}
	k.leapUntil(30*time.Second, gone)
	if took := k.p.now().Sub(began); took > 8*time.Minute {
		t.Errorf("the deletion took %v", took)
	}
	if got := k.api.get(staying.UID); got.Status.Phase != v1.PodRunning {
		t.Errorf("phase %s: news may be under way to slurmdbd", got.Status.Phase)
	}
	k.leapUntil(time.Minute, func() bool { return inPhase(v1.PodFailed)(k.api.get(staying.UID)) })
	if got := k.api.get(staying.UID); got.Status.Reason != "JobLost" || !strings.Contains(got.Status.Message, "accounting shows it as RUNNING still") {
		t.Errorf("%s: %s", got.Status.Reason, got.Status.Message)
	}
	if took := k.p.now().Sub(began); took < runawayAfter {
		t.Errorf("lost after %v", took)
	}
}

func TestNewestRun(t *testing.T) {
	runs := []job{{ID: "7", State: "NODE_FAIL", Start: at(10)}, {ID: "7", State: "PREEMPTED", Start: at(30)}, {ID: "8", State: "FAILED", Start: at(90)}, {ID: "7", State: "FAILED", Start: at(20)}}
	if j, found := newestRun(runs, "7"); !found || j.State != "PREEMPTED" {
		t.Errorf("%+v", j)
	}
	if j, _ := newestRun(append(runs, job{ID: "7", State: "PENDING"}, job{ID: "7", State: "REQUEUED", Start: at(40)}), "7"); j.State != "PENDING" {
		t.Errorf("%+v", j)
	}
	if _, found := newestRun(runs, "9"); found {
		t.Error("found")
	}
}
