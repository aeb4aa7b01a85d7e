package knoc

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// waitingWith waits until a container's waiting message has the text.
func (k *knocTest) waitingWith(pod *v1.Pod, text string) *v1.Pod {
	k.Helper()
	return k.wait(pod.UID, "waiting with "+text, func(pod *v1.Pod) bool {
		return len(pod.Status.ContainerStatuses) == 1 && pod.Status.ContainerStatuses[0].State.Waiting != nil &&
			strings.Contains(pod.Status.ContainerStatuses[0].State.Waiting.Message, text)
	})
}

// restart is kill -9 and a new start, with what happens in between.
func (k *knocTest) restart(between func()) {
	k.Helper()
	k.stop()
	<-k.done
	between()
	k.start()
}

const noController = "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n"

// TestDeleteInDoubt: sbatch was called and failed, Slurm turns out not to have
// the job, and the pod was deleted meanwhile: it goes, and never runs.
func TestDeleteInDoubt(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Slurm("sbatch.error", noController)
	pod := k.api.create(k.pod("doubtful", k.ran("doubtful")))
	k.waitingWith(pod, "Unable to contact slurm controller")
	k.api.remove(pod.UID, 30)
	k.leap(5 * time.Minute)
	k.waitGone(pod.UID)
	if n := k.calls("sbatch"); n > 2 {
		t.Errorf("sbatch was called %d times for a pod that was deleted after the first", n)
	}
}

// TestKilledAndForgotten: a container that was killed leaves to Slurm whether it
// was for want of memory; where squeue has forgotten the job, sacct tells.
func TestKilledAndForgotten(t *testing.T) {
	for _, c := range []struct{ name, accounting, reason string }{{"sacct", "", "OOMKilled"}, {"none", "sacct.disabled", "Error"}} {
		t.Run(c.name, func(t *testing.T) {
			k := newKnocTest(t)
			k.start()
			if c.accounting != "" {
				k.cluster.Slurm(c.accounting, "")
			}
			pod := k.api.create(k.pod("killed", k.ran("killed")+"while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.1; done; exit 137"))
			got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
			id := got.Annotations[AnnotationJobID]
			k.restart(func() {
				k.cluster.Slurm("job/"+id+"/force-state", "OUT_OF_MEMORY")
				k.cluster.Sh("touch go")
				k.cluster.WaitState(id, "OUT_OF_MEMORY")
				k.cluster.Slurm("minjobage", "0")
			})
			got = k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
			if exitCode(got) != 137 || got.Status.ContainerStatuses[0].State.Terminated.Reason != c.reason {
				t.Errorf("%+v, want 137 and %s", got.Status.ContainerStatuses[0].State.Terminated, c.reason)
			}
			k.once("killed")
		})
	}
}

// TestCancelledAndForgotten: the same for a job that was told to stop.
func TestCancelledAndForgotten(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("stopped", k.ran("stopped")+"trap 'exit 0' TERM; while :; do sleep 0.1; done"))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	k.restart(func() {
		k.cluster.Slurm("killwait", "10")
		k.cluster.Sh("scancel " + id)
		k.cluster.WaitState(id, "CANCELLED")
		k.cluster.Slurm("minjobage", "0")
	})
	got = k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	if got.Status.Reason != "SlurmJobCancelled" {
		t.Errorf("reason %q %q, want SlurmJobCancelled", got.Status.Reason, got.Status.Message)
	}
}

// TestFailedByOthers: somebody else, such as the pod garbage collector, set the
// phase; the job is ended and the object goes all the same.
func TestFailedByOthers(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("others", "sleep 1000"))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	k.restart(func() {
		k.api.update(pod.UID, func(pod *v1.Pod) {
			pod.Status.Phase = v1.PodFailed
			delete(pod.Annotations, AnnotationJobID)
		})
	})
	k.api.remove(pod.UID, 1)
	k.waitGone(pod.UID)
	k.cluster.WaitState(id, "FAILED", "CANCELLED", "COMPLETED")
}

// TestDeletedWithoutDirectory: a pod that ended and is being deleted, and of
// which the cluster has nothing, still has to go.
func TestDeletedWithoutDirectory(t *testing.T) {
	k := newKnocTest(t)
	now, grace := metav1.Now(), int64(30)
	pod := k.pod("refused", "true")
	pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = &now, &grace
	pod.Status.Phase = v1.PodFailed
	k.api.create(pod)
	k.start()
	k.waitGone(pod.UID)
}

// TestCopiedAnnotation: a pod made from another one's YAML carries its job id,
// and is a pod like any other.
func TestCopiedAnnotation(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.pod("copy", k.ran("copy"))
	pod.Annotations = map[string]string{AnnotationJobID: "77"}
	k.api.create(pod)
	k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	k.once("copy")
}

// TestForeignJobIsSafe: a job id is only a hint until squeue lists the job under
// the pod's name. Whatever the annotation says, another's job is not touched.
func TestForeignJobIsSafe(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	victim := k.api.create(k.pod("victim", "sleep 1000"))
	got := k.wait(victim.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	evil := k.pod("evil", "true")
	evil.Annotations = map[string]string{AnnotationJobID: id}
	evil.Status = *got.Status.DeepCopy()
	k.api.create(evil)
	k.api.remove(evil.UID, 0)
	for range 6 {
		time.Sleep(700 * time.Millisecond)
		k.leap(time.Minute)
	}
	k.waitGone(evil.UID)
	if state := k.cluster.JobFile(id, "state"); state != "RUNNING" {
		t.Errorf("the other pod's job is %s, want RUNNING", state)
	}
}

// TestJobIDReused: slurmctld lost its state and gives out old ids again.
func TestJobIDReused(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Slurm("sacct.disabled", "")
	k.start()
	pod := k.api.create(k.pod("lost", "sleep 1000"))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	k.vanish(id)
	k.cluster.Sh("printf '#!/bin/sh\\nsleep 1000\\n' >s; sbatch -J knoc-uid-other s")
	k.cluster.WaitState(id, "RUNNING")
	k.leapUntil(time.Minute, func() bool { return inPhase(v1.PodFailed)(k.api.get(pod.UID)) })
	got = k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	if got.Status.Reason != "JobLost" {
		t.Errorf("reason %q, want JobLost", got.Status.Reason)
	}
	k.api.remove(pod.UID, 0)
	k.waitGone(pod.UID)
	if state := k.cluster.JobFile(id, "state"); state != "RUNNING" {
		t.Errorf("the other job with this id is %s, want RUNNING", state)
	}
}

// TestClaimOfAnotherJob: Slurm accepted a pod twice, knoc knew of the one that
// found the claim taken and ended at once. What Slurm said of that one must not
// be taken for the end of the other.
func TestClaimOfAnotherJob(t *testing.T) {
	now := time.Unix(1700000000, 0)
	w := &work{jobID: "2", staged: true}
	w.observe(job{ID: "2", State: "COMPLETED"}, now)
	w.read(0, 0, []byte("1700000000 claim 1\n1700000000 start main 0\n"), now.Add(time.Second), now.Add(time.Second))
	if w.jobID != "1" || w.jobGone() || w.over {
		t.Errorf("job %s, gone %v, over %v; want job 1, alive", w.jobID, w.jobGone(), w.over)
	}
	w.observe(job{ID: "1", State: "COMPLETED"}, now.Add(2*time.Second))
	if !w.jobGone() {
		t.Error("the end of the job itself is not seen")
	}
}

// TestBrokenFiles: what is broken in one pod's directory is that pod's trouble.
func TestBrokenFiles(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	a := k.api.create(k.pod("job", k.ran("job")+k.untilGo("job")+"exit 3"))
	b := k.api.create(k.pod("meta", "sleep 1000"))
	k.wait(a.UID, "Running", inPhase(v1.PodRunning))
	got := k.wait(b.UID, "Running", inPhase(v1.PodRunning))
	k.restart(func() {
		k.cluster.Sh("cd .knoc/knoc-c1 && echo >uid-job/job && echo garbage >uid-meta/meta")
		k.api.mu.Lock()
		delete(k.api.pods, b.UID)
		k.api.mu.Unlock()
	})
	k.letGo("job")
	if got := k.wait(a.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 3 {
		t.Errorf("exit code %d, want 3", exitCode(got))
	}
	k.once("job")
	k.waitGone(b.UID)
	k.cluster.WaitState(got.Annotations[AnnotationJobID], "CANCELLED", "FAILED", "COMPLETED")
}

// TestStopWithoutCommand: where no command can be written (a full disk, a
// directory wiped by its owner) a signal does; a long grace period is not waited for.
func TestStopWithoutCommand(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("full", "trap 'exit 4' TERM; while :; do sleep 0.1; done"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.cluster.Sh("cd .knoc/knoc-c1/" + string(pod.UID) + " && rm -rf cmd")
	k.api.remove(pod.UID, 3600)
	k.waitGone(pod.UID)
}

// TestCancelLost: the cancelling of a queued job fails while slurmctld is away.
func TestCancelLost(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Slurm("hold", "")
	k.start()
	pod := k.api.create(k.pod("queued", k.ran("queued")))
	k.waitingWith(pod, "Priority")
	k.cluster.Slurm("scancel.error", "scancel: error: Unable to contact slurm controller\n")
	k.api.remove(pod.UID, 3600)
	for end := time.Now().Add(60 * time.Second); !strings.Contains(strings.Join(k.cluster.SlurmCalls("scancel"), "\n"), "--state=PENDING"); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("scancel was never called")
		}
	}
	k.cluster.NoSlurm("scancel.error")
	k.leap(time.Minute)
	k.waitGone(pod.UID)
	if n := k.runs("queued"); n != 0 {
		t.Errorf("it ran %d times", n)
	}
}

// TestHugeGrace: the longest grace period that the API takes is long, not none.
func TestHugeGrace(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.pod("huge", "trap 'sleep 2; exit 4' TERM; while :; do sleep 0.1; done")
	grace := int64(1<<63 - 1)
	pod.Spec.TerminationGracePeriodSeconds = &grace
	k.api.create(pod)
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.api.remove(pod.UID, grace)
	k.waitGone(pod.UID)
	if got := k.api.get(pod.UID); exitCode(got) != 4 {
		t.Errorf("exit code %d, want 4: it had time to end by itself", exitCode(got))
	}
}

// TestOddErrorText: sbatch's words need not be UTF-8, and are long.
func TestOddErrorText(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Slurm("sbatch.error", strings.Repeat("é\xff", 3000)+"\nsbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n")
	pod := k.api.create(k.pod("odd", "true"))
	k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	k.p.mu.RLock()
	defer k.p.mu.RUnlock()
	for _, w := range k.p.works {
		if text := w.trouble + w.refused.Message; strings.ToValidUTF8(text, "") != text {
			t.Error("sbatch's text is not valid UTF-8: the API server would keep another one")
		}
	}
}

// TestGroupLimitPasses: a limit on the jobs that may be submitted is no verdict.
func TestGroupLimitPasses(t *testing.T) {
	for _, text := range []string{"AssocGrpSubmitJobsLimit", "QOSGrpSubmitJobsLimit", "AssocMaxSubmitJobLimit", "QOSMaxSubmitJobPerUserLimit"} {
		if rejected("sbatch: error: " + text + "\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)") {
			t.Errorf("%s is taken for a verdict", text)
		}
	}
}

// TestHalvesAreRemoved: what an earlier knoc staged of a pod that is gone may
// hold secrets.
func TestHalvesAreRemoved(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.restart(func() {
		k.cluster.Sh("cd .knoc/knoc-c1 && mkdir -p uid-gone.new-1000000001/env && echo secret >uid-gone.new-1000000001/env/main")
	})
	if _, err := os.Stat(filepath.Join(k.dir(), "uid-gone.new-1000000001")); !os.IsNotExist(err) {
		t.Errorf("half a pod is still there: %v", err)
	}
}

// jobsAlive are the ids of a pod's jobs that have not ended.
func (k *knocTest) jobsAlive(uid string) string {
	return strings.Join(strings.Fields(k.cluster.Sh(`cd .slurm/job; for j in *; do
		[ "$(cat $j/name 2>/dev/null)" = knoc-`+uid+` ] || continue
		case $(cat $j/state) in PENDING | RUNNING | COMPLETING) echo $j ;; esac
	done`)), " ")
}

// TestChaos: whatever is cut, killed or answered wrongly, a pod runs at most
// once, ends with its own exit code, and its object goes after its job.
func TestChaos(t *testing.T) {
	k := newKnocTest(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	k.api.goes = func(pod *v1.Pod) {
		if alive := k.jobsAlive(string(pod.UID)); alive != "" {
			t.Errorf("the object of %s goes while its jobs %s live", pod.Name, alive)
		}
	}
	faults := []string{"sbatch.delay", "sbatch.error", "squeue.error", "sacct.error", "scancel.error", "sinfo.error", "hold"}
	heal := func() {
		k.cluster.Refuse(false)
		k.cluster.CutAfter(-1)
		k.cluster.CutOutputAfter(-1)
		for _, name := range faults {
			os.Remove(filepath.Join(k.cluster.Home, ".slurm", name))
		}
	}
	k.start()
	deleted := map[string]bool{}
	const pods = 16
	for i := range 2 * pods {
		if i < pods {
			name := fmt.Sprint("c", i)
			k.api.create(k.pod(name, k.ran(name)+fmt.Sprintf("sleep %d.%d; exit %d", rnd.IntN(3), rnd.IntN(10), i+1)))
		}
		if name := fmt.Sprint("c", rnd.IntN(pods)); rnd.IntN(4) == 0 && k.api.get(k.pod(name, "").UID) != nil {
			deleted[name] = true
			if k.api.remove(k.pod(name, "").UID, int64(rnd.IntN(3))); rnd.IntN(3) == 0 { // --force
				k.api.mu.Lock()
				delete(k.api.pods, k.pod(name, "").UID)
				k.api.mu.Unlock()
				k.p.kick()
			}
		}
		switch rnd.IntN(9) {
		case 0:
			k.cluster.Cut()
		case 1:
			k.cluster.CutAfter(int64(rnd.IntN(30000)))
		case 2:
			k.cluster.CutOutputAfter(int64(rnd.IntN(2000)))
		case 3:
			k.cluster.Slurm("sbatch.fail-but-accept", "")
		case 4, 5:
			name := faults[rnd.IntN(len(faults))]
			k.cluster.Slurm(name, map[bool]string{false: noController, true: "1"}[name == "sbatch.delay"])
		case 6:
			heal()
			k.restart(func() {})
		case 7:
			heal()
		case 8:
			k.leap(time.Duration(rnd.IntN(60)) * time.Second)
		}
		time.Sleep(time.Duration(rnd.IntN(400)) * time.Millisecond)
	}
	heal()
	time.Sleep(time.Second)
	// Calls of sbatch that were killed need not be waited for.
	k.cluster.Sh("cd .knoc/knoc-c1; for l in */lock; do [ ! -d $l ] || : >$l/over; done")
	stop := make(chan struct{})
	defer close(stop)
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(500 * time.Millisecond):
				k.leap(20 * time.Second)
			}
		}
	}()
	for i := range pods {
		name := fmt.Sprint("c", i)
		pod := k.pod(name, "")
		if deleted[name] {
			k.waitGone(pod.UID)
			if alive := k.jobsAlive(string(pod.UID)); alive != "" {
				t.Errorf("pod %s is gone and its jobs %s live", name, alive)
			}
		} else if got := k.wait(pod.UID, "ended", func(pod *v1.Pod) bool { return terminalPhase(pod.Status.Phase) }); exitCode(got) != int32(i+1) {
			t.Errorf("pod %s: exit code %d, want %d; %s %s", name, exitCode(got), i+1, got.Status.Reason, got.Status.Message)
		}
		if n := k.runs(name); n > 1 || n == 0 && !deleted[name] {
			t.Errorf("pod %s ran %d times", name, n)
		}
	}
}

// TestMarkerLost: a journal whose marker nobody saw is read all the same.
func TestMarkerLost(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Sh("cd .knoc/knoc-c1 && rm -rf changed && : >changed") // no marker can be made
	pod := k.api.create(k.pod("unmarked", "sleep 100"))
	for end := time.Now().Add(60 * time.Second); k.api.get(pod.UID).Status.Phase != v1.PodRunning; time.Sleep(500 * time.Millisecond) {
		if k.leap(30 * time.Second); time.Now().After(end) {
			t.Fatal("it runs, and nobody knows")
		}
	}
}

// TestRequeuedAndDeleted: an admin requeues the job, which then waits in the
// queue with a journal and a claim of its first run.
func TestRequeuedAndDeleted(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("again", k.ran("again")+"sleep 1000"))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	waitUntil(t, "a run", func() bool { return k.runs("again") == 1 })
	k.cluster.Slurm("hold", "")
	k.cluster.Sh("scontrol requeue " + id)
	k.cluster.WaitState(id, "PENDING")
	k.leap(30 * time.Second)
	time.Sleep(time.Second)
	k.api.remove(pod.UID, 3600)
	for range 4 {
		time.Sleep(300 * time.Millisecond)
		k.leap(30 * time.Second)
	}
	k.waitGone(pod.UID)
	k.once("again")
}

// TestSqueueFails: a slurmctld that is away is not asked all the time.
func TestSqueueFails(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("long", "sleep 1000"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.cluster.Slurm("squeue.error", noController)
	before := k.calls("squeue")
	const minutes = 5
	for range minutes * 60 / 2 {
		k.leap(2 * time.Second)
		time.Sleep(40 * time.Millisecond)
	}
	if n := k.calls("squeue") - before; n > 3*minutes+7 {
		t.Errorf("squeue was called %d times in %d minutes", n, minutes)
	}
}

// TestHalfOverWhole: one exchange unpacked a pod and got no further, the next is
// cut while it unpacks: what is there must not look like a whole pod.
func TestHalfOverWhole(t *testing.T) {
	for _, at := range []int64{6000, 8000, 10000, 13000} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			k := newKnocTest(t)
			k.cluster.Stub("mv", "#!/bin/sh\n[ ! -e $HOME/.slurm/mv.fail ] || exit 1\nPATH=/usr/bin:/bin\nexec mv \"$@\"\n")
			k.start()
			k.cluster.Slurm("mv.fail", "")
			pod := k.api.create(k.pod("half", k.ran("half")))
			k.waitingWith(pod, "could not write")
			k.cluster.CutAfter(at)
			k.cluster.NoSlurm("mv.fail")
			k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
			k.once("half")
		})
	}
}

// TestSealedIsRemoved: a pod that was sealed before anything of it arrived has a
// directory, which the next knoc removes.
func TestSealedIsRemoved(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.restart(func() { k.cluster.Sh("cd .knoc/knoc-c1 && mkdir -p uid-seal/lock && : >uid-seal/sealed") })
	k.leap(10 * time.Second)
	time.Sleep(time.Second)
	k.leap(10 * time.Second)
	k.waitGone("uid-seal")
}

// TestWipedAndDeleted: the directory of a running pod is wiped by its owner, and
// knoc starts anew: the job is found by name and ended.
func TestWipedAndDeleted(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("wiped", "sleep 1000"))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.restart(func() { k.cluster.Sh("rm -rf .knoc/knoc-c1/" + string(pod.UID)) })
	k.api.remove(pod.UID, 3600)
	k.waitGone(pod.UID)
	k.cluster.WaitState(got.Annotations[AnnotationJobID], "CANCELLED")
}

// TestHeldBackAndDeleted: when sbatch fails, the pods after the first few are not
// handed to it. One that is deleted then leaves nothing on the cluster either.
func TestHeldBackAndDeleted(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Slurm("sbatch.error", noController)
	var pods []*v1.Pod
	for i := range 3 * submitParallel {
		pods = append(pods, k.api.create(k.pod(fmt.Sprintf("held-%d", i), "true")))
	}
	k.start() // all of them in one exchange
	for _, pod := range pods {
		k.wait(pod.UID, "waiting for Slurm", func(p *v1.Pod) bool {
			return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].State.Waiting.Reason == "SlurmSubmitFailed"
		})
	}
	if left := k.cluster.Sh("cd .knoc/knoc-c1 && ls -d *.new-* submit.* 2>/dev/null || :"); left != "" {
		t.Errorf("an exchange left behind: %s", left)
	}
	for _, pod := range pods {
		k.api.remove(pod.UID, 30)
	}
	k.cluster.NoSlurm("sbatch.error")
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		k.leap(10 * time.Second)
		left := k.cluster.Sh("cd .knoc/knoc-c1 && ls -d uid-* 2>/dev/null || :")
		if left == "" {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the pods are deleted and left: %s", left)
		}
	}
}
