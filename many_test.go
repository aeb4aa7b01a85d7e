package knoc

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Thirty containers, one of which ignores TERM and has children in other sessions.
func TestPodScriptManyContainers(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		containers := []v1.Container{shContainer("a0", `trap '' TERM; setsid sh -c "trap '' TERM; while :; do sleep 0.1; done" & echo up; while :; do sleep 0.1; done`)}
		for i := range 29 {
			containers = append(containers, shContainer(fmt.Sprintf("a%d", i+1), untilTerm))
		}
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyAlways, containers...), nil)
		w.start(shell, "7")
		for i := range containers {
			w.awaitLog(fmt.Sprintf("a%d.0", i), "up")
		}
		w.command(1, "stop - 3")
		w.signal(syscall.SIGUSR1)
		began := time.Now()
		w.end()
		if took := time.Since(began); took > 40*time.Second {
			t.Errorf("it took %v to stop", took)
		}
		got := w.facts("journal.0")
		if !slices.Contains(got, "exit a0 0 137") || got[len(got)-1] != "done 1" {
			t.Errorf("journal: %s", strings.Join(got, "; "))
		}
		for i := range 29 {
			if !slices.Contains(got, fmt.Sprintf("exit a%d 0 4", i+1)) {
				t.Errorf("container a%d did not end by TERM: %s", i+1, strings.Join(got, "; "))
			}
		}
	})
}
