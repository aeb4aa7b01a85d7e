package knoc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// fakeAPI is the API server of these tests: what podAPI needs, and the status
// that virtual-kubelet would have written.
type fakeAPI struct {
	t       *testing.T
	mu      sync.Mutex
	pods    map[types.UID]*v1.Pod
	deleted map[types.UID]*v1.Pod // as they were when they went
	events  []string
	kick    func()
	goes    func(*v1.Pod) // sees each object that knoc deletes, before it goes
}

func newFakeAPI(t *testing.T) *fakeAPI {
	return &fakeAPI{t: t, pods: map[types.UID]*v1.Pod{}, deleted: map[types.UID]*v1.Pod{}, kick: func() {}}
}

func (f *fakeAPI) Pods() []*v1.Pod {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []*v1.Pod
	for _, pod := range f.pods {
		all = append(all, pod)
	}
	return all
}

func (f *fakeAPI) List(context.Context) ([]*v1.Pod, error) { return f.Pods(), nil }

func (f *fakeAPI) Delete(_ context.Context, pod *v1.Pod) error {
	if f.goes != nil {
		f.goes(pod)
	}
	f.mu.Lock()
	if now := f.pods[pod.UID]; now != nil {
		f.deleted[pod.UID] = now
		delete(f.pods, pod.UID)
	}
	kick := f.kick
	f.mu.Unlock()
	kick()
	return nil
}

func (f *fakeAPI) Event(pod *v1.Pod, container, _, reason, message string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	name := pod.Name
	if container != "" {
		name += "/" + container
	}
	f.events = append(f.events, name+" "+reason+": "+message)
}

// update changes a pod as an API client would and tells the informer's reader.
func (f *fakeAPI) update(uid types.UID, change func(*v1.Pod)) {
	f.mu.Lock()
	if old := f.pods[uid]; old != nil {
		pod := old.DeepCopy()
		change(pod)
		f.pods[uid] = pod
	}
	kick := f.kick
	f.mu.Unlock()
	kick()
}

func (f *fakeAPI) create(pod *v1.Pod) *v1.Pod {
	f.mu.Lock()
	f.pods[pod.UID] = pod
	kick := f.kick
	f.mu.Unlock()
	kick()
	return pod
}

func (f *fakeAPI) remove(uid types.UID, grace int64) {
	f.update(uid, func(pod *v1.Pod) {
		now := metav1.Now()
		pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = &now, &grace
	})
}

// notified is virtual-kubelet's part: the status goes to the API server, unless
// the pod has another UID or has ended.
func (f *fakeAPI) notified(sent *v1.Pod) {
	f.update(sent.UID, func(pod *v1.Pod) {
		if !terminalPhase(pod.Status.Phase) {
			pod.Status = *sent.Status.DeepCopy()
			if id := sent.Annotations[AnnotationJobID]; id != "" {
				if pod.Annotations == nil {
					pod.Annotations = map[string]string{}
				}
				pod.Annotations[AnnotationJobID] = id
			}
		}
	})
}

func (f *fakeAPI) get(uid types.UID) *v1.Pod {
	f.mu.Lock()
	defer f.mu.Unlock()
	if pod := f.pods[uid]; pod != nil {
		return pod
	}
	return f.deleted[uid]
}

// noObjects is an API server without any ConfigMap.
type noObjects struct{}

func (noObjects) ConfigMap(_ context.Context, namespace, name string) (*v1.ConfigMap, error) {
	return nil, fmt.Errorf("no configmap %s/%s", namespace, name)
}
func (noObjects) Secret(_ context.Context, namespace, name string) (*v1.Secret, error) {
	return nil, fmt.Errorf("no secret %s/%s", namespace, name)
}
func (noObjects) Services(context.Context, string, string) ([]v1.Service, error) { return nil, nil }

func (noObjects) Token(context.Context, *v1.Pod, string, int64) (string, time.Time, error) {
	return "", time.Time{}, errors.New("no tokens")
}

// knocTest is a knoc against a hermetic cluster.
type knocTest struct {
	*testing.T
	cluster *testCluster
	api     *fakeAPI
	objs    objects
	stop    func() // as kill -9 does: nothing is tidied up
	p       *KNOCProvider
	done    chan error
	poll    time.Duration
	ahead   atomic.Int64 // how far knoc's clock is ahead of the real one
}

// leap lets time pass for knoc without waiting for it.
func (k *knocTest) leap(d time.Duration) {
	k.ahead.Add(int64(d))
	k.p.kick()
}

func newKnocTest(t *testing.T) *knocTest {
	t.Parallel()
	k := &knocTest{T: t, cluster: newTestCluster(t), api: newFakeAPI(t), objs: noObjects{}}
	k.cluster.InstallSlurm()
	return k
}

// start starts a knoc, waits until it has read the directories, and has it
// stopped at the end of the test.
func (k *knocTest) start() {
	k.Helper()
	k.launch()
	select {
	case <-k.p.adopted():
	case err := <-k.done:
		k.Fatalf("knoc ended: %v", err)
	case <-time.After(30 * time.Second):
		k.Fatal("knoc did not start within 30 s")
	}
}

func (k *knocTest) launch() {
	k.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var sink io.Writer = io.Discard
	if testing.Verbose() {
		sink = os.Stderr
	}
	p, err := newProvider(Config{
		NodeName: "knoc", ClusterID: "c1", SSH: k.cluster.Config(), Partition: "batch", Poll: k.poll,
		Logger: slog.New(slog.NewTextHandler(sink, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}, NodeConfig{}, k.objs, k.api)
	if err != nil {
		k.Fatal(err)
	}
	p.now = func() time.Time { return time.Now().Add(time.Duration(k.ahead.Load())) }
	k.api.mu.Lock()
	k.api.kick = p.kick
	k.api.mu.Unlock()
	p.NotifyPods(ctx, k.api.notified)
	k.p, k.done = p, make(chan error, 1)
	go func(done chan error) { done <- p.run(ctx) }(k.done)
	k.stop = func() { cancel() }
	k.Cleanup(cancel)
}

// pod is a pod of one container that runs a shell command.
func (k *knocTest) pod(name, command string) *v1.Pod {
	automount := false
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec: v1.PodSpec{
			RestartPolicy: v1.RestartPolicyNever, AutomountServiceAccountToken: &automount,
			Containers: []v1.Container{{Name: "main", Image: "busybox", Command: []string{"sh", "-c", command}}},
		},
	}
}

// untilGo is the part of a pod's command that waits for letGo. A pod that ends
// by itself, after a second say, may have ended before a slow machine has looked.
func (k *knocTest) untilGo(name string) string {
	return "while [ ! -e " + k.cluster.Home + "/go-" + name + " ]; do sleep 0.05; done; "
}

func (k *knocTest) letGo(name string) { k.Helper(); k.cluster.Sh("touch go-" + name) }

// letEnd is letGo that waits until the pod's job is over.
func (k *knocTest) letEnd(name string) {
	k.Helper()
	k.letGo(name)
	k.cluster.WaitState(k.api.get(types.UID("uid-" + name)).Annotations[AnnotationJobID], "FAILED", "COMPLETED")
}

// leapUntil has time pass in leaps, until ok or a minute of real time is over.
func (k *knocTest) leapUntil(d time.Duration, ok func() bool) {
	for end := time.Now().Add(time.Minute); !ok() && time.Now().Before(end); time.Sleep(300 * time.Millisecond) {
		k.leap(d)
	}
}

// wait waits until the pod is as it should be.
func (k *knocTest) wait(uid types.UID, what string, ok func(*v1.Pod) bool) *v1.Pod {
	k.Helper()
	end := time.Now().Add(60 * time.Second)
	for {
		pod := k.api.get(uid)
		if pod != nil && ok(pod) {
			return pod
		}
		if time.Now().After(end) {
			k.Fatalf("pod %s: not %s within a minute; status %+v\nevents %q\nfiles\n%s", uid, what, pod.Status, k.api.events, k.cluster.Sh("find .knoc | head -100; cat .knoc/*/*/journal.* .knoc/*/*/slurm.out; ls .slurm"))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func inPhase(phase v1.PodPhase) func(*v1.Pod) bool {
	return func(pod *v1.Pod) bool { return pod.Status.Phase == phase }
}

func (k *knocTest) waitGone(uid types.UID) {
	k.Helper()
	end := time.Now().Add(60 * time.Second)
	for {
		k.api.mu.Lock()
		_, there := k.api.pods[uid]
		k.api.mu.Unlock()
		_, err := os.Stat(filepath.Join(k.dir(), string(uid)))
		if !there && os.IsNotExist(err) {
			return
		}
		if time.Now().After(end) {
			k.Fatalf("pod %s is not gone within a minute: in the API %v, its directory: %v\n%s", uid, there, err, k.dump(uid))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// dump is what knoc knows of a pod.
func (k *knocTest) dump(uid types.UID) string {
	k.p.mu.RLock()
	defer k.p.mu.RUnlock()
	w := k.p.works[uid]
	if w == nil {
		return "knoc does not know it"
	}
	short := *w
	short.status = v1.PodStatus{Phase: w.status.Phase}
	short.pod = nil
	return fmt.Sprintf("API object %v, at %v: %+v", w.pod != nil, k.p.now(), short)
}

func (k *knocTest) dir() string { return filepath.Join(k.cluster.Home, ".knoc", "knoc-c1") }

// runs counts how often a pod's command ran: each run appends a line.
func (k *knocTest) runs(name string) int {
	data, _ := os.ReadFile(filepath.Join(k.cluster.Home, "ran-"+name))
	return strings.Count(string(data), "\n")
}

func (k *knocTest) ran(name string) string {
	return "echo x >>" + filepath.Join(k.cluster.Home, "ran-"+name) + "; "
}

func (k *knocTest) once(name string) {
	k.Helper()
	if n := k.runs(name); n != 1 {
		k.Errorf("pod %s ran %d times, want once", name, n)
	}
}

func exitCode(pod *v1.Pod) int32 {
	for _, c := range pod.Status.ContainerStatuses {
		if c.State.Terminated != nil {
			return c.State.Terminated.ExitCode
		}
	}
	return -1
}

func TestPodRuns(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	for code, phase := range map[int]v1.PodPhase{0: v1.PodSucceeded, 3: v1.PodFailed} {
		name := fmt.Sprintf("exit%d", code)
		pod := k.api.create(k.pod(name, k.ran(name)+fmt.Sprintf("exit %d", code)))
		got := k.wait(pod.UID, string(phase), inPhase(phase))
		if exitCode(got) != int32(code) || got.Annotations[AnnotationJobID] == "" {
			t.Errorf("exit code %d and annotations %v, want %d and a job id", exitCode(got), got.Annotations, code)
		}
		k.once(name)
	}
}

func TestRunningIsSeenAndDeleteEndsTheJob(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("sleeper", "trap 'exit 4' TERM; while :; do sleep 0.1; done"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.api.remove(pod.UID, 30)
	k.waitGone(pod.UID)
	if got := k.api.get(pod.UID); exitCode(got) != 4 || got.Status.Phase != v1.PodFailed {
		t.Errorf("the object went with phase %s and exit code %d, want Failed and 4: it ended by its own trap", got.Status.Phase, exitCode(got))
	}
}

func TestAdoption(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	long := k.api.create(k.pod("long", k.ran("long")+"while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.1; done; exit 5"))
	short := k.api.create(k.pod("short", k.ran("short")+k.untilGo("short")+"exit 6"))
	k.wait(long.UID, "Running", inPhase(v1.PodRunning))
	k.wait(short.UID, "Running", inPhase(v1.PodRunning))
	k.stop()
	<-k.done
	k.letEnd("short")
	k.start()
	if got := k.wait(short.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 6 {
		t.Errorf("a pod that ended while knoc was away: exit code %d, want 6", exitCode(got))
	}
	k.cluster.Sh("touch go")
	if got := k.wait(long.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 5 {
		t.Errorf("exit code %d, want 5", exitCode(got))
	}
	k.once("long")
	k.once("short")
}

func TestSecondKnocFencesTheFirst(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	first := k.done
	k.start()
	select {
	case err := <-first:
		if !errors.Is(err, errFenced) {
			t.Errorf("the first knoc ended with %v, want errFenced", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("the first knoc still runs")
	}
	pod := k.api.create(k.pod("after", k.ran("after")))
	k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	k.once("after")
}

// TestCutStream cuts the connection at many places of a submission: whatever
// arrived, the pod runs exactly once.
func TestCutStream(t *testing.T) {
	for _, at := range []int64{1, 200, 1000, 3000, 6000, 9000, 12000, 16000, 20000, 30000} {
		t.Run(fmt.Sprint(at), func(t *testing.T) {
			k := newKnocTest(t)
			k.start()
			k.cluster.CutAfter(at)
			pod := k.api.create(k.pod("cut", k.ran("cut")))
			k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
			k.once("cut")
		})
	}
}

func TestOrphanIsStopped(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("orphan", "sleep 100"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.api.mu.Lock()
	delete(k.api.pods, pod.UID) // force-deleted, and the event was missed
	k.api.mu.Unlock()
	k.p.kick()
	k.waitGone(pod.UID)
}

func TestRefusedPodFails(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.pod("never", "true")
	pod.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{ISCSI: &v1.ISCSIVolumeSource{}}}}
	k.api.create(pod)
	got := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	if got.Status.Reason == "" || !strings.Contains(got.Status.Message, "iscsi") {
		t.Errorf("reason %q, message %q; want both, naming nfs", got.Status.Reason, got.Status.Message)
	}
	k.api.remove(pod.UID, 0)
	k.waitGone(pod.UID)
}

// calls counts a Slurm command's calls.
func (k *knocTest) calls(command string) int { return len(k.cluster.SlurmCalls(command)) }

func TestAcceptedThoughSbatchFailed(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Slurm("sbatch.fail-but-accept", "")
	pod := k.api.create(k.pod("doubt", k.ran("doubt")+"exit 3"))
	if got := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 3 {
		t.Errorf("exit code %d, want 3; %q", exitCode(got), got.Status.Message)
	}
	k.once("doubt")
	if n := k.calls("sbatch"); n != 1 {
		t.Errorf("sbatch was called %d times, want once", n)
	}
}

func TestSbatchFailsForAWhile(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Slurm("sbatch.error", "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n")
	pod := k.api.create(k.pod("later", k.ran("later")))
	k.wait(pod.UID, "waiting with sbatch's error", func(pod *v1.Pod) bool {
		return len(pod.Status.ContainerStatuses) == 1 && pod.Status.ContainerStatuses[0].State.Waiting != nil &&
			strings.Contains(pod.Status.ContainerStatuses[0].State.Waiting.Message, "Unable to contact slurm controller")
	})
	k.cluster.NoSlurm("sbatch.error")
	k.wait(pod.UID, "Succeeded", inPhase(v1.PodSucceeded))
	k.once("later")
}

func TestSbatchRejects(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	const verdict = "sbatch: error: Batch job submission failed: Invalid partition name specified"
	k.cluster.Slurm("sbatch.error", verdict+"\n")
	pod := k.api.create(k.pod("rejected", k.ran("rejected")))
	got := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	if !strings.Contains(got.Status.Message, verdict) || got.Status.Reason != "SlurmRejected" {
		t.Errorf("reason %q, message %q; want SlurmRejected and sbatch's own text", got.Status.Reason, got.Status.Message)
	}
	k.api.remove(pod.UID, 0)
	k.waitGone(pod.UID)
}

func TestDeletePending(t *testing.T) {
	k := newKnocTest(t)
	k.cluster.Slurm("hold", "")
	k.start()
	pod := k.api.create(k.pod("pending", k.ran("pending")))
	got := k.wait(pod.UID, "waiting for Slurm", func(pod *v1.Pod) bool {
		return len(pod.Status.ContainerStatuses) == 1 && pod.Status.ContainerStatuses[0].State.Waiting != nil &&
			strings.Contains(pod.Status.ContainerStatuses[0].State.Waiting.Message, "Priority")
	})
	if got.Status.Phase != v1.PodPending {
		t.Errorf("phase %s while Slurm queues it, want Pending", got.Status.Phase)
	}
	k.api.remove(pod.UID, 30)
	k.waitGone(pod.UID)
	if n := k.runs("pending"); n != 0 {
		t.Errorf("it ran %d times, want never", n)
	}
	for _, call := range k.cluster.SlurmCalls("scancel") {
		if strings.Contains(call, "--signal") {
			t.Errorf("%q for a job that waits: scancel would try for half a minute", call)
		}
	}
}

// TestCannotTell: while squeue fails or lies no phase changes; after that the
// pod ends as it did.
func TestCannotTell(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("unseen", k.ran("unseen")+k.untilGo("unseen")+"exit 3"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.cluster.Slurm("squeue.error", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n")
	k.cluster.Slurm("sinfo.error", "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n")
	k.p.mu.Lock()
	for _, w := range k.p.works {
		w.checkAt, w.absent = time.Time{}, time.Now().Add(-2*absentFor)
	}
	k.p.mu.Unlock()
	k.p.kick()
	for end := time.Now().Add(30 * time.Second); !strings.Contains(k.p.nodeState().Problem, "Unable to contact slurm controller"); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("the node's problem is %q, want squeue's words", k.p.nodeState().Problem)
		}
	}
	if got := k.api.get(pod.UID); got.Status.Phase != v1.PodRunning {
		t.Errorf("phase %s while squeue fails, want Running", got.Status.Phase)
	}
	k.letGo("unseen")
	if got := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 3 {
		t.Errorf("exit code %d, want 3: the journal tells, with or without Slurm", exitCode(got))
	}
}

// TestOutageOfSSH: a pod that runs and ends while the network is cut keeps its
// phase until the network is back, and then ends as it did.
func TestOutageOfSSH(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("through", k.ran("through")+k.untilGo("through")+"exit 7"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.cluster.Refuse(true)
	k.cluster.Cut()
	other := k.api.create(k.pod("waits", k.ran("waits")))
	for end := time.Now().Add(30 * time.Second); k.p.nodeState().Problem == ""; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the node has no problem while SSH is cut")
		}
	}
	k.api.remove(other.UID, 30)
	k.letEnd("through")
	time.Sleep(500 * time.Millisecond)
	if got := k.api.get(pod.UID); got.Status.Phase != v1.PodRunning {
		t.Errorf("phase %s during the cut, want Running", got.Status.Phase)
	}
	k.cluster.Refuse(false)
	if got := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 7 {
		t.Errorf("exit code %d, want 7", exitCode(got))
	}
	k.once("through")
	k.waitGone(other.UID)
	if n := k.runs("waits"); n != 0 {
		t.Errorf("a pod deleted before it was submitted ran %d times", n)
	}
}

// TestLost: a job that nobody knows any more, without an end in its journal.
func TestLost(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("lost", "sleep 1000"))
	got := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	id := got.Annotations[AnnotationJobID]
	k.vanish(id)
	// A minute passes between two squeue: the test does not wait for it.
	k.p.mu.Lock()
	for _, w := range k.p.works {
		w.absent = time.Now().Add(-time.Second)
	}
	k.p.mu.Unlock()
	k.leap(absentFor)
	got = k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	if got.Status.Reason != "JobLost" {
		t.Errorf("reason %q, want JobLost", got.Status.Reason)
	}
}

// TestForgottenWhileAway: knoc was away for longer than slurmctld remembers.
func TestForgottenWhileAway(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("away", k.ran("away")+k.untilGo("away")+"exit 9"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	k.stop()
	<-k.done
	k.letEnd("away")
	k.cluster.Slurm("minjobage", "0")
	k.start()
	if got := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed)); exitCode(got) != 9 {
		t.Errorf("exit code %d, want 9", exitCode(got))
	}
	k.once("away")
}

// TestDirectoryWipedNeverRunsTwice: the API says that the pod was submitted, and
// its directory is gone.
func TestDirectoryWipedNeverRunsTwice(t *testing.T) {
	k := newKnocTest(t)
	pod := k.pod("wiped", k.ran("wiped"))
	pod.Annotations = map[string]string{AnnotationJobID: "77"}
	pod.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "main"}}
	k.api.create(pod)
	k.start()
	time.Sleep(2 * time.Second)
	if n := k.calls("sbatch"); n != 0 {
		t.Errorf("sbatch was called %d times, want never", n)
	}
	k.api.remove(pod.UID, 0)
}

// TestBurst: many pods at once go in few exchanges, and each runs once.
func TestBurst(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	const n = 20
	for i := range n {
		k.api.create(k.pod(fmt.Sprintf("burst%d", i), k.ran(fmt.Sprintf("burst%d", i))))
	}
	for i := range n {
		name := fmt.Sprintf("burst%d", i)
		k.wait(types.UID("uid-"+name), "Succeeded", inPhase(v1.PodSucceeded))
		k.once(name)
	}
}

// A deadline that is set or lowered while the job runs gets there.
func TestLoweredDeadline(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.api.create(k.pod("long", "exec sleep 1000"))
	k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	for _, seconds := range []int64{100000, 1} {
		k.api.update(pod.UID, func(p *v1.Pod) { p.Spec.ActiveDeadlineSeconds = &seconds })
		k.p.kick()
		k.leapUntil(10*time.Second, func() bool {
			return strings.Contains(k.cluster.Sh("cat .knoc/knoc-c1/"+string(pod.UID)+"/cmd/* || :"), fmt.Sprintf("deadline - %d\n", seconds))
		})
	}
	o := k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	if o.Status.Reason != "DeadlineExceeded" {
		t.Errorf("reason %s: %s", o.Status.Reason, o.Status.Message)
	}
	if got := strings.Count(k.cluster.Sh("cat .knoc/knoc-c1/"+string(pod.UID)+"/cmd/*"), "deadline"); got != 2 {
		t.Errorf("the command was given %d times, want 2", got)
	}
}
