package knoc

import (
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

func needNamespaces(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("unshare", "-U", "--map-current-user", "--pid", "--fork", "--mount", "--mount-proc", "true").CombinedOutput(); err != nil {
		t.Skipf("no such namespaces here: %v: %s", err, out)
	}
}

// Containers that share a process namespace see each other, and stop, exit codes
// and restarts are as for others.
func TestPodScriptShared(t *testing.T) {
	t.Parallel()
	needNamespaces(t)
	shared := true
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range []struct {
			name       string
			containers []v1.Container
			do         func(w *scriptRun)
			want       []string // sorted
		}{
			{"exit codes", []v1.Container{
				shContainer("a", `until [ -e b.up ]; do sleep 0.1; done; grep -al "tele[v]ision" /proc/[0-9]*/cmdline >seen; read -r one </proc/1/cmdline; kill -9 1; : >a.up; exit 3`),
				shContainer("b", `: >b.up; until [ -e a.up ]; do sleep 0.1; done; exit 42`, "television"),
			}, nil, []string{"done 1", "exit a 0 3", "exit b 0 42", "start a 0", "start b 0"}},
			{"stop", []v1.Container{shContainer("a", untilTerm), shContainer("b", "trap '' TERM; echo up; while :; do sleep 0.1; done")}, func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				w.awaitLog("b.0", "up")
				w.write("cmd/1", "stop - 1\n")
				w.signal(syscall.SIGUSR1)
			}, []string{"ack 1", "done 1", "exit a 0 4", "exit b 0 137", "kill a 0 stop 1", "kill b 0 stop 1", "start a 0", "start b 0", "stopping 1"}},
		} {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				pod := scriptPod(v1.RestartPolicyNever, tc.containers...)
				pod.Spec.ShareProcessNamespace = &shared
				w := stageScript(t, newBase(t), pod, nil)
				w.start(shell, "7", "TMPDIR="+t.TempDir())
				began := time.Now()
				if tc.do != nil {
					tc.do(w)
				}
				w.end()
				got := w.facts("journal.0")
				slices.Sort(got)
				if diff := cmp.Diff(tc.want, got); diff != "" {
					t.Errorf("journal, sorted (-want +got):\n%s\nstderr: %s\nlogs: %s%s", diff, w.stderr.String(), w.read("log/a.0"), w.read("log/b.0"))
				}
				if w.stderr.Len() > 0 || time.Since(began) > 30*time.Second {
					t.Errorf("stderr %q, after %v", w.stderr.String(), time.Since(began))
				}
				if seen := w.read("seen"); tc.do == nil && strings.Count(seen, "\n") == 0 {
					t.Errorf("a did not see b: %q", seen)
				}
			})
		}
	})
}
