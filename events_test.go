package knoc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestEventsOf(t *testing.T) {
	texts := map[string]string{"a.pull": "manifest unknown", "a.0.readiness": "HTTP probe failed with statuscode: 500", "s.0.startup": "no"}
	for _, c := range []struct{ name, policy, pod, journal, want string }{
		{"started", "Always", "a", "claim 7; host n1; start a 0",
			`a Normal Pulled: Container image "busybox" already present on machine and can be accessed by the pod|a Normal Created: Container created|a Normal Started: Container started`},
		{"pulled", "Always", "i|a", "pull i; pulled i 1234; start i 0; exit i 0 0; start a 0",
			`i Normal Pulling: Pulling image "busybox"|i Normal Pulled: Successfully pulled image "busybox" in 1.234s|i Normal Created: Container created|i Normal Started: Container started|` +
				`a Normal Pulled: Container image "busybox" already present on machine and can be accessed by the pod|a Normal Created: Container created|a Normal Started: Container started`},
		{"not pulled", "Always", "a", "pull a; pullfailed a 255; exit a 0 255; backoff a 0 10",
			`a Normal Pulling: Pulling image "busybox"|a Warning Failed: Failed to pull image "busybox": manifest unknown|a Warning Failed: Error: ErrImagePull|` +
				`a Normal BackOff: Back-off pulling image "busybox"|a Warning Failed: Error: ImagePullBackOff`},
		{"pulled, with its size", "Always", "a", "pull a; pulled a 234 1234 1060", `a Normal Pulling: Pulling image "busybox"|a Normal Pulled: Successfully pulled image "busybox" in 234ms (1.234s including waiting). Image size: 1085440 bytes.`},
		{"pulled never", "Always", "a", "neverpull a", `a Warning ErrImageNeverPull: Container image "busybox" is not present with pull policy of Never|a Warning Failed: Error: ErrImageNeverPull`},
		{"pull back-off", "Always", "a", "pull a; pullfailed a 255; pullwait a 10",
			`a Normal Pulling: Pulling image "busybox"|a Warning Failed: Failed to pull image "busybox": manifest unknown|a Warning Failed: Error: ErrImagePull|` +
				`a Normal BackOff: Back-off pulling image "busybox"|a Warning Failed: Error: ImagePullBackOff`},
		{"crash loop", "Always", "a", "exit a 0 3; start a 0; exit a 0 3; backoff a 0 10",
			`a Normal Pulled: Container image "busybox" already present on machine and can be accessed by the pod|a Normal Created: Container created|a Normal Started: Container started|` +
				`a Warning BackOff: Back-off restarting failed container a in pod p_ns(u)`},
		{"unhealthy", "Always", "s+|a", "unhealthy a 0 readiness 1; ready a 0 0; ready a 0 1; unhealthy a 0 readiness 0; unhealthy s 0 startup 3; kill s 0 startup 30; kill a 0 liveness 5",
			`a Warning Unhealthy: Readiness probe failed: HTTP probe failed with statuscode: 500|a Warning ProbeWarning: Readiness probe warning: HTTP probe failed with statuscode: 500|` +
				`s Warning Unhealthy: Startup probe failed: no|s Normal Killing: Init container s failed startup probe|a Normal Killing: Container a failed liveness probe, will be restarted`},
		{"not restarted", "Never", "a", "kill a 0 liveness 5", `a Normal Killing: Container a failed liveness probe`},
		{"hooks", "Always", "a", "hook a 0 post 0; hook a 0 post 7; kill a 0 hook 30; hook a 0 pre 0; hook a 0 pre 1",
			`a Warning FailedPostStartHook: PostStartHook failed|a Normal Killing: FailedPostStartHook|a Warning FailedPreStopHook: PreStopHook failed`},
		{"stopped", "Always", "a", "stopping 30; kill a 0 stop 30; exit a 0 143; done 1", `a Normal Killing: Stopping container a`},
		{"new image", "Never", "a", "kill a 0 update 30", `a Normal Killing: Container a definition changed, will be restarted`},
		{"deadline", "Always", "a", "deadline; kill a 0 deadline 30", ` Normal DeadlineExceeded: Pod was active on the node longer than the specified deadline|a Normal Killing: Stopping container a`},
		{"time limit", "Always", "a", "timelimit", ` Warning SlurmTimeLimit: job 7 is about to reach its time limit`},
		{"none of the pod's", "Always", "a", "start x 0; kill x 0 stop 1; pull x; unhealthy x 0 liveness 1", ""},
	} {
		pod := foldPod(v1.RestartPolicy(c.policy), c.pod)
		var got []string
		for _, list := range eventsOf(pod, &observed{Messages: texts, Job: job{ID: "7"}}, journal(c.journal), 0) {
			for _, e := range list {
				got = append(got, e.container+" "+e.kind+" "+e.reason+": "+e.message)
			}
		}
		if d := cmp.Diff(c.want, strings.Join(got, "|")); d != "" {
			t.Errorf("%s: %s", c.name, d)
		}
	}
}

func TestFieldPath(t *testing.T) {
	pod := foldPod(v1.RestartPolicyAlways, "i|a")
	pod.Spec.EphemeralContainers = []v1.EphemeralContainer{{EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: "e"}}}
	for name, want := range map[string]string{"i": "spec.initContainers{i}", "a": "spec.containers{a}", "e": "spec.ephemeralContainers{e}"} {
		if got := fieldPath(pod, name); got != want || anyContainer(pod, name) == nil {
			t.Errorf("%s: %q", name, got)
		}
	}
}

// What a status shows was told before; whatever came later was not.
func TestShownBy(t *testing.T) {
	story := "claim 7; start i 0; exit i 0 0; start a 0; unhealthy a 0 readiness 1; exit a 0 3; backoff a 0 10; start a 1; kill a 1 liveness 5; exit a 1 143; backoff a 1 20; start a 2"
	all := journal(story)
	for cut := range len(all) + 1 {
		pod := foldPod(v1.RestartPolicyAlways, "i|a?")
		if cut > 0 {
			pod.Status = fold(pod, observed{Submitted: true, Journal: all[:cut]})
		}
		n := shownBy(&pod.Status)
		for i, e := range all {
			switch e.Word {
			case "start", "backoff", "kill":
				// A kill that nothing came after leaves no trace in a status.
				lastKill := e.Word == "kill" && i == cut-1
				if got, want := n.has(e), i < cut; got != want && !lastKill {
					t.Errorf("status of %d events: event %d (%s %v) was told: %v", cut, i, e.Word, e.Args, got)
				}
			}
		}
	}
	ended := shownBy(&v1.PodStatus{Phase: v1.PodFailed})
	if !ended.has(all[3]) {
		t.Error("events of a pod that has ended are told again")
	}
}

func (k *knocTest) eventsAbout(name string) []string {
	k.api.mu.Lock()
	defer k.api.mu.Unlock()
	var list []string
	for _, e := range k.api.events {
		if who, rest, _ := strings.Cut(e, " "); who == name || strings.HasPrefix(who, name+"/") {
			list = append(list, strings.TrimPrefix(who, name)+" "+rest)
		}
	}
	return list
}

// Each event comes once, also when knoc starts again in the middle.
func TestEventsOnce(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	pod := k.pod("told", "while [ ! -e "+k.cluster.Home+"/go ]; do sleep 0.05; done; exit 3")
	pod.CreationTimestamp = metav1.Now()
	k.api.create(pod)
	running := k.wait(pod.UID, "Running", inPhase(v1.PodRunning))
	want := []string{
		" Submitted: Submitted as Slurm job " + running.Annotations[AnnotationJobID] + " in partition batch",
		"/main Pulling", "/main Pulled", "/main Created: Container created", "/main Started: Container started",
	}
	quiet := func(list []string) (short []string) {
		for _, e := range list {
			switch word, _, _ := strings.Cut(e, ":"); {
			case strings.HasPrefix(word, "/main Pull"):
				short = append(short, word)
			case word != " Queued":
				short = append(short, e)
			}
		}
		return short
	}
	for range 2 {
		if d := cmp.Diff(want, quiet(k.eventsAbout("told"))); d != "" {
			t.Fatal(d)
		}
		k.restart(func() { time.Sleep(100 * time.Millisecond) })
		time.Sleep(time.Second)
	}
	// What happens while it is away is told when it is back.
	k.restart(func() {
		k.cluster.Sh("{ echo $(($(date +%s) + 2)) kill main 0 liveness 30; } >>.knoc/knoc-c1/uid-told/journal.0")
	})
	k.cluster.Sh("touch go")
	k.wait(pod.UID, "Failed", inPhase(v1.PodFailed))
	want = append(want, "/main Killing: Container main failed liveness probe")
	if d := cmp.Diff(want, quiet(k.eventsAbout("told"))); d != "" {
		t.Fatal(d)
	}
}

// Why a job waits is told when it changes, and not all day long.
func TestQueuedEvents(t *testing.T) {
	api := newFakeAPI(t)
	l := &loop{KNOCProvider: &KNOCProvider{api: api}}
	pod := foldPod(v1.RestartPolicyNever, "a")
	pod.Status.ContainerStatuses = []v1.ContainerStatus{{Name: "a", State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Message: "job 7 is pending in partition batch: Priority"}}}}
	w := &work{pod: pod, jobID: "7", reported: true}
	now := at(1000)
	see := func(reason string) {
		w.job = job{ID: "7", State: "PENDING", Partition: "batch", Reason: reason}
		l.tell(w, now)
	}
	see("Priority") // the API shows it: told by the knoc before
	see("Resources")
	see("Resources")
	if d := cmp.Diff([]string{"p Queued: Slurm job 7 is pending in partition batch: Resources"}, api.events); d != "" {
		t.Fatal(d)
	}
	for i := range 24 * 60 {
		now = now.Add(time.Minute)
		see(fmt.Sprint("Reason", i%2))
	}
	if n := len(api.events); n > queuedAtOnce+24*6+1 || n < 24*5 {
		t.Errorf("%d events in a day", n)
	}
}
