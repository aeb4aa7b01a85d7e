package knoc

import (
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

func TestStarved(t *testing.T) {
	t.Parallel()
	fails := func(n int) string { return strings.Repeat("pull a; pullfailed a 255; pullwait a 10; ", n) }
	for _, tc := range []struct {
		name, pod, journal string
		restart            int
		want               bool
	}{
		{"four times", "a", fails(4), 0, true},
		{"three times", "a", fails(3), 0, false},
		{"once, in a job that was parked", "a", fails(1), 1, true},
		{"one is under way", "a", fails(4) + "pull a", 0, false},
		{"pulled at last", "a", fails(4) + "pull a; pulled a 1", 0, false},
		{"another container runs", "a b", fails(4) + "start b 0", 0, false},
		{"another container has done its work", "a b", fails(4) + "start b 0; exit b 0 0", 0, false},
		{"another container will start again", "a b", fails(4) + "start b 0; exit b 0 1; backoff b 0 10", 0, false},
		{"the other one waits too", "a b", fails(4) + "pull b; pullfailed b 255", 0, true},
		{"an init container has done its work", "i|a", "start i 0; exit i 0 0; " + fails(4), 0, true},
		{"a sidecar runs", "s+|a", "start s 0; started s 0; " + fails(4), 0, false},
		{"it ran, and got another image", "a", "start a 0; kill a 0 update 1; exit a 0 143; image a 1; " + fails(4), 0, true},
		{"never to be pulled", "a", strings.Repeat("neverpull a; ", 4), 0, true},
		{"nothing", "a", "", 0, false},
	} {
		pod := foldPod(v1.RestartPolicyAlways, tc.pod)
		if got := newFacts(journal(strings.TrimSuffix(tc.journal, "; "))).starved(&pod.Spec, tc.restart); got != tc.want {
			t.Errorf("%s: %v", tc.name, got)
		}
	}
}

// A job whose image cannot be had gives its allocation back, and tries again when
// its time has come, or when the pod gets another image.
func TestParked(t *testing.T) {
	k := newKnocTest(t)
	k.start()
	k.cluster.Sh("mkdir -p .apptainer-stub; echo manifest unknown >.apptainer-stub/error")
	pod := k.pod("parked", "true")
	pod.Spec.Containers[0].Image = "r/app:1"
	k.api.create(pod)
	waits := func(p *v1.Pod) bool {
		if len(p.Status.ContainerStatuses) == 0 {
			return false
		}
		w := p.Status.ContainerStatuses[0].State.Waiting
		return p.Status.Phase == v1.PodPending && w != nil && (w.Reason == "ErrImagePull" || w.Reason == "ImagePullBackOff") && strings.Contains(w.Message, "manifest unknown")
	}
	k.wait(pod.UID, "waits for its image", waits)
	// It has tried three times more.
	uid := string(pod.UID)
	k.cluster.Sh("cd .knoc/knoc-c1/" + uid + " && for i in 1 2 3; do date '+%s pullfailed main 255' >>journal.0; done; date '+%s pullwait main 80' >>journal.0; : >../changed/" + uid + ".0-9.1")
	held := func(n int) func() bool {
		return func() bool {
			calls := k.cluster.SlurmCalls("scontrol")
			return len(slices.DeleteFunc(calls, func(c string) bool { return !strings.Contains(c, "requeuehold") })) >= n && strings.Contains(k.cluster.Sh("squeue --noheader --format=%r"), "JobHeldUser")
		}
	}
	k.waitFor("the job is held", held(1))
	k.wait(pod.UID, "still waits for its image", waits)
	k.leap(parkFor + time.Second)
	k.waitFor("the job has run again", func() bool { return strings.Contains(k.cluster.Sh("ls .knoc/knoc-c1/"+uid), "journal.1") })
	defer func() {
	}()
	k.waitFor("the job is held again", held(2))
	k.wait(pod.UID, "waits for its image again", waits)
	k.cluster.Sh("rm .apptainer-stub/error")
	k.setImage(pod, "r/app:2")
	k.wait(pod.UID, "runs with another image", func(p *v1.Pod) bool { return p.Status.Phase == v1.PodSucceeded || runsImage("r/app:2", 0)(p) })
}
