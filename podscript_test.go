package knoc

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// Most of these tests wait for sleeps: two at a time, as on a machine of two
// cores by default, would take minutes. An explicit -parallel comes later and wins.
func init() {
	testing.Init()
	flag.Set("test.parallel", "12")
}

var update = flag.Bool("update", false, "write the golden files of testdata/pods")

// testShells are the shells that scripts must work with, of those the machine
// has: at least sh. KNOC_TEST_SHELLS names the ones that must be there.
func testShells(t testing.TB) [][]string {
	t.Helper()
	names, required := strings.Fields(os.Getenv("KNOC_TEST_SHELLS")), true
	if len(names) == 0 {
		names, required = []string{"dash", "bash", "busybox", "sh"}, false
	}
	var shells [][]string
	seen := map[string]bool{}
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			if required || name == "sh" {
				t.Fatalf("the tests run scripts under %s, which is not installed: %v", name, err)
			}
			continue
		}
		// sh is often one of the others by another name.
		if path, err = filepath.EvalSymlinks(path); err != nil || seen[path] {
			continue
		}
		seen[path] = true
		if name == "busybox" {
			shells = append(shells, []string{name, "sh"})
		} else {
			shells = append(shells, []string{name})
		}
	}
	return shells
}

// stubRuntime stands in for apptainer: it runs the program on this machine, or
// for an image's own program prints the image. Its options are those that
// runtimeArgv writes.
const stubRuntime = `#!/bin/sh
[ "$1" = --quiet ] || exit 250
action=$2
shift 2
if [ "$action" = pull ]; then
	for image; do :; done
	case $image in */missing) echo "no such image" >&2; exit 255 ;; */slow) echo pulling; exec sleep 100 ;; esac
	[ "$(ls ../images/lock)" = "" ] || echo "two pulls at once"
	echo "$image" >>../pulls
	: >../images/lock/image
	exec sleep 0.2
fi
while :; do
	case $1 in
	--pwd | --mount) shift 2 ;;
	--*) shift ;;
	*) break ;;
	esac
done
image=$1
shift
case $action in
exec) exec "$@" ;;
run) echo "run $image $*" ;;
esac
`

// base is a pods' directory on a cluster that is this machine.
type base struct{ dir, bin string }

func newBase(t *testing.T) base {
	t.Helper()
	b := base{dir: t.TempDir()}
	b.bin = filepath.Join(b.dir, "bin")
	for _, d := range []string{"bin", "changed"} {
		if err := os.Mkdir(filepath.Join(b.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(b.bin, "apptainer"), []byte(stubRuntime), 0o700); err != nil {
		t.Fatal(err)
	}
	return b
}

// scriptPod has the containers given, of which those named i… are init containers.
func scriptPod(policy v1.RestartPolicy, containers ...v1.Container) *v1.Pod {
	grace := int64(30)
	pod := &v1.Pod{}
	pod.Namespace, pod.Name, pod.UID = "default", "test", "0b9f4b2e-0001"
	pod.Spec.RestartPolicy = policy
	pod.Spec.TerminationGracePeriodSeconds = &grace
	for _, c := range containers {
		if strings.HasPrefix(c.Name, "i") {
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
		} else {
			pod.Spec.Containers = append(pod.Spec.Containers, c)
		}
	}
	return pod
}

func shContainer(name, script string, args ...string) v1.Container {
	return v1.Container{Name: name, Image: "busybox", Command: append([]string{"sh", "-c", script, name}, args...)}
}

// scriptRun is a pod's directory, and its script while it runs.
type scriptRun struct {
	t      *testing.T
	base   base
	dir    string
	stderr bytes.Buffer
	cmd    *exec.Cmd
}

// stageScript writes the directory of a pod.
func stageScript(t *testing.T, b base, pod *v1.Pod, env map[string][]envVar) *scriptRun {
	t.Helper()
	w := &scriptRun{t: t, base: b, dir: filepath.Join(b.dir, string(pod.UID))}
	for _, d := range []string{"env", "cmd", "run"} {
		if err := os.MkdirAll(filepath.Join(w.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	s, err := newPodScript(pod, scriptConfig{Dir: w.dir, BackoffSeconds: 1})
	if err != nil {
		t.Fatal(err)
	}
	text, err := s.render()
	if err != nil {
		t.Fatal(err)
	}
	w.write("pod.sh", text)
	for _, c := range allContainers(pod) {
		data, err := envFile(env[c.Name], "")
		if err != nil {
			t.Fatal(err)
		}
		w.write("env/"+c.Name, string(data))
	}
	return w
}

func (w *scriptRun) write(name, text string) {
	w.t.Helper()
	if err := os.WriteFile(filepath.Join(w.dir, name), []byte(text), 0o700); err != nil {
		w.t.Fatal(err)
	}
}

func (w *scriptRun) read(name string) string {
	data, _ := os.ReadFile(filepath.Join(w.dir, name))
	return string(data)
}

// start runs the script as a job of that id, in a process group of its own.
func (w *scriptRun) start(shell []string, job string, env ...string) {
	w.t.Helper()
	w.cmd = exec.Command(shell[0], append(slices.Clone(shell[1:]), filepath.Join(w.dir, "pod.sh"))...)
	w.cmd.Env = append(os.Environ(), "PATH="+w.base.bin+":"+os.Getenv("PATH"), "SLURM_JOB_ID="+job)
	w.cmd.Env = append(w.cmd.Env, env...)
	w.cmd.Stderr = &w.stderr
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := w.cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { syscall.Kill(-w.cmd.Process.Pid, syscall.SIGKILL) })
}

// end waits for the script and returns its exit code. It must leave no process.
func (w *scriptRun) end() int {
	w.t.Helper()
	done := make(chan error, 1)
	go func() { done <- w.cmd.Wait() }()
	select {
	case <-done:
	case <-time.After(60 * time.Second):
		w.t.Fatalf("the script does not end; journal:\n%s\nstderr: %s", w.read("journal.0"), w.stderr.String())
	}
	for since := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		left := processes(w.t, w.cmd.Process.Pid)
		if len(left) == 0 {
			break
		}
		if time.Since(since) > 2*time.Second {
			w.t.Fatalf("the script left processes behind:\n%s", strings.Join(left, "\n"))
		}
	}
	return w.cmd.ProcessState.ExitCode()
}

// processes are those of a process group, as lines of /proc/PID/stat; a zombie
// is no process, only its parent's to ask for.
func processes(t *testing.T, group int) (found []string) {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range stats {
		stat, _ := os.ReadFile(name)
		f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // state, parent, group
		if len(f) > 2 && f[0] != "Z" && f[2] == fmt.Sprint(group) {
			found = append(found, string(stat))
		}
	}
	return found
}

// facts are the journal's lines without time, claim and host. Every line must be
// one that the provider understands.
func (w *scriptRun) facts(journal string) []string {
	w.t.Helper()
	text := w.read(journal)
	events := parseJournal([]byte(text))
	if n := strings.Count(text, "\n"); n != len(events) || text != "" && !strings.HasSuffix(text, "\n") {
		w.t.Fatalf("%d lines in the journal, %d are events:\n%s", n, len(events), text)
	}
	var facts []string
	for i, e := range events {
		if i == 0 && e.Word == "claim" || i == 1 && e.Word == "host" {
			continue
		}
		facts = append(facts, strings.Join(append([]string{e.Word}, e.Args...), " "))
	}
	return facts
}

// await waits for a fact.
func (w *scriptRun) await(fact string) {
	w.t.Helper()
	for since := time.Now(); !strings.Contains(w.read("journal.0"), " "+fact+"\n"); time.Sleep(5 * time.Millisecond) {
		if time.Since(since) > 30*time.Second {
			w.t.Fatalf("no %q in the journal:\n%s\nstderr: %s", fact, w.read("journal.0"), w.stderr.String())
		}
	}
}

// awaitLog waits for text in a container's log: the program itself is running
// then, not only the shell that becomes it.
func (w *scriptRun) awaitLog(log, text string) {
	w.t.Helper()
	for since := time.Now(); !strings.Contains(w.read("log/"+log), text); time.Sleep(5 * time.Millisecond) {
		if time.Since(since) > 30*time.Second {
			w.t.Fatalf("no %q in log %s: %q", text, log, w.read("log/"+log))
		}
	}
}

// command leaves a command as the provider does, by rename.
func (w *scriptRun) command(seq int, line string) {
	w.t.Helper()
	w.write("cmd/.new", line+"\n")
	if err := os.Rename(filepath.Join(w.dir, "cmd/.new"), filepath.Join(w.dir, fmt.Sprintf("cmd/%010d", seq))); err != nil {
		w.t.Fatal(err)
	}
}

func (w *scriptRun) signal(s syscall.Signal) {
	w.t.Helper()
	if err := w.cmd.Process.Signal(s); err != nil {
		w.t.Fatal(err)
	}
}

// eachShell runs a test under every shell, all at once.
func eachShell(t *testing.T, test func(t *testing.T, shell []string)) {
	for _, shell := range testShells(t) {
		t.Run(shell[0], func(t *testing.T) {
			t.Parallel()
			test(t, shell)
		})
	}
}

const (
	untilTerm = `trap 'echo bye; exit 4' TERM; echo up; while :; do sleep 0.1; done`
	ignoreAll = `trap '' TERM; echo up; while :; do sleep 0.1; done`
)

func TestPodScript(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name       string
		policy     v1.RestartPolicy
		containers []v1.Container
		want       []string // in this order, if all comes from one shell
		exit       int
	}{
		{"ok", v1.RestartPolicyNever, []v1.Container{shContainer("a", "exit 0")},
			[]string{"start a 0", "exit a 0 0", "done 0"}, 0},
		{"code", v1.RestartPolicyNever, []v1.Container{shContainer("a", "exit 3")},
			[]string{"start a 0", "exit a 0 3", "done 1"}, 1},
		{"killed", v1.RestartPolicyNever, []v1.Container{shContainer("a", "kill -9 $$$$")},
			[]string{"start a 0", "exit a 0 137", "done 1"}, 1},
		{"no such program", v1.RestartPolicyNever, []v1.Container{{Name: "a", Image: "busybox", Command: []string{"/nonexistent/program"}}},
			[]string{"start a 0", "exit a 0 127", "done 1"}, 1},
		{"init order", v1.RestartPolicyNever, []v1.Container{shContainer("i1", "sleep 0.2"), shContainer("i2", ":"), shContainer("a", ":")},
			[]string{"start i1 0", "exit i1 0 0", "start i2 0", "exit i2 0 0", "start a 0", "exit a 0 0", "done 0"}, 0},
		{"init failure", v1.RestartPolicyNever, []v1.Container{shContainer("i1", "exit 7"), shContainer("i2", ":"), shContainer("a", ":")},
			[]string{"start i1 0", "exit i1 0 7", "done 1"}, 1},
		{"init retried", v1.RestartPolicyOnFailure, []v1.Container{shContainer("i1", `[ -e tried ] || { : >tried; exit 7; }`), shContainer("a", ":")},
			[]string{"start i1 0", "exit i1 0 7", "backoff i1 0 1", "start i1 1", "exit i1 1 0", "start a 0", "exit a 0 0", "done 0"}, 0},
		{"on failure", v1.RestartPolicyOnFailure, []v1.Container{shContainer("a", `echo x >>tries; [ "$(wc -l <tries)" = 3 ] || exit 5`)},
			[]string{"start a 0", "exit a 0 5", "backoff a 0 1", "start a 1", "exit a 1 5", "backoff a 1 2", "start a 2", "exit a 2 0", "done 0"}, 0},
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range tests {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				w := stageScript(t, newBase(t), scriptPod(tc.policy, tc.containers...), nil)
				w.start(shell, "7")
				if code := w.end(); code != tc.exit {
					t.Errorf("exit code %d, want %d; stderr: %s", code, tc.exit, w.stderr.String())
				}
				if diff := cmp.Diff(tc.want, w.facts("journal.0")); diff != "" {
					t.Errorf("journal (-want +got):\n%s\nstderr: %s", diff, w.stderr.String())
				}
			})
		}
	})
}

func TestPodScriptSideBySide(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		// Each waits for the other, so they end only if both run at once.
		meet := `: >"$0.up"; until [ -e "$1.up" ]; do sleep 0.05; done; exit "$2"`
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, shContainer("a", meet, "b", "0"), shContainer("b", meet, "a", "3")), nil)
		w.start(shell, "7")
		if code := w.end(); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
		got := w.facts("journal.0")
		slices.Sort(got)
		want := []string{"done 1", "exit a 0 0", "exit b 0 3", "start a 0", "start b 0"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("journal, sorted (-want +got):\n%s", diff)
		}
		if !strings.HasSuffix(w.read("journal.0"), " done 1\n") {
			t.Errorf("done is not the last line:\n%s", w.read("journal.0"))
		}
	})
}

func TestPodScriptHead(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		b := newBase(t)
		w := stageScript(t, b, scriptPod(v1.RestartPolicyNever, shContainer("a", `umask; echo out; echo err >&2; cat`)), nil)
		w.start(shell, "7")
		w.end()
		events := parseJournal([]byte(w.read("journal.0")))
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		if len(events) < 2 || events[0].Word != "claim" || events[0].Args[0] != "7" || events[1].Word != "host" || events[1].Args[0] != host {
			t.Fatalf("the journal does not begin with claim 7 and host %s:\n%s", host, w.read("journal.0"))
		}
		if target, err := os.Readlink(filepath.Join(w.dir, "claim")); target != "7" {
			t.Errorf("claim is %q: %v", target, err)
		}
		if got := w.read("log/a.0"); got != "0077\nout\nerr\n" {
			t.Errorf("the log is %q", got)
		}
		if got := w.read("run/a"); got != "" {
			t.Errorf("run/a of a container that ended is %q", got)
		}
		// One marker is left of each of the two writers, under a name of its last count.
		markers, err := filepath.Glob(filepath.Join(b.dir, "changed", "*"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range markers {
			markers[i] = filepath.Base(markers[i])
		}
		if diff := cmp.Diff([]string{"0b9f4b2e-0001.0-0.2", "0b9f4b2e-0001.0-1.2"}, markers); diff != "" {
			t.Errorf("markers (-want +got):\n%s", diff)
		}
	})
}

func TestPodScriptClaim(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, shContainer("a", "echo ran")), nil)
		if err := os.Symlink("6", filepath.Join(w.dir, "claim")); err != nil {
			t.Fatal(err)
		}
		w.start(shell, "7")
		if code := w.end(); code != 0 {
			t.Errorf("exit code %d of a job that another one was faster than, want 0", code)
		}
		if journal, log := w.read("journal.0"), w.read("log/a.0"); journal != "" || log != "" {
			t.Fatalf("a job without the claim ran:\n%s\n%s", journal, log)
		}
		// The job that holds the claim goes on, also when Slurm has requeued it:
		// what the first run left does not matter, and the journals are apart.
		w.write("run/stop", "30\n")
		w.write("run/a", "1\n")
		for restart := range 2 {
			w.start(shell, "6", fmt.Sprintf("SLURM_RESTART_COUNT=%d", restart))
			if code := w.end(); code != 0 {
				t.Errorf("exit code %d, want 0; stderr: %s", code, w.stderr.String())
			}
			if diff := cmp.Diff([]string{"start a 0", "exit a 0 0", "done 0"}, w.facts(fmt.Sprintf("journal.%d", restart))); diff != "" {
				t.Errorf("journal %d (-want +got):\n%s", restart, diff)
			}
		}
		// Outside of a job nothing runs.
		w = stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, shContainer("a", "echo ran")), nil)
		w.start(shell, "")
		if code := w.end(); code != 1 || !strings.Contains(w.stderr.String(), "SLURM_JOB_ID") || w.read("journal.0") != "" {
			t.Errorf("exit code %d without a job id, stderr: %s", code, w.stderr.String())
		}
	})
}

func TestPodScriptStop(t *testing.T) {
	t.Parallel()
	always := v1.RestartPolicyAlways
	tests := []struct {
		name       string
		containers []v1.Container
		do         func(w *scriptRun)
		want       []string
		most       time.Duration // from do to the end
	}{
		{"scancel", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
		}, []string{"start a 0", "stopping 30", "exit a 0 4", "done 1"}, 5 * time.Second},
		{"scancel to every process", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			syscall.Kill(-w.cmd.Process.Pid, syscall.SIGTERM)
		}, nil, 5 * time.Second},
		{"command and wake-up", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 20")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 20", "ack 0000000001", "exit a 0 4", "done 1"}, 5 * time.Second},
		{"command without wake-up", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 20")
		}, []string{"start a 0", "stopping 20", "ack 0000000001", "exit a 0 4", "done 1"}, 9 * time.Second},
		{"kill after the grace period", []v1.Container{shContainer("a", `trap '' TERM; sh -c "`+ignoreAll+`"; exit $?`)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 1")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 1", "ack 0000000001", "exit a 0 137", "done 1"}, 6 * time.Second},
		{"kill at once", []v1.Container{shContainer("a", ignoreAll)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 0")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 0", "ack 0000000001", "exit a 0 137", "done 1"}, 4 * time.Second},
		{"shorter then longer", []v1.Container{shContainer("a", ignoreAll)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
			w.await("stopping 30")
			w.command(3, "stop - 1")
			w.command(4, "stop - 50")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 30", "stopping 1", "ack 0000000003", "ack 0000000004", "exit a 0 137", "done 1"}, 6 * time.Second},
		{"each command once", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(8, "dance - 1")
			w.command(9, "stop - many")
			w.write("cmd/0000000010.tmp", "stop - 5\n")
			for range 5 {
				w.signal(syscall.SIGUSR1)
			}
			time.Sleep(100 * time.Millisecond)
			w.command(10, "stop - 20")
			for range 5 {
				w.signal(syscall.SIGUSR1)
				time.Sleep(time.Millisecond)
			}
		}, []string{"start a 0", "stopping 20", "ack 0000000010", "exit a 0 4", "done 1"}, 6 * time.Second},
		{"in the init phase", []v1.Container{shContainer("i1", untilTerm), shContainer("i2", ":"), shContainer("a", ":")}, func(w *scriptRun) {
			w.awaitLog("i1.0", "up")
			w.signal(syscall.SIGTERM)
		}, []string{"start i1 0", "stopping 30", "exit i1 0 4", "done 1"}, 5 * time.Second},
		{"in a back-off", []v1.Container{shContainer("a", "exit 0")}, func(w *scriptRun) {
			w.await("backoff a 1 2")
			w.signal(syscall.SIGTERM)
		}, nil, 5 * time.Second},
	}
	eachShell(t, func(t *testing.T, shell []string) {
		for _, tc := range tests {
			t.Run(tc.name, func(t *testing.T) {
				t.Parallel()
				w := stageScript(t, newBase(t), scriptPod(always, tc.containers...), nil)
				w.start(shell, "7")
				tc.do(w)
				began := time.Now()
				w.end()
				if took := time.Since(began); took > tc.most {
					t.Errorf("it took %v to stop, want at most %v", took, tc.most)
				}
				got := w.facts("journal.0")
				if tc.want != nil {
					if diff := cmp.Diff(tc.want, got); diff != "" {
						t.Errorf("journal (-want +got):\n%s\nstderr: %s", diff, w.stderr.String())
					}
				}
				if !slices.Contains(got, "stopping 30") && tc.want == nil || !strings.HasPrefix(got[len(got)-1], "done ") {
					t.Errorf("no stop or no end in the journal: %q\nstderr: %s", got, w.stderr.String())
				}
			})
		}
	})
}

// A command that is there before the job starts is obeyed before anything runs.
func TestPodScriptStopBeforeStart(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, shContainer("a", "echo ran")), nil)
		w.command(1, "stop - 5")
		w.start(shell, "7")
		if code := w.end(); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
		if diff := cmp.Diff([]string{"stopping 5", "ack 0000000001", "done 1"}, w.facts("journal.0")); diff != "" {
			t.Errorf("journal (-want +got):\n%s", diff)
		}
	})
}

// Images come into the runtime's cache one at a time, and each one once.
func TestPodScriptFetch(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		b := newBase(t)
		var pods []*scriptRun
		for _, uid := range []string{"u1", "u2"} {
			pod := scriptPod(v1.RestartPolicyNever, shContainer("a", ":"), shContainer("b", ":"), shContainer("c", ":"))
			pod.UID = types.UID(uid)
			pod.Spec.Containers[2].Image = "r/other"
			w := stageScript(t, b, pod, nil)
			w.start(shell, "7")
			pods = append(pods, w)
		}
		for _, w := range pods {
			if code := w.end(); code != 0 {
				t.Errorf("exit code %d; stderr: %s", code, w.stderr.String())
			}
			if log := w.read("log/a.0") + w.read("log/b.0") + w.read("log/c.0"); log != "" {
				t.Errorf("logs: %s", log)
			}
		}
		pulls := strings.Fields(pods[0].read("../pulls"))
		slices.Sort(pulls)
		if diff := cmp.Diff([]string{"docker://busybox", "docker://r/other"}, pulls); diff != "" {
			t.Errorf("pulls (-want +got):\n%s", diff)
		}
		pod := scriptPod(v1.RestartPolicyNever, shContainer("a", ":"), shContainer("b", ":"))
		pod.Spec.Containers[0].Image = "r/missing"
		w := stageScript(t, b, pod, nil)
		w.start(shell, "7")
		w.end()
		if got := w.facts("journal.0"); !slices.Contains(got, "exit a 0 255") || !slices.Contains(got, "exit b 0 0") || w.read("log/a.0") != "no such image\n" {
			t.Errorf("journal %q, log %q of an image that is not there", got, w.read("log/a.0"))
		}
		// A stop ends a pull and leaves no lock.
		pod = scriptPod(v1.RestartPolicyNever, shContainer("a", ":"))
		pod.UID, pod.Spec.Containers[0].Image = "u3", "r/slow"
		w = stageScript(t, b, pod, nil)
		w.start(shell, "7")
		w.awaitLog("a.0", "pulling")
		w.signal(syscall.SIGTERM)
		w.end()
		if diff := cmp.Diff([]string{"start a 0", "stopping 30", "exit a 0 143", "done 1"}, w.facts("journal.0")); diff != "" {
			t.Errorf("journal (-want +got):\n%s", diff)
		}
		if _, err := os.Lstat(filepath.Join(b.dir, "images/lock")); err == nil {
			t.Error("the lock was left behind")
		}
	})
}

// hostileTexts are what a quoting mistake would change or run.
var hostileTexts = []string{
	"", " ", "  lead and trail  ", "a b", "it's", `'`, `''`, `"quoted"`, `\`, `a\`, `\\n`, "tab\there", "line\nbreak", "\n", "trail\n",
	"cr\r\n", "$HOME", "${HOME}", "$(touch /tmp/knoc-hostile)", "`touch /tmp/knoc-hostile`", "$$", "!", "!!", "#", "a#b", ";", "a;b", "&", "|", ">x", "<x",
	"*", "?", "[a-z]", "~", "~root", "{a,b}", "-n", "--", "--containall", "=", "a=b", ",", "é☃", "\x01\x7f", "\xff\xfe", "%s", `{"json": ["it's", "\u0041"]}`,
	"'; touch /tmp/knoc-hostile; '", "\n#SBATCH --uid=0\n", "EOF", strings.Repeat("x'y ", 2000),
}

func TestPodScriptHostile(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		print := `for a; do printf '%s\0' "$a"; done`
		pod := scriptPod(v1.RestartPolicyNever, shContainer("args", print), shContainer("env", ""), shContainer("refs", print))
		var vars []envVar
		for i, text := range hostileTexts {
			// The API reads $$ and $(VAR) in args; $$ is how to write $.
			pod.Spec.Containers[0].Args = append(pod.Spec.Containers[0].Args, strings.ReplaceAll(text, "$", "$$"))
			vars = append(vars, envVar{Name: fmt.Sprintf("V%d", i), Value: literal(text, true)})
			pod.Spec.Containers[1].Command[2] += fmt.Sprintf("printf '%%s\\0' \"$APPTAINERENV_V%d\"\n", i)
			pod.Spec.Containers[2].Args = append(pod.Spec.Containers[2].Args, fmt.Sprintf("$(V%d)", i))
		}
		vars = append(vars, envVar{Name: "SECRET", Value: literal(`{"json" of the environment}`, true)})
		vars = append(vars, envVar{Name: "IP", Value: []valuePart{{Text: "http://"}, {Var: varPodIP}, {Text: "/'"}}})
		pod.Spec.Containers[1].Command[2] = strings.ReplaceAll(pod.Spec.Containers[1].Command[2], "$", "$$")
		pod.Spec.Containers[1].Command[2] += "printf '%s\\0' \"$$APPTAINERENV_IP\" \"$${APPTAINERENV_INHERITED-none}\" \"$$APPTAINER_CACHEDIR\"\n"
		pod.Spec.Containers[2].Args = append(pod.Spec.Containers[2].Args, "$(NONE) $$(V1) <$(V4)> $(V4", "$(a.b)$")

		w := stageScript(t, newBase(t), pod, map[string][]envVar{"env": vars, "refs": vars})
		if strings.Contains(w.read("pod.sh"), `{"json"`+" of the environment") {
			t.Fatal("a value of the environment is in the script")
		}
		w.start(shell, "7", "APPTAINERENV_INHERITED=x\nexport APPTAINER_y='", "SINGULARITY_BIND=/etc", "APPTAINER_CACHEDIR=/cache")
		if code := w.end(); code != 0 {
			t.Fatalf("exit code %d; stderr: %s; logs: %s %s", code, w.stderr.String(), w.read("log/args.0"), w.read("log/env.0"))
		}
		ip := "http:///'"
		for _, e := range parseJournal([]byte(w.read("journal.0"))) {
			if e.Word == "host" && len(e.Args) > 1 {
				ip = "http://" + e.Args[1] + "/'"
			}
		}
		for log, want := range map[string][]string{
			"args": hostileTexts,
			"env":  append(slices.Clone(hostileTexts), ip, "none", "/cache"),
			"refs": append(slices.Clone(hostileTexts), "$(NONE) $(V1) <it's> $(V4", "$(a.b)$"),
		} {
			got := strings.Split(strings.TrimSuffix(w.read("log/"+log+".0"), "\x00"), "\x00")
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s arrived otherwise (-want +got):\n%s", log, diff)
			}
		}
		if _, err := os.Lstat("/tmp/knoc-hostile"); err == nil {
			t.Fatal("text was executed")
		}
	})
}

// TestPodGoldens shows what becomes of a pod: testdata/pods/NAME.yaml is
// rendered to NAME.sh. Each is parsed and executed under every shell.
func TestPodGoldens(t *testing.T) {
	t.Parallel()
	names, err := filepath.Glob("testdata/pods/*.yaml")
	if err != nil || len(names) == 0 {
		t.Fatalf("no testdata/pods/*.yaml: %v", err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		pod := &v1.Pod{}
		if err := yaml.UnmarshalStrict(data, pod); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := checkPod(pod); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		options, err := sbatchOptions(pod, "batch")
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		render := func(dir string) string {
			s, err := newPodScript(pod, scriptConfig{Dir: dir, Options: options, InsecureRegistries: []string{"10.77.0.1:5000"}})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			text, err := s.render()
			if err != nil {
				t.Fatal(err)
			}
			return text
		}
		golden := strings.TrimSuffix(name, ".yaml") + ".sh"
		text := render("/home/user/.knoc/knoc-c1/" + string(pod.UID))
		if *update {
			if err := os.WriteFile(golden, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatalf("%v (go test -run Goldens -update writes it)", err)
		}
		if diff := cmp.Diff(string(want), text); diff != "" {
			t.Errorf("%s has changed (-want +got); go test -run Goldens -update writes it anew:\n%s", golden, diff)
		}
		for _, shell := range testShells(t) {
			t.Run(shell[0]+"/"+filepath.Base(golden), func(t *testing.T) {
				t.Parallel()
				out, err := exec.Command(shell[0], append(slices.Clone(shell[1:]), "-n", golden)...).CombinedOutput()
				if err != nil || len(out) > 0 {
					t.Fatalf("%s -n: %v\n%s", shell[0], err, out)
				}
				b := newBase(t)
				w := stageScript(t, b, pod, nil)
				w.write("pod.sh", render(w.dir))
				w.start(shell, "7")
				if code := w.end(); code != 0 {
					t.Errorf("exit code %d; stderr: %s\n%s", code, w.stderr.String(), w.read("journal.0"))
				}
				if facts := w.facts("journal.0"); facts[len(facts)-1] != "done 0" {
					t.Errorf("journal: %q", facts)
				}
			})
		}
	}
}

func TestNewPodScriptRefuses(t *testing.T) {
	t.Parallel()
	good := func() *v1.Pod { return scriptPod(v1.RestartPolicyNever, shContainer("a", ":")) }
	if _, err := newPodScript(good(), scriptConfig{Dir: "/d"}); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name string
		pod  func(*v1.Pod)
		cfg  scriptConfig
		want string
	}{
		{"relative directory", nil, scriptConfig{Dir: "d"}, `"d" is not an absolute path`},
		{"directory", nil, scriptConfig{Dir: "/d\nrm -rf /"}, "directory"},
		{"runtime", nil, scriptConfig{Dir: "/d", Runtime: "app tainer"}, "runtime"},
		{"pod name", func(p *v1.Pod) { p.Name = "a\nb" }, scriptConfig{Dir: "/d"}, "name"},
		{"container name", func(p *v1.Pod) { p.Spec.Containers[0].Name = "$(id)" }, scriptConfig{Dir: "/d"}, "container name"},
		{"policy", func(p *v1.Pod) { p.Spec.RestartPolicy = "a; b" }, scriptConfig{Dir: "/d"}, "restart policy"},
		{"two lines of options", nil, scriptConfig{Dir: "/d", Options: []string{"--mem=1M\ntouch x"}}, "is not one option"},
		{"return in options", nil, scriptConfig{Dir: "/d", Options: []string{`"--comment=a` + "\r" + `b"`}}, "is not one option"},
		{"no option", nil, scriptConfig{Dir: "/d", Options: []string{"rm -rf /"}}, "is not one option"},
		{"image", func(p *v1.Pod) { p.Spec.Containers[0].Image = "Busy Box" }, scriptConfig{Dir: "/d"}, "InvalidImageName: container a"},
	}
	for _, tc := range tests {
		pod := good()
		if tc.pod != nil {
			tc.pod(pod)
		}
		if _, err := newPodScript(pod, tc.cfg); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: error %v, want one with %q", tc.name, err, tc.want)
		}
	}
	pod := good()
	pod.Spec.Containers[0].Args = []string{"a\x00b"}
	s, err := newPodScript(pod, scriptConfig{Dir: "/d"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.render(); err == nil || !strings.Contains(err.Error(), "NUL") {
		t.Errorf("a NUL byte in args: error %v, want one that names it", err)
	}
}
