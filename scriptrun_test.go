package knoc

import (
	"bytes"
	"crypto/sha256"
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

	v1 "k8s.io/api/core/v1"
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
case $1 in
--quiet | --silent) ;;
sif)
	case $2 in
	list) echo " 2    |1       |NONE    |32227-36450               |JSON.Generic"; echo "3 |1 |NONE |3-4|JSON.Generic"; echo "4 |1 |NONE |4-5|FS (Squashfs)" ;;
	dump) [ "$3" != 2 ] && cat ../../config || echo '{"data":{"Cmd":["wrong"]}}' ;;
	esac
	exit
	;;
*) exit 250 ;;
esac
action=$2
shift 2
if [ "$action" = pull ]; then
	[ "$1" != --no-https ] || shift
	case $2 in
	*/missing) echo "no such image" >&2; exit 255 ;;
	*/flaky) [ -e ../tried ] || { : >../tried; exit 255; } ;;
	*/slow) echo pulling; exec sleep 100 ;;
	*/big)
		case $APPTAINER_TMPDIR in */room) ;; *) echo "FATAL: no space left on device" >&2; exit 255 ;; esac
		;;
	esac
	[ -d "$APPTAINER_CACHEDIR" ] && [ ! -e "$1" ] || { echo "two pulls at once" >&2; exit 250; }
	echo "$2" >>../../pulls
	mkdir -p "$APPTAINER_CACHEDIR/cache/blob"
	hex=$(echo "$2" | sha256sum)
	printf '{\n "manifests": [\n  {\n  "digest": "sha256:%s"\n }]}' "${hex%% *}" >"$APPTAINER_CACHEDIR/cache/blob/index.json"
	exec sleep 0.2 9>"$1"
fi
while :; do
	case $1 in
	--writable-tmpfs)
		export KNOC_TEST_TMPFS=1
		shift
		;;
	--overlay)
		export KNOC_TEST_ROOT="$2"
		shift 2
		;;
	--mount)
		case $2 in
		*,destination=/dev) dev=${2#*source=} && export KNOC_TEST_DEV="${dev%,*}" ;;
		*/msg/*,destination=/dev/*) message=${2#*source=} && export KNOC_TEST_MESSAGE="${message%,*}" ;;
		esac
		shift 2
		;;
	--pwd | --hostname | --workdir | --no-mount | --home | --security | --add-caps | --drop-caps) shift 2 ;;
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

// stubCurl stands in for the curl that asks a registry for the digest of a reference:
// it is that in the file digest, or else nobody answers. Others get the real one.
const stubCurl = `#!/bin/sh
for url; do :; done
case $url in
*/v2/*/manifests/*)
	echo "$url" >>../../asked
	[ -s ../../digest ] || exit 6
	printf 'HTTP/1.1 200 OK\r\nDocker-Content-Digest: sha256:%s\r\n\r\n' "$(cat ../../digest)"
	exit
	;;
esac
PATH=${PATH#*:}
exec curl "$@"
`

// stubEnter stands in for run/enter.sh: it runs the program on this machine.
const stubEnter = `#!/bin/sh
read -r pid <"run/$1"
[ -n "$pid" ] && [ -e up ] || [ ! -e late ] || { echo "knoc: container $1 is not running: it has not started yet"; exit 125; }
shift 2
exec "$@"
`

// base is a pods' directory on a cluster that is this machine. The runtime there
// has the image busybox in its cache, which shContainer asks for.
type base struct{ dir, bin string }

func newBase(t *testing.T) base {
	t.Helper()
	b := base{dir: filepath.Join(t.TempDir(), "node")}
	b.bin = filepath.Join(b.dir, "bin")
	for _, d := range []string{"bin", "changed", "../images"} {
		if err := os.MkdirAll(filepath.Join(b.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	b.cached(t, "busybox")
	writeProgram(t, filepath.Join(b.bin, "apptainer"), stubRuntime)
	writeProgram(t, filepath.Join(b.bin, "curl"), stubCurl)
	return b
}

// cached puts an image into the cache, and returns its digest.
func (b base) cached(t *testing.T, image string) string {
	t.Helper()
	src, err := findImage(image, nil)
	if err != nil {
		t.Fatal(err)
	}
	hex := fmt.Sprintf("%x", sha256.Sum256([]byte(image)))
	for name, text := range map[string]string{"sha256." + hex + ".sif": "", "ref." + src.key(nil): "# " + image + "\nhex=" + hex + " kind=manifest size=1048576\naction=exec\n"} {
		if err := os.WriteFile(filepath.Join(b.dir, "../images", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return hex
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
	return v1.Container{Name: name, Image: "busybox", ImagePullPolicy: v1.PullIfNotPresent, Command: append([]string{"sh", "-c", script, name}, args...)}
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
	return stageScriptWith(t, b, pod, env, scriptConfig{})
}

func stageScriptWith(t *testing.T, b base, pod *v1.Pod, env map[string][]envVar, cfg scriptConfig) *scriptRun {
	t.Helper()
	w := &scriptRun{t: t, base: b, dir: filepath.Join(b.dir, string(pod.UID))}
	for _, d := range []string{"env", "cmd", "run", "msg", "vol"} {
		if err := os.MkdirAll(filepath.Join(w.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	cfg.Dir, cfg.BackoffSeconds = w.dir, 1
	s, err := newPodScript(pod, cfg)
	if err != nil {
		t.Fatal(err)
	}
	text, err := s.render()
	if err != nil {
		t.Fatal(err)
	}
	w.write("pod.sh", text)
	w.write("run/enter.sh", stubEnter)
	pull, err := render("pull.sh.tmpl", newPullScript("apptainer", 0))
	if err != nil {
		t.Fatal(err)
	}
	w.write("run/pull.sh", pull)
	if s.Places() {
		if text, err = render("places.sh.tmpl", s); err != nil {
			t.Fatal(err)
		}
		w.write("run/places.sh", text)
		for _, v := range pod.Spec.Volumes {
			if err := os.MkdirAll(filepath.Join(w.dir, "vol", v.Name), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range allContainers(pod) {
		data, err := envFile(env[c.Name], "", isMapped(pod))
		if err != nil {
			t.Fatal(err)
		}
		w.write("env/"+c.Name, string(data))
		helpers, err := envHelpers(data)
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range helpers {
			w.write(h.Name, string(h.Body))
		}
	}
	return w
}

func (w *scriptRun) write(name, text string) {
	w.t.Helper()
	writeProgram(w.t, filepath.Join(w.dir, name), text)
}

func (w *scriptRun) read(name string) string {
	data, _ := os.ReadFile(filepath.Join(w.dir, name))
	return string(data)
}

// patch changes the script: text that must be in it.
func (w *scriptRun) patch(old, new string) {
	w.t.Helper()
	text := w.read("pod.sh")
	if !strings.Contains(text, old) {
		w.t.Fatalf("the script has no %q", old)
	}
	w.write("pod.sh", strings.ReplaceAll(text, old, new))
}

// hurry injects a clock that runs so many times faster, and sleeps that fit it.
func (w *scriptRun) hurry(times int) {
	w.t.Helper()
	w.patch("clock=${clock%.*}${clock#*.}", fmt.Sprintf("clock=${clock%%.*}${clock#*.}; clock=$((clock * %d))", times))
	w.patch("\nPATH=", fmt.Sprintf(`
sleep() { # for the shell's own: it is always run by itself in the background
	set -- $(($1 * 1000 / %d))
	fraction=00$(($1 %% 1000))
	exec env sleep $(($1 / 1000)).${fraction#"${fraction%%???}"}
}
PATH=`, times))
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
		if time.Since(since) > 30*time.Second {
			w.t.Fatalf("the script left processes behind:\n%s\njournal:\n%s", strings.Join(left, "\n"), w.read("journal.0"))
		}
	}
	return w.cmd.ProcessState.ExitCode()
}

// processes are those of a process group, as lines of /proc/PID/stat and the command line; a zombie
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
			line, _ := os.ReadFile(strings.TrimSuffix(name, "stat") + "cmdline")
			found = append(found, string(stat)+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return found
}

// facts are the journal's lines without time, claim, host and digests. Every line must be
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
		if i == 0 && e.Word == "claim" || i == 1 && e.Word == "host" || e.Word == "digest" {
			continue
		}
		facts = append(facts, strings.Join(append([]string{e.Word}, e.Args...), " "))
	}
	return facts
}

// await waits for a fact.
func (w *scriptRun) await(fact string) {
	w.t.Helper()
	w.until(fact, func() bool { return strings.Contains(w.read("journal.0"), " "+fact+"\n") })
}

// awaitLog waits for text in a container's log: the program itself is running
// then, not only the shell that becomes it.
func (w *scriptRun) awaitLog(log, text string) {
	w.t.Helper()
	w.until("in log "+log+": "+text, func() bool { return strings.Contains(w.read("log/"+log), text) })
}

func (w *scriptRun) until(what string, done func() bool) {
	w.t.Helper()
	for since := time.Now(); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Since(since) > 30*time.Second {
			w.t.Fatalf("waited in vain for %q; journal:\n%s\nstderr: %s", what, w.read("journal.0"), w.stderr.String())
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

// eachShell runs a test under every shell that KNOC_TEST_SHELLS names, all at once;
// without it under sh alone, so that go test takes less than a minute. The goldens
// run under all shells that there are (testShells) in any case.
func eachShell(t *testing.T, test func(t *testing.T, shell []string)) {
	shells := testShells(t)
	if os.Getenv("KNOC_TEST_SHELLS") == "" {
		shells = [][]string{{"sh"}}
	}
	for _, shell := range shells {
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
