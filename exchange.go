package knoc

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"
)

const (
	maxBody   = 64 << 20 // of one frame
	maxNoise  = 1 << 20  // outside of frames, between two of them
	maxStderr = 64 << 10 // kept, the last
	// lastWords is how long the exit status and stderr of an ended script are awaited.
	lastWords = time.Second
)

// exitError is a script that ended, with another status than 0.
type exitError struct {
	// Status is the exit status, or 128 + the number of the signal that killed it.
	Status int
	// Stderr is the last of what it wrote there, at most 64 KiB.
	Stderr string
}

func (e *exitError) Error() string {
	return fmt.Sprintf("remote script ended with status %d%s", e.Status, excerpt(": ", e.Stderr))
}

// excerpt is the end of a text, for an error message.
func excerpt(before, text string) string {
	text = strings.TrimSpace(text)
	if text == "" {
		return ""
	}
	if len(text) > 1024 {
		text = "…" + strings.ToValidUTF8(text[len(text)-1024:], "")
	}
	return before + text
}

// newNonce marks our own output among that of others. The first character
// occurs only there, which makes it simple to search for.
func newNonce() string { return "@" + rand.Text() }

// remoteCommand is the command line that runs a script of n bytes, which stdin
// begins with. It has no text of a user and means the same in sh, bash, csh,
// tcsh and fish. The shell must not read the script itself: it reads ahead, and
// would take some of the data that follows. Nor does an argument list limit the
// size, since eval is a builtin.
func remoteCommand(n int) string {
	return fmt.Sprintf(`exec sh -c 'eval "$(dd bs=%d count=1 iflag=fullblock 2>/dev/null)"'`, n)
}

// remoteTTYCommand is the same for a terminal, which would echo the script, cut
// its lines at 4096 bytes and obey its control characters. So the terminal is
// made raw before mark says that the script may come.
func remoteTTYCommand(n int, mark string) string {
	return fmt.Sprintf(`exec sh -c 'tty=$(stty -g); stty raw -echo; printf %%s %s; eval "$(dd bs=%d count=1 iflag=fullblock 2>/dev/null)"'`, mark, n)
}

// group makes one command of a script: a shell reads it to its end before it
// runs any of it, so of a script that was cut on the way nothing is run. Its
// last byte is the brace.
func group(script string) string { return "{\n" + script + "\n}" }

// frame is one record of a script's answer.
type frame struct {
	name string
	body []byte
}

// frameReader finds the frames in a script's stdout.
type frameReader struct {
	r     *bufio.Reader
	nonce string
	noise tail // the last that was outside of frames
}

func newFrameReader(r io.Reader, nonce string) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(r, 64<<10), nonce: nonce, noise: tail{max: 1024}}
}

// next reads one frame. The error is io.EOF where the output ended between two
// frames.
func (f *frameReader) next() (frame, error) {
	for matched, skipped := 0, 0; matched < len(f.nonce); {
		b, err := f.r.ReadByte()
		if err != nil {
			return frame{}, err
		}
		switch b {
		case f.nonce[matched]:
			matched++
		case f.nonce[0]:
			matched = 1
		default:
			matched = 0
		}
		f.noise.Write([]byte{b})
		if skipped++; skipped > maxNoise {
			return frame{}, fmt.Errorf("more than %d bytes outside of frames", maxNoise)
		}
	}
	f.noise.drop(len(f.nonce))
	var head []byte
	for len(head) == 0 || head[len(head)-1] != '\n' {
		b, err := f.r.ReadByte()
		if err != nil {
			return frame{}, cutShort(err)
		}
		if head = append(head, b); len(head) > 512 {
			return frame{}, errors.New("a frame's first line has no end")
		}
	}
	fields := strings.Split(strings.TrimSuffix(string(head), "\n"), " ")
	if len(fields) != 3 || fields[0] != "" || fields[1] == "" {
		return frame{}, fmt.Errorf("a frame begins with %q", head)
	}
	name := fields[1]
	n, err := strconv.ParseUint(fields[2], 10, 64)
	if err != nil {
		return frame{}, fmt.Errorf("a frame begins with %q", head)
	}
	if n > maxBody {
		return frame{}, fmt.Errorf("frame %q has %d bytes, more than %d", name, n, maxBody)
	}
	var body bytes.Buffer // grows with what comes, not with what is announced
	if _, err := io.CopyN(&body, f.r, int64(n)); err != nil {
		return frame{}, cutShort(err)
	}
	if b, err := f.r.ReadByte(); err != nil {
		return frame{}, cutShort(err)
	} else if b != '\n' {
		return frame{}, fmt.Errorf("frame %q is longer than the %d bytes announced", name, n)
	}
	return frame{name, body.Bytes()}, nil
}

func cutShort(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// tail keeps the last max bytes written to it.
type tail struct {
	mu  sync.Mutex
	max int
	b   []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if len(t.b) > 2*t.max {
		t.b = append(t.b[:0], t.b[len(t.b)-t.max:]...)
	}
	return len(p), nil
}

// drop forgets the last n bytes.
func (t *tail) drop(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = t.b[:max(0, len(t.b)-n)]
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(t.b[max(0, len(t.b)-t.max):])
}

// session is a script that runs on the cluster and is talked to: lines to its
// stdin, frames from its stdout.
type session struct {
	lease  *lease
	stdin  io.WriteCloser
	stderr tail

	frames chan frame
	ended  chan struct{} // closed when err is set and no frame comes any more
	err    error         // io.EOF after `end 0`

	sent    chan struct{} // closed when the script has been written, or never will be
	exited  chan struct{} // closed when the remote process has gone, exit is set
	exit    error
	stop    context.CancelCauseFunc
	stopped context.Context
}

// start runs a framed script on the control connection until ctx ends.
func (c *sshClient) start(ctx context.Context, script string) (*session, error) {
	nonce := newNonce()
	prologue, err := render("prologue.sh.tmpl", struct{ Nonce string }{nonce})
	if err != nil {
		return nil, err
	}
	script = group(prologue + script)
	if strings.ContainsRune(script, 0) {
		return nil, errors.New("a script with a NUL byte")
	}
	s := &session{
		stderr: tail{max: maxStderr},
		frames: make(chan frame),
		ended:  make(chan struct{}),
		sent:   make(chan struct{}),
		exited: make(chan struct{}),
	}
	var stdout, stderr io.Reader
	s.lease, err = c.control.open(ctx, func(x *ssh.Session) (err error) {
		if s.stdin, stdout, stderr, err = pipes(x); err != nil {
			return err
		}
		return x.Start(remoteCommand(len(script)))
	})
	if err != nil {
		return nil, err
	}
	s.stopped, s.stop = context.WithCancelCause(ctx)
	stderrDone := make(chan struct{})
	go func() { io.Copy(&s.stderr, stderr); close(stderrDone) }()
	go func() { s.exit = s.lease.Wait(); close(s.exited) }()
	go func() { io.WriteString(s.stdin, script); close(s.sent) }()
	go s.read(newFrameReader(stdout, nonce), stderrDone)
	go s.cleanUp()
	return s, nil
}

func pipes(x *ssh.Session) (stdin io.WriteCloser, stdout, stderr io.Reader, err error) {
	if stdin, err = x.StdinPipe(); err == nil {
		if stdout, err = x.StdoutPipe(); err == nil {
			stderr, err = x.StderrPipe()
		}
	}
	return stdin, stdout, stderr, err
}

// read hands out the frames until the last, and finds how the script ended.
func (s *session) read(r *frameReader, stderrDone <-chan struct{}) {
	defer close(s.ended)
	for {
		f, err := r.next()
		if err == nil && f.name == "end" {
			var status int
			if status, err = strconv.Atoi(string(f.body)); err == nil && status == 0 {
				s.err = io.EOF
				return
			} else if err == nil {
				within(lastWords, stderrDone)
				s.err = &exitError{status, s.stderr.String()}
				return
			}
		}
		if err != nil {
			s.err = s.unknown(err, &r.noise, stderrDone)
			return
		}
		select {
		case s.frames <- f:
		case <-s.stopped.Done():
			s.err = fmt.Errorf("%w: %w", errConnection, context.Cause(s.stopped))
			return
		}
	}
}

// unknown is the error for a script whose end was not heard.
func (s *session) unknown(err error, noise *tail, stderrDone <-chan struct{}) error {
	if s.stopped.Err() != nil {
		return fmt.Errorf("%w: %w", errConnection, context.Cause(s.stopped))
	}
	within(lastWords, stderrDone)
	within(lastWords, s.exited)
	what := "the answer is garbled: " + err.Error()
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		what = "the answer ended too early: " + s.lease.link.why().Error()
	}
	select {
	case <-s.exited:
		var missing *ssh.ExitMissingError
		if s.exit == nil {
			what += " (exit status 0)"
		} else if !errors.As(s.exit, &missing) {
			what += fmt.Sprintf(" (%v)", s.exit)
		}
	default:
	}
	return fmt.Errorf("%w: %s%s%s", errConnection, what,
		excerpt("; stderr: ", s.stderr.String()), excerpt("; stdout: ", noise.String()))
}

func within(d time.Duration, done <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// cleanUp closes the session when the script has ended or the caller has no
// more use for it.
func (s *session) cleanUp() {
	select {
	case <-s.ended:
		// The script has spoken its last; sshd counts the session until its
		// processes are gone.
		select {
		case <-s.exited:
		case <-s.stopped.Done():
			within(lastWords, s.exited)
		case <-time.After(lastWords):
		}
	case <-s.stopped.Done():
	}
	closeSession(s.lease, s.exited)
	s.stop(errors.New("the session has ended"))
}

// closeSession ends a session and whatever still runs in it. sshd leaves the
// processes of a closed session alone, and one that neither reads nor writes
// (`tail -f` of a quiet log) would stay for ever; OpenSSH 7.9 and later pass a
// signal on to the whole process group.
func closeSession(l *lease, exited <-chan struct{}) {
	select {
	case <-exited:
	default:
		l.Signal(ssh.SIGTERM)
	}
	l.Close()
	l.release()
}

// Next is the script's next frame. After the last the error is io.EOF where the
// script ended with status 0, *exitError where it did not, and wraps
// errConnection where that is unknown.
func (s *session) Next(ctx context.Context) (name string, body []byte, err error) {
	select {
	case f := <-s.frames:
		return f.name, f.body, nil
	case <-s.ended:
		return "", nil, s.err
	case <-s.stopped.Done():
		// The reader may hang on a connection that is silent: do not wait for it,
		// unless the end is what made cleanUp stop.
		select {
		case <-s.ended:
			return "", nil, s.err
		default:
			return "", nil, fmt.Errorf("%w: %w", errConnection, context.Cause(s.stopped))
		}
	case <-ctx.Done():
		return "", nil, fmt.Errorf("%w: %w", errConnection, context.Cause(ctx))
	}
}

// Send writes one line to the script's stdin.
func (s *session) Send(line string) error {
	if strings.ContainsAny(line, "\n\x00") {
		return fmt.Errorf("line %q for a held script: it has a newline or a NUL", line)
	}
	select {
	case <-s.sent:
	case <-s.stopped.Done():
		return fmt.Errorf("%w: %w", errConnection, context.Cause(s.stopped))
	}
	if _, err := io.WriteString(s.stdin, line+"\n"); err != nil {
		return fmt.Errorf("%w: %w", errConnection, err)
	}
	return nil
}

// Close ends the session. It does not wait for anything.
func (s *session) Close() { s.stop(errors.New("the session was closed")) }

// Hold runs a script on the control connection, which stays until it ends by
// itself, ctx ends or Close is called. It sees the end of its stdin then.
func (c *sshClient) Hold(ctx context.Context, script string) (*session, error) {
	return c.start(ctx, script)
}

// Exchange runs a script on the control connection, feeds it in (nil: nothing)
// and hands each frame it says to each (nil: frames are dropped), whose error
// ends the exchange and is returned. The result is nil only when the script's
// own `end 0` arrived; *exitError when it said another status; and wraps
// errConnection when the outcome is unknown: cut, timed out, ended without a
// word. Nothing of in is read after Exchange has returned, so a Read of it must
// not block for long.
//
// Scripts may use say, end by exit (an own EXIT trap would silence the end), and
// must not exec. Only one process at a time may say something: frames of
// concurrent ones would mix.
func (c *sshClient) Exchange(ctx context.Context, script string, in io.Reader, each func(name string, body []byte) error) (err error) {
	began := time.Now()
	defer func() { c.metrics.exchange(time.Since(began), err) }()
	s, err := c.start(ctx, script)
	if err != nil {
		return err
	}
	g := &gate{r: in}
	defer g.shut(true)
	defer s.Close()
	go func() {
		<-s.sent
		if in != nil {
			if err := g.copyTo(s.stdin); err != nil {
				// No end of file: the script must not take a part for the whole.
				s.stop(fmt.Errorf("reading the input of the script: %w", err))
				return
			}
		}
		s.stdin.Close()
	}()
	for {
		name, body, err := s.Next(ctx)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if each != nil {
			if err := each(name, body); err != nil {
				return err
			}
		}
	}
}

// gate passes a reader on until it is shut.
type gate struct {
	mu     sync.Mutex
	r      io.Reader
	closed atomic.Bool
}

// copyTo copies until the reader's end, an error of it (which is returned), an
// error of the writer, or the gate is shut.
func (g *gate) copyTo(w io.Writer) error {
	buf := make([]byte, 32<<10)
	for {
		g.mu.Lock()
		if g.closed.Load() {
			g.mu.Unlock()
			return nil
		}
		n, err := g.r.Read(buf)
		g.mu.Unlock()
		if _, werr := w.Write(buf[:n]); werr != nil {
			return nil // the session tells why
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// shut lets no further Read begin, and waits for one that is going on.
func (g *gate) shut(wait bool) {
	g.closed.Store(true)
	if wait {
		g.mu.Lock()
		defer g.mu.Unlock()
	}
}
