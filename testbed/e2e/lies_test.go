//go:build testbed

package e2e

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// sbatch may answer anything and the job be there, or not: each pod runs once
// all the same. The wrapper treats a pod as its name says, the first time only.
func TestSbatchThatLiesRunsEachPodOnce(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	shim(t, "sbatch", fmt.Sprintf(`
for last; do :; done
uid=${last%%/pod.sh} uid=${uid##*/}
meta=$(cat "${last%%/pod.sh}/meta")
case $meta in *'"%s"'*) ;; *) exec $real "$@" ;; esac
mkdir "${TMPDIR:-/tmp}/knoc-e2e-$uid" 2>/dev/null || exec $real "$@"
case $meta in
*'"error-but-accepted"'*)
	$real "$@" >/dev/null
	echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
	exit 1 ;;
*'"error-and-accepted-late"'*)
	# slurmctld still works off its backlog when the client has long given up
	setsid sh -c 'sleep 15; exec "$@" >/dev/null 2>&1' sh $real "$@" </dev/null >/dev/null 2>&1 &
	echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
	exit 1 ;;
*'"error-not-accepted"'*)
	echo "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)" >&2
	exit 1 ;;
*'"hangs-accepted"'*)
	$real "$@" >/dev/null
	exec sleep 3000 ;;
*'"hangs-not-accepted"'*)
	exec sleep 3000 ;;
*'"banner"'*)
	echo "Welcome to the centre! Job 3 is yours."
	exec $real "$@" ;;
*'"banner-after"'*)
	$real "$@"
	echo "4" ;;
*'"silent"'*)
	$real "$@" >/dev/null ;;
esac
`, n.name))
	var manifests []*v1.Pod
	for _, name := range []string{"error-but-accepted", "error-and-accepted-late", "error-not-accepted", "hangs-accepted", "hangs-not-accepted", "banner", "banner-after", "silent"} {
		manifests = append(manifests, n.shell(name, "sleep 2", counted))
	}
	pods := n.create(manifests...)
	for _, p := range pods {
		if p.name == "error-and-accepted-late" {
			p.jobs = 2 // of which the claim lets one run
		}
	}
	for _, p := range pods {
		p.ranOnce()
	}
}

// squeue may fail, or print anything with exit status 0: no pod changes for it.
// The wrapper lies only to the knoc that comes through the proxy.
func TestSqueueThatLiesChangesNoPod(t *testing.T) {
	t.Parallel()
	x := newProxy(t)
	startKnoc(t, "knoc-lied-to", x.args()...)
	n := newNamespaceOn(t, "knoc-lied-to")
	pods := n.create(n.shell("runs", "echo up; until [ -e /go/on ]; do sleep 0.2; done; exit 3", emptyDir("go", "/go")),
		n.shell("waits", "true", flags("--hold")))
	pods[0].await("Running", running("main"))
	pods[1].awaitJob()
	lie := func(text string) func() {
		return shim(t, "squeue", fmt.Sprintf("set -- $SSH_CONNECTION -- \"$@\"\nport=$2\nwhile [ \"$1\" != -- ]; do shift; done; shift\n[ \"${port:-0}\" -gt %d ] && [ \"$port\" -lt %d ] || exec $real \"$@\"\n%s\n", proxyPorts, proxyPorts+1000, text))
	}
	// Each call another lie, then none but the one that every job is gone, for
	// long enough to look twice.
	calls := shimDir() + "/calls"
	lie("echo >>" + calls + `; case $(($(wc -l <` + calls + `) % 4)) in
0) exit 0 ;;
1) echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1 ;;
2) echo 'Welcome to the centre!'; echo '1|PENDING'; exit 0 ;;
3) $real "$@" | head -c 40 ;;
esac`)
	until(t, "squeue to be asked a few times", func() bool {
		return strings.Count(command(t, "KNOC_LOGIN", "cat "+calls+" 2>/dev/null || true"), "\n") >= 6
	})
	lie("exit 0")
	time.Sleep(80 * time.Second)
	lie("exec $real \"$@\"")
	for i, phase := range []v1.PodPhase{"Running", "Pending"} {
		if got := pods[i].now().Status.Phase; got != phase {
			t.Errorf("pod %s is %s, want %s", pods[i].name, got, phase)
		}
	}
	login(t, "cd "+pods[0].dir()+" && touch vol/go/on && scontrol release "+pods[1].awaitJob())
	if o := pods[0].awaitPhase("Failed"); exitCode(o, "main") != 3 {
		t.Errorf("exit code is %d, want 3", exitCode(o, "main"))
	}
	pods[1].awaitPhase("Succeeded")
}

// The connection breaks at many places of the stream that stages pods, in both
// directions: each pod runs once, with all its files whole.
func TestStagingCutAnywhereRunsEachPodOnce(t *testing.T) {
	t.Parallel()
	x := newProxy(t)
	startKnoc(t, "knoc-cut-off", x.args()...)
	n := newNamespaceOn(t, "knoc-cut-off")
	var changes []func(*v1.Pod)
	var sums []string
	for i := range 4 {
		name, random := fmt.Sprintf("big-%d", i), make([]byte, 700<<10)
		for i := range random {
			random[i] = byte(rand.Uint32())
		}
		n.configMap(name, nil, map[string][]byte{"random": random})
		changes = append(changes, volume(name, "/"+name, v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: name}}}))
		sums = append(sums, fmt.Sprintf("%x  /%s/random\n", sha256.Sum256(random), name))
	}
	changes = append(changes, counted)
	var pods []*pod
	for round, cuts := range [][]cut{
		{{up: 6_000}, {up: 20_000}, {up: 100_000}, {up: 700_000}},
		{{up: 1_400_000}, {up: 2_000_000}, {up: 2_800_000}, {up: 2_900_000}},
		{{up: 1_000_000, silent: true}, {down: 3_500}, {down: 4_500}, {down: 5_500}, {down: 6_500}},
	} {
		x.cutNext(cuts...)
		pods = append(pods, n.create(n.shell(fmt.Sprintf("big-%d", round), "sha256sum /big-?/random", changes...),
			n.shell(fmt.Sprintf("small-%d", round), "true", counted))...)
		x.drop()
		until(t, "all the cuts to be made", func() bool { return x.left() == 0 })
	}
	x.drop()
	for _, p := range pods {
		p.ranOnce()
		if strings.HasPrefix(p.name, "big") {
			p.awaitLog("/big-3/random") // the connection may still be coming back
			if got, want := p.log(), strings.Join(sums, ""); got != want {
				t.Errorf("%s: files are %q, want %q", p.name, got, want)
			}
		}
	}
}

// The connection breaks every other second, while pods come, run, end, and are
// deleted: each runs once at the most, and those that are left do run.
func TestConnectionThatBreaksAllTheTime(t *testing.T) {
	t.Parallel()
	x := newProxy(t)
	startKnoc(t, "knoc-broken", x.args()...)
	n := newNamespaceOn(t, "knoc-broken")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(300+rand.IntN(2500)) * time.Millisecond):
				x.drop()
			}
		}
	}()
	var stay, gone []*pod
	for round := range 10 {
		var manifests []*v1.Pod
		for _, name := range []string{"stays", "stays-too", "deleted"} {
			manifests = append(manifests, n.shell(fmt.Sprintf("%s-%d", name, round), "sleep 3", counted))
		}
		pods := n.create(manifests...)
		stay, gone = append(stay, pods[:2]...), append(gone, pods[2])
		time.Sleep(time.Duration(rand.IntN(3000)) * time.Millisecond)
		pods[2].kubectl("delete", "pod", pods[2].name, "--grace-period=2", "--wait=false")
	}
	close(stop)
	<-stopped
	for _, p := range stay {
		p.ranOnce()
	}
	for _, p := range gone {
		p.awaitGone()
		p.noJobAlive()
	}
}

// Whatever the HPC user's shell is and prints, knoc talks through it.
func TestLoginShells(t *testing.T) {
	t.Parallel()
	user := login(t, "id -un")
	before := loginRoot(t, "getent passwd "+user+" | cut -d: -f7")
	setShell := func(shell string) { // at once: to slurmctld a user that is not there for a moment is a failed job
		loginRoot(t, fmt.Sprintf("sed 's|^\\(%s:.*:\\)[^:]*$|\\1%s|' /etc/passwd >/etc/passwd.e2e && chmod 644 /etc/passwd.e2e && mv /etc/passwd.e2e /etc/passwd", user, shell))
	}
	files := "~/.bashrc ~/.cshrc ~/.config/fish/config.fish"
	login(t, "for f in "+files+"; do [ ! -e $f ] || mv $f $f.e2e; done; mkdir -p ~/.config/fish")
	t.Cleanup(func() {
		setShell(before)
		login(t, "for f in "+files+"; do rm -f $f; [ ! -e $f.e2e ] || mv $f.e2e $f; done")
	})
	for _, c := range []struct{ shell, file, text string }{
		{"/bin/bash", "~/.bashrc", "echo Welcome to the centre; echo end 0; echo Quota: 99% >&2; set -u"},
		{"/usr/bin/tcsh", "~/.cshrc", "echo Welcome to the centre; setenv LANG xx"},
		{"/usr/bin/fish", "~/.config/fish/config.fish", "echo Welcome to the centre"},
	} {
		login(t, "[ -x "+c.shell+" ]")
		login(t, fmt.Sprintf("echo %q >%s", c.text, c.file))
		setShell(c.shell)
		name := "knoc-" + c.shell[strings.LastIndex(c.shell, "/")+1:]
		t.Run(name, func(t *testing.T) {
			startKnoc(t, name)
			n := newNamespaceOn(t, name)
			p := n.createOne(n.shell("pod", "echo \"it's me\"; sleep 1", counted))
			p.ranOnce()
			if got := p.log(); got != "it's me\n" {
				t.Errorf("log is %q", got)
			}
		})
	}
}

// A second knoc for the same node: the first has to stop, and both together run
// each pod once, those that one of them was just submitting too.
func TestSecondKnocOfTheSameNameTakesOver(t *testing.T) {
	t.Parallel()
	first := startKnoc(t, "knoc-twin")
	second := newKnoc(t, "knoc-twin")
	n := newNamespaceOn(t, "knoc-twin")
	runs := n.createOne(n.shell("runs", "echo up; sleep 30; exit 6", counted))
	runs.await("Running", running("main"))

	second.start()
	var pods []*pod
	for i := range 10 {
		pods = append(pods, n.create(n.shell(fmt.Sprintf("a-%d", i), "true", counted), n.shell(fmt.Sprintf("b-%d", i), "true", counted))...)
	}
	second.awaitServing()
	select {
	case <-first.ended:
	case <-time.After(limit):
		t.Error("the first goes on")
	}
	select {
	case <-second.ended:
		t.Fatal("the second ended too")
	default:
	}
	out, _ := execute(nil, "grep", "-c", "taken over", ownLog("knoc-twin"))
	if strings.TrimSpace(out) == "0" {
		t.Error("the log does not say why the first stopped")
	}
	for _, p := range pods {
		p.ranOnce()
	}
	if o := runs.awaitPhase("Failed"); exitCode(o, "main") != 6 || runs.runs() != 1 {
		t.Errorf("exit code %d, %d runs; want 6, once", exitCode(o, "main"), runs.runs())
	}
}

// kill -9 while pods are being submitted, again and again.
func TestKillWhileSubmittingRunsEachPodOnce(t *testing.T) {
	t.Parallel()
	k := startKnoc(t, "knoc-killed")
	n := newNamespaceOn(t, "knoc-killed")
	var mu sync.Mutex
	var pods []*pod
	for round := range 6 {
		var manifests []*v1.Pod
		for i := range 4 {
			manifests = append(manifests, n.shell(fmt.Sprintf("pod-%d-%d", round, i), "true", counted))
		}
		created := make(chan struct{})
		go func() {
			defer close(created)
			mu.Lock()
			defer mu.Unlock()
			pods = append(pods, n.create(manifests...)...)
		}()
		time.Sleep(time.Duration(200+150*round) * time.Millisecond)
		k.stop(syscall.SIGKILL)
		<-created
		k.start()
		time.Sleep(time.Duration(rand.IntN(1500)) * time.Millisecond)
	}
	k.awaitServing()
	for _, p := range pods {
		p.ranOnce()
	}
}
