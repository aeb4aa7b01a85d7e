package knoc

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// foldPod is a pod with containers "a" and so on; names before "|" are init
// containers. After a name come + for a sidecar, ? for a readiness probe, ^ for a
// startup probe, ! for a postStart hook.
func foldPod(policy v1.RestartPolicy, names string) *v1.Pod {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u", Generation: 2, CreationTimestamp: metav1.Unix(50, 0)},
		Spec:       v1.PodSpec{RestartPolicy: policy},
		Status:     v1.PodStatus{Phase: v1.PodPending, QOSClass: v1.PodQOSBurstable},
	}
	inits, apps, ok := strings.Cut(names, "|")
	if !ok {
		inits, apps = "", names
	}
	container := func(name string) v1.Container {
		c := v1.Container{Image: "busybox", Name: strings.TrimRight(name, "+?^!")}
		for _, mark := range name[len(c.Name):] {
			switch mark {
			case '+':
				c.RestartPolicy = new(v1.ContainerRestartPolicyAlways)
			case '?':
				c.ReadinessProbe = &v1.Probe{}
			case '^':
				c.StartupProbe = &v1.Probe{}
			case '!':
				c.Lifecycle = &v1.Lifecycle{PostStart: &v1.LifecycleHandler{}}
			}
		}
		return c
	}
	for _, name := range strings.Fields(inits) {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, container(name))
	}
	for _, name := range strings.Fields(apps) {
		pod.Spec.Containers = append(pod.Spec.Containers, container(name))
	}
	return pod
}

// journal makes a journal of "start a 0; exit a 0 3", a second apart from 101 on.
func journal(facts string) []event {
	var b strings.Builder
	n := 100
	for fact := range strings.SplitSeq(facts, ";") {
		if fact = strings.TrimSpace(fact); fact != "" {
			n++
			fmt.Fprintf(&b, "%d %s\n", n, fact)
		}
	}
	return parseJournal([]byte(b.String()))
}

// brief is a status in a line.
func brief(s v1.PodStatus) string {
	var b strings.Builder
	b.WriteString(string(s.Phase))
	if s.Reason != "" {
		b.WriteString(" " + s.Reason)
	}
	for _, c := range slices.Concat(s.InitContainerStatuses, s.ContainerStatuses) {
		fmt.Fprintf(&b, "; %s ", c.Name)
		switch {
		case c.State.Running != nil:
			b.WriteString("running")
		case c.State.Terminated != nil:
			fmt.Fprintf(&b, "%s %d", c.State.Terminated.Reason, c.State.Terminated.ExitCode)
		case c.State.Waiting != nil:
			b.WriteString(c.State.Waiting.Reason)
		}
		if last := c.LastTerminationState.Terminated; last != nil {
			fmt.Fprintf(&b, " last %d", last.ExitCode)
		}
		if c.RestartCount > 0 {
			fmt.Fprintf(&b, " restarts %d", c.RestartCount)
		}
		switch {
		case c.Ready:
			b.WriteString(" ready")
		case c.State.Running != nil && *c.Started:
			b.WriteString(" unready")
		case c.State.Running != nil:
			b.WriteString(" starting")
		}
	}
	return b.String()
}

func TestFold(t *testing.T) {
	const (
		never     = v1.RestartPolicyNever
		always    = v1.RestartPolicyAlways
		onFailure = v1.RestartPolicyOnFailure
	)
	slurm := func(state string) job { return job{ID: "7", State: state, Partition: "batch", End: at(300)} }
	for _, c := range []struct {
		name    string
		policy  v1.RestartPolicy
		pod     string
		o       observed // Submitted is set, if Waiting is not
		journal string
		deleted bool
		want    string
		message string // the pod's, or else the first container's waiting message
	}{
		{name: "just created", pod: "a", o: observed{Waiting: &notYet{"CreateContainerConfigError", "configmap x not found"}}, want: "Pending; a CreateContainerConfigError", message: "configmap x not found"},
		{name: "submitted", pod: "a", o: observed{Job: job{ID: "7"}}, want: "Pending; a SlurmPending", message: "job 7 was submitted"},
		{name: "queued", pod: "i|a", o: observed{Job: job{ID: "7", State: "PENDING", Reason: "Priority", Partition: "batch"}}, want: "Pending; i SlurmPending; a SlurmPending", message: "job 7 is pending in partition batch: Priority"},
		{name: "held", pod: "a", o: observed{Job: job{ID: "7", State: "REQUEUE_HOLD"}}, want: "Pending; a SlurmPending", message: "job 7 is requeue hold"},
		{name: "unknown state", pod: "a", o: observed{Job: job{ID: "7", State: "NEW_WORD"}}, want: "Pending; a SlurmPending"},
		{name: "the job runs, nothing started", pod: "a", o: observed{Job: slurm("RUNNING")}, want: "Pending; a ContainerCreating"},
		{name: "claimed", pod: "i|a", journal: "claim 7; host n1 10.0.0.1", want: "Pending; i PodInitializing; a PodInitializing"},

		{name: "running", pod: "a", journal: "claim 7; start a 0", want: "Running; a running ready"},
		{name: "one of two started", pod: "a b", journal: "start a 0", want: "Pending; a running ready; b ContainerCreating"},
		{name: "init container runs", pod: "i|a", journal: "start i 0", want: "Pending; i running unready; a PodInitializing"},
		{name: "init container ended", pod: "i|a", journal: "start i 0; exit i 0 0", want: "Pending; i Completed 0 ready; a PodInitializing"},
		{name: "initialized", pod: "i|a", journal: "start i 0; exit i 0 0; start a 0", want: "Running; i Completed 0 ready; a running ready"},
		{name: "second init container waits", pod: "i j|a", journal: "start i 0; exit i 0 0; start j 0", want: "Pending; i Completed 0 ready; j running unready; a PodInitializing"},
		{name: "sidecar", pod: "s+|a", journal: "start s 0; start a 0", want: "Running; s running ready; a running ready"},
		{name: "sidecar before the app", pod: "s+|a", journal: "start s 0", want: "Pending; s running ready; a PodInitializing"},
		{name: "init container fails, will be run again", policy: onFailure, pod: "i|a", journal: "start i 0; exit i 0 3; backoff i 0 10", want: "Pending; i CrashLoopBackOff last 3; a PodInitializing", message: "back-off 10s restarting failed container=i pod=p_ns(u)"},
		{name: "init container failed, not done yet", policy: never, pod: "i|a", journal: "start i 0; exit i 0 3", want: "Pending; i Error 3; a PodInitializing"},
		{name: "init container failed", policy: never, pod: "i|a", journal: "start i 0; exit i 0 3; done 1", want: "Failed; i Error 3; a PodInitializing"},

		{name: "ended for a new image", policy: never, pod: "a", journal: "start a 0; kill a 0 update 30; exit a 0 0", want: "Running; a ContainerCreating last 0"},
		{name: "ended for a new image, and stopped", policy: never, pod: "a", deleted: true, journal: "start a 0; kill a 0 update 30; exit a 0 0; stopping 30", want: "Running; a Completed 0"},
		{name: "runs with a new image", policy: never, pod: "a", journal: "start a 0; kill a 0 update 30; exit a 0 0; image a 1; start a 1", want: "Running; a running last 0 restarts 1 ready"},

		{name: "ended, not done", policy: never, pod: "a", journal: "start a 0; exit a 0 0", want: "Running; a Completed 0"},
		{name: "succeeded", policy: never, pod: "i|a", journal: "start i 0; exit i 0 0; start a 0; exit a 0 0; done 0", want: "Succeeded; i Completed 0 ready; a Completed 0"},
		{name: "failed", policy: never, pod: "a b", journal: "start a 0; start b 0; exit a 0 3; exit b 0 0; done 1", want: "Failed; a Error 3; b Completed 0"},
		{name: "one of two failed, one runs", policy: never, pod: "a b", journal: "start a 0; start b 0; exit a 0 3", want: "Running; a Error 3; b running ready"},
		{name: "done with another word than the exits", policy: never, pod: "a", journal: "start a 0; exit a 0 3; done 0", want: "Failed; a Error 3"},
		{name: "done 1 with exits of 0", policy: never, pod: "a", journal: "start a 0; exit a 0 0; done 1", want: "Failed; a Completed 0"},
		{name: "done without an exit", policy: never, pod: "a", journal: "start a 0; done 0", want: "Failed; a ContainerStatusUnknown 137"},
		{name: "done without a start", policy: never, pod: "a b", journal: "start a 0; exit a 0 0; done 0", want: "Failed; a Completed 0; b ContainerCreating"},
		{name: "exit without a start", policy: never, pod: "a", journal: "exit a 0 0; done 0", want: "Succeeded; a Completed 0"},
		{name: "foreign and repeated lines", policy: never, pod: "a", journal: "start x 0; start a 0; start a 0; exit a 0 3; exit a 0 0; done 1; start a 1; exit a 1 0; done 0", want: "Failed; a Error 3"},
		{name: "Slurm knows nothing more, the journal does", policy: never, pod: "a", o: observed{Lost: true}, journal: "start a 0; exit a 0 0; done 0", want: "Succeeded; a Completed 0"},
		{name: "done though Slurm failed it", policy: never, pod: "a", o: observed{Job: slurm("FAILED")}, journal: "start a 0; exit a 0 0; done 0", want: "Succeeded; a Completed 0"},

		{name: "readiness not known", pod: "a?", journal: "start a 0", want: "Running; a running unready"},
		{name: "ready", pod: "a?", journal: "start a 0; ready a 0 0; ready a 0 1", want: "Running; a running ready"},
		{name: "not ready any more", pod: "a?", journal: "start a 0; ready a 0 1; unhealthy a 0 readiness 3; ready a 0 0", want: "Running; a running unready"},
		{name: "ready is of one run", pod: "a?", journal: "start a 0; ready a 0 1; exit a 0 1; backoff a 0 10; start a 1; ready a 0 1", want: "Running; a running last 1 restarts 1 unready"},
		{name: "ready without a probe", pod: "a", journal: "start a 0; ready a 0 0", want: "Running; a running ready"},
		{name: "not started", pod: "a^?", journal: "start a 0; unhealthy a 0 startup 1", want: "Running; a running starting"},
		{name: "started", pod: "a^", journal: "start a 0; started a 0", want: "Running; a running ready"},
		{name: "started, not ready", pod: "a^?", journal: "start a 0; started a 0", want: "Running; a running unready"},
		{name: "not ready while terminating", pod: "a?", deleted: true, journal: "start a 0; ready a 0 1", want: "Running; a running unready"},
		{name: "postStart", pod: "a!", journal: "claim 7; start a 0", want: "Pending; a ContainerCreating"},
		{name: "postStart ended", pod: "a!", journal: "start a 0; hook a 0 post 0", want: "Running; a running ready"},
		{name: "postStart failed", policy: never, pod: "a!", journal: "start a 0; hook a 0 post 7; kill a 0 hook 30; exit a 0 143; done 1", want: "Failed; a Error 143"},
		{name: "postStart again", pod: "a!", journal: "start a 0; hook a 0 post 7; kill a 0 hook 30; exit a 0 143; backoff a 0 10; start a 1", want: "Running; a ContainerCreating last 143 restarts 1"},

		{name: "sidecar not started", pod: "s+^|a", journal: "start s 0", want: "Pending; s running starting; a PodInitializing"},
		{name: "sidecar started", pod: "s+^|a", journal: "start s 0; started s 0; start a 0", want: "Running; s running ready; a running ready"},
		{name: "sidecar starts again", pod: "s+^|a", journal: "start s 0; started s 0; start a 0; exit s 0 1; backoff s 0 10; start s 1", want: "Running; s running last 1 restarts 1 starting; a running ready"},
		{name: "sidecar waits to start again", pod: "s+|a", journal: "start s 0; start a 0; exit s 0 0; backoff s 0 10", want: "Running; s CrashLoopBackOff last 0; a running ready"},
		{name: "the app is done, the sidecar stops", policy: never, pod: "s+|a", journal: "start s 0; start a 0; exit a 0 0; kill s 0 stop 30", want: "Running; s running ready; a Completed 0"},
		{name: "succeeded in spite of the sidecar", policy: never, pod: "s+|a", journal: "start s 0; start a 0; exit a 0 0; kill s 0 stop 30; exit s 0 137; done 0", want: "Succeeded; s Error 137; a Completed 0"},
		{name: "a sidecar crashed first", policy: onFailure, pod: "s+|a", journal: "start s 0; start a 0; exit s 0 9; backoff s 0 10; start s 1; exit a 0 0; kill s 1 stop 30; exit s 1 143; done 0", want: "Succeeded; s Error 143 last 9 restarts 1; a Completed 0"},
		{name: "failed with a sidecar", policy: never, pod: "s+|a", journal: "start s 0; start a 0; exit a 0 3; kill s 0 stop 30; exit s 0 0; done 1", want: "Failed; s Completed 0; a Error 3"},

		{name: "the image is pulled", pod: "a", journal: "claim 7; pull a", want: "Pending; a ContainerCreating"},
		{name: "the pull failed", pod: "a", o: observed{Messages: map[string]string{"a.pull": "manifest unknown"}}, journal: "pull a; pullfailed a 255", want: "Pending; a ErrImagePull", message: "manifest unknown"},
		{name: "the pull failed with many words", pod: "a", o: observed{Messages: map[string]string{"a.pull": "INFO:    Fetching OCI image...\nFATAL:   While making image: manifest unknown\n"}}, journal: "pull a; pullfailed a 255", want: "Pending; a ErrImagePull", message: "While making image: manifest unknown"},
		{name: "the pull failed, its text is not there", pod: "a", journal: "pull a; pullfailed a 255", want: "Pending; a ErrImagePull", message: "the image cannot be pulled"},
		{name: "the pull failed again", pod: "a", o: observed{Messages: map[string]string{"a.pull": "manifest unknown"}}, journal: "pull a; pullfailed a 255; pullwait a 10; pull a", want: "Pending; a ImagePullBackOff", message: "Back-off pulling image \"busybox\": ErrImagePull: manifest unknown"},
		{name: "the second pull failed", pod: "a", o: observed{Messages: map[string]string{"a.pull": "manifest unknown"}}, journal: "pull a; pullfailed a 255; pullwait a 10; pull a; pullfailed a 255", want: "Pending; a ErrImagePull", message: "manifest unknown"},
		{name: "never to be pulled", pod: "a", journal: "neverpull a", want: "Pending; a ErrImageNeverPull", message: "Container image \"busybox\" is not present with pull policy of Never"},
		{name: "pulled at last", pod: "a", journal: "pull a; pullfailed a 255; pull a; pulled a 1200; start a 0", want: "Running; a running ready"},

		{name: "the pull failed, the attempt is over", pod: "a", o: observed{Messages: map[string]string{"a.pull": "manifest unknown"}}, journal: "pull a; pullfailed a 255; exit a 0 255; backoff a 0 10", want: "Pending; a ErrImagePull", message: "manifest unknown"},
		{name: "the second pull was better", pod: "a", journal: "pull a; pullfailed a 255; exit a 0 255; backoff a 0 10; pull a; pulled a 5; start a 1", want: "Running; a running ready"},
		{name: "the pull failed after a restart", pod: "a", journal: "start a 0; exit a 0 3; backoff a 0 10; pull a; pullfailed a 255; exit a 1 255; backoff a 1 20; pull a", want: "Running; a ErrImagePull last 3"},
		{name: "a restart after it", pod: "a", journal: "start a 0; exit a 0 3; backoff a 0 10; pull a; pullfailed a 255; exit a 1 255; backoff a 1 20; pull a; pulled a 1; start a 2", want: "Running; a running last 3 restarts 1 ready"},
		{name: "the pull failed for good", policy: never, pod: "a", o: observed{Messages: map[string]string{"a.pull": "manifest unknown"}}, journal: "pull a; pullfailed a 255; exit a 0 255; done 1", want: "Failed; a ErrImagePull 255"},

		{name: "killed for memory, by the kernel's count", policy: never, pod: "a b", journal: "start a 0; start b 0; exit a 0 137; oom a 0; exit b 0 0; done 1", want: "Failed; a OOMKilled 137; b Completed 0"},
		{name: "a child was killed for memory", policy: never, pod: "a", journal: "start a 0; oom a 0; exit a 0 1; done 1", want: "Failed; a OOMKilled 1"},
		{name: "a child was killed, the container ended with 0", policy: never, pod: "a b", journal: "start a 0; start b 0; oom a 0; exit a 0 0; exit b 0 0; done 0", want: "Failed; a OOMKilled 137; b Completed 0"},
		{name: "a run before was killed for memory", policy: onFailure, pod: "a", journal: "start a 0; exit a 0 137; oom a 0; backoff a 0 10; start a 1; exit a 1 0; done 0", want: "Succeeded; a Completed 0 last 137 restarts 1"},
		{name: "the count is the job's: who was killed explains it", policy: never, pod: "a b", journal: "start a 0; start b 0; exit a 0 137; oom a 0; exit b 0 0; oom b 0; done 1", want: "Failed; a OOMKilled 137; b Completed 0"},
		{name: "who failed explains it", policy: never, pod: "a b", journal: "start a 0; start b 0; exit a 0 3; oom a 0; exit b 0 0; oom b 0; done 1", want: "Failed; a OOMKilled 3; b Completed 0"},
		{name: "an older run explains it", policy: onFailure, pod: "a b", journal: "start a 0; start b 0; exit a 0 137; oom a 0; start a 1; exit a 1 3; start a 2; exit a 2 0; oom b 0; exit b 0 0; done 0", want: "Succeeded; a Completed 0 last 3 restarts 2; b Completed 0"},
		{name: "nobody explains it", policy: never, pod: "a b", journal: "start a 0; start b 0; exit a 0 0; oom a 0; exit b 0 0; oom b 0; done 0", want: "Failed OOMKilled; a Completed 0; b Completed 0", message: "job 7 used more memory than it was given"},
		{name: "out of memory, the script ended with 0", policy: never, pod: "a", o: observed{Job: slurm("OUT_OF_MEMORY")}, journal: "start a 0; exit a 0 0; done 0", want: "Failed OOMKilled; a OOMKilled 137", message: "job 7 used more memory than it was given"},
		{name: "out of memory, nobody knows whose", policy: never, pod: "a b", o: observed{Job: slurm("OUT_OF_MEMORY")}, journal: "start a 0; start b 0; exit a 0 0; exit b 0 0; done 0", want: "Failed OOMKilled; a Completed 0; b Completed 0"},
		{name: "killed by its liveness probe, Slurm is not asked", policy: never, pod: "a", o: observed{Job: slurm("COMPLETING")}, journal: "start a 0; unhealthy a 0 liveness 3; kill a 0 liveness 1; exit a 0 137; done 1", want: "Failed; a Error 137"},

		{name: "the deadline", policy: always, pod: "a", journal: "start a 0; deadline; stopping 30; exit a 0 0; done 0", want: "Failed DeadlineExceeded; a Completed 0", message: "Pod was active on the node longer than the specified deadline"},
		{name: "the deadline, the end is missing", policy: always, pod: "a", o: observed{Job: slurm("CANCELLED")}, journal: "start a 0; deadline; stopping 30", want: "Failed DeadlineExceeded; a DeadlineExceeded 137"},
		{name: "the deadline, still stopping", policy: always, pod: "a", journal: "start a 0; deadline; stopping 30; exit a 0 0", want: "Running; a Completed 0"},
		{name: "Slurm's time limit", policy: always, pod: "a", o: observed{Job: slurm("RUNNING")}, journal: "start a 0; timelimit; stopping 30; exit a 0 143; done 1", want: "Failed SlurmTimeLimit; a Error 143", message: "job 7 reached its time limit"},
		{name: "Slurm's time limit, and it killed", policy: always, pod: "a", o: observed{Job: slurm("TIMEOUT")}, journal: "start a 0; timelimit; stopping 30", want: "Failed SlurmTimeLimit; a SlurmTimeLimit 137", message: "job 7 reached its time limit"},
		{name: "told to stop, and then the deadline", policy: never, pod: "a", o: observed{Job: job{ID: "7", State: "CANCELLED", By: "0"}}, journal: "start a 0; stopping 30; ack 1; deadline; exit a 0 143; done 1", want: "Failed SlurmJobCancelled; a Error 143"},

		{name: "suspended", pod: "a", o: observed{Job: slurm("SUSPENDED")}, journal: "start a 0", want: "Running SlurmJobSuspended; a running unready", message: "job 7 is suspended"},
		{name: "suspended before its first container", pod: "a", o: observed{Job: slurm("STOPPED")}, journal: "claim 7", want: "Pending SlurmJobSuspended; a ContainerCreating", message: "job 7 is stopped"},

		{name: "back-off", policy: always, pod: "a", journal: "start a 0; exit a 0 3; backoff a 0 10", want: "Running; a CrashLoopBackOff last 3", message: "back-off 10s restarting failed container=a pod=p_ns(u)"},
		{name: "long back-off", policy: always, pod: "a", journal: "start a 3; exit a 3 0; backoff a 3 300", want: "Running; a CrashLoopBackOff last 0 restarts 3", message: "back-off 5m0s restarting failed container=a pod=p_ns(u)"},
		{name: "between exit and back-off", policy: always, pod: "a", journal: "start a 0; exit a 0 3", want: "Running; a Error 3"},
		{name: "restarted", policy: onFailure, pod: "a", journal: "start a 0; exit a 0 3; backoff a 0 10; start a 1", want: "Running; a running last 3 restarts 1 ready"},
		{name: "succeeded the second time", policy: onFailure, pod: "a", journal: "start a 0; exit a 0 3; backoff a 0 10; start a 1; exit a 1 0; done 0", want: "Succeeded; a Completed 0 last 3 restarts 1"},
		{name: "succeeded, then failed", policy: always, pod: "a", deleted: true, journal: "start a 0; exit a 0 0; backoff a 0 10; start a 1; stopping 5; exit a 1 143; done 1", want: "Failed; a Error 143 last 0 restarts 1"},
		{name: "an exit was lost", policy: always, pod: "a", journal: "start a 0; start a 1", want: "Running; a running last 137 restarts 1 ready"},

		{name: "deleted, runs", policy: always, pod: "a", deleted: true, journal: "start a 0; stopping 30", want: "Running; a running unready"},
		{name: "deleted, ended well", policy: always, pod: "a", deleted: true, journal: "start a 0; stopping 30; exit a 0 0; done 0", want: "Succeeded; a Completed 0"},
		{name: "deleted in the queue", pod: "a", deleted: true, o: observed{Job: job{ID: "7", State: "CANCELLED"}}, want: "Failed SlurmJobCancelled; a SlurmJobCancelled"},
		{name: "deleted in back-off", policy: always, pod: "a", deleted: true, journal: "start a 0; exit a 0 3; backoff a 0 10; stopping 30; done 1", want: "Failed; a Error 3"},
		{name: "deleted while an init container ran", policy: always, pod: "i|a", deleted: true, journal: "start i 0; stopping 30; exit i 0 143; done 1", want: "Failed; i Error 143; a PodInitializing"},

		{name: "stopped by somebody, Slurm has not said by whom", policy: never, pod: "a", o: observed{Job: slurm("RUNNING")}, journal: "start a 0; stopping 30; exit a 0 0; done 0", want: "Running; a Completed 0"},
		{name: "cancelled by somebody", policy: never, pod: "a", o: observed{Job: job{ID: "7", State: "CANCELLED", By: "1000"}}, journal: "start a 0; stopping 30; exit a 0 0; done 0", want: "Failed SlurmJobCancelled; a Completed 0", message: "job 7 was cancelled by uid 1000"},
		{name: "preempted", policy: never, pod: "a", o: observed{Job: slurm("PREEMPTED")}, journal: "start a 0; stopping 30; exit a 0 143; done 1", want: "Failed SlurmPreempted; a Error 143"},
		{name: "signalled by somebody", policy: never, pod: "a", o: observed{Job: slurm("COMPLETED")}, journal: "start a 0; stopping 30; exit a 0 0; done 0", want: "Failed SlurmJobStopped; a Completed 0", message: "job 7 was told to stop by a signal, and did"},
		{name: "signalled, and Slurm forgot", policy: never, pod: "a", o: observed{Lost: true}, journal: "start a 0; stopping 30; exit a 0 0; done 0", want: "Failed SlurmJobStopped; a Completed 0"},
		{name: "cancelled at once", policy: never, pod: "i|a b", o: observed{Job: job{ID: "7", State: "CANCELLED", By: "0", End: at(300)}}, journal: "start i 0; exit i 0 0; start a 0", want: "Failed SlurmJobCancelled; i Completed 0 ready; a SlurmJobCancelled 137; b SlurmJobCancelled", message: "job 7 was cancelled by uid 0"},
		{name: "time limit", policy: always, pod: "a", o: observed{Job: slurm("TIMEOUT")}, journal: "start a 0", want: "Failed SlurmTimeLimit; a SlurmTimeLimit 137", message: "job 7 reached its time limit"},
		{name: "node failure", policy: never, pod: "a b", o: observed{Job: slurm("NODE_FAIL")}, journal: "start a 0; start b 0; exit b 0 0", want: "Failed SlurmNodeFail; a SlurmNodeFail 137; b Completed 0"},
		{name: "all ended well, the end is missing", policy: never, pod: "a", o: observed{Job: slurm("NODE_FAIL")}, journal: "start a 0; exit a 0 0", want: "Failed SlurmNodeFail; a Completed 0"},
		{name: "completed without a journal", policy: never, pod: "a", o: observed{Job: slurm("COMPLETED")}, want: "Failed JournalIncomplete; a JournalIncomplete"},
		{name: "failed at the start", policy: never, pod: "a", o: observed{Job: job{ID: "7", State: "FAILED", ExitCode: 1, Reason: "NonZeroExitCode"}}, want: "Failed SlurmJobFailed; a SlurmJobFailed", message: "job 7 failed before its containers ended (exit code 1): NonZeroExitCode"},
		{name: "out of memory, the script too", policy: never, pod: "a", o: observed{Job: slurm("OUT_OF_MEMORY")}, journal: "start a 0", want: "Failed OOMKilled; a OOMKilled 137"},
		{name: "out of memory, a container", policy: never, pod: "a b", o: observed{Job: slurm("OUT_OF_MEMORY")}, journal: "start a 0; start b 0; exit a 0 137; exit b 0 1; done 1", want: "Failed; a OOMKilled 137; b Error 1"},
		{name: "killed, Slurm has not said why", policy: never, pod: "a", o: observed{Job: slurm("COMPLETING")}, journal: "start a 0; exit a 0 137; done 1", want: "Running; a Error 137"},
		{name: "killed", policy: never, pod: "a", o: observed{Job: slurm("FAILED")}, journal: "start a 0; exit a 0 137; done 1", want: "Failed; a Error 137"},
		{name: "crash loop ends with the job", policy: always, pod: "a", o: observed{Job: slurm("BOOT_FAIL")}, journal: "start a 0; exit a 0 3; backoff a 0 10", want: "Failed SlurmBootFail; a Error 3"},

		{name: "refused", pod: "i|a", o: observed{Refused: &refusal{"UnsupportedVolume", "volume x: nfs"}}, want: "Failed UnsupportedVolume; i UnsupportedVolume; a UnsupportedVolume", message: "volume x: nfs"},
		{name: "lost", policy: never, pod: "a", o: observed{Lost: true, Job: job{ID: "7"}}, journal: "start a 0", want: "Failed JobLost; a JobLost 137"},
		{name: "unreachable", policy: never, pod: "a", o: observed{Unreachable: "timeout", Job: slurm("CANCELLED")}, journal: "start a 0", want: "Running; a running ready"},
		{name: "unreachable, but done", policy: never, pod: "a", o: observed{Unreachable: "timeout"}, journal: "start a 0; exit a 0 0; done 0", want: "Succeeded; a Completed 0"},
	} {
		pod := foldPod(c.policy, c.pod)
		if c.deleted {
			pod.DeletionTimestamp = &metav1.Time{Time: at(90)}
		}
		c.o.Submitted = c.o.Waiting == nil
		c.o.Journal = journal(c.journal)
		if strings.Contains(c.message, "job 7") {
			c.o.Job.ID = "7"
		}
		s := fold(pod, c.o)
		if got := brief(s); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
			continue
		}
		first := slices.Concat(s.InitContainerStatuses, s.ContainerStatuses)[0]
		message := s.Message
		if w := first.State.Waiting; message == "" && w != nil {
			message = w.Message
		}
		if c.message != "" && message != c.message {
			t.Errorf("%s: message %q, want %q", c.name, message, c.message)
		}
		hasDisruption := slices.ContainsFunc(s.Conditions, func(k v1.PodCondition) bool { return k.Type == v1.DisruptionTarget })
		if want := s.Phase == v1.PodFailed && slurmStates[c.o.Job.State].disruption; hasDisruption != want {
			t.Errorf("%s: DisruptionTarget %v, want %v", c.name, hasDisruption, want)
		}
		checkStable(t, c.name, pod, s, c.o)
	}
}

// checkStable folds once more onto what came out.
func checkStable(t *testing.T, name string, pod *v1.Pod, s v1.PodStatus, o observed) {
	t.Helper()
	next := pod.DeepCopy()
	next.Status = *s.DeepCopy()
	if d := cmp.Diff(s, fold(next, o)); d != "" {
		t.Fatalf("%s: the second time it differs: %s", name, d)
	}
}

// The whole of a status, and what happens to it.
func TestFoldFields(t *testing.T) {
	pod := foldPod(v1.RestartPolicyNever, "i|a")
	pod.Spec.ReadinessGates = []v1.PodReadinessGate{{ConditionType: "example.com/gate"}}
	scheduled := v1.PodCondition{Type: v1.PodScheduled, Status: v1.ConditionTrue, LastTransitionTime: metav1.Unix(60, 0)}
	pod.Status.Conditions = []v1.PodCondition{scheduled}
	pod.Status.Reason = "ProviderFailed"
	cond := func(kind v1.PodConditionType, status v1.ConditionStatus, when int64, reason, message string) v1.PodCondition {
		return v1.PodCondition{Type: kind, Status: status, LastTransitionTime: metav1.Unix(when, 0), Reason: reason, Message: message, ObservedGeneration: 2}
	}
	no, yes := false, true

	o := observed{Submitted: true, Job: job{ID: "7", State: "PENDING", Partition: "batch"}}
	pod.Status = fold(pod, o)
	wait := v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "SlurmPending", Message: "job 7 is pending in partition batch"}}
	want := v1.PodStatus{
		Phase: v1.PodPending, QOSClass: v1.PodQOSBurstable, ObservedGeneration: 2,
		Conditions: []v1.PodCondition{
			scheduled,
			cond(v1.PodReadyToStartContainers, v1.ConditionFalse, 50, "", ""),
			cond(v1.PodInitialized, v1.ConditionFalse, 50, "ContainersNotInitialized", "containers with incomplete status: [i]"),
			cond(v1.ContainersReady, v1.ConditionFalse, 50, "ContainersNotReady", "containers with unready status: [a]"),
			cond(v1.PodReady, v1.ConditionFalse, 50, "ContainersNotReady", "containers with unready status: [a]"),
		},
		InitContainerStatuses: []v1.ContainerStatus{{Name: "i", Image: "busybox", State: wait, Started: &no}},
		ContainerStatuses:     []v1.ContainerStatus{{Name: "a", Image: "busybox", State: wait, Started: &no}},
	}
	if d := cmp.Diff(want, pod.Status); d != "" {
		t.Fatal(d)
	}

	o.Job = job{ID: "7", State: "RUNNING", Start: at(99)}
	o.Journal = journal("claim 7; host n1 127.0.0.1 junk 10.0.0.1 fe80::1 10.0.0.2 fd00::1; start i 0; exit i 0 0; start a 0")
	o.Journal = append(o.Journal, parseJournal([]byte("105 message i 0\n"))...)
	o.Messages = map[string]string{"i.0": "hello"}
	pod.Status = fold(pod, o)
	want.Phase = v1.PodRunning
	want.StartTime = &metav1.Time{Time: at(101)}
	want.HostIP, want.HostIPs = "10.0.0.1", []v1.HostIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}}
	want.PodIP, want.PodIPs = "10.0.0.1", []v1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}}
	want.Conditions = []v1.PodCondition{
		scheduled,
		cond(v1.PodReadyToStartContainers, v1.ConditionTrue, 105, "", ""),
		cond(v1.PodInitialized, v1.ConditionTrue, 105, "", ""),
		cond(v1.ContainersReady, v1.ConditionTrue, 105, "", ""),
		cond(v1.PodReady, v1.ConditionFalse, 50, "ReadinessGatesNotReady", `corresponding condition of pod readiness gate "example.com/gate" does not exist.`),
	}
	want.InitContainerStatuses = []v1.ContainerStatus{{
		Name: "i", Image: "busybox", ContainerID: "apptainer://u/i/0", Started: &no, Ready: true,
		State: v1.ContainerState{Terminated: &v1.ContainerStateTerminated{
			Reason: "Completed", Message: "hello", StartedAt: metav1.Unix(103, 0), FinishedAt: metav1.Unix(104, 0), ContainerID: "apptainer://u/i/0",
		}},
	}}
	want.ContainerStatuses = []v1.ContainerStatus{{
		Name: "a", Image: "busybox", ContainerID: "apptainer://u/a/0", Started: &yes, Ready: true,
		State: v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: metav1.Unix(105, 0)}},
	}}
	if d := cmp.Diff(want, pod.Status); d != "" {
		t.Fatal(d)
	}

	// Somebody opens the gate; then the node fails, and its clock was ahead.
	gate := v1.PodCondition{Type: "example.com/gate", Status: v1.ConditionTrue}
	pod.Status.Conditions = append([]v1.PodCondition{gate}, pod.Status.Conditions...)
	pod.Status = fold(pod, o)
	if got := pod.Status.Conditions[5]; got.Type != v1.PodReady || got.Status != v1.ConditionTrue || got.LastTransitionTime.Unix() != 105 {
		t.Fatalf("with its gate open: %+v", got)
	}
	o.Job = job{ID: "7", State: "NODE_FAIL", NodeList: "n1", End: at(90)}
	pod.Status = fold(pod, o)
	message := "job 7 lost its compute node on n1"
	want.Phase, want.Reason, want.Message = v1.PodFailed, "SlurmNodeFail", message
	want.Conditions = []v1.PodCondition{
		gate,
		scheduled,
		cond(v1.PodReadyToStartContainers, v1.ConditionFalse, 105, "", ""),
		cond(v1.PodInitialized, v1.ConditionTrue, 105, "", ""),
		cond(v1.ContainersReady, v1.ConditionFalse, 105, "PodFailed", ""),
		cond(v1.PodReady, v1.ConditionFalse, 105, "PodFailed", ""),
		cond(v1.DisruptionTarget, v1.ConditionTrue, 105, "SlurmNodeFail", message),
	}
	a := &want.ContainerStatuses[0]
	a.Started, a.Ready = &no, false
	a.State = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{
		ExitCode: 137, Reason: "SlurmNodeFail", Message: message,
		StartedAt: metav1.Unix(105, 0), FinishedAt: metav1.Unix(105, 0), ContainerID: "apptainer://u/a/0",
	}}
	if d := cmp.Diff(want, pod.Status); d != "" {
		t.Fatal(d)
	}

	// A terminal phase never changes.
	o.Journal = journal("start a 0; exit a 0 0; done 0")
	if d := cmp.Diff(want, fold(pod, o)); d != "" {
		t.Fatal(d)
	}
}

func TestFoldDeadline(t *testing.T) {
	for _, c := range []struct {
		name     string
		deadline int64
		journal  string
		job      job
		want     string
	}{
		{"the job stopped itself", 2, "claim 7; start a 0; stopping 30; exit a 0 0; done 0", job{State: "RUNNING"}, "Failed DeadlineExceeded; a Completed 0"},
		{"stopped before it", 3, "claim 7; start a 0; stopping 30; exit a 0 0; done 0", job{State: "CANCELLED"}, "Failed SlurmJobCancelled; a Completed 0"},
		{"ended by itself after it", 2, "claim 7; start a 0; exit a 0 0; done 0", job{}, "Succeeded; a Completed 0"},
		{"Slurm ended it", 100, "claim 7; start a 0", job{State: "TIMEOUT", Start: at(100), End: at(201)}, "Failed DeadlineExceeded; a DeadlineExceeded 137"},
		{"a site's shorter limit", 100, "claim 7; start a 0", job{State: "TIMEOUT", Start: at(100), End: at(200)}, "Failed SlurmTimeLimit; a SlurmTimeLimit 137"},
		{"no journal", 100, "", job{State: "TIMEOUT", Start: at(100), End: at(200)}, "Failed DeadlineExceeded; a DeadlineExceeded"},
	} {
		pod := foldPod(v1.RestartPolicyNever, "a")
		pod.Spec.ActiveDeadlineSeconds = &c.deadline
		if got := brief(fold(pod, observed{Submitted: true, Job: c.job, Journal: journal(c.journal)})); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.name, got, c.want)
		}
	}
}

// What is not news leaves the status as it is.
func TestFoldWithoutNews(t *testing.T) {
	queuedJob := observed{Submitted: true, Job: job{ID: "7", State: "PENDING", Reason: "Priority", Partition: "batch"}}
	started := observed{Submitted: true, Job: job{ID: "7", State: "RUNNING"}, Journal: journal("claim 7; start a 0")}
	for _, c := range []struct {
		name      string
		then, now observed
		want      string
	}{
		{"queued, unreachable", queuedJob, observed{Submitted: true, Job: job{ID: "7", State: "CANCELLED"}, Unreachable: "timeout"}, "Pending; a SlurmPending"},
		{"queued, knoc restarts", queuedJob, observed{Submitted: true, Job: job{ID: "7"}}, "Pending; a SlurmPending"},
		{"queued, a new word", queuedJob, observed{Submitted: true, Job: job{ID: "7", State: "NEW_WORD"}}, "Pending; a SlurmPending"},
		{"running, unreachable", started, observed{Unreachable: "timeout"}, "Running; a running ready"},
		{"running, knoc restarts", started, observed{Submitted: true, Job: job{ID: "7"}}, "Running; a running ready"},
		{"running, the journal cannot be seen", started, observed{Submitted: true, Job: job{ID: "7", State: "RUNNING"}}, "Running; a running ready"},
	} {
		pod := foldPod(v1.RestartPolicyAlways, "a")
		pod.Status = fold(pod, c.then)
		got := fold(pod, c.now)
		if d := cmp.Diff(pod.Status, got); d != "" || brief(got) != c.want {
			t.Errorf("%s: %s\nwant %s\n%s", c.name, brief(got), c.want, d)
		}
	}
	pod := foldPod(v1.RestartPolicyAlways, "a")
	pod.Status = fold(pod, observed{Waiting: &notYet{"X", "y"}})
	if got := brief(fold(pod, observed{})); got != "Pending; a ContainerCreating" {
		t.Errorf("when the wait is over: %s", got)
	}
}

// Slurm runs a job again, with a journal of its own.
func TestFoldRequeued(t *testing.T) {
	first := observed{Submitted: true, Job: job{ID: "7", State: "RUNNING"}, Journal: journal("start a 0; exit a 0 3; backoff a 0 10; start a 1; start b 0; exit b 0 1")}
	again := observed{Submitted: true, Job: job{ID: "7", State: "PENDING"}}
	for policy, want := range map[v1.RestartPolicy][3]string{
		v1.RestartPolicyAlways: {
			"Running; a running last 3 restarts 1 ready; b Error 1",
			"Pending; a SlurmPending last 137 restarts 1; b SlurmPending last 1",
			"Running; a running last 137 restarts 2 ready; b running last 1 restarts 1 ready",
		},
		v1.RestartPolicyNever: {
			"Running; a running last 3 restarts 1 ready; b Error 1",
			"Pending; a SlurmPending last 137 restarts 1; b Error 1",
			"Running; a running last 137 restarts 2 ready; b Error 1",
		},
	} {
		pod := foldPod(policy, "a b")
		for i, o := range []observed{first, again, {Submitted: true, Restart: 1, Journal: journal("start a 2; start b 1")}} {
			pod.Status = fold(pod, o)
			if got := brief(pod.Status); got != want[i] {
				t.Errorf("%s, step %d: %s\nwant %s", policy, i, got, want[i])
			}
		}
	}
}

func TestFoldImage(t *testing.T) {
	pod := foldPod(v1.RestartPolicyNever, "a")
	pod.Spec.Containers[0].Image = "third" // which was not even sent
	for facts, want := range map[string]string{
		"":                                 "third",
		"start a 0":                        "first",
		"start a 0; image a 1":             "first",
		"start a 0; image a 1; start a 1":  "second",
		"image a 1; start a 0; exit a 0 3": "second",
		"image a 7; start a 0":             "third",
	} {
		s := fold(pod, observed{Submitted: true, Journal: journal(facts), Images: map[string][]string{"a": {"first", "second"}}})
		if got := s.ContainerStatuses[0].Image; got != want {
			t.Errorf("%q: image %q, want %q", facts, got, want)
		}
	}
}

func TestFoldEphemeral(t *testing.T) {
	pod := foldPod(v1.RestartPolicyAlways, "a")
	for _, name := range []string{"e", "f", "g"} {
		pod.Spec.EphemeralContainers = append(pod.Spec.EphemeralContainers, v1.EphemeralContainer{EphemeralContainerCommon: v1.EphemeralContainerCommon{Name: name, Image: "debug"}})
	}
	pod.Status.EphemeralContainerStatuses = []v1.ContainerStatus{{Name: "f", ImageID: "kept"}}
	s := fold(pod, observed{
		Submitted: true, Journal: journal("start a 0; start e 0; exit e 0 3; start f 0"),
		Held: map[string]held{"g": {notYet: notYet{"CreateContainerConfigError", "no such thing"}, image: "debug"}},
	})
	if s.Phase != v1.PodRunning || !s.ContainerStatuses[0].Ready {
		t.Errorf("the pod is %s", brief(s))
	}
	e := s.EphemeralContainerStatuses
	if len(e) != 3 || e[0].State.Terminated == nil || e[0].State.Terminated.ExitCode != 3 || e[1].State.Running == nil || e[1].ImageID != "kept" ||
		e[1].Ready || e[1].Started != nil || e[2].State.Waiting == nil || e[2].State.Waiting.Reason != "CreateContainerConfigError" {
		t.Errorf("ephemeral containers: %+v", e)
	}
	// They change nothing about how the pod ends.
	s = fold(pod, observed{Submitted: true, Journal: journal("start a 0; start e 0; exit a 0 0; exit e 0 9; done 0")})
	if s.Phase != v1.PodSucceeded {
		t.Errorf("the pod is %s, want Succeeded", brief(s))
	}
}
