//go:build testbed

package e2e

import (
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

func TestLogsTailFollowAndLimit(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "for i in 1 2 3; do echo line $i; sleep 1; done; sleep 3; echo last"))
	p.awaitLog("line 1")
	if got, want := p.log("--follow"), "line 1\nline 2\nline 3\nlast\n"; got != want { // ends by itself
		t.Errorf("followed log is %q, want %q", got, want)
	}
	p.awaitPhase("Succeeded")
	if got, want := p.log("--tail=2"), "line 3\nlast\n"; got != want {
		t.Errorf("--tail=2 gives %q, want %q", got, want)
	}
	if got, want := p.log("--limit-bytes=6"), "line 1"; got != want {
		t.Errorf("--limit-bytes=6 gives %q, want %q", got, want)
	}
}

// Lines of a log have the times at which they were written, to a second or so.
func TestLogsSinceAndTimestamps(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo first; sleep 5; echo second; sleep 5; echo third; date -u +%s; sleep 2"))
	p.awaitPhase("Succeeded")
	stamped := p.log("--timestamps")
	var times []time.Time
	for _, line := range strings.Split(strings.TrimSuffix(stamped, "\n"), "\n") {
		stamp, rest, _ := strings.Cut(line, " ")
		at, err := time.Parse(time.RFC3339Nano, stamp)
		if err != nil {
			t.Fatalf("log %q: %v", stamped, err)
		}
		times = append(times, at)
		if seconds, err := strconv.ParseInt(rest, 10, 64); err == nil && (at.Unix() < seconds-1 || at.Unix() > seconds+3) {
			t.Errorf("the line %q was written at %v", line, time.Unix(seconds, 0).UTC())
		}
	}
	if len(times) != 4 {
		t.Fatalf("log %q, want 4 lines", stamped)
	}
	for i, least := range []time.Duration{3 * time.Second, 3 * time.Second, 0} {
		if between := times[i+1].Sub(times[i]); between < least {
			t.Errorf("%v between lines %d and %d, want at least %v: %q", between, i, i+1, least, stamped)
		}
	}
	if got := p.log("--since-time="+times[1].Format(time.RFC3339), "--tail=10"); !strings.HasPrefix(got, "second\nthird\n") {
		t.Errorf("since the second line: %q", got)
	}
	if got := p.log("--since=1h"); !strings.HasPrefix(got, "first\n") {
		t.Errorf("since an hour ago: %q", got)
	}
	if got := p.log("--tail=0"); got != "" {
		t.Errorf("a tail of 0 gives %q", got)
	}
}

func TestLogOf20MBIsWhole(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "seq 1 2500000"))
	p.awaitPhase("Succeeded")
	got := p.log()
	if want := 2500000; strings.Count(got, "\n") != want || !strings.HasSuffix(got, "\n2500000\n") || !strings.HasPrefix(got, "1\n2\n") {
		t.Errorf("got %d bytes, %d lines, want %d lines", len(got), strings.Count(got, "\n"), want)
	}
}

func TestExecRunsInTheContainer(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo hello >/tmp/file; echo up; exec sleep 1000", appContainer("other", "exec sleep 1000"), func(p *v1.Pod) {
		p.Spec.Containers[0].Env = []v1.EnvVar{{Name: "GREETING", Value: "hi 'there' $x"}}
	}))
	p.awaitLog("up")
	exec := func(stdin string, args ...string) (string, error) {
		return tryKubectl([]byte(stdin), append([]string{"-n", n.name, "exec", "-i", "pod", "--"}, args...)...)
	}
	if out, err := exec("", "cat", "/tmp/file"); err != nil || out != "hello\n" {
		t.Errorf("cat printed %q, %v", out, err)
	}
	if out, err := exec("", "sh", "-c", `printf "%s\n" "$GREETING" "$@"`, "sh", "a b", "'c' $d `e`", ""); err != nil || out != "hi 'there' $x\na b\n'c' $d `e`\n\n" {
		t.Errorf("sh printed %q, %v", out, err)
	}
	if out, err := exec("some text", "wc", "-c"); err != nil || strings.TrimSpace(out) != "9" {
		t.Errorf("wc printed %q, %v", out, err)
	}
	if _, err := exec("", "sh", "-c", "exit 42"); err == nil || !strings.Contains(err.Error(), "exit code 42") && !strings.Contains(err.Error(), "exit status 42") {
		t.Errorf("exit 42 gave %v", err)
	}
	if out := p.kubectl("exec", "pod", "-c", "other", "--", "ls", "/tmp"); strings.Contains(out, "file") {
		t.Errorf("the other container has %q", out)
	}
	p.kubectl("delete", "pod", "pod", "--grace-period=1", "--timeout=120s")
}
