//go:build testbed

package e2e

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// key is what somebody types who has seen a text appear on the screen.
type key struct{ seen, typed string }

// screen is what a terminal shows.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *screen) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.ReplaceAll(s.text.String(), "\r", "")
}

// terminal runs kubectl on a terminal (util-linux's script makes it), types the
// keys, each when its text has been seen behind that of the key before, and
// returns all that the screen shows.
func terminal(t *testing.T, keys []key, args ...string) (string, error) {
	t.Helper()
	quoted := make([]string, len(args))
	for i, a := range args {
		quoted[i] = "'" + strings.ReplaceAll(a, "'", `'\''`) + "'"
	}
	c := exec.CommandContext(t.Context(), "script", "-qec", "stty rows 33 cols 99; exec kubectl "+strings.Join(quoted, " "), "/dev/null")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out := &screen{}
	c.Stdout, c.Stderr = out, out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		from := 0
		for _, k := range keys {
			for {
				if at := strings.Index(out.String()[from:], k.seen); at >= 0 {
					from += at + len(k.seen)
					break
				}
				select {
				case <-ended:
					return
				case <-time.After(50 * time.Millisecond):
				}
			}
			io.WriteString(in, k.typed)
		}
	}()
	timer := time.AfterFunc(limit, func() { c.Process.Kill() })
	defer timer.Stop()
	err = c.Wait()
	return out.String(), err
}

func TestExecOnATerminal(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000"))
	p.awaitLog("up")
	in := func(keys []key, cmd ...string) (string, int) {
		out, err := terminal(t, keys, append([]string{"-n", n.name, "exec", "-it", "pod", "--"}, cmd...)...)
		if err == nil {
			return out, 0
		}
		if exit, ok := err.(*exec.ExitError); ok {
			return out, exit.ExitCode()
		}
		t.Fatalf("%v: %v: %s", cmd, err, out)
		return "", 0
	}
	if out, code := in(nil, "sh", "-c", "stty size; exit 6"); !strings.Contains(out, "33 99\n") || code != 6 {
		t.Errorf("size: %q, exit code %d", out, code)
	}
	// Ctrl-C is for the program, which may have a use for it.
	if out, code := in([]key{{"ready\n", "\x03"}}, "sh", "-c", "trap 'echo caught' INT; echo ready; sleep 5; echo after; exit 5"); !strings.Contains(out, "caught\nafter\n") || code != 5 {
		t.Errorf("Ctrl-C, caught: %q, exit code %d", out, code)
	}
	if out, code := in([]key{{"ready\n", "\x03"}}, "sh", "-c", "echo ready; exec sleep 1000"); code != 130 {
		t.Errorf("Ctrl-C: %q, exit code %d, want 130", out, code)
	}
	if out, code := in([]key{{"ready> ", "echo go $((3+4)); sleep 1000\n"}, {"go 7\n", "\x03"}, {"ready> ", "echo $((40+2)); exit 4\n"}}, "env", "PS1=ready> ", "sh"); !strings.Contains(out, "42\n") || code != 4 {
		t.Errorf("shell: %q, exit code %d", out, code)
	}
	if out, code := in([]key{{"ready\n", "text\n"}, {"text\ntext\n", "\x04"}}, "sh", "-c", "echo ready; exec cat"); !strings.Contains(out, "text\ntext\n") || code != 0 {
		t.Errorf("Ctrl-D: %q, exit code %d", out, code)
	}
}

// When kubectl dies, what it ran dies too.
func TestExecClientGone(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000"))
	p.awaitLog("up")
	c := exec.Command("kubectl", "-n", n.name, "exec", "pod", "--", "sh", "-c", "trap '' TERM HUP INT; sleep 98765; sleep 98765")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	alive := func() bool {
		return strings.Contains(p.kubectl("exec", "pod", "--", "ps"), "98765")
	}
	until(t, "the command to run", alive)
	c.Process.Kill()
	c.Wait()
	until(t, "the command to be gone", func() bool { return !alive() })
}

func TestExecManyAtOnce(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000"))
	p.awaitLog("up")
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			want := fmt.Sprintf("this is %d\n", i)
			if out, err := tryKubectl(nil, "-n", n.name, "exec", "pod", "--", "sh", "-c", "sleep 2; echo this is "+fmt.Sprint(i)); err != nil || out != want {
				t.Errorf("exec %d: %q, %v", i, out, err)
			}
		})
	}
	wg.Wait()
}

func TestCopyPortForwardAttachAndStats(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "mkdir /tmp/w; echo served >/tmp/w/x; (httpd -f -p 18099 -h /tmp/w) & (httpd -f -p 127.0.0.1:18098 -h /tmp/w) & i=0; while [ $i -lt 3000000 ]; do i=$((i+1)); done; while :; do echo tick; sleep 0.5; done"))
	p.awaitLog("tick")

	blob := make([]byte, 20<<20)
	rand.Read(blob)
	file := filepath.Join(t.TempDir(), "blob")
	if err := os.WriteFile(file, blob, 0o600); err != nil {
		t.Fatal(err)
	}
	p.kubectl("cp", file, "pod:/tmp/blob")
	if out, want := p.kubectl("exec", "pod", "--", "sha256sum", "/tmp/blob"), fmt.Sprintf("%x", sha256.Sum256(blob)); !strings.HasPrefix(out, want) {
		t.Errorf("copied in: %s, want %s", out, want)
	}
	p.kubectl("cp", "pod:/tmp/blob", file+".back")
	if back, err := os.ReadFile(file + ".back"); err != nil || !bytes.Equal(back, blob) {
		t.Errorf("copied out: %d bytes, %v", len(back), err)
	}

	for _, to := range []string{"18099", "18098"} { // the latter is found on the compute node only
		c := exec.Command("kubectl", "-n", n.name, "port-forward", "pod", ":"+to)
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { c.Process.Kill(); c.Wait() }()
		line := make([]byte, 200)
		k, _ := out.Read(line)
		port := regexp.MustCompile(`127\.0\.0\.1:(\d+)`).FindSubmatch(line[:k])
		if port == nil {
			t.Fatalf("kubectl port-forward says %q", line[:k])
		}
		for range 3 {
			r, err := http.Get("http://127.0.0.1:" + string(port[1]) + "/x")
			if err != nil {
				t.Fatalf("port %s: %v", to, err)
			}
			body, err := io.ReadAll(r.Body)
			r.Body.Close()
			if err != nil || string(body) != "served\n" {
				t.Errorf("through the forwarded port %s: %q, %v", to, body, err)
			}
		}
	}

	a := exec.Command("kubectl", "-n", n.name, "attach", "pod")
	shown, err := a.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	before := strings.Count(p.log(), "tick\n")
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	var ticks atomic.Int32
	go func() {
		for lines := bufio.NewScanner(shown); lines.Scan(); ticks.Add(1) {
		}
	}()
	until(t, "attach to show what is printed from now on", func() bool { return ticks.Load() >= 2 })
	a.Process.Kill()
	a.Wait()
	if all := strings.Count(p.log(), "tick\n"); int(ticks.Load()) > all-before {
		t.Errorf("attach shows %d lines, the container has printed %d since", ticks.Load(), all-before)
	}

	until(t, "the pod to be measured", func() bool {
		var s stats.Summary
		if err := json.Unmarshal([]byte(kubectl(t, "get", "--raw", "/api/v1/nodes/"+env("KNOC_NODE")+"/proxy/stats/summary")), &s); err != nil {
			t.Fatal(err)
		}
		for _, ps := range s.Pods {
			if ps.PodRef.UID == string(p.uid) {
				return len(ps.Containers) == 1 && *ps.Containers[0].Memory.RSSBytes > 1<<20 && *ps.CPU.UsageCoreNanoSeconds > 0
			}
		}
		return false
	})
	if m := kubectl(t, "get", "--raw", "/api/v1/nodes/"+env("KNOC_NODE")+"/proxy/metrics/resource"); !strings.Contains(m, `container_memory_working_set_bytes{container="main",pod="pod",namespace="`+n.name+`"}`) || !strings.Contains(m, "scrape_error 0\n") {
		t.Errorf("metrics:\n%s", m)
	}
	p.kubectl("delete", "pod", "pod", "--grace-period=1", "--timeout=120s")
}
