package knoc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
)

// followTick is how often a followed log is opened anew: a descriptor that is
// kept open may not see what another machine appends (NFS, Lustre).
const followTick = time.Second

// logData is what templates/logs.sh.tmpl needs.
type logData struct {
	File   string
	Offset int64  // bytes of the file to pass over
	Tail   string // a number of last lines, "" is all
	Follow bool   // something will be read after this
}

// GetContainerLogs streams the log of a container's newest attempt, or of the
// one before it (Previous), straight from the file that the container writes
// on the cluster. Nothing is kept in memory, and closing the reader ends the
// remote side.
//
// Errors are made before the first byte, in the words of a kubelet
// (pkg/kubelet/kubelet_pods.go, validateContainerLogStatus), since after it
// virtual-kubelet can no longer answer with a status.
func (p *KNOCProvider) GetContainerLogs(ctx context.Context, namespace, name, container string, opts api.ContainerLogOpts) (io.ReadCloser, error) {
	switch {
	case opts.Timestamps:
		return nil, errdefs.InvalidInput("timestamps of log lines are not supported yet: leave --timestamps out")
	case opts.SinceSeconds > 0 || !opts.SinceTime.IsZero():
		return nil, errdefs.InvalidInput("logs since a time are not supported yet: leave --since and --since-time out, --tail works")
	case opts.Tail < 0 || opts.LimitBytes < 0:
		return nil, errdefs.InvalidInputf("tailLines %d and limitBytes %d must not be negative", opts.Tail, opts.LimitBytes)
	}
	w, err := p.lookup(namespace, name)
	if err != nil {
		return nil, err
	}
	attempt, err := w.logAttempt(container, opts.Previous)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	r, pw := io.Pipe()
	l := &logCopy{
		ssh: p.ssh, out: pw, opened: make(chan struct{}),
		file:  path.Join(w.Dir, "log", container+"."+strconv.Itoa(attempt)),
		limit: int64(opts.LimitBytes),
	}
	if opts.Tail > 0 { // virtual-kubelet gives 0 for "not asked for"
		l.tail = strconv.Itoa(opts.Tail)
	}
	if opts.Follow {
		l.ended = func() bool { return p.attemptEnded(w, container, attempt) }
	}
	failed := make(chan error, 1)
	go func() {
		err := l.run(ctx)
		failed <- err
		pw.CloseWithError(err) // a nil error is io.EOF
	}()
	select {
	case <-l.opened:
		return &logReader{r, cancel}, nil
	case err := <-failed:
		cancel()
		if err != nil {
			return nil, fmt.Errorf("reading the log of container %q of pod %s/%s: %w", container, namespace, name, err)
		}
		return &logReader{r, cancel}, nil
	}
}

// attemptEnded says whether that run of the container is over, or the pod gone.
func (p *KNOCProvider) attemptEnded(w workView, container string, attempt int) bool {
	now, err := p.lookup(w.Pod.Namespace, w.Pod.Name)
	return err != nil || now.UID != w.UID || now.JobEnded || !now.Running[container] || now.Attempts[container] != attempt
}

// AttachToContainer shows what a running container writes from now on, until it
// ends. Its stdout and stderr are one file on the cluster, so both come as
// stdout. A container's stdin is /dev/null: there is nothing to attach to yet.
func (p *KNOCProvider) AttachToContainer(ctx context.Context, namespace, name, container string, attach api.AttachIO) error {
	w, err := p.lookup(namespace, name)
	if err != nil {
		return err
	}
	if err := w.canEnter(container); err != nil {
		return err
	}
	if attach.Stdin() != nil {
		return errdefs.InvalidInput("attaching to a container's stdin is not supported yet: attach without --stdin, or use kubectl exec")
	}
	attempt := w.Attempts[container]
	var out io.Writer = io.Discard
	if w := attach.Stdout(); w != nil {
		out = w
	}
	l := &logCopy{
		ssh: p.ssh, out: out, opened: make(chan struct{}), tail: "0",
		file:  path.Join(w.Dir, "log", container+"."+strconv.Itoa(attempt)),
		ended: func() bool { return p.attemptEnded(w, container, attempt) },
	}
	return l.run(ctx)
}

// logAttempt is the number of the run whose log is asked for.
func (w *workView) logAttempt(container string, previous bool) (int, error) {
	if w.Pod == nil {
		return 0, errdefs.NotFound("the pod is gone from the API server")
	}
	if !hasContainer(w.Pod, container) {
		return 0, errdefs.NotFoundf("container %q not found in pod %q", container, w.Pod.Name)
	}
	n, ok := w.Attempts[container]
	switch {
	case !ok || n < 0:
		if w.JobEnded {
			return 0, errdefs.InvalidInputf("container %q in pod %q has no logs: it was never started", container, w.Pod.Name)
		}
		return 0, errdefs.InvalidInputf("container %q in pod %q is waiting to start: %s", container, w.Pod.Name, w.waitingReason(container))
	case !previous:
		return n, nil
	case n == 0:
		return 0, errdefs.InvalidInputf("previous terminated container %q in pod %q not found", container, w.Pod.Name)
	}
	return n - 1, nil
}

// waitingReason is the reason that the pod's status shows for a container that
// has not started.
func (w *workView) waitingReason(container string) string {
	s := w.Pod.Status
	for _, c := range slices.Concat(s.InitContainerStatuses, s.ContainerStatuses, s.EphemeralContainerStatuses) {
		if c.Name == container && c.State.Waiting != nil && c.State.Waiting.Reason != "" {
			return c.State.Waiting.Reason
		}
	}
	return "ContainerCreating"
}

type logReader struct {
	*io.PipeReader
	cancel context.CancelFunc
}

// Close ends the stream, also on the cluster.
func (r *logReader) Close() error {
	r.cancel()
	return r.PipeReader.Close()
}

// logCopy copies one log file, and what is appended to it while ended is false.
type logCopy struct {
	ssh    *sshClient
	out    io.Writer
	file   string
	tail   string
	limit  int64       // 0 is none
	ended  func() bool // nil: read once
	opened chan struct{}
	open   bool

	offset int64 // how much of the file was read or passed over
	sent   int64
}

// errLogLimit ends a stream whose byte limit is reached.
var errLogLimit = errors.New("log limit reached")

func (l *logCopy) run(ctx context.Context) error {
	for {
		// Asked before the read, so that the read after the end sees all.
		last := l.ended == nil || l.ended()
		err := l.read(ctx, !last)
		switch {
		case errors.Is(err, errLogLimit):
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil && !(l.open && l.ended != nil && errors.Is(err, errConnection)):
			return err
		case err == nil && last:
			return nil
		}
		// A follower outlives a cut of the connection: it goes on from its offset.
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(followTick):
		}
	}
}

// read copies what the file holds from the offset on.
func (l *logCopy) read(ctx context.Context, more bool) error {
	script, err := render("logs.sh.tmpl", logData{File: l.file, Offset: l.offset, Tail: l.tail, Follow: more})
	if err != nil {
		return err
	}
	in := &logSection{log: l}
	complaint := &tail{max: 500}
	err = l.ssh.Stream(ctx, script, nil, in, complaint, nil, nil)
	if in.err != nil {
		return in.err
	}
	var exit *exitError
	if errors.As(err, &exit) {
		exit.Stderr = complaint.String()
	}
	return err
}

// logSection takes one read's bytes: first a line that says where in the file
// the rest begins, then the rest.
type logSection struct {
	log  *logCopy
	line []byte
	body bool
	err  error
}

func (s *logSection) Write(b []byte) (int, error) {
	n := len(b)
	if !s.body {
		line, rest, found := strings.Cut(string(append(s.line, b...)), "\n")
		if !found {
			s.line = []byte(line)
			return n, nil
		}
		from, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
		if err != nil {
			return 0, s.fail(fmt.Errorf("reading the log: %q is no offset", line))
		}
		s.body = true
		s.log.offset, s.log.tail = from, ""
		if !s.log.open {
			s.log.open = true
			close(s.log.opened)
		}
		b = []byte(rest)
	}
	s.log.offset += int64(len(b))
	if l := s.log; l.limit > 0 && l.sent+int64(len(b)) >= l.limit {
		b = b[:l.limit-l.sent]
		if _, err := l.out.Write(b); err != nil {
			return 0, s.fail(err)
		}
		return 0, s.fail(errLogLimit)
	}
	s.log.sent += int64(len(b))
	if len(b) == 0 {
		return n, nil
	}
	if _, err := s.log.out.Write(b); err != nil {
		return 0, s.fail(err)
	}
	return n, nil
}

// fail has Stream close the session.
func (s *logSection) fail(err error) error {
	s.err = err
	return err
}
