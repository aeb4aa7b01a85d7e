//go:build testbed

// Package e2e shows that knoc does what the README says, on the testbed: a real
// Kubernetes, a real Slurm, a real Apptainer. It drives everything from outside,
// with kubectl and with the commands that testbed/run/env names.
//
// Each test has namespaces of its own, so that tests can run side by side and
// again. Tests that hurt the whole cluster (cut, freeze, switch off) are not
// parallel: Go runs these first, one after the other (disturb_test.go). They are
// few, as nothing else can run meanwhile: a test that needs to hurt only a knoc,
// or its connection, starts one of its own, under another node name, through a
// proxy of its own (knoc_test.go), and is parallel.
//
//	. testbed/run/env && go test -tags testbed -count=1 -parallel 12 -timeout 30m ./testbed/e2e
//
// KNOC_E2E_LONG=1 keeps a knoc away for seven minutes instead of twenty seconds.
package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// limit is how long anything may take before a test gives up. It is generous:
// the machine may be small and busy, and a failure should mean that something
// never happens, not that it was slow.
const limit = 4 * time.Minute

func TestMain(m *testing.M) {
	for _, name := range []string{"KUBECONFIG", "KNOC_NODE", "KNOC_LOGIN", "KNOC_LOGIN_ROOT", "KNOC_IMAGE_BUSYBOX", "KNOC_IMAGE_APP",
		"KNOC_RESTART", "KNOC_STOP", "KNOC_START", "KNOC_SHIM_DIR", "KNOC_CUT", "KNOC_HEAL", "KNOC_NODE_OFF", "KNOC_NODE_ON",
		"KNOC_SSH", "KNOC_SSH_KNOWN_HOSTS", "KNOC_CLOUD_EXEC", "KNOC_BIN", "KNOC_ARGS_FILE", "KNOC_LOG", "KNOC_PKI"} {
		if os.Getenv(name) == "" {
			fmt.Fprintf(os.Stderr, "%s is not set: run testbed/up, then . testbed/run/env\n", name)
			os.Exit(1)
		}
	}
	if err := cleanUp(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	seen = newStore()
	code := m.Run()
	seen.close()
	os.Exit(code)
}

// cleanUp ends what a test run left that was killed.
func cleanUp() error {
	if out, err := run(nil, "KNOC_HEAL"); err != nil {
		return fmt.Errorf("%v: %s", err, out)
	}
	if out, err := run(nil, "KNOC_LOGIN_ROOT", "kill -CONT $(cat /run/slurmctld.pid)"); err != nil {
		return fmt.Errorf("no slurmctld on login: %v: %s", err, out)
	}
	if out, err := run(nil, "KNOC_LOGIN", "rm -rf "+shimDir()+"/*"); err != nil {
		return fmt.Errorf("%v: %s", err, out)
	}
	left, err := tryKubectl(nil, "get", "namespace", "-l", "knoc-e2e", "-o", "jsonpath={.items[*].metadata.name}")
	if err != nil {
		return err
	}
	for _, n := range strings.Fields(left) { // pods of a knoc that was killed have nobody to end them
		if out, err := tryKubectl(nil, "delete", "pods", "--all", "-n", n, "--force", "--grace-period=0", "--wait=false"); err != nil {
			return fmt.Errorf("pods of an earlier run: %v: %s", err, out)
		}
	}
	if out, err := tryKubectl(nil, "delete", "namespace", "-l", "knoc-e2e", "--wait=true", "--timeout=120s"); err != nil {
		return fmt.Errorf("namespaces of an earlier run: %v: %s", err, out)
	}
	return nil
}

// run calls a command of the testbed's contract: $KNOC_LOGIN and its like.
func run(stdin []byte, name string, args ...string) (string, error) {
	return execute(stdin, "sh", append([]string{"-c", "$" + name + ` "$@"`, name}, args...)...)
}

// execute runs a program and gives back all it prints; it is never waited for longer than limit.
func execute(stdin []byte, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	c := exec.CommandContext(ctx, name, args...)
	c.Stdin = bytes.NewReader(stdin)
	var out, errs bytes.Buffer
	c.Stdout, c.Stderr = &out, &errs
	c.WaitDelay = 5 * time.Second
	if err := c.Run(); err != nil {
		return out.String(), fmt.Errorf("%s: %w: %s", strings.Join(append([]string{name}, args...), " "), err, strings.TrimSpace(errs.String()))
	}
	return out.String(), nil
}

// command is run, where an error is the test's failure.
func command(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := run(nil, name, args...)
	if err != nil {
		t.Fatalf("$%s: %v", name, err)
	}
	return out
}

// login runs a shell command line on the login machine as the HPC user, and
// gives back what it prints, without the last newlines.
func login(t testing.TB, line string) string {
	t.Helper()
	return strings.TrimRight(command(t, "KNOC_LOGIN", line), "\n")
}

func loginRoot(t testing.TB, line string) string {
	t.Helper()
	return strings.TrimRight(command(t, "KNOC_LOGIN_ROOT", line), "\n")
}

func tryKubectl(stdin []byte, args ...string) (string, error) {
	return execute(stdin, "kubectl", args...)
}

func kubectl(t testing.TB, args ...string) string {
	t.Helper()
	out, err := tryKubectl(nil, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// until waits until done answers true; it asks every half second.
func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	if !inTime(done) {
		t.Fatalf("waited %v: %s", limit, what)
	}
}

// inTime is until for a caller that has more to say when it was in vain.
func inTime(done func() bool) bool {
	for end := time.Now().Add(limit); !done(); time.Sleep(500 * time.Millisecond) {
		if time.Now().After(end) {
			return false
		}
	}
	return true
}

func env(name string) string { return os.Getenv(name) }

func accounting() bool { return env("KNOC_ACCOUNTING") != "none" }
