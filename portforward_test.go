package knoc

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestPortForward(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	port := echoServer(t)
	near, far := pipe()
	result := make(chan error, 1)
	go func() { result <- p.PortForward(t.Context(), "default", "web", port, near) }()
	if err := <-result; err == nil || !strings.Contains(err.Error(), "no address") {
		t.Errorf("pod without address: %v", err)
	}
	pod := p.works["0f3b3c2e-1111-4222-8333-444455556666"]
	pod.pod.Status.PodIP = "127.0.0.1"
	go func() { result <- p.PortForward(t.Context(), "default", "web", port, near) }()
	data := bytes.Repeat([]byte("0123456789"), 100000)
	go func() {
		far.Write(data)
		far.CloseWrite()
	}()
	got, err := io.ReadAll(far)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, data) {
		t.Errorf("%d bytes came back of %d", len(got), len(data))
	}
	if err := <-result; err != nil {
		t.Errorf("error %v", err)
	}
	near, _ = pipe()
	err = p.PortForward(t.Context(), "default", "web", 1, near)
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || !strings.Contains(err.Error(), "connect") {
		t.Errorf("closed port: %v", err)
	}
	// A server that the login node does not find at the pod's address.
	pod.pod.Status.PodIP = "127.0.0.2"
	near, far = pipe()
	go func() { result <- p.PortForward(t.Context(), "default", "web", port, near) }()
	go func() {
		far.Write(data)
		far.CloseWrite()
	}()
	if got, err = io.ReadAll(far); err != nil || !bytes.Equal(got, data) {
		t.Errorf("through the relay: %d bytes came back of %d, %v", len(got), len(data), err)
	}
	if err := <-result; err != nil {
		t.Errorf("error %v", err)
	}
}

// echoServer sends back what it is sent and listens on 127.0.0.1.
func echoServer(t *testing.T) int32 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(conn, conn)
				conn.Close()
			}()
		}
	}()
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// The relay works with what a compute node has.
func TestRelay(t *testing.T) {
	t.Parallel()
	text, err := render("relay.sh.tmpl", struct{}{})
	if err != nil {
		t.Fatal(err)
	}
	port := echoServer(t)
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	tools := 0
	for _, tool := range []string{"python3", "perl", "socat", "ncat", "bash", ""} {
		t.Run("with "+tool, func(t *testing.T) {
			bin := t.TempDir()
			for _, name := range []string{tool, "sh", "cat"} {
				path, err := exec.LookPath(name)
				if name != "" && err != nil {
					t.Skipf("%s is not installed", tool)
				}
				if name != "" {
					if err := os.Symlink(path, filepath.Join(bin, name)); err != nil {
						t.Fatal(err)
					}
				}
			}
			run := func(port int32, in io.Reader) (string, string, error) {
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				c := exec.CommandContext(ctx, "sh", "-c", text, "relay", strconv.Itoa(int(port)))
				c.Env = []string{"PATH=" + bin}
				if tool == "python3" { // the first choice, and may be a script of the machine's
					c.Env = []string{"PATH=" + os.Getenv("PATH")}
				}
				var stdout, stderr strings.Builder
				c.Stdin, c.Stdout, c.Stderr = in, &stdout, &stderr
				err := c.Run()
				return stdout.String(), stderr.String(), err
			}
			if tool == "" {
				if _, stderr, err := run(port, nil); err == nil || !strings.Contains(stderr, "none of python3") {
					t.Errorf("%v: %s", err, stderr)
				}
				return
			}
			tools++
			if tool != "bash" { // it cannot pass on the end of the input
				if stdout, stderr, err := run(port, bytes.NewReader(data)); err != nil || stdout != string(data) {
					t.Errorf("%d bytes came back of %d, %v: %s", len(stdout), len(data), err, stderr)
				}
			}
			// A server that ends first.
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			go func() {
				if conn, err := l.Accept(); err == nil {
					conn.Write([]byte("bye"))
					conn.Close()
				}
			}()
			r, w, err := os.Pipe() // never written to
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if tool == "socat" || tool == "ncat" { // these wait for the client
				time.AfterFunc(time.Second, func() { w.Close() })
			}
			if stdout, stderr, err := run(int32(l.Addr().(*net.TCPAddr).Port), r); err != nil || stdout != "bye" {
				t.Errorf("%q, %v: %s", stdout, err, stderr)
			}
			if _, _, err := run(1, nil); err == nil {
				t.Error("nobody listens, and that is no error")
			}
		})
	}
	if tools == 0 {
		t.Error("this machine has no tool for the relay")
	}
}
