package knoc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
	utilexec "k8s.io/utils/exec"
)

// execData is what templates/exec.sh.tmpl needs.
type execData struct {
	JobID      string
	Step       string // the step's name, by which it can be found and cancelled
	Mark       string
	TTY, Stdin bool
	Words      []string // what sh runs: a script and its arguments
}

// RunInContainer runs a command in a running container, as kubectl exec does:
// srun --overlap starts a step beside the pod's own in its job, and run/enter.sh,
// left by pod.sh, joins the container. The command's own exit status comes back
// as an utilexec.CodeExitError, unwrapped: virtual-kubelet looks for it by type
// assertion (internal/kubernetes/remotecommand/exec.go).
func (p *KNOCProvider) RunInContainer(ctx context.Context, namespace, name, container string, cmd []string, attach api.AttachIO) error {
	w, err := p.lookup(namespace, name)
	if err != nil {
		return err
	}
	if err := w.canEnter(container); err != nil {
		return err
	}
	if len(cmd) == 0 {
		return errdefs.InvalidInput("no command to execute was given")
	}
	for _, arg := range cmd {
		if strings.ContainsRune(arg, 0) {
			return errdefs.InvalidInput("a command's argument holds a NUL byte, which no program can be given")
		}
	}
	mark := newNonce()
	data := execData{
		JobID: w.JobID, Step: "knoc-exec-" + strings.TrimLeft(mark, "@"), Mark: mark,
		TTY: attach.TTY(), Stdin: attach.Stdin() != nil,
		Words: append([]string{path.Join(w.Dir, "run/enter.sh"), container, "--"}, cmd...),
	}
	script, err := render("exec.sh.tmpl", data)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx) // ends the reader of sizes
	defer cancel()
	stdin, stdout, stderr := attach.Stdin(), io.Writer(attach.Stdout()), io.Writer(attach.Stderr())
	end := &trailer{Mark: mark, Out: stderr}
	stderr = end
	var tty *ttySize
	var resize <-chan ttySize
	if data.TTY { // one stream carries all
		end.Out, stdout, stderr = stdout, end, nil
		resize = sizes(ctx, attach.Resize())
		tty = firstSize(ctx, resize)
	}
	err = p.ssh.Stream(ctx, script, stdin, stdout, stderr, tty, resize)

	status, told := end.Status()
	var exit *exitError
	switch {
	case told && status == 0:
		return nil
	case told:
		return utilexec.CodeExitError{Err: fmt.Errorf("command terminated with exit code %d", status), Code: status}
	case !errors.As(err, &exit):
		// sshd passes a signal on only since OpenSSH 7.9, and after a cut
		// nobody knows: the step must not outlive its client.
		p.cancelStep(context.WithoutCancel(ctx), w.JobID, data.Step)
	case exit.Status > 128:
		// srun's word for a step that was killed, as it is when its job ends.
		return utilexec.CodeExitError{Err: fmt.Errorf("command was ended by signal %d", exit.Status-128), Code: exit.Status}
	}
	if err == nil {
		err = errors.New("srun ended well, but the command never told its exit status")
	}
	return fmt.Errorf("running a command in container %q of pod %s/%s through srun in job %s: %w%s",
		container, namespace, name, w.JobID, err, excerpt(": ", end.LastWords()))
}

// trailer passes a stream on up to a mark that no program knows beforehand;
// templates/exec.sh.tmpl puts the command's exit status after it. It holds back
// nothing but what may be the begin of the mark.
type trailer struct {
	Mark string
	Out  io.Writer // nil drops everything

	held []byte // a suffix of the stream that is a prefix of Mark
	rest []byte // what follows Mark
	seen bool
	last []byte // the end of what was passed on
}

// Write implements io.Writer.
func (t *trailer) Write(p []byte) (int, error) {
	if t.seen {
		t.rest = append(t.rest, p[:min(len(p), max(0, 64-len(t.rest)))]...)
		return len(p), nil
	}
	data := append(t.held, p...)
	t.held = nil
	before, after, found := bytes.Cut(data, []byte(t.Mark))
	if found {
		t.seen = true
		t.rest = bytes.Clone(after[:min(len(after), 64)])
	} else {
		keep := min(len(data), len(t.Mark)-1)
		for !strings.HasPrefix(t.Mark, string(data[len(data)-keep:])) {
			keep--
		}
		before, t.held = data[:len(data)-keep], bytes.Clone(data[len(data)-keep:])
	}
	if t.Out == nil || len(before) == 0 {
		t.remember(before)
		return len(p), nil
	}
	t.remember(before)
	if _, err := t.Out.Write(before); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (t *trailer) remember(b []byte) {
	t.last = append(t.last, b[max(0, len(b)-500):]...)
	t.last = t.last[max(0, len(t.last)-500):]
}

// Status is the exit status after the mark; false when there was none.
func (t *trailer) Status() (int, bool) {
	line, _, whole := strings.Cut(string(t.rest), "\n")
	n, err := strconv.Atoi(strings.TrimRight(line, "\r"))
	return n, t.seen && whole && err == nil && n >= 0 && n <= 255
}

// LastWords is the end of what was written before the mark: srun's complaint,
// when there is no mark.
func (t *trailer) LastWords() string { return string(t.last) + string(t.held) }

// canEnter is nil for a container that runs now; else the error says why not.
func (w *workView) canEnter(container string) error {
	if w.Pod == nil {
		return errdefs.NotFound("the pod is gone from the API server")
	}
	if !hasContainer(w.Pod, container) {
		return errdefs.NotFoundf("container %q not found in pod %q", container, w.Pod.Name)
	}
	switch {
	case w.Running[container] && w.JobID != "" && w.Node != "" && !w.JobEnded:
		return nil
	case w.started(container):
		return errdefs.InvalidInputf("container %q in pod %q is not running: it has ended", container, w.Pod.Name)
	case w.JobEnded:
		return errdefs.InvalidInputf("container %q in pod %q is not running: its job ended before it started", container, w.Pod.Name)
	}
	return errdefs.InvalidInputf("container %q in pod %q is not running: it is waiting to start", container, w.Pod.Name)
}

// started says whether the journal has a start of the container.
func (w *workView) started(container string) bool {
	n, ok := w.Attempts[container]
	return ok && n >= 0
}

// hasContainer says whether the pod has a container of any kind with that name.
func hasContainer(pod *v1.Pod, name string) bool {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return true
			}
		}
	}
	for i := range pod.Spec.EphemeralContainers {
		if pod.Spec.EphemeralContainers[i].Name == name {
			return true
		}
	}
	return false
}

// cancelStep ends a step of a job by the step's name, as far as that can be done now.
func (p *KNOCProvider) cancelStep(ctx context.Context, jobID, step string) {
	script, err := render("execcancel.sh.tmpl", execData{JobID: jobID, Step: step})
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	// An error is an outage, or the job is over: either ends the step as well.
	_ = p.ssh.Exchange(ctx, script, nil, func(string, []byte) error { return nil })
}

// firstSize waits a moment for the size that kubectl sends at once: srun does
// not like a terminal that changes while it starts ("accept failure").
func firstSize(ctx context.Context, resize <-chan ttySize) *ttySize {
	size := ttySize{Width: 80, Height: 24}
	select {
	case size = <-resize:
	case <-time.After(200 * time.Millisecond):
	case <-ctx.Done():
	}
	return &size
}

// sizes passes on the sizes of the client's terminal until ctx is done. The
// channel of virtual-kubelet is never closed, and when the client has gone it
// delivers {0,0} without end (virtual-kubelet #1266): such sizes are dropped,
// at most one a second.
func sizes(ctx context.Context, from <-chan api.TermSize) <-chan ttySize {
	to := make(chan ttySize)
	go func() {
		var last api.TermSize
		for {
			var size api.TermSize
			var ok bool
			select {
			case size, ok = <-from:
			case <-ctx.Done():
				return
			}
			if !ok {
				return
			}
			if size.Width == 0 || size.Height == 0 {
				select {
				case <-time.After(time.Second):
				case <-ctx.Done():
					return
				}
				continue
			}
			if size == last {
				continue
			}
			last = size
			select {
			case to <- ttySize{Width: size.Width, Height: size.Height}:
			case <-ctx.Done():
				return
			}
		}
	}()
	return to
}
