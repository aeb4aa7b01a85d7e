//go:build testbed

package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// knoc is one that a test started: the testbed's, but for its node's name, its
// port, and its identity, which is the cluster's administrator.
type knoc struct {
	t      testing.TB
	node   string
	listen string
	args   []string
	cmd    *exec.Cmd
	ended  chan struct{}
}

var ports atomic.Int32

// startKnoc starts a knoc for another node and waits until it serves. At the
// end the node and its directory on the cluster are removed.
func startKnoc(t testing.TB, node string, more ...string) *knoc {
	t.Helper()
	t.Cleanup(func() {
		kubectl(t, "delete", "node", node, "--ignore-not-found")
		login(t, "rm -rf ~/.knoc/"+node+"-*")
	})
	k := newKnoc(t, node, more...)
	k.start()
	k.awaitServing()
	return k
}

// newKnoc prepares one; it is stopped at the end, if it runs then.
func newKnoc(t testing.TB, node string, more ...string) *knoc {
	t.Helper()
	text, err := os.ReadFile(env("KNOC_ARGS_FILE"))
	if err != nil {
		t.Fatal(err)
	}
	args := strings.Split(strings.TrimSpace(string(text)), "\n")
	var host string
	for i, a := range args {
		if a == "--listen" {
			host, _, _ = net.SplitHostPort(args[i+1])
		}
	}
	k := &knoc{t: t, node: node, listen: fmt.Sprintf("%s:%d", host, 10260+ports.Add(1))}
	k.args = append(args, append([]string{"--nodename", node, "--listen", k.listen, "--kubeconfig", env("KNOC_PKI") + "/admin.kubeconfig"}, more...)...)
	t.Cleanup(func() { k.stop(syscall.SIGTERM) })
	return k
}

func ownLog(node string) string {
	return filepath.Join(filepath.Dir(env("KNOC_LOG")), "e2e-"+node+".log")
}

func (k *knoc) start() {
	k.t.Helper()
	log, err := os.OpenFile(ownLog(k.node), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		k.t.Fatal(err)
	}
	defer log.Close()
	k.cmd = exec.Command("sh", append([]string{"-c", `exec $KNOC_CLOUD_EXEC $KNOC_BIN "$@"`, "sh"}, k.args...)...)
	k.cmd.Stdout, k.cmd.Stderr = log, log
	k.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // it may be below a shell
	if err := k.cmd.Start(); err != nil {
		k.t.Fatal(err)
	}
	k.ended = make(chan struct{})
	go func(c *exec.Cmd, ended chan struct{}) { c.Wait(); close(ended) }(k.cmd, k.ended)
}

// awaitServing waits until the kubelet port is open and the node says Ready.
func (k *knoc) awaitServing() {
	k.t.Helper()
	until(k.t, "knoc for node "+k.node+" to serve (see "+ownLog(k.node)+")", func() bool {
		select {
		case <-k.ended:
			out, _ := execute(nil, "tail", "-n", "3", ownLog(k.node))
			k.t.Fatalf("knoc for node %s ended: %s", k.node, out)
		default:
		}
		c, err := net.DialTimeout("tcp", k.listen, time.Second)
		if err != nil {
			return false
		}
		c.Close()
		return nodeCondition(k.node, "Ready") == "True"
	})
}

// stop sends it a signal, if it runs, and waits for its end.
func (k *knoc) stop(sig syscall.Signal) {
	if k.cmd == nil {
		return
	}
	syscall.Kill(-k.cmd.Process.Pid, sig)
	select {
	case <-k.ended:
	case <-time.After(20 * time.Second):
		if sig != syscall.SIGKILL {
			k.t.Errorf("knoc for node %s does not stop", k.node)
		}
		syscall.Kill(-k.cmd.Process.Pid, syscall.SIGKILL)
		<-k.ended
	}
	k.cmd = nil
}

// nodeCondition is the status of a node's condition, "" when there is none.
func nodeCondition(node, kind string) string { return nodeConditionField(node, kind, "status") }

func nodeConditionField(node, kind, field string) string {
	out, _ := tryKubectl(nil, "get", "node", node, "--ignore-not-found", "-o",
		fmt.Sprintf(`jsonpath={.status.conditions[?(@.type==%q)].%s}`, kind, field))
	return out
}

// awaitReachable waits until a node reports no trouble with the cluster.
func awaitReachable(t testing.TB, node string) {
	t.Helper()
	until(t, "node "+node+" to report that the cluster answers", func() bool {
		taints, err := tryKubectl(nil, "get", "node", node, "-o", "jsonpath={.spec.taints[*].key}")
		return err == nil && nodeCondition(node, "NetworkUnavailable") == "False" && !strings.Contains(taints, "unavailable")
	})
}

// proxy stands between a knoc and the login machine's sshd, on this machine's
// address, which the cloud machine reaches.
type proxy struct {
	listener   net.Listener
	host       net.IP
	target     string
	KnownHosts string // the file with the host key, under this address

	mu    sync.Mutex
	cuts  []cut
	conns map[net.Conn]bool
	ports int // local ones of connections to sshd begin here
}

// cut is what happens to one connection: it breaks after so many bytes.
type cut struct {
	up, down int64 // from and to knoc; 0 is never
	silent   bool  // it stops there instead, without a word
}

const proxyPorts = 30500 // how a shim on the login machine tells who calls: $SSH_CONNECTION

func newProxy(t testing.TB) *proxy {
	t.Helper()
	_, target, _ := strings.Cut(env("KNOC_SSH"), "@")
	probe, err := net.Dial("udp", target)
	if err != nil {
		t.Fatal(err)
	}
	host := probe.LocalAddr().(*net.UDPAddr).IP
	probe.Close()
	p := &proxy{host: host, target: target, conns: map[net.Conn]bool{}, ports: proxyPorts}
	if p.listener, err = net.Listen("tcp", net.JoinHostPort(host.String(), "0")); err != nil {
		t.Fatal(err)
	}
	keys, err := os.ReadFile(env("KNOC_SSH_KNOWN_HOSTS"))
	if err != nil {
		t.Fatal(err)
	}
	_, key, _ := strings.Cut(string(keys), " ")
	p.KnownHosts = filepath.Join(t.TempDir(), "known_hosts")
	if err := os.WriteFile(p.KnownHosts, []byte(fmt.Sprintf("[%s]:%d %s", host, p.port(), key)), 0o644); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := p.listener.Accept()
			if err != nil {
				return
			}
			go p.serve(c)
		}
	}()
	t.Cleanup(func() { p.listener.Close(); p.drop() })
	return p
}

func (p *proxy) port() int { return p.listener.Addr().(*net.TCPAddr).Port }

// args are knoc's, to go through the proxy.
func (p *proxy) args() []string {
	user, _, _ := strings.Cut(env("KNOC_SSH"), "@")
	return []string{"--ssh", fmt.Sprintf("%s@%s:%d", user, p.host, p.port()), "--ssh-known-hosts", p.KnownHosts}
}

// cutNext lays down what happens to the next connections.
func (p *proxy) cutNext(cuts ...cut) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cuts = append(p.cuts, cuts...)
}

// left is how many cuts no connection has come for yet.
func (p *proxy) left() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.cuts)
}

// drop breaks all connections.
func (p *proxy) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}

func (p *proxy) serve(in net.Conn) {
	p.mu.Lock()
	var this cut
	if len(p.cuts) > 0 {
		this, p.cuts = p.cuts[0], p.cuts[1:]
	}
	p.ports++
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: p.host, Port: p.ports}}
	p.mu.Unlock()
	out, err := dialer.Dial("tcp", p.target)
	if err != nil {
		in.Close()
		return
	}
	both := []net.Conn{in, out}
	p.mu.Lock()
	for _, c := range both {
		c.(*net.TCPConn).SetLinger(0) // what is on its way is lost
		p.conns[c] = true
	}
	p.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(func() { forward(out, in, this.up, this.silent) })
	wg.Go(func() { forward(in, out, this.down, this.silent) })
	wg.Wait()
	p.mu.Lock()
	for _, c := range both {
		delete(p.conns, c)
	}
	p.mu.Unlock()
}

// forward copies up to limit bytes, then breaks both connections, or goes on
// reading without passing anything on.
func forward(to, from net.Conn, limit int64, silent bool) {
	defer to.Close()
	defer from.Close()
	buf := make([]byte, 16<<10)
	for passed := int64(0); ; {
		n, err := from.Read(buf)
		cutHere := limit > 0 && passed+int64(n) >= limit
		if cutHere && !silent {
			to.Write(buf[:max(0, limit-passed)])
			return
		}
		if cutHere { // silent
			passed += int64(n)
			if err != nil {
				return
			}
			continue
		}
		if _, e := to.Write(buf[:n]); e != nil || err != nil {
			return
		}
		passed += int64(n)
	}
}
