package knoc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	"golang.org/x/crypto/ssh"
)

// ttySize is a terminal's size in characters.
type ttySize struct{ Width, Height uint16 }

// Stream runs a script on one of the stream connections with raw bytes in and
// out; with tty it has a terminal of that size, which follows resize, and no
// stderr of its own. What a login shell prints before the script begins is
// dropped. The result is nil when the script ended with status 0, *exitError
// when it did not, and wraps errConnection when that is unknown. When ctx ends,
// or stdout or stderr can no longer be written, the session is closed and the
// script gets SIGTERM.
//
// Stream returns when the script has ended. A Read of stdin that is going on
// then may last longer: it ends with whatever stdin is, and its bytes are lost.
func (c *sshClient) Stream(ctx context.Context, script string, stdin io.Reader, stdout, stderr io.Writer, tty *ttySize, resize <-chan ttySize) error {
	if strings.ContainsRune(script, 0) {
		return errors.New("a script with a NUL byte")
	}
	if stdout == nil {
		stdout = io.Discard
	}
	if stderr == nil {
		stderr = io.Discard
	}
	mark, raw := newNonce(), newNonce()
	var command string
	if tty != nil {
		// The script may come once the terminal is raw, which the command says,
		// and what is typed once it is as it was, or ^D would be a mere byte.
		script = group("stty \"$tty\"; printf %s " + string(quote(mark)) + "\n" + script)
		command = remoteTTYCommand(len(script), raw)
	} else {
		say := "printf %s " + string(quote(mark))
		script = group(say + "; " + say + " >&2\n" + script)
		command = remoteCommand(len(script))
	}
	var in io.WriteCloser
	var out, errOut io.Reader
	l, err := c.streams.open(ctx, func(x *ssh.Session) (err error) {
		if in, out, errOut, err = pipes(x); err != nil {
			return err
		}
		if tty != nil {
			if err = x.RequestPty("xterm", int(tty.Height), int(tty.Width), ssh.TerminalModes{}); err != nil {
				return fmt.Errorf("asking for a terminal: %w", err)
			}
		}
		return x.Start(command)
	})
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	exited := make(chan struct{})
	// In the background, since a silent connection can hold it up.
	defer func() { go closeSession(l, exited) }()

	outAfter := newAfterMark(stdout, mark)
	errAfter := newAfterMark(stderr, mark)
	outFirst, errFirst := io.Writer(outAfter), io.Writer(errAfter)
	rawAfter := newAfterMark(outAfter, raw)
	if tty != nil {
		outFirst, errFirst = rawAfter, stderr // no stderr, and no mark on it
	}
	var copies sync.WaitGroup
	for _, c := range []struct {
		to   io.Writer
		from io.Reader
	}{{outFirst, out}, {errFirst, errOut}} {
		copies.Go(func() {
			if _, err := io.Copy(c.to, c.from); err != nil {
				stop(fmt.Errorf("writing the output of a stream: %w", err))
			}
		})
	}
	g := &gate{r: stdin}
	defer g.shut(false)
	go func() {
		if tty != nil && !rawAfter.await(ctx) {
			return
		}
		io.WriteString(in, script)
		if tty != nil && !outAfter.await(ctx) {
			return
		}
		if stdin != nil {
			if err := g.copyTo(in); err != nil {
				stop(fmt.Errorf("reading the input of a stream: %w", err))
				return
			}
		}
		in.Close()
	}()
	if resize != nil {
		go func() {
			for {
				select {
				case size, ok := <-resize:
					if !ok {
						return
					}
					l.WindowChange(int(size.Height), int(size.Width))
				case <-ctx.Done():
					return
				}
			}
		}()
	}
	var exit error
	go func() {
		copies.Wait()
		exit = l.Wait()
		close(exited)
	}()
	select {
	case <-exited:
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", errConnection, context.Cause(ctx))
	}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", errConnection, context.Cause(ctx))
	}
	return outAfter.outcome(errAfter, exit, l.link)
}

// outcome is the result of a stream that has ended.
func (a *afterMark) outcome(stderr *afterMark, exit error, l *link) error {
	var status *ssh.ExitError
	var missing *ssh.ExitMissingError
	switch {
	case errors.As(exit, &missing):
		return fmt.Errorf("%w: %w", errConnection, l.why())
	case exit != nil && !errors.As(exit, &status):
		return fmt.Errorf("%w: %w", errConnection, exit)
	case !a.begun():
		how := "exit status 0"
		if exit != nil {
			how = exit.Error()
		}
		return fmt.Errorf("%w: the login shell did not run the script (%s)%s%s", errConnection, how,
			excerpt("; stderr: ", stderr.skipped.String()), excerpt("; stdout: ", a.skipped.String()))
	case exit == nil:
		return nil
	case status.Signal() != "":
		return &exitError{Status: 128 + signalNumber(status.Signal())}
	}
	return &exitError{Status: status.ExitStatus()}
}

// signalNumber is the number Linux has for a signal that RFC 4254, 6.10, names
// without SIG; 0 for one it does not.
func signalNumber(name string) int {
	return map[string]int{"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "ABRT": 6, "FPE": 8, "KILL": 9,
		"USR1": 10, "SEGV": 11, "USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15}[name]
}

// afterMark passes on what comes after the mark. What comes before it is noise
// of the login shell.
type afterMark struct {
	w       io.Writer
	mark    string
	matched int
	found   chan struct{} // closed at the mark
	skipped tail
}

func newAfterMark(w io.Writer, mark string) *afterMark {
	return &afterMark{w: w, mark: mark, found: make(chan struct{}), skipped: tail{max: 1024}}
}

func (a *afterMark) begin() { close(a.found) }

func (a *afterMark) await(ctx context.Context) bool {
	select {
	case <-a.found:
		return true
	case <-ctx.Done():
		return false
	}
}

func (a *afterMark) begun() bool {
	select {
	case <-a.found:
		return true
	default:
		return false
	}
}

func (a *afterMark) Write(p []byte) (int, error) {
	if a.begun() {
		return a.w.Write(p)
	}
	for i, b := range p {
		// The mark's first character occurs only there.
		switch b {
		case a.mark[a.matched]:
			a.matched++
		case a.mark[0]:
			a.matched = 1
		default:
			a.matched = 0
		}
		if a.matched == len(a.mark) {
			a.begin()
			a.skipped.Write(p[:i+1])
			if rest := p[i+1:]; len(rest) > 0 {
				n, err := a.w.Write(rest)
				return i + 1 + n, err
			}
			return len(p), nil
		}
	}
	a.skipped.Write(p)
	return len(p), nil
}
