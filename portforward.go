package knoc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"golang.org/x/crypto/ssh"
)

// PortForward joins a client's stream with a port of the pod: the login node's
// sshd opens the connection (direct-tcpip, RFC 4254, 7.2) to the compute node,
// whose network the pod's containers share. Where nobody listens at that address,
// or sshd opens no connections (AllowTcpForwarding no), a step of the job relays
// to the compute node's loopback, as under a kubelet a server is found there.
func (p *KNOCProvider) PortForward(ctx context.Context, namespace, name string, port int32, stream io.ReadWriteCloser) error {
	w, err := p.lookup(namespace, name)
	if err != nil {
		return err
	}
	if w.Pod == nil || w.Pod.Status.PodIP == "" || w.JobEnded {
		return errdefs.InvalidInputf("pod %q is not running: it has no address to forward port %d to", name, port)
	}
	client, err := p.ssh.client(ctx)
	if err != nil {
		return err
	}
	addr := net.JoinHostPort(w.Pod.Status.PodIP, strconv.Itoa(int(port)))
	conn, err := client.DialContext(ctx, "tcp", addr)
	if err != nil {
		var refused *ssh.OpenChannelError
		if errors.As(err, &refused) && ctx.Err() == nil {
			if err2 := p.relay(ctx, w, port, stream); err2 != nil {
				err = fmt.Errorf("the login node cannot reach %s (%w), and on the compute node itself: %w", addr, err, err2)
			} else {
				return nil
			}
		}
		return fmt.Errorf("forwarding port %d of pod %s/%s: %w", port, namespace, name, err)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	defer conn.Close()
	go func() {
		io.Copy(conn, stream)
		// The client has no more to send; the answer may still come.
		if c, ok := conn.(interface{ CloseWrite() error }); ok {
			c.CloseWrite()
		}
	}()
	_, err = io.Copy(stream, conn)
	stream.Close()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// relay joins the stream with a port of the compute node's loopback, by a step in
// the pod's job (templates/relay.sh.tmpl).
func (p *KNOCProvider) relay(ctx context.Context, w workView, port int32, stream io.ReadWriteCloser) error {
	text, err := render("relay.sh.tmpl", struct{}{})
	if err != nil {
		return err
	}
	mark := newNonce()
	data := execData{
		JobID: w.JobID, Step: "knoc-port-" + strings.TrimLeft(mark, "@"), Mark: mark, Stdin: true,
		Words: []string{"-c", text, "relay", strconv.Itoa(int(port))},
	}
	script, err := render("exec.sh.tmpl", data)
	if err != nil {
		return err
	}
	end := &trailer{Mark: mark}
	err = p.ssh.Stream(ctx, script, stream, stream, end, nil, nil)
	stream.Close()
	status, told := end.Status()
	switch {
	case told && status == 0:
		return nil
	case told:
		return fmt.Errorf("%s", strings.TrimSpace(end.LastWords()))
	}
	// Nobody knows whether the step has ended: see RunInContainer.
	p.cancelStep(context.WithoutCancel(ctx), w.JobID, data.Step)
	if err == nil {
		err = errors.New("srun ended without a word")
	}
	return fmt.Errorf("%w%s", err, excerpt(": ", end.LastWords()))
}
