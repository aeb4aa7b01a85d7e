package knoc

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// testCluster is a login node for tests: a real SSH server on a real TCP port
// that really runs the commands it is given, with a home directory of its own
// and Bin first in PATH. What it does follows OpenSSH's sshd, with faults that
// tests ask for. Set its fields before the first connection, or by an option.
type testCluster struct {
	t testing.TB

	Home, Bin      string // Bin is Home/bin
	Addr           string // host:port
	User           string
	KnownHostsFile string
	KeyFile        string

	// Shell runs a command: Shell... command. By default /bin/sh -c.
	Shell []string
	// Banner is written to the stdout of each command before it runs, as a noisy
	// .bashrc does.
	Banner string
	// MaxSessions is the number of sessions that one connection may have.
	MaxSessions int
	// Env is added to the environment of each command.
	Env []string

	// HostKeys are the server's keys and certificates. KnownHostsFile has the first.
	HostKeys []ssh.Signer
	allowed  map[string]bool

	listener net.Listener
	refuse   atomic.Bool
	connects atomic.Int32 // TCP connections accepted
	open     atomic.Int32 // sessions open now
	serving  sync.WaitGroup

	mu            sync.Mutex
	conns         map[*faultConn]bool
	thaw          chan struct{} // nil: not frozen; closed by Thaw
	cutIn, cutOut int64         // bytes until the cut, -1: never
}

// The keys of whoever runs the tests are none of their business.
func init() { os.Unsetenv("SSH_AUTH_SOCK") }

// newTestCluster starts one, which ends with the test.
func newTestCluster(t testing.TB, opts ...func(*testCluster)) *testCluster {
	t.Helper()
	dir := t.TempDir()
	c := &testCluster{
		t: t, Home: filepath.Join(dir, "home"), User: "hpcuser",
		KnownHostsFile: filepath.Join(dir, "known_hosts"), KeyFile: filepath.Join(dir, "id"),
		Shell: []string{"/bin/sh", "-c"}, MaxSessions: 10,
		HostKeys: []ssh.Signer{newTestKey(t)}, allowed: map[string]bool{}, conns: map[*faultConn]bool{}, cutIn: -1, cutOut: -1,
	}
	c.Bin = filepath.Join(c.Home, "bin")
	if err := os.MkdirAll(c.Bin, 0o700); err != nil {
		t.Fatal(err)
	}
	key := writeTestKey(t, c.KeyFile, "")
	c.Allow(key.PublicKey())
	for _, o := range opts {
		o(c)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.listener, c.Addr = l, l.Addr().String()
	c.writeFile(c.KnownHostsFile, knownhosts.Line([]string{c.Addr}, c.HostKeys[0].PublicKey())+"\n")
	c.serving.Go(c.serve)
	t.Cleanup(func() {
		l.Close()
		c.Thaw()
		ended := make(chan struct{})
		go func() { c.serving.Wait(); close(ended) }()
		// A command may begin at this moment: it must not outlive the test, and
		// nobody may report its failure when the test has ended.
		for {
			c.Cut()
			c.killAll()
			select {
			case <-ended:
				return
			case <-time.After(100 * time.Millisecond):
			}
		}
	})
	return c
}

// newTestKey makes an ed25519 key.
func newTestKey(t testing.TB) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// writeTestKey writes a new private key file.
func writeTestKey(t testing.TB, file, passphrase string) ssh.Signer {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var block *pem.Block
	if passphrase == "" {
		block, err = ssh.MarshalPrivateKey(key, "test")
	} else {
		block, err = ssh.MarshalPrivateKeyWithPassphrase(key, "test", []byte(passphrase))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Config is how to reach this cluster.
func (c *testCluster) Config() SSHConfig {
	return SSHConfig{
		Address: c.User + "@" + c.Addr, KeyFile: c.KeyFile, KnownHosts: []string{c.KnownHostsFile},
		ConnectTimeout: 10 * time.Second, Backoff: 20 * time.Millisecond,
	}
}

// Client is an sshClient for this cluster, closed with the test.
func (c *testCluster) Client(change ...func(*SSHConfig)) *sshClient {
	c.t.Helper()
	cfg := c.Config()
	for _, f := range change {
		f(&cfg)
	}
	client, err := newSSH(cfg)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { client.Close() })
	return client
}

// Stub writes an executable sh script into Bin.
func (c *testCluster) Stub(name, script string) {
	c.t.Helper()
	if !strings.HasPrefix(script, "#!") {
		script = "#!/bin/sh\n" + script
	}
	// By rename, so that a script that runs right now stays whole.
	tmp := filepath.Join(c.Bin, "."+name+".new")
	writeProgram(c.t, tmp, script)
	if err := os.Rename(tmp, filepath.Join(c.Bin, name)); err != nil {
		c.t.Fatal(err)
	}
}

// Sh runs a command as over SSH, without SSH, and returns its output.
func (c *testCluster) Sh(script string) string {
	c.t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Dir, cmd.Env = c.Home, c.env()
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s: %v\n%s", script, err, out)
	}
	return string(out)
}

// writeProgram writes a file that will be executed. A process that is forked
// while it is open would hold it open until its own exec, and what somebody
// writes cannot be run: a shell then takes the next of that name in PATH.
func writeProgram(t testing.TB, name, text string) {
	t.Helper()
	syscall.ForkLock.RLock()
	err := os.WriteFile(name, []byte(text), 0o700)
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
}

func (c *testCluster) writeFile(name, text string) {
	c.t.Helper()
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// Allow lets a key in.
func (c *testCluster) Allow(key ssh.PublicKey) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.allowed[string(key.Marshal())] = true
}

// Cut closes all connections now.
func (c *testCluster) Cut() {
	c.mu.Lock()
	conns := c.conns
	c.conns = map[*faultConn]bool{}
	c.mu.Unlock()
	for conn := range conns {
		conn.Close()
	}
}

// Freeze holds all traffic up, silently, until Thaw: what a firewall that drops
// packets does.
func (c *testCluster) Freeze() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.thaw == nil {
		c.thaw = make(chan struct{})
	}
}

// Thaw ends Freeze.
func (c *testCluster) Thaw() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.thaw != nil {
		close(c.thaw)
		c.thaw = nil
	}
}

// CutAfter gives the commands n more bytes of stdin, in all, then cuts.
func (c *testCluster) CutAfter(n int64) { c.mu.Lock(); c.cutIn = n; c.mu.Unlock() }

// CutOutputAfter lets n more bytes of stdout through, then cuts.
func (c *testCluster) CutOutputAfter(n int64) { c.mu.Lock(); c.cutOut = n; c.mu.Unlock() }

// Refuse closes each new connection at once.
func (c *testCluster) Refuse(yes bool) { c.refuse.Store(yes) }

// quota says how many of n bytes may pass before the cut.
func (c *testCluster) quota(left *int64, n int) (pass int, cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if *left < 0 {
		return n, false
	}
	if int64(n) < *left {
		*left -= int64(n)
		return n, false
	}
	pass, *left = int(*left), -1
	return pass, true
}

// faultConn is a server's TCP connection.
type faultConn struct {
	net.Conn
	c      *testCluster
	closed chan struct{}
	once   sync.Once
}

func (f *faultConn) wait() {
	f.c.mu.Lock()
	thaw := f.c.thaw
	f.c.mu.Unlock()
	if thaw != nil {
		select {
		case <-thaw:
		case <-f.closed:
		}
	}
}

func (f *faultConn) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	f.wait()
	return n, err
}

func (f *faultConn) Write(p []byte) (int, error) {
	f.wait()
	return f.Conn.Write(p)
}

func (f *faultConn) Close() error {
	f.once.Do(func() { close(f.closed) })
	return f.Conn.Close()
}

func (c *testCluster) serve() {
	for {
		conn, err := c.listener.Accept()
		if err != nil {
			return
		}
		c.connects.Add(1)
		if c.refuse.Load() {
			conn.Close()
			continue
		}
		f := &faultConn{Conn: conn, c: c, closed: make(chan struct{})}
		c.mu.Lock()
		c.conns[f] = true
		c.mu.Unlock()
		c.serving.Go(func() { c.serveConn(f) })
	}
}

func (c *testCluster) serveConn(f *faultConn) {
	defer f.Close()
	cfg := &ssh.ServerConfig{
		PublicKeyCallback: func(m ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			c.mu.Lock()
			defer c.mu.Unlock()
			if cert, ok := key.(*ssh.Certificate); ok && c.allowed[string(cert.SignatureKey.Marshal())] {
				return nil, nil
			}
			if m.User() != c.User || !c.allowed[string(key.Marshal())] {
				return nil, errors.New("no such key")
			}
			return nil, nil
		},
	}
	for _, k := range c.HostKeys {
		cfg.AddHostKey(k)
	}
	conn, chans, reqs, err := ssh.NewServerConn(f, cfg)
	if err != nil {
		return
	}
	defer conn.Close()
	go ssh.DiscardRequests(reqs) // answers keepalives with a failure, as sshd does
	var sessions atomic.Int32
	for nc := range chans {
		switch nc.ChannelType() {
		case "session":
			if int(sessions.Add(1)) > c.MaxSessions {
				sessions.Add(-1)
				nc.Reject(ssh.ConnectionFailed, "open failed")
				continue
			}
			c.serving.Go(func() {
				defer sessions.Add(-1)
				c.open.Add(1)
				defer c.open.Add(-1)
				c.serveSession(nc)
			})
		case "direct-tcpip":
			go serveTunnel(nc)
		default:
			nc.Reject(ssh.UnknownChannelType, nc.ChannelType())
		}
	}
}

func serveTunnel(nc ssh.NewChannel) {
	var to struct {
		Host string
		Port uint32
		From string
		Orig uint32
	}
	if err := ssh.Unmarshal(nc.ExtraData(), &to); err != nil {
		nc.Reject(ssh.ConnectionFailed, err.Error())
		return
	}
	conn, err := net.Dial("tcp", net.JoinHostPort(to.Host, strconv.Itoa(int(to.Port))))
	if err != nil {
		nc.Reject(ssh.ConnectionFailed, err.Error())
		return
	}
	ch, reqs, err := nc.Accept()
	if err != nil {
		conn.Close()
		return
	}
	go ssh.DiscardRequests(reqs)
	go func() { io.Copy(conn, ch); conn.(*net.TCPConn).CloseWrite() }()
	io.Copy(ch, conn)
	ch.Close()
	conn.Close()
}

func (c *testCluster) env() []string {
	return append([]string{"HOME=" + c.Home, "PATH=" + c.Bin + ":/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
		"USER=" + c.User, "LOGNAME=" + c.User, "SHELL=" + c.Shell[0]}, c.Env...)
}

// serveSession runs one command. Like sshd it keeps the session, for the count
// of MaxSessions, until the command has ended, though the client may have gone.
func (c *testCluster) serveSession(nc ssh.NewChannel) {
	ch, reqs, err := nc.Accept()
	if err != nil {
		return
	}
	defer ch.Close()
	var tty *testPTY
	var cmd *exec.Cmd
	done := make(chan struct{})
	var hangup func()
	for req := range reqs {
		ok := false
		switch req.Type {
		case "pty-req":
			var r struct {
				Term             string
				Cols, Rows, W, H uint32
				Modes            string
			}
			if ssh.Unmarshal(req.Payload, &r) == nil && cmd == nil {
				if tty, err = openTestPTY(); err != nil {
					c.t.Errorf("no pty: %v", err)
				} else {
					tty.resize(r.Cols, r.Rows)
					ok = true
				}
			}
		case "window-change":
			var r struct{ Cols, Rows, W, H uint32 }
			if ok = ssh.Unmarshal(req.Payload, &r) == nil && tty != nil; ok {
				tty.resize(r.Cols, r.Rows)
			}
		case "signal":
			var r struct{ Name string }
			signals := map[string]syscall.Signal{"TERM": syscall.SIGTERM, "HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "KILL": syscall.SIGKILL}
			if ok = ssh.Unmarshal(req.Payload, &r) == nil && cmd != nil; ok {
				syscall.Kill(-cmd.Process.Pid, signals[r.Name])
			}
		case "exec":
			var r struct{ Command string }
			if ssh.Unmarshal(req.Payload, &r) != nil || cmd != nil {
				break
			}
			cmd = exec.Command(c.Shell[0], append(append([]string(nil), c.Shell[1:]...), r.Command)...)
			cmd.Dir, cmd.Env = c.Home, c.env()
			hangup, err = c.run(cmd, ch, tty, done)
			if ok = err == nil; !ok {
				c.t.Errorf("%q: %v", c.Shell, err)
				cmd = nil
			}
		}
		if req.WantReply {
			req.Reply(ok, nil)
		}
	}
	// The client has closed the channel, or the connection is gone.
	if hangup != nil {
		hangup()
		<-done
	}
}

// run starts cmd and tells the client of its end; hangup closes our side of
// its standard streams.
func (c *testCluster) run(cmd *exec.Cmd, ch ssh.Channel, tty *testPTY, done chan struct{}) (hangup func(), err error) {
	var in io.WriteCloser
	var outs []io.ReadCloser
	var theirs []*os.File
	if tty != nil {
		cmd.Stdin, cmd.Stdout, cmd.Stderr = tty.slave, tty.slave, tty.slave
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		in, outs, theirs = noClose{tty.master}, []io.ReadCloser{tty.master}, []*os.File{tty.slave}
		cmd.Env = append(cmd.Env, "TERM=xterm")
	} else {
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		ir, iw, _ := os.Pipe()
		or, ow, _ := os.Pipe()
		er, ew, err := os.Pipe()
		if err != nil {
			return nil, err
		}
		cmd.Stdin, cmd.Stdout, cmd.Stderr = ir, ow, ew
		in, outs, theirs = iw, []io.ReadCloser{or, er}, []*os.File{ir, ow, ew}
	}
	hangup = func() {
		in.Close()
		for _, o := range outs {
			o.Close()
		}
	}
	io.WriteString(ch, c.Banner)
	err = cmd.Start()
	for _, f := range theirs {
		f.Close()
	}
	if err != nil {
		hangup()
		return nil, err
	}
	go func() {
		c.copy(in, ch, &c.cutIn)
		in.Close()
	}()
	var copies sync.WaitGroup
	for i, o := range outs {
		copies.Go(func() {
			if i == 0 {
				c.copy(ch, o, &c.cutOut)
			} else {
				io.Copy(ch.Stderr(), o)
			}
			o.Close() // a writer whose reader has gone gets SIGPIPE
		})
	}
	go func() {
		defer close(done)
		cmd.Wait()
		st := cmd.ProcessState.Sys().(syscall.WaitStatus)
		finish := func() {
			if st.Signaled() {
				name := map[syscall.Signal]string{syscall.SIGTERM: "TERM", syscall.SIGKILL: "KILL", syscall.SIGHUP: "HUP", syscall.SIGINT: "INT", syscall.SIGPIPE: "PIPE"}[st.Signal()]
				ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
					Name     string
					Core     bool
					Msg, Lan string
				}{name, false, "", ""}))
			} else {
				ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(st.ExitStatus())}))
			}
		}
		go func() {
			// The channel stays open while any process holds the output open.
			copies.Wait()
			finish()
			ch.Close()
		}()
	}()
	return hangup, nil
}

// copy copies until the reader's end, or cuts all connections when the bytes in
// left have passed.
func (c *testCluster) copy(w io.Writer, r io.Reader, left *int64) {
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		pass, cut := c.quota(left, n)
		_, werr := w.Write(buf[:pass])
		if cut {
			c.Cut()
			return
		}
		if err != nil || werr != nil {
			return
		}
	}
}

type noClose struct{ io.Writer }

func (noClose) Close() error { return nil }

// killAll ends every process of this cluster, known by its HOME: jobs outlive
// the sessions that started them.
func (c *testCluster) killAll() {
	for range 50 {
		found := false
		dirs, _ := filepath.Glob("/proc/[0-9]*")
		for _, d := range dirs {
			env, err := os.ReadFile(filepath.Join(d, "environ"))
			if err != nil || !bytes.Contains(append([]byte{0}, env...), []byte("\x00HOME="+c.Home+"\x00")) {
				continue
			}
			if pid, err := strconv.Atoi(filepath.Base(d)); err == nil && pid != os.Getpid() {
				found = true
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		if !found {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
