package knoc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
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
	Since  int64  // only what was written since then, in seconds of Unix time; 0 is all
	Ago    int    // the same, in seconds before now
	Stamps bool   // the index comes too
	Index  int64  // bytes of the index to pass over
}

// tailNone is a key of a request's context: it asks for no line that is there
// already (tailLines=0), which virtual-kubelet cannot tell from all of them.
type tailNone struct{}

// withTailNone marks such requests.
func withTailNone(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/containerLogs/") && r.URL.Query().Get("tailLines") == "0" {
			r = r.WithContext(context.WithValue(r.Context(), tailNone{}, true))
		}
		h.ServeHTTP(w, r)
	})
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
	if opts.Tail < 0 || opts.LimitBytes < 0 || opts.SinceSeconds < 0 {
		return nil, errdefs.InvalidInputf("tailLines %d, limitBytes %d and sinceSeconds %d must not be negative", opts.Tail, opts.LimitBytes, opts.SinceSeconds)
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
		limit: int64(opts.LimitBytes), ago: opts.SinceSeconds,
	}
	if opts.Tail > 0 || ctx.Value(tailNone{}) != nil { // virtual-kubelet gives 0 for "not asked for"
		l.tail = strconv.Itoa(opts.Tail)
	}
	if !opts.SinceTime.IsZero() {
		l.since = max(opts.SinceTime.Unix(), 1)
	}
	if opts.Timestamps {
		l.stamps = &logStamps{now: time.Now}
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
	since  int64       // Unix time; 0 is all
	ago    int         // seconds before now; 0 is all
	limit  int64       // bytes to send; 0 is no limit
	stamps *logStamps  // nil: no times before lines
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
		err := l.read(ctx)
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
func (l *logCopy) read(ctx context.Context) error {
	data := logData{File: l.file, Offset: l.offset, Tail: l.tail, Since: l.since, Ago: l.ago, Stamps: l.stamps != nil}
	if l.stamps != nil {
		data.Index = l.stamps.read
	}
	script, err := render("logs.sh.tmpl", data)
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
// the rest begins and how many bytes of the index come before it, then those.
type logSection struct {
	log   *logCopy
	line  []byte
	body  bool
	index int64
	err   error
}

func (s *logSection) Write(b []byte) (int, error) {
	n := len(b)
	if !s.body {
		line, rest, found := strings.Cut(string(append(s.line, b...)), "\n")
		if !found {
			s.line = []byte(line)
			return n, nil
		}
		if err := s.begin(line); err != nil {
			return 0, s.fail(err)
		}
		b = []byte(rest)
	}
	if s.index > 0 {
		part := b[:min(s.index, int64(len(b)))]
		s.index -= int64(len(part))
		b = b[len(part):]
		if err := s.log.stamps.learn(part); err != nil {
			return 0, s.fail(err)
		}
	}
	if len(b) == 0 {
		return n, nil
	}
	if err := s.log.put(b); err != nil {
		return 0, s.fail(err)
	}
	return n, nil
}

// begin takes the first line.
func (s *logSection) begin(line string) error {
	offset, index, _ := strings.Cut(line, " ")
	from, err := strconv.ParseInt(offset, 10, 64)
	if err == nil && s.log.stamps != nil {
		s.index, err = strconv.ParseInt(index, 10, 64)
	}
	if err != nil {
		return fmt.Errorf("reading the log: %q is no offset", line)
	}
	l := s.log
	s.body = true
	l.offset, l.tail, l.since, l.ago = from, "", 0, 0
	if l.stamps != nil {
		l.stamps.pass(from)
	}
	if !l.open {
		l.open = true
		close(l.opened)
	}
	return nil
}

// put sends on what was read of the log.
func (l *logCopy) put(b []byte) error {
	from := l.offset
	l.offset += int64(len(b))
	if l.stamps != nil {
		b = l.stamps.stamp(b, from)
	}
	limited := l.limit > 0 && l.sent+int64(len(b)) >= l.limit
	if limited {
		b = b[:l.limit-l.sent]
	}
	l.sent += int64(len(b))
	if _, err := l.out.Write(b); err != nil {
		return err
	}
	if limited {
		return errLogLimit
	}
	return nil
}

// fail has Stream close the session.
func (s *logSection) fail(err error) error {
	s.err = err
	return err
}

// logStamps knows when the bytes of a log were written, from its index: lines of
// seconds and bytes, which pod.sh adds while the log grows (grown in
// templates/pod.stop.tmpl). All that came between two looks has the time of the
// later one.
type logStamps struct {
	now   func() time.Time
	read  int64 // bytes of the index, whole lines only
	part  []byte
	marks []logMark
	mid   bool // the last byte sent was not a line's end
}

// logMark says that the log had so many bytes when it was written to at that time.
type logMark struct{ seconds, size int64 }

// learn takes bytes of the index. A line whose size is not more than the one
// before says nothing: a container's last line may overtake one of the ticker's.
func (s *logStamps) learn(b []byte) error {
	s.part = append(s.part, b...)
	for {
		line, rest, found := bytes.Cut(s.part, []byte("\n"))
		if !found {
			return nil
		}
		var m logMark
		if _, err := fmt.Sscanf(string(line), "%d %d", &m.seconds, &m.size); err != nil {
			return fmt.Errorf("reading the log's index: %q is not two numbers", line)
		}
		s.read += int64(len(line)) + 1
		s.part = rest
		if n := len(s.marks); n == 0 || m.size > s.marks[n-1].size {
			s.marks = append(s.marks, m)
		}
	}
}

// pass forgets what is known of the bytes before an offset, and what came of a
// line of the index that a lost connection cut.
func (s *logStamps) pass(offset int64) {
	s.part = nil
	i := 0
	for i < len(s.marks) && s.marks[i].size <= offset {
		i++
	}
	s.marks = s.marks[i:]
}

// stamp puts the time before each line of b, which begins at that offset of the
// log, as the kubelet does with timestamps=true (RFC 3339). What is younger than
// the index was written just now.
func (s *logStamps) stamp(b []byte, offset int64) []byte {
	var out []byte
	for len(b) > 0 {
		if !s.mid {
			for len(s.marks) > 0 && s.marks[0].size <= offset {
				s.marks = s.marks[1:]
			}
			at := s.now().Truncate(time.Second)
			if len(s.marks) > 0 {
				at = time.Unix(s.marks[0].seconds, 0)
			}
			out = append(at.UTC().AppendFormat(out, time.RFC3339Nano), ' ')
		}
		line := b
		i := bytes.IndexByte(b, '\n')
		if i >= 0 {
			line = b[:i+1]
		}
		s.mid = i < 0
		out = append(out, line...)
		offset += int64(len(line))
		b = b[len(line):]
	}
	return out
}
