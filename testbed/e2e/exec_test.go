//go:build testbed

package e2e

import (
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
	"testing"
	"time"

	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// terminal runs kubectl on a terminal (util-linux's script makes it), types what
// keys gives, each after its pause, and returns all that the screen shows.
func terminal(t *testing.T, keys []string, args ...string) (string, error) {
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
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		for _, k := range keys {
			time.Sleep(2 * time.Second)
			io.WriteString(in, k)
		}
	}()
	timer := time.AfterFunc(limit, func() { c.Process.Kill() })
	defer timer.Stop()
	err = c.Wait()
	return strings.ReplaceAll(out.String(), "\r", ""), err
}

func TestExecOnATerminal(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo up; exec sleep 1000"))
	p.awaitLog("up")
	in := func(keys []string, cmd ...string) (string, int) {
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
	if out, code := in([]string{"\x03"}, "sh", "-c", "trap 'echo caught' INT; sleep 5; echo after; exit 5"); !strings.Contains(out, "caught\nafter\n") || code != 5 {
		t.Errorf("Ctrl-C, caught: %q, exit code %d", out, code)
	}
	if out, code := in([]string{"\x03"}, "sleep", "1000"); code != 130 {
		t.Errorf("Ctrl-C: %q, exit code %d, want 130", out, code)
	}
	if out, code := in([]string{"sleep 1000\n", "\x03", "echo $((40+2)); exit 4\n"}, "sh"); !strings.Contains(out, "42\n") || code != 4 {
		t.Errorf("shell: %q, exit code %d", out, code)
	}
	if out, code := in([]string{"text\n", "\x04"}, "cat"); !strings.Contains(out, "text\ntext\n") || code != 0 {
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
	p := n.createOne(n.shell("pod", "mkdir /tmp/w; echo served >/tmp/w/x; (httpd -f -p 18099 -h /tmp/w) & i=0; while [ $i -lt 3000000 ]; do i=$((i+1)); done; while :; do echo tick; sleep 0.5; done"))
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

	c := exec.Command("kubectl", "-n", n.name, "port-forward", "pod", ":18099")
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
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil || string(body) != "served\n" {
			t.Errorf("through the forwarded port: %q, %v", body, err)
		}
	}

	a := exec.Command("kubectl", "-n", n.name, "attach", "pod")
	var shown bytes.Buffer
	a.Stdout = &shown
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(5 * time.Second)
	a.Process.Kill()
	a.Wait()
	if ticks := strings.Count(shown.String(), "tick\n"); ticks < 2 || ticks > 30 {
		t.Errorf("attach for 5 s shows %q", shown.String())
	}

	until(t, "Slurm to have measured the pod", func() bool {
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
