package knoc

import (
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
	"sigs.k8s.io/yaml"
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
		{"no such program", v1.RestartPolicyNever, []v1.Container{{Name: "a", Image: "busybox", ImagePullPolicy: v1.PullIfNotPresent, Command: []string{"/nonexistent/program"}}},
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

// A log's index has its size when it was last written to.
func TestPodScriptLogIndex(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever,
			shContainer("a", "echo one; sleep 4; printf two"), shContainer("quiet", "sleep 4")), nil)
		began := time.Now().Unix()
		w.start(shell, "7")
		if code := w.end(); code != 0 {
			t.Errorf("exit code %d, want 0; stderr: %s", code, w.stderr.String())
		}
		var marks []logMark
		index := &logStamps{}
		if err := index.learn([]byte(w.read("log/a.0.at"))); err != nil {
			t.Fatal(err)
		}
		marks = index.marks
		if len(marks) != 2 || marks[0].size != 4 || marks[1].size != 7 ||
			marks[0].seconds < began || marks[1].seconds-marks[0].seconds < 3 || marks[1].seconds > time.Now().Unix() {
			t.Errorf("the job began at %d, its log's index is %q", began, w.read("log/a.0.at"))
		}
		if got := w.read("log/quiet.0.at"); got != "" {
			t.Errorf("the index of a log without a line is %q", got)
		}
	})
}

// Signals that were ignored when a shell started stay so, whatever it traps: a
// slurmd that was started with nohup makes such jobs.
func TestPodScriptNohup(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, shContainer("a", "sleep 0.2")), nil)
		began := time.Now()
		w.start(append([]string{"nohup"}, shell...), "7")
		if code := w.end(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		if took := time.Since(began); took > 4*time.Second {
			t.Errorf("it took %v to end", took)
		}
	})
}

// Files of knoc's own in run/ have names that no container can have.
func TestPodScriptOwnFiles(t *testing.T) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		var containers []v1.Container
		want := []string{"done 0"}
		for _, name := range []string{"enter", "hosts", "pod", "probe", "stop"} {
			containers = append(containers, shContainer(name, "sleep 0.3"))
			want = append(want, "exit "+name+" 0 0", "start "+name+" 0")
		}
		w := stageScript(t, newBase(t), scriptPod(v1.RestartPolicyNever, containers...), nil)
		w.write("run/enter.sh", stubEnter)
		w.start(shell, "7")
		if code := w.end(); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		got := w.facts("journal.0")
		slices.Sort(got)
		slices.Sort(want)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("journal, sorted (-want +got):\n%s", diff)
		}
		if w.read("run/enter.sh") != stubEnter {
			t.Error("a container's name has spoilt run/enter.sh")
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
		// what the first run left does not matter, and journals and attempts are apart.
		w.write("run/pod.stop", "30\n")
		w.write("run/a", "1\n")
		for restart := range 2 {
			w.start(shell, "6", fmt.Sprintf("SLURM_RESTART_COUNT=%d", restart))
			if code := w.end(); code != 0 {
				t.Errorf("exit code %d, want 0; stderr: %s", code, w.stderr.String())
			}
			want := []string{fmt.Sprintf("start a %d", restart), fmt.Sprintf("exit a %d 0", restart), "done 0"}
			if diff := cmp.Diff(want, w.facts(fmt.Sprintf("journal.%d", restart))); diff != "" {
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

func signalled(name string, s v1.Signal, script string) v1.Container {
	c := shContainer(name, script)
	c.Lifecycle = &v1.Lifecycle{StopSignal: &s}
	return c
}

func TestStopNumber(t *testing.T) {
	t.Parallel()
	for s, want := range map[v1.Signal]int{"SIGTERM": 15, "SIGUSR1": 10, "SIGRTMIN+1": 35, "SIGRTMIN+15": 49, "SIGRTMAX-14": 50, "SIGRTMAX-1": 63, "SIGRTMAX": 64, "SIGSTOP": 0, "SIGCHLD": 0, "SIGRTMIN+16": 0, "SIGRTMAX-15": 0, "SIGRTMIN+-1": 0, "; id": 0, "": 0} {
		if got := stopNumber(s); got != want {
			t.Errorf("%s is %d, want %d", s, got, want)
		}
	}
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
		}, []string{"start a 0", "stopping 30", "kill a 0 stop 30", "exit a 0 4", "done 1"}, 5 * time.Second},
		{"a signal of its own", []v1.Container{signalled("a", "SIGUSR1", strings.ReplaceAll(untilTerm, "TERM", "USR1"))}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
		}, []string{"start a 0", "stopping 30", "kill a 0 stop 30", "exit a 0 4", "done 1"}, 5 * time.Second},
		{"at once", []v1.Container{signalled("a", "SIGKILL", "trap '' TERM; echo up; while :; do sleep 0.1; done")}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
		}, []string{"start a 0", "stopping 30", "kill a 0 stop 30", "exit a 0 137", "done 1"}, 5 * time.Second},
		{"scancel to every process", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			syscall.Kill(-w.cmd.Process.Pid, syscall.SIGTERM)
		}, nil, 5 * time.Second},
		{"command and wake-up", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 20")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 20", "ack 0000000001", "kill a 0 stop 20", "exit a 0 4", "done 1"}, 5 * time.Second},
		{"command without wake-up", []v1.Container{shContainer("a", untilTerm)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 20")
		}, []string{"start a 0", "stopping 20", "ack 0000000001", "kill a 0 stop 20", "exit a 0 4", "done 1"}, 9 * time.Second},
		{"kill after the grace period", []v1.Container{shContainer("a", `trap '' TERM; sh -c "`+ignoreAll+`"; exit $?`)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 1")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 1", "ack 0000000001", "kill a 0 stop 1", "exit a 0 137", "done 1"}, 6 * time.Second},
		{"no grace period but the two seconds that TERM always has", []v1.Container{shContainer("a", ignoreAll)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.command(1, "stop - 0")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 0", "ack 0000000001", "kill a 0 stop 0", "exit a 0 137", "done 1"}, 5 * time.Second},
		{"shorter then longer", []v1.Container{shContainer("a", ignoreAll)}, func(w *scriptRun) {
			w.awaitLog("a.0", "up")
			w.signal(syscall.SIGTERM)
			w.await("kill a 0 stop 30")
			w.command(3, "stop - 1")
			w.command(4, "stop - 50")
			w.signal(syscall.SIGUSR1)
		}, []string{"start a 0", "stopping 30", "kill a 0 stop 30", "stopping 1", "ack 0000000003", "ack 0000000004", "exit a 0 137", "done 1"}, 6 * time.Second},
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
		}, []string{"start a 0", "stopping 20", "ack 0000000010", "kill a 0 stop 20", "exit a 0 4", "done 1"}, 6 * time.Second},
		{"in the init phase", []v1.Container{shContainer("i1", untilTerm), shContainer("i2", ":"), shContainer("a", ":")}, func(w *scriptRun) {
			w.awaitLog("i1.0", "up")
			w.signal(syscall.SIGTERM)
		}, []string{"start i1 0", "stopping 30", "kill i1 0 stop 30", "exit i1 0 4", "done 1"}, 5 * time.Second},
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
		const secret = "a value of the environment"
		var vars []envVar
		for i, text := range hostileTexts {
			// The API reads $$ and $(VAR) in args; $$ is how to write $.
			pod.Spec.Containers[0].Args = append(pod.Spec.Containers[0].Args, strings.ReplaceAll(text, "$", "$$"))
			vars = append(vars, envVar{Name: fmt.Sprintf("V%d", i), Value: literal(text, true)})
			pod.Spec.Containers[1].Command[2] += fmt.Sprintf("printf '%%s\\0' \"${APPTAINERENV_V%d-$V%[1]d}\"\n", i)
			pod.Spec.Containers[2].Args = append(pod.Spec.Containers[2].Args, fmt.Sprintf("$(V%d)", i))
		}
		vars = append(vars, envVar{Name: "SECRET", Value: literal(secret, true)})
		vars = append(vars, envVar{Name: "IP", Value: []valuePart{{Text: "http://"}, {Var: varPodIP}, {Text: "/'"}}})
		pod.Spec.Containers[1].Command[2] = strings.ReplaceAll(pod.Spec.Containers[1].Command[2], "$", "$$")
		pod.Spec.Containers[1].Command[2] += "printf '%s\\0' \"$$APPTAINERENV_IP\" \"$${APPTAINERENV_INHERITED-none}$${https_proxy-}$${TERM-}\" \"$$APPTAINER_CACHEDIR\"\n"
		pod.Spec.Containers[2].Args = append(pod.Spec.Containers[2].Args, "$(NONE) $$(V1) <$(V4)> $(V4", "$(a.b)$", "$(SECRET)")

		w := stageScript(t, newBase(t), pod, map[string][]envVar{"env": vars, "refs": vars})
		if strings.Contains(w.read("pod.sh"), secret) {
			t.Fatal("a value of the environment is in the script")
		}
		w.start(shell, "7", "APPTAINERENV_INHERITED=x\nexport APPTAINER_y='", "https_proxy=http://p", "TERM=x", "SINGULARITY_BIND=/etc", "APPTAINER_CACHEDIR=/cache")
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
			"refs": append(slices.Clone(hostileTexts), "$(NONE) $(V1) <it's> $(V4", "$(a.b)$", secret),
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
		render := func(dir, withoutSubIDs string) string {
			s, err := newPodScript(pod, scriptConfig{Dir: dir, Options: options, InsecureRegistries: []string{"10.77.0.1:5000"}, WithoutSubIDs: withoutSubIDs, UsageSeconds: 15})
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
		text := render("/home/user/.knoc/knoc-c1/"+string(pod.UID), "")
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
				if isTrue(pod.Spec.ShareProcessNamespace) {
					needNamespaces(t)
				}
				b := newBase(t)
				w := stageScript(t, b, pod, nil)
				// This machine may have no subordinate ids, and has no image files.
				w.write("pod.sh", strings.ReplaceAll(render(w.dir, idsIgnore), "sif='/apps/images/main.sif'", "sif=pod.sh"))
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
		{"image", func(p *v1.Pod) { p.Spec.Containers[0].Image = "Busy Box" }, scriptConfig{Dir: "/d"}, "InvalidImageName: Failed to apply default image tag"},
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
