package knoc

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilexec "k8s.io/utils/exec"
)

// verbsProvider is a provider whose loop does not run: it knows the one pod
// default/web, whose journal is given, with a directory on the test cluster.
func verbsProvider(t *testing.T, c *testCluster, journal string) (*KNOCProvider, string) {
	t.Helper()
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "0f3b3c2e-1111-4222-8333-444455556666"},
		Spec: v1.PodSpec{
			InitContainers: []v1.Container{{Name: "init"}},
			Containers:     []v1.Container{{Name: "main"}, {Name: "side"}},
		},
	}
	base := filepath.Join(c.Home, "base")
	dir := filepath.Join(base, string(pod.UID))
	for _, d := range []string{"log", "run"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	// The real one needs a container; what it is called with is tested here.
	c.writeFile(filepath.Join(dir, "run/enter.sh"), `[ "$2" = -- ] || exit 125; container=$1; shift 2; export container; exec "$@"`)
	c.Stub("srun", `
echo "$*" >>"$HOME/srun.log"
while :; do
	case $1 in
	--input=none) exec </dev/null; shift ;;
	--*) shift ;;
	*) break ;;
	esac
done
"$@"
rc=$?
[ "$rc" = 0 ] || echo "srun: error: n1: task 0: Exited with exit code $rc" >&2
exit "$rc"`)
	client := c.Client()
	p := &KNOCProvider{
		cfg: Config{NodeName: "knoc"}, ssh: client, log: slog.New(slog.DiscardHandler), now: time.Now,
		remote: &remote{ssh: client, dir: base, epoch: "1000000001", user: c.User, log: slog.New(slog.DiscardHandler)},
		works:  map[types.UID]*work{},
	}
	p.metrics = newMetrics(p)
	client.metrics = p.metrics
	setJournal(p, pod, "41", journal)
	return p, dir
}

// setJournal makes the pod known with that journal.
func setJournal(p *KNOCProvider, pod *v1.Pod, jobID, journal string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.works[pod.UID] = &work{meta: metaOf(pod), pod: pod, jobID: jobID, staged: true, journal: []byte(journal), events: parseJournal([]byte(journal))}
}

const runningJournal = `1700000000 claim 41
1700000000 host n1 10.0.0.5
1700000001 start init 0
1700000002 exit init 0 0
1700000003 start main 0
`

// attached is an api.AttachIO for tests.
type attached struct {
	in       io.Reader
	out, err io.WriteCloser
	tty      bool
	resize   chan api.TermSize
}

func (a attached) Stdin() io.Reader            { return a.in }
func (a attached) Stdout() io.WriteCloser      { return a.out }
func (a attached) Stderr() io.WriteCloser      { return a.err }
func (a attached) TTY() bool                   { return a.tty }
func (a attached) Resize() <-chan api.TermSize { return a.resize }

// buffer is a bytes.Buffer for two goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *buffer) Close() error { return nil }

func waitUntil(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited 20 s in vain: %s", what)
		}
	}
}

func TestRunInContainer(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t, func(c *testCluster) { c.Banner = "Welcome to the cluster\n" })
	p, _ := verbsProvider(t, c, runningJournal)
	binary := make([]byte, 70000)
	for i := range binary {
		binary[i] = byte(i * 7 % 251)
	}
	hostile := "it's \"$(id)\" `id` \\ \n * ~ é"
	for _, test := range []struct {
		name   string
		in     io.Reader
		cmd    []string
		out    string
		err    string
		status int
	}{
		{name: "streams apart", cmd: []string{"sh", "-c", "echo out; echo err >&2"}, out: "out\n", err: "err\n"},
		{name: "container", cmd: []string{"sh", "-c", "echo $container"}, out: "main\n"},
		{name: "no stdin", cmd: []string{"cat"}},
		{name: "stdin", in: strings.NewReader("one\ntwo"), cmd: []string{"cat"}, out: "one\ntwo"},
		{name: "binary", in: bytes.NewReader(binary), cmd: []string{"cat"}, out: string(binary)},
		{name: "stdin unread", in: bytes.NewReader(make([]byte, 1<<20)), cmd: []string{"echo", "done"}, out: "done\n"},
		{name: "quoting", cmd: []string{"printf", "%s|", hostile, "", "-n"}, out: hostile + "||-n|"},
		{name: "exit code", cmd: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}, out: "out\n", err: "err\n", status: 7},
		{name: "exit code 1", cmd: []string{"false"}, status: 1},
		{name: "not found", cmd: []string{"/no/such/program"}, status: 127, err: "not found"},
		{name: "signal", cmd: []string{"sh", "-c", "kill -9 $$"}, status: 137, err: "Killed"},
		{name: "no newline", cmd: []string{"sh", "-c", "printf x; printf y >&2"}, out: "x", err: "y"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var out, errOut buffer
			err := p.RunInContainer(t.Context(), "default", "web", "main", test.cmd, attached{in: test.in, out: &out, err: &errOut})
			status := 0
			if err != nil {
				exit, ok := err.(utilexec.ExitError) // as virtual-kubelet asks, unwrapped
				if !ok || !exit.Exited() {
					t.Fatalf("error is %T: %v", err, err)
				}
				status = exit.ExitStatus()
			}
			if status != test.status {
				t.Errorf("exit status %d, want %d", status, test.status)
			}
			if out.String() != test.out {
				t.Errorf("stdout %.200q, want %.200q", out.String(), test.out)
			}
			if got := errOut.String(); got != test.err && (test.status < 126 || !strings.Contains(got, test.err) || strings.Contains(got, "\x1e") || strings.Contains(got, "srun")) {
				t.Errorf("stderr %q, want %q", got, test.err)
			}
		})
	}
	calls, err := os.ReadFile(filepath.Join(c.Home, "srun.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, word := range []string{"--jobid=41", "--relative=0", "--overlap", "--ntasks=1", "/run/enter.sh main -- cat"} {
		if !strings.Contains(string(calls), word) {
			t.Errorf("srun was not called with %s: %s", word, calls)
		}
	}
}

func TestRunInContainerTTY(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t, func(c *testCluster) { c.Banner = "Welcome\n" })
	p, _ := verbsProvider(t, c, runningJournal)
	resize := make(chan api.TermSize)
	done := make(chan struct{})
	go func() { // as virtual-kubelet does when the client has gone: zeros without end
		defer close(done)
		size := api.TermSize{Width: 101, Height: 31}
		for {
			select {
			case resize <- size:
				size = api.TermSize{}
			case <-t.Context().Done():
				return
			}
		}
	}()
	var out buffer
	in, type_ := io.Pipe()
	defer type_.Close()
	err := p.RunInContainer(t.Context(), "default", "web", "main",
		[]string{"sh", "-c", `i=0; while [ "$(stty size)" != "31 101" ] && [ $i -lt 500 ]; do sleep 0.02; i=$((i+1)); done; stty size; exit 3`},
		attached{in: in, out: &out, tty: true, resize: resize})
	var exit utilexec.CodeExitError
	if !errors.As(err, &exit) || exit.Code != 3 {
		t.Errorf("error %v, want exit status 3", err)
	}
	if got := out.String(); got != "31 101\n" && got != "31 101\r\n" {
		t.Errorf("terminal shows %q, want its size only", got)
	}
}

func TestRunInContainerRefuses(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	for _, test := range []struct {
		name, pod, container string
		journal              string
		cmd                  []string
		want                 string
		notFound, invalid    bool
	}{
		{name: "pod", pod: "other", container: "main", journal: runningJournal, want: "pod default/other is not known", notFound: true},
		{name: "container", container: "nope", journal: runningJournal, want: `container "nope" not found in pod "web"`, notFound: true},
		{name: "waiting", container: "side", journal: runningJournal, want: `container "side" in pod "web" is not running: it is waiting to start`, invalid: true},
		{name: "pending", container: "main", want: "waiting to start", invalid: true},
		{name: "ended", container: "init", journal: runningJournal, want: `container "init" in pod "web" is not running: it has ended`, invalid: true},
		{name: "job ended", container: "main", journal: runningJournal + "1700000009 exit main 0 0\n1700000009 done 0\n", want: "it has ended", invalid: true},
		{name: "no command", container: "main", journal: runningJournal, cmd: []string{}, want: "no command", invalid: true},
		{name: "NUL", container: "main", journal: runningJournal, cmd: []string{"a\x00b"}, want: "NUL", invalid: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, _ := verbsProvider(t, c, test.journal)
			pod, cmd := test.pod, test.cmd
			if pod == "" {
				pod = "web"
			}
			if cmd == nil {
				cmd = []string{"true"}
			}
			err := p.RunInContainer(t.Context(), "default", pod, test.container, cmd, attached{})
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if errdefs.IsNotFound(err) != test.notFound || errdefs.IsInvalidInput(err) != test.invalid {
				t.Errorf("%v: not found %t, invalid %t", err, errdefs.IsNotFound(err), errdefs.IsInvalidInput(err))
			}
		})
	}
}

// What srun itself has to say is the error when the command did not run.
func TestRunInContainerSrunFails(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	c.Stub("srun", `echo "srun: error: Unable to confirm allocation for job 41: Invalid job id specified" >&2; exit 1`)
	err := p.RunInContainer(t.Context(), "default", "web", "main", []string{"true"}, attached{})
	if err == nil || !strings.Contains(err.Error(), "Invalid job id specified") || !strings.Contains(err.Error(), `container "main" of pod default/web`) {
		t.Errorf("error %v", err)
	}
	if _, ok := err.(utilexec.ExitError); ok {
		t.Errorf("%v passes for the command's own exit status", err)
	}
	// The job ends: its steps are killed, and srun with them says so.
	c.Stub("srun", `echo begun; exit 137`)
	err = p.RunInContainer(t.Context(), "default", "web", "main", []string{"true"}, attached{})
	if exit, ok := err.(utilexec.ExitError); !ok || exit.ExitStatus() != 137 {
		t.Errorf("error %v, want exit status 137", err)
	}
}

// When the client goes, the command goes: its step is cancelled by name.
func TestRunInContainerClientGone(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	c.Stub("srun", `
for arg; do case $arg in --job-name=*) echo "41.7 ${arg#--job-name=}" >"$HOME/steps" ;; esac; done
echo begun
trap '' TERM HUP
sleep 60`)
	c.Stub("squeue", `[ "$*" = "--steps --noheader --jobs=41 --format=%i %j" ] || exit 1; echo "41.batch batch"; cat "$HOME/steps"`)
	c.Stub("scancel", `echo "$*" >>"$HOME/scancel.log"`)
	cancelled := func() bool {
		b, _ := os.ReadFile(filepath.Join(c.Home, "scancel.log"))
		return string(b) == "--quiet 41.7\n"
	}

	ctx, cancel := context.WithCancel(t.Context())
	var out buffer
	result := make(chan error, 1)
	go func() {
		result <- p.RunInContainer(ctx, "default", "web", "main", []string{"sleep", "60"}, attached{out: &out})
	}()
	waitUntil(t, "the command has begun", func() bool { return out.String() == "begun\n" })
	cancel()
	select {
	case err := <-result:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want context.Canceled", err)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("RunInContainer does not return")
	}
	if !cancelled() {
		t.Error("the step was not cancelled")
	}

	// Over a websocket only a failing write tells.
	os.Remove(filepath.Join(c.Home, "scancel.log"))
	err := p.RunInContainer(t.Context(), "default", "web", "main", []string{"sleep", "60"}, attached{out: broken{}})
	if err == nil || !strings.Contains(err.Error(), "client has gone") {
		t.Errorf("error %v, want the writer's", err)
	}
	if !cancelled() {
		t.Error("the step was not cancelled after a failed write")
	}
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("client has gone") }
func (broken) Close() error              { return nil }

func TestTrailer(t *testing.T) {
	for _, test := range []struct {
		writes string // separated by |
		out    string
		status int
		told   bool
	}{
		{"hello|@MARK7\n", "hello", 7, true},
		{"hello@MARK7\n", "hello", 7, true},
		{"a@|MA|RK|25|5\r\n", "a", 255, true},
		{"a@MA|b@|@MARK0\nsrun: error\n", "a@MAb@", 0, true},
		{"@@MARK1\n", "@", 1, true},
		{"a@MARK|", "a", 0, false},
		{"a@MARK7|", "a", 0, false},
		{"a@MARK256\n|", "a", 0, false},
		{"a@MARKx\n|", "a", 0, false},
		{"only text|", "only text", 0, false},
		{"|", "", 0, false},
	} {
		var out bytes.Buffer
		tr := &trailer{Mark: "@MARK", Out: &out}
		for w := range strings.SplitSeq(test.writes, "|") {
			if n, err := tr.Write([]byte(w)); n != len(w) || err != nil {
				t.Fatalf("%q: write of %q: %d, %v", test.writes, w, n, err)
			}
		}
		status, told := tr.Status()
		if out.String() != test.out || told != test.told || told && status != test.status {
			t.Errorf("%q: passes on %q, status %d %t; want %q, %d %t", test.writes, out.String(), status, told, test.out, test.status, test.told)
		}
	}
}

// Nothing of an interactive stream waits for more than a mark may need.
func TestTrailerPassesOnAtOnce(t *testing.T) {
	var out bytes.Buffer
	tr := &trailer{Mark: "@MARK", Out: &out}
	for _, s := range []string{"login: ", "a", "\n", "$ "} {
		before := out.Len()
		tr.Write([]byte(s))
		if out.Len() != before+len(s) {
			t.Errorf("%q was held back", s)
		}
	}
}

// halfPipe is one end of a duplex stream that can be half closed.
type halfPipe struct {
	*io.PipeReader
	w *io.PipeWriter
}

func (h halfPipe) Write(b []byte) (int, error) { return h.w.Write(b) }
func (h halfPipe) CloseWrite() error           { return h.w.Close() }
func (h halfPipe) Close() error {
	h.w.Close()
	return h.PipeReader.Close()
}

func pipe() (a, b halfPipe) {
	r1, w1 := io.Pipe()
	r2, w2 := io.Pipe()
	return halfPipe{r1, w2}, halfPipe{r2, w1}
}
