package knoc

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// foldFacts are what foldStory makes journals of, a byte each.
var foldFacts = []string{
	"claim 7", "host n1 10.0.0.1", "start i 0", "exit i 0 0", "exit i 0 1", "start i 1", "exit i 1 0", "start s 0", "exit s 0 0",
	"start a 0", "start a 0", "exit a 0 0", "exit a 0 0", "exit a 0 137", "backoff a 0 10", "start a 1", "exit a 1 0", "exit a 1 3", "exit a 2 0",
	"start b 0", "start b 0", "exit b 0 0", "exit b 0 0", "exit b 0 3", "start x 0", "ack 1", "stopping 30",
	"pull a", "pulled a 5", "pulled a 5 9 4096", "pullfailed a 255", "pullwait a 10", "neverpull a", "digest a manifest 0123", "started a 0", "started a 1", "ready a 0 1", "ready a 0 0", "ready a 1 1", "ready s 0 1", "started s 0", "unhealthy a 0 liveness 3",
	"kill a 0 liveness 3", "kill a 0 update 30", "image a 1", "kill b 0 stop 3", "kill s 0 stop 3", "hook a 0 post 0", "hook a 0 post 1", "hook a 1 post 0", "oom a 0", "oom b 0", "oom i 0", "message a 0", "message b 0", "deadline", "timelimit", "done 0", "done 0", "done 1",
}

// foldStory folds a journal of story's facts, with text somewhere in it, twice: up
// to cut, and then as a whole, with a state of the job. how has all else.
func foldStory(t *testing.T, text, story []byte, cut, state uint8, how uint16) {
	states := []string{""}
	for state := range slurmStates {
		states = append(states, state)
	}
	slices.Sort(states)
	facts := make([]string, len(story))
	for i, b := range story {
		facts[i] = foldFacts[int(b)%len(foldFacts)]
	}
	policy := []v1.RestartPolicy{v1.RestartPolicyAlways, v1.RestartPolicyOnFailure, v1.RestartPolicyNever}[how%3]
	pod := foldPod(policy, []string{"a", "a!? b^", "i|a^? b", "s+^? i|a!"}[how/3%4])
	if how&1024 != 0 {
		pod.DeletionTimestamp = &metav1.Time{Time: at(90)}
	}
	if how&16384 != 0 {
		pod.Annotations = map[string]string{requeueAnnotation: "true"}
	}
	if how&32768 != 0 {
		pod.Spec.ActiveDeadlineSeconds = new(int64(3))
	}
	texts := map[string]string{}
	for _, file := range []string{"a.0", "a.1", "b.0", "i.0", "a.pull", "a.0.liveness"} {
		texts[file] = string(text)
	}
	part := observed{Submitted: true, Messages: texts, Job: job{ID: "7", State: "RUNNING"}, Journal: journal(strings.Join(facts[:min(int(cut), len(facts))], ";"))}
	whole := part
	whole.Job = job{ID: "7", State: states[int(state)%len(states)], End: at(300)}
	whole.Journal = slices.Concat(part.Journal, parseJournal(append(text, '\n')), journal(strings.Join(facts, ";"))[len(part.Journal):])
	if how&8192 != 0 { // run again: the newest journal is another one
		whole.Journal, whole.Restart = whole.Journal[len(part.Journal):], 1
	}
	whole.Lost = how&2048 != 0
	if how&4096 != 0 {
		whole.Unreachable = "timeout"
	}
	if how&512 != 0 {
		whole.Unclear = "sacct answers errors"
	}
	for _, o := range []observed{part, whole} {
		before := pod.Status
		s := fold(pod, o)
		checkFolded(t, pod, before, s, o)
		checkStable(t, "fuzz", pod, s, o)
		if _, err := json.Marshal(s); err != nil {
			t.Fatal(err)
		}
		pod.Status = s
		if n := len(eventsOf(pod, &o, o.Journal, 0)); n != len(o.Journal) {
			t.Fatalf("%d lists of events for %d lines", n, len(o.Journal))
		}
		for _, e := range o.Journal {
			shownBy(&s).has(e)
		}
	}
}

func TestFoldStories(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		story := make([]byte, random.IntN(14))
		for i := range story {
			story[i] = byte(random.Uint32())
		}
		foldStory(t, nil, story, uint8(random.IntN(14)), uint8(random.Uint32()), uint16(random.Uint32()))
	}
}

func FuzzFold(f *testing.F) {
	f.Add([]byte(nil), []byte{0, 1, 9, 11, 58}, uint8(3), uint8(4), uint16(2))
	f.Add([]byte("105 exit a 0 0\n99 done 0\n9 start a 4\n5 done 0"), []byte{0, 9, 13}, uint8(3), uint8(9), uint16(1024))
	f.Add([]byte("\xff\x00 104 message a 0"), []byte{0, 7, 2, 3, 9, 52, 14, 15}, uint8(6), uint8(0), uint16(8192+11))
	f.Fuzz(foldStory)
}

// checkFolded holds a status against the journal, read in the plainest way, and
// against the rules of the API server.
func checkFolded(t *testing.T, pod *v1.Pod, before, s v1.PodStatus, o observed) {
	started, done := map[string]bool{}, false
	code := map[string]string{}
	attempt := map[string]int32{}
	for _, e := range o.Journal {
		switch e.Word {
		case "start", "exit":
			if n := e.num(1); !started[e.Args[0]] || n > attempt[e.Args[0]] {
				started[e.Args[0]], attempt[e.Args[0]] = true, n
				delete(code, e.Args[0])
			}
			if _, seen := code[e.Args[0]]; e.Word == "exit" && e.num(1) == attempt[e.Args[0]] && !seen {
				code[e.Args[0]] = e.Args[2]
			}
		case "done":
			done = true
		}
		if done {
			break
		}
	}
	if terminalPhase(before.Phase) {
		if d := cmp.Diff(before, s); d != "" {
			t.Fatalf("a terminal status changed: %s", d)
		}
		return
	}
	for _, c := range pod.Spec.Containers {
		if n := strings.TrimLeft(code[c.Name], "0"); s.Phase == v1.PodSucceeded && (code[c.Name] == "" || n != "" || !done) {
			t.Fatalf("Succeeded, and container %s ended with %q (done %v)", c.Name, code[c.Name], done)
		}
		if s.Phase == v1.PodRunning && !started[c.Name] && len(o.Journal) > 0 {
			t.Fatalf("Running before container %s started", c.Name)
		}
	}
	if s.Phase == v1.PodRunning && len(o.Journal) == 0 && before.Phase != v1.PodRunning {
		t.Fatal("Running without a journal")
	}
	for _, ip := range s.PodIPs {
		if errs := validation.IsValidIP(nil, ip.IP); len(errs) > 0 {
			t.Fatalf("podIPs %v: %v", s.PodIPs, errs)
		}
	}
	if s.PodIP != "" && (len(s.PodIPs) == 0 || s.PodIPs[0].IP != s.PodIP) {
		t.Fatalf("podIP %s, podIPs %v", s.PodIP, s.PodIPs)
	}
	specs := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	old := slices.Concat(before.InitContainerStatuses, before.ContainerStatuses)
	for i, c := range slices.Concat(s.InitContainerStatuses, s.ContainerStatuses) {
		states := 0
		for _, set := range []bool{c.State.Running != nil, c.State.Waiting != nil, c.State.Terminated != nil} {
			if set {
				states++
			}
		}
		if states != 1 || c.Name != specs[i].Name {
			t.Fatalf("container %s: %+v", specs[i].Name, c)
		}
		if terminalPhase(s.Phase) && c.State.Running != nil {
			t.Fatalf("container %s runs in a pod that is %s", c.Name, s.Phase)
		}
		if len(old) > 0 && c.RestartCount < old[i].RestartCount || c.RestartCount < 0 {
			t.Fatalf("container %s counts back: %d", c.Name, c.RestartCount)
		}
		for _, state := range []v1.ContainerState{c.State, c.LastTerminationState} {
			if x := state.Terminated; x != nil && (len(x.Message) > messagesLimit/len(specs) || !utf8.ValidString(x.Message) || x.ExitCode < 0 || x.ExitCode > 255 || x.Reason == "") {
				t.Fatalf("container %s: %+v", c.Name, x)
			}
			if x := state.Waiting; x != nil && (!utf8.ValidString(x.Message) || x.Reason == "") {
				t.Fatalf("container %s: %+v", c.Name, x)
			}
		}
		if c.Ready && !isInit(pod, c.Name) && (c.State.Running == nil || !*c.Started) {
			t.Fatalf("container %s is ready: %+v", c.Name, c)
		}
		if len(old) > 0 && old[i].State.Terminated != nil && c.State.Terminated == nil && !mayRestart(&specs[i], &pod.Spec, old[i].State.Terminated.ExitCode) {
			t.Fatalf("container %s leaves the terminated state", c.Name)
		}
	}
}

func isInit(pod *v1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Spec.InitContainers, func(c v1.Container) bool { return c.Name == name })
}
