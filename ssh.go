package knoc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os/user"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"
)

// SSHConfig says how to reach the cluster's login node. The zero value of every
// field but Address works.
type SSHConfig struct {
	// Address is user@host[:port] of the login node.
	Address string
	// KeyFile is a private key; a certificate beside it (KeyFile + "-cert.pub",
	// as ssh-keygen -s writes it) is offered too. The keys of a running
	// ssh-agent (SSH_AUTH_SOCK) are offered after it.
	KeyFile string
	// PassphraseFile holds the passphrase of KeyFile.
	PassphraseFile string
	// KnownHosts are the known_hosts files; by default ~/.ssh/known_hosts and
	// /etc/ssh/ssh_known_hosts, where they exist.
	KnownHosts []string
	// Jumps are the hosts to go through, user@host[:port], nearest first, as in
	// ssh's ProxyJump. Their host keys are checked as the login node's is.
	Jumps []string
	// ConnectTimeout bounds one attempt to connect, through all jumps, until
	// the last of them has let us in; by default 15 s.
	ConnectTimeout time.Duration
	// Keepalive is how often each connection is asked whether it is alive, and
	// how long an answer may take; by default 15 s, so that a silent cut is
	// noticed within 30 s.
	Keepalive time.Duration
	// Backoff is the pause after a first failed attempt to connect. It doubles
	// with each further one up to 30 s; by default half a second.
	Backoff time.Duration
	// StreamConnections is the most connections opened for logs, exec and
	// port-forward; by default 4, of at most 8 sessions each.
	StreamConnections int
	// Logger hears of connections made and lost; by default nobody does.
	Logger *slog.Logger
}

// sshClient keeps the connections to the login node: the control connection for
// exchanges and held sessions, and others for streams, so that no flood of
// output can delay the loop. A connection is made when it is needed, and again
// after it was lost.
type sshClient struct {
	metrics *metrics // nil takes nothing down
	cfg     SSHConfig
	hops    []hop // the jumps, then the login node
	keys    *keyring
	log     *slog.Logger

	ctx    context.Context // ends with Close
	cancel context.CancelFunc

	control, streams *pool
}

// hop is one host on the way.
type hop struct{ user, addr string }

func (h hop) String() string { return h.user + "@" + h.addr }

// parseHop reads user@host[:port]. An IPv6 address with a port stands in
// brackets.
func parseHop(s string) (hop, error) {
	bad := func(why string) (hop, error) {
		return hop{}, fmt.Errorf("ssh address %q: %s; give user@host or user@host:port", s, why)
	}
	name, host, found := strings.Cut(s, "@")
	if !found {
		host = s
		u, err := user.Current()
		if err != nil {
			return bad("it names no user")
		}
		name = u.Username
	}
	port := "22"
	if h, p, err := net.SplitHostPort(host); err == nil {
		if host, port = h, p; port == "" {
			port = "22"
		}
	} else if ip := strings.Trim(host, "[]"); net.ParseIP(ip) != nil {
		host = ip
	} else if strings.ContainsAny(host, ":[]") {
		return bad(err.Error())
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return bad(fmt.Sprintf("%q is no port", port))
	}
	if name == "" || host == "" || strings.ContainsAny(name+host, " \t\r\n/@") {
		return bad("it names no user, or no host")
	}
	return hop{user: name, addr: net.JoinHostPort(host, port)}, nil
}

// newSSH reads and checks the key and the known_hosts files. It connects to
// nothing yet.
func newSSH(cfg SSHConfig) (*sshClient, error) {
	if cfg.ConnectTimeout <= 0 {
		cfg.ConnectTimeout = 15 * time.Second
	}
	if cfg.Keepalive <= 0 {
		cfg.Keepalive = 15 * time.Second
	}
	if cfg.Backoff <= 0 {
		cfg.Backoff = 500 * time.Millisecond
	}
	if cfg.StreamConnections <= 0 {
		cfg.StreamConnections = 4
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c := &sshClient{cfg: cfg, log: cfg.Logger}
	for _, s := range append(append([]string(nil), cfg.Jumps...), cfg.Address) {
		h, err := parseHop(s)
		if err != nil {
			return nil, err
		}
		c.hops = append(c.hops, h)
	}
	var err error
	if c.keys, err = newKeyring(cfg.KeyFile, cfg.PassphraseFile); err != nil {
		return nil, err
	}
	if _, _, err = knownHosts(cfg.KnownHosts); err != nil {
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	// The second control connection is for servers that allow fewer sessions
	// than we would open.
	c.control = newPool(c, "control", 2, true)
	c.streams = newPool(c, "stream", cfg.StreamConnections, false)
	return c, nil
}

// Close ends all connections, and with them all sessions.
func (c *sshClient) Close() error {
	c.cancel()
	c.control.close()
	c.streams.close()
	return nil
}

// client is a connection for others to use (port-forward, the classic API). It
// is one of the stream connections; do not close it. A tunnel is no session for
// sshd, so a connection full of sessions serves too.
func (c *sshClient) client(ctx context.Context) (*ssh.Client, error) {
	if l := c.streams.any(); l != nil {
		return l.client, nil
	}
	l, err := c.streams.acquire(ctx)
	if err != nil {
		return nil, err
	}
	defer c.streams.release(l)
	c.streams.pin(l)
	return l.client, nil
}

// link is one connection to the login node.
type link struct {
	client *ssh.Client
	conn   *liveConn     // the TCP connection underneath, to the first hop
	dead   chan struct{} // closed when the connection is gone
	cause  atomic.Pointer[error]

	// The pool's, under its mutex.
	open       int // sessions
	limit      int // of sessions, since the server refused one
	limitUntil time.Time
	pinned     bool // somebody outside holds the client
	idle       *time.Timer
}

// liveConn remembers when the other side last said anything.
type liveConn struct {
	net.Conn
	heard atomic.Int64 // UnixNano
}

func (c *liveConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.heard.Store(time.Now().UnixNano())
	}
	return n, err
}

// connect makes a connection through all hops. The whole of it is bounded by
// ConnectTimeout: golang.org/x/crypto/ssh knows no context, so the TCP
// connection is closed under it.
func (c *sshClient) connect() (*link, error) {
	ctx, cancel := context.WithTimeoutCause(c.ctx, c.cfg.ConnectTimeout,
		fmt.Errorf("no answer within %s", c.cfg.ConnectTimeout))
	defer cancel()
	var at hop
	fail := func(err error) (*link, error) {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("connecting to %s: %w", at, err)
	}
	at = c.hops[0]
	tcp, err := new(net.Dialer).DialContext(ctx, "tcp", at.addr)
	if err != nil {
		return fail(err)
	}
	l := &link{conn: &liveConn{Conn: tcp}, dead: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { tcp.Close() })
	var conn net.Conn = l.conn
	for i, h := range c.hops {
		at = h
		if l.client, err = c.handshake(conn, h); err != nil {
			tcp.Close()
			return fail(err)
		}
		if i+1 < len(c.hops) {
			at = c.hops[i+1]
			if conn, err = l.client.Dial("tcp", at.addr); err != nil {
				tcp.Close()
				return fail(fmt.Errorf("through %s: %w", h, err))
			}
		}
	}
	if !stop() {
		tcp.Close()
		return fail(context.Cause(ctx))
	}
	go func() {
		l.client.Wait()
		// A link may die at its far end only; the hops before it go too.
		tcp.Close()
		close(l.dead)
	}()
	go c.keepalive(l)
	c.log.Info("ssh connected", "to", at.String())
	return l, nil
}

// handshake speaks SSH over conn with one hop: checks its host key, shows ours.
func (c *sshClient) handshake(conn net.Conn, h hop) (*ssh.Client, error) {
	check, algorithms, err := hostKeyCheck(c.cfg.KnownHosts, h.addr)
	if err != nil {
		return nil, err
	}
	signers, done, err := c.keys.signers()
	if err != nil {
		return nil, err
	}
	defer done()
	cc, chans, reqs, err := ssh.NewClientConn(conn, h.addr, &ssh.ClientConfig{
		User:              h.user,
		Auth:              []ssh.AuthMethod{ssh.PublicKeys(signers...)},
		HostKeyCallback:   check,
		HostKeyAlgorithms: algorithms,
		ClientVersion:     "SSH-2.0-knoc",
	})
	if err != nil {
		conn.Close()
		var refused *hostKeyError
		if errors.As(err, &refused) {
			return nil, refused
		}
		if strings.Contains(err.Error(), "unable to authenticate") {
			return nil, &authError{fmt.Sprintf("%s accepts none of the keys offered (%s): add its public key to ~/.ssh/authorized_keys there (%v)", h, c.keys, err)}
		}
		return nil, err
	}
	return ssh.NewClient(cc, chans, reqs), nil
}

// keepalive asks the other side again and again whether it is there, and ends
// the connection when it stays silent. TCP alone would not notice a cut for
// many minutes.
func (c *sshClient) keepalive(l *link) {
	every := c.cfg.Keepalive
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-l.dead:
			return
		case <-tick.C:
		}
		answer := make(chan error, 1)
		go func() {
			// OpenSSH answers "failure" to this name, which is an answer.
			_, _, err := l.client.SendRequest("keepalive@openssh.com", true, nil)
			answer <- err
		}()
		for waiting := true; waiting; {
			select {
			case <-l.dead:
				return
			case err := <-answer:
				if err != nil {
					l.kill(err)
					return
				}
				waiting = false
			case <-time.After(every):
				// Bytes of any kind are a sign of life too: an answer may be
				// stuck behind much data on a slow line.
				silent := time.Duration(time.Now().UnixNano() - l.conn.heard.Load())
				if silent >= every {
					l.kill(fmt.Errorf("the other side is silent for %s", silent.Round(time.Millisecond)))
					return
				}
			}
		}
	}
}

// kill ends the connection at its lowest layer: closing anything above would
// send a message first, and wait for a peer that may be gone.
func (l *link) kill(why error) {
	l.cause.CompareAndSwap(nil, &why)
	l.conn.Close()
}

// isDead says whether the connection is gone, or goes within a moment.
func (l *link) isDead(within time.Duration) bool {
	select {
	case <-l.dead:
		return true
	case <-time.After(within):
		return false
	}
}

// why says what ended the connection, as far as we know.
func (l *link) why() error {
	if p := l.cause.Load(); p != nil {
		return *p
	}
	select {
	case <-l.dead:
		return errors.New("the connection was closed by the other side")
	default:
		return errors.New("the session was closed by the other side")
	}
}
