package knoc

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
)

// restartedJournal is of a pod whose container main runs for the third time.
const restartedJournal = runningJournal + `1700000004 exit main 0 1
1700000004 backoff main 0 10
1700000014 start main 1
1700000015 exit main 1 1
1700000015 backoff main 1 20
1700000035 start main 2
`

func TestGetContainerLogs(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t, func(c *testCluster) { c.Banner = "Welcome to the cluster\n" })
	p, dir := verbsProvider(t, c, restartedJournal)
	binary := make([]byte, 1<<20)
	for i := range binary {
		binary[i] = byte(i * 7 % 256)
	}
	c.writeFile(filepath.Join(dir, "log/init.0"), "")
	c.writeFile(filepath.Join(dir, "log/main.0"), string(binary))
	c.writeFile(filepath.Join(dir, "log/main.1"), "before\n")
	c.writeFile(filepath.Join(dir, "log/main.2"), "one\ntwo\nthree\nfour")
	for _, test := range []struct {
		name      string
		container string
		opts      api.ContainerLogOpts
		want      string
	}{
		{"all", "main", api.ContainerLogOpts{}, "one\ntwo\nthree\nfour"},
		{"empty", "init", api.ContainerLogOpts{}, ""},
		{"previous", "main", api.ContainerLogOpts{Previous: true}, "before\n"},
		{"tail", "main", api.ContainerLogOpts{Tail: 2}, "three\nfour"},
		{"more tail than lines", "main", api.ContainerLogOpts{Tail: 100}, "one\ntwo\nthree\nfour"},
		{"limit", "main", api.ContainerLogOpts{LimitBytes: 5}, "one\nt"},
		{"more limit than bytes", "main", api.ContainerLogOpts{LimitBytes: 500}, "one\ntwo\nthree\nfour"},
		{"limit of the tail", "main", api.ContainerLogOpts{Tail: 3, LimitBytes: 6}, "two\nth"},
		{"follow what has ended", "init", api.ContainerLogOpts{Follow: true}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			r, err := p.GetContainerLogs(t.Context(), "default", "web", test.container, test.opts)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			got, err := io.ReadAll(r)
			if err != nil || string(got) != test.want {
				t.Errorf("log %q, %v, want %q", got, err, test.want)
			}
		})
	}
	setJournal(p, p.works["0f3b3c2e-1111-4222-8333-444455556666"].pod, "41", runningJournal)
	r, err := p.GetContainerLogs(t.Context(), "default", "web", "main", api.ContainerLogOpts{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, binary) {
		t.Errorf("1 MiB of bytes: %d came, %v", len(got), err)
	}
}

// The index of a log says when its bytes were written.
func TestLogTimes(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, dir := verbsProvider(t, c, restartedJournal)
	at := time.Now().Add(-time.Hour).Truncate(time.Second)
	sec := func(n int) int64 { return at.Add(time.Duration(n) * time.Second).Unix() }
	stamp := func(n int) string { return at.Add(time.Duration(n)*time.Second).UTC().Format(time.RFC3339Nano) + " " }
	c.writeFile(filepath.Join(dir, "log/main.2"), "one\ntwo\nthree\nfour\nfi")
	// A line of the index that is older than the one before it is passed over.
	c.writeFile(filepath.Join(dir, "log/main.2.at"), fmt.Sprintf("%d 8\n%d 14\n%d 8\n%d 19\n%d 21\n", sec(0), sec(10), sec(9), sec(20), sec(3590)))
	all := stamp(0) + "one\n" + stamp(0) + "two\n" + stamp(10) + "three\n" + stamp(20) + "four\n" + stamp(3590) + "fi"
	none := context.WithValue(t.Context(), tailNone{}, true)
	for _, test := range []struct {
		name string
		ctx  context.Context
		opts api.ContainerLogOpts
		want string
	}{
		{"timestamps", nil, api.ContainerLogOpts{Timestamps: true}, all},
		{"timestamps of the tail", nil, api.ContainerLogOpts{Timestamps: true, Tail: 2}, stamp(20) + "four\n" + stamp(3590) + "fi"},
		{"limit counts them", nil, api.ContainerLogOpts{Timestamps: true, LimitBytes: 30}, all[:30]},
		{"since time", nil, api.ContainerLogOpts{SinceTime: at.Add(10 * time.Second)}, "three\nfour\nfi"},
		{"since a time between", nil, api.ContainerLogOpts{SinceTime: at.Add(11 * time.Second)}, "four\nfi"},
		{"since the beginning", nil, api.ContainerLogOpts{SinceTime: time.Unix(1, 0)}, "one\ntwo\nthree\nfour\nfi"},
		{"since the future", nil, api.ContainerLogOpts{SinceTime: at.Add(24 * time.Hour)}, ""},
		{"since seconds", nil, api.ContainerLogOpts{SinceSeconds: 600}, "fi"},
		{"since, tail and timestamps", nil, api.ContainerLogOpts{SinceTime: at.Add(10 * time.Second), Tail: 2, Timestamps: true}, stamp(20) + "four\n" + stamp(3590) + "fi"},
		{"a tail of none", none, api.ContainerLogOpts{}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx := test.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			r, err := p.GetContainerLogs(ctx, "default", "web", "main", test.opts)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			got, err := io.ReadAll(r)
			if err != nil || string(got) != test.want {
				t.Errorf("log %q, %v, want %q", got, err, test.want)
			}
		})
	}
}

// The last lines of a large log are found from its end.
func TestLogTailOfManyLines(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, dir := verbsProvider(t, c, runningJournal)
	var b strings.Builder
	for i := range 60000 {
		fmt.Fprintf(&b, "line %d\n", i)
	}
	all := b.String()
	c.writeFile(filepath.Join(dir, "log/main.0"), all)
	for _, n := range []int{1, 1000, 20000, 59999, 60000, 70000} {
		r, err := p.GetContainerLogs(t.Context(), "default", "web", "main", api.ContainerLogOpts{Tail: n})
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		r.Close()
		lines := strings.SplitAfter(strings.TrimSuffix(all, "\n"), "\n")
		want := strings.Join(lines[max(0, len(lines)-n):], "") + "\n"
		if err != nil || string(got) != want {
			t.Errorf("the last %d lines: %d bytes, %v, want %d", n, len(got), err, len(want))
		}
	}
}

func TestGetContainerLogsRefuses(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	waiting := v1.ContainerStatus{Name: "main", State: v1.ContainerState{Waiting: &v1.ContainerStateWaiting{Reason: "PodInitializing"}}}
	for _, test := range []struct {
		name, pod, container, journal string
		opts                          api.ContainerLogOpts
		status                        []v1.ContainerStatus
		want                          string
		notFound, invalid             bool
	}{
		{name: "pod", pod: "other", want: "pod default/other is not known", notFound: true},
		{name: "container", container: "nope", journal: runningJournal, want: `container "nope" not found in pod "web"`, notFound: true},
		{name: "queued", want: `container "main" in pod "web" is waiting to start: ContainerCreating`, invalid: true},
		{name: "waiting", status: []v1.ContainerStatus{waiting}, want: `container "main" in pod "web" is waiting to start: PodInitializing`, invalid: true},
		{name: "never started", journal: "1700000000 claim 41\n1700000001 done 1\n", want: "never started", invalid: true},
		{name: "no previous", journal: runningJournal, opts: api.ContainerLogOpts{Previous: true}, want: `previous terminated container "main" in pod "web" not found`, invalid: true},
		{name: "negative", journal: runningJournal, opts: api.ContainerLogOpts{Tail: -1}, want: "-1", invalid: true},
		{name: "file is missing", journal: runningJournal, want: "log/main.0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, _ := verbsProvider(t, c, test.journal)
			p.works["0f3b3c2e-1111-4222-8333-444455556666"].pod.Status.ContainerStatuses = test.status
			pod, container := test.pod, test.container
			if pod == "" {
				pod = "web"
			}
			if container == "" {
				container = "main"
			}
			r, err := p.GetContainerLogs(t.Context(), "default", pod, container, test.opts)
			if err == nil {
				r.Close()
			}
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
			if errdefs.IsNotFound(err) != test.notFound || errdefs.IsInvalidInput(err) != test.invalid {
				t.Errorf("%v: not found %t, invalid %t", err, errdefs.IsNotFound(err), errdefs.IsInvalidInput(err))
			}
		})
	}
}

// appendTo is what a container does.
func appendTo(t *testing.T, name, text string) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
}

func TestFollowLogs(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, dir := verbsProvider(t, c, runningJournal)
	pod := p.works["0f3b3c2e-1111-4222-8333-444455556666"].pod
	file := filepath.Join(dir, "log/main.0")
	appendTo(t, file, "zero\none\ntwo\n")
	r, err := p.GetContainerLogs(t.Context(), "default", "web", "main", api.ContainerLogOpts{Follow: true, Tail: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var got buffer
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(&got, r)
		done <- err
	}()
	want := "one\ntwo\n"
	waitUntil(t, "the last two lines", func() bool { return got.String() == want })
	for i, line := range []string{"three\n", "half a li", "ne\n\x00binary", "\n"} {
		appendTo(t, file, line)
		want += line
		waitUntil(t, "line "+line, func() bool { return got.String() == want })
		if i == 1 {
			c.Cut() // the connection is lost, not a byte of the log
		}
	}
	appendTo(t, file, "last words")
	setJournal(p, pod, "41", runningJournal+"1700000009 exit main 0 0\n")
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("following does not end with the container")
	}
	if got.String() != want+"last words" {
		t.Errorf("log %q, want %q", got.String(), want+"last words")
	}
}

// Closing the reader ends what runs on the cluster, and so does the caller's ctx.
func TestLogsReaderClosed(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, dir := verbsProvider(t, c, runningJournal)
	c.writeFile(filepath.Join(dir, "log/main.0"), strings.Repeat("0123456789abcde\n", 1<<20)) // 16 MiB
	for _, end := range []string{"close", "cancel"} {
		ctx, cancel := context.WithCancel(t.Context())
		r, err := p.GetContainerLogs(ctx, "default", "web", "main", api.ContainerLogOpts{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(r, make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
		if end == "close" {
			r.Close()
		} else {
			cancel()
			if _, err := io.Copy(io.Discard, r); err == nil {
				t.Error("a log that was cut short ends without an error")
			}
		}
		waitUntil(t, end+" ends the session", func() bool { return c.open.Load() == 0 })
		cancel()
	}
}

func TestAttachToContainer(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, dir := verbsProvider(t, c, runningJournal)
	pod := p.works["0f3b3c2e-1111-4222-8333-444455556666"].pod
	file := filepath.Join(dir, "log/main.0")
	appendTo(t, file, "old\n")
	err := p.AttachToContainer(t.Context(), "default", "web", "main", attached{in: strings.NewReader("x")})
	if !errdefs.IsInvalidInput(err) || !strings.Contains(err.Error(), "not supported yet") {
		t.Errorf("stdin: %v", err)
	}
	if err := p.AttachToContainer(t.Context(), "default", "web", "init", attached{}); !errdefs.IsInvalidInput(err) {
		t.Errorf("ended container: %v", err)
	}
	var out buffer
	done := make(chan error, 1)
	go func() { done <- p.AttachToContainer(t.Context(), "default", "web", "main", attached{out: &out}) }()
	n := 0
	waitUntil(t, "new lines", func() bool { // nothing tells when it listens
		if n++; n%20 == 0 {
			appendTo(t, file, "new\n")
		}
		return strings.HasPrefix(out.String(), "new\n")
	})
	setJournal(p, pod, "41", runningJournal+"1700000009 exit main 0 0\n")
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("attach does not end with the container")
	}
}
