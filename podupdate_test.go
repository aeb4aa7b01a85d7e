package knoc

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// part leaves a new image of a container, or an ephemeral container, as the
// provider does, and the command. The stub runs the command of c, whatever the image.
func (w *scriptRun) part(seq int, pod *v1.Pod, c v1.Container, verb string, number int) {
	w.t.Helper()
	pod = pod.DeepCopy()
	at := number
	if verb == "update" {
		at = 1 + slices.IndexFunc(allContainers(pod), func(x *v1.Container) bool { return x.Name == c.Name })
		*allContainers(pod)[at-1] = c
	} else {
		for len(allContainers(pod)) < at {
			pod.Spec.Containers = append(pod.Spec.Containers, c)
		}
	}
	s, err := newPodScript(pod, scriptConfig{Dir: w.dir})
	if err != nil {
		w.t.Fatal(err)
	}
	text, err := s.part(at)
	if err != nil {
		w.t.Fatal(err)
	}
	// By rename, as stop.sh does it: what is sent again may be read just now.
	name := fmt.Sprintf("run/%s.%s.%d", verb, c.Name, number)
	w.write("run/part.new", text)
	if err := os.Rename(filepath.Join(w.dir, "run/part.new"), filepath.Join(w.dir, name)); err != nil {
		w.t.Fatal(err)
	}
	w.write("env/"+c.Name, "")
	w.command(seq, fmt.Sprintf("%s %s %d", verb, c.Name, number))
}

func (w *scriptRun) wake() { w.signal(syscall.SIGUSR1) }

func TestPodScriptUpdate(t *testing.T) {
	t.Parallel()
	second := func(name, script string) v1.Container {
		c := shContainer(name, script)
		c.Image = "r/second"
		return c
	}
	tests := []struct {
		name   string
		policy v1.RestartPolicy
		pod    []v1.Container
		do     func(w *scriptRun, pod *v1.Pod)
		want   []string
	}{
		{"running whatever the policy", v1.RestartPolicyNever, []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun, pod *v1.Pod) {
			w.awaitLog("a.0", "up")
			w.part(1, pod, second("a", "echo two; exit 0"), "update", 1)
			w.wake()
		}, []string{"start a 0", "kill a 0 update 30", "exit a 0 4", "image a 1", "start a 1", "exit a 1 0", "done 0"}},
		{"a command that comes twice", v1.RestartPolicyNever, []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun, pod *v1.Pod) {
			w.awaitLog("a.0", "up")
			w.part(1, pod, second("a", untilTerm), "update", 1)
			w.wake()
			w.awaitLog("a.1", "up")
			w.part(2, pod, second("a", untilTerm), "update", 1)
			w.wake()
			w.await("ack 0000000002")
			w.part(3, pod, second("a", "exit 3"), "update", 2)
			w.wake()
		}, []string{"start a 0", "kill a 0 update 30", "exit a 0 4", "image a 1", "start a 1",
			"kill a 1 update 30", "exit a 1 4", "image a 2", "start a 2", "exit a 2 3", "done 1"}},
		{"before the job starts", v1.RestartPolicyNever, []v1.Container{shContainer("a", "exit 9")}, func(w *scriptRun, pod *v1.Pod) {
			w.part(1, pod, second("a", "exit 8"), "update", 1)
			w.part(2, pod, second("a", "exit 0"), "update", 2)
		}, []string{"image a 2", "start a 0", "exit a 0 0", "done 0"}},
		{"in a back-off", v1.RestartPolicyOnFailure, []v1.Container{shContainer("a", "exit 9")}, func(w *scriptRun, pod *v1.Pod) {
			w.await("backoff a 2 4")
			w.part(1, pod, second("a", "[ -e once ] || { : >once; exit 7; }"), "update", 1)
			w.wake()
		}, []string{"start a 0", "exit a 0 9", "backoff a 0 1", "start a 1", "exit a 1 9", "backoff a 1 2", "start a 2", "exit a 2 9", "backoff a 2 4", "image a 1", "start a 3", "exit a 3 7", "backoff a 3 1", "start a 4", "exit a 4 0", "done 0"}},
		{"an init container does its work first", v1.RestartPolicyAlways, []v1.Container{shContainer("i1", "echo up; sleep 1; [ -e once ] || { : >once; exit 7; }"), shContainer("a", "echo up; sleep 1000")}, func(w *scriptRun, pod *v1.Pod) {
			w.awaitLog("i1.0", "up")
			w.part(1, pod, second("i1", "echo new"), "update", 1)
			w.part(2, pod, second("a", untilTerm), "update", 1)
			w.wake()
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
		}, []string{"start i1 0", "exit i1 0 7", "image i1 1", "start i1 1", "exit i1 1 0",
			"image a 1", "start a 0", "stopping 30", "kill a 0 stop 30", "exit a 0 4", "done 1"}},
		{"an image that cannot be had", v1.RestartPolicyNever, []v1.Container{func() v1.Container { c := shContainer("a", "exit 9"); c.Image = "r/missing"; return c }()}, func(w *scriptRun, pod *v1.Pod) {
			w.await("pullfailed a 255")
			w.part(1, pod, second("a", "exit 0"), "update", 1)
			w.wake()
		}, nil},
		{"in a stop", v1.RestartPolicyAlways, []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun, pod *v1.Pod) {
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
			w.part(1, pod, second("a", "exit 0"), "update", 1)
		}, nil},
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range tests {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				pod := scriptPod(tc.policy, tc.pod...)
				w := stageScript(t, newBase(t), pod, nil)
				before := strings.HasPrefix(tc.name, "before")
				if !before {
					w.start(shell, "7")
				}
				tc.do(w, pod)
				if before {
					w.start(shell, "7")
				}
				w.end()
				var got []string
				for _, f := range w.facts("journal.0") {
					if !strings.HasPrefix(f, "pull") && !strings.HasPrefix(f, "ack") {
						got = append(got, f)
					}
				}
				if tc.want == nil {
					if i := slices.Index(got, "start a 1"); i >= 0 {
						t.Errorf("a second attempt in %q", got)
					}
					if tc.name == "an image that cannot be had" && (!slices.Contains(got, "image a 1") || got[len(got)-1] != "done 0") {
						t.Errorf("the new image was not taken: %q", got)
					}
					return
				}
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Errorf("journal (-want +got):\n%s\nstderr: %s", diff, w.stderr.String())
				}
			})
		}
	})
}

func TestPodScriptEphemeral(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyAlways, shContainer("i1", "echo up; until [ -e go ]; do sleep 0.1; done"), shContainer("a", untilTerm))
		w := stageScript(t, newBase(t), pod, nil)
		w.start(shell, "7")
		w.awaitLog("i1.0", "up")
		w.part(1, pod, shContainer("debug", "exit 5"), "add", 3) // also while init containers are at work
		w.wake()
		w.await("exit debug 0 5")
		w.write("go", "")
		w.awaitLog("a.0", "up")
		for _, seq := range []int{2, 3} { // the second is one that was sent again
			w.part(seq, pod, shContainer("more", "grep SigIgn /proc/self/status; "+untilTerm), "add", 4)
			w.wake()
		}
		w.part(4, pod, shContainer("gap", ":"), "add", 6)
		w.wake()
		w.awaitLog("more.0", "up")
		w.await("ack 0000000004")
		// Signals are as a program finds them that nothing was done to.
		var ignored uint64
		if _, err := fmt.Sscanf(w.read("log/more.0"), "SigIgn: %x", &ignored); err != nil || ignored&(1<<(syscall.SIGUSR1-1)|1<<(syscall.SIGUSR2-1)|1<<(syscall.SIGTERM-1)) != 0 {
			t.Errorf("ignored signals %x: %v", ignored, err)
		}
		w.command(5, "stop - 20")
		w.wake()
		w.end()
		got := w.facts("journal.0")
		for _, once := range []string{"start debug 0", "start more 0", "exit more 0 4", "kill more 0 stop 20"} {
			if n := strings.Count(strings.Join(got, "\n")+"\n", once+"\n"); n != 1 {
				t.Errorf("%q is %d times in %q", once, n, got)
			}
		}
		if slices.Contains(got, "start gap 0") {
			t.Errorf("a container was added out of turn: %q", got)
		}
	})
}

// The end of the apps is the pod's: an ephemeral container is ended then.
func TestPodScriptEndsEphemeral(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		pod := scriptPod(v1.RestartPolicyNever, shContainer("a", "until [ -e go ]; do sleep 0.1; done"))
		w := stageScript(t, newBase(t), pod, nil)
		w.part(1, pod, shContainer("debug", untilTerm), "add", 2)
		w.start(shell, "7") // it was there before the job
		w.awaitLog("debug.0", "up")
		w.write("go", "")
		began := time.Now()
		if code := w.end(); code != 0 || time.Since(began) > 10*time.Second {
			t.Errorf("exit code %d after %v, want 0 at once", code, time.Since(began))
		}
		got := w.facts("journal.0")
		if !slices.Contains(got, "exit debug 0 4") || slices.ContainsFunc(got, func(f string) bool { return strings.HasPrefix(f, "stopping") }) || got[len(got)-1] != "done 0" {
			t.Errorf("journal: %q", got)
		}
	})
}
