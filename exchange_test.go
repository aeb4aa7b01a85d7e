package knoc

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// forEachSh runs a test on clusters whose sh is each of those that are here:
// bash on most of them, dash on Debian's, busybox perhaps.
func forEachSh(t *testing.T, f func(t *testing.T, c *testCluster)) {
	for _, sh := range []string{"sh", "bash", "dash", "busybox"} {
		file, err := exec.LookPath(sh)
		if err != nil && (sh == "dash" || sh == "busybox") {
			continue // `make test` has them all
		} else if err != nil {
			t.Fatal(err)
		}
		t.Run(sh, func(t *testing.T) {
			t.Parallel()
			c := newTestCluster(t)
			if err := os.Symlink(file, filepath.Join(c.Bin, "sh")); err != nil {
				t.Fatal(err)
			}
			f(t, c)
		})
	}
}

func TestExchange(t *testing.T) { forEachSh(t, testExchange) }

func testExchange(t *testing.T, c *testCluster) {
	client := c.Client()
	var stderr = strings.Repeat("x", 200)
	for _, tt := range []struct {
		name, script, in string
		want             string
		status           int // of the exitError
		unknown          bool
		errHas           string
	}{
		{name: "empty script"},
		{name: "frames and data", script: `say a 1; say b "$(cat)"`, in: "data", want: "a=1\nb=data\n"},
		{name: "no newline at the end, a comment", script: "say a 1 # done", want: "a=1\n"},
		{name: "here-document", script: "cat >f <<'X'\na\nX\nsay f \"$(cat f)\"", want: "f=a\n"},
		{name: "hostile bodies", script: "say x \"$(cat)\"; say y ''; say z '@ABC a 3\nend 0\n'",
			in: "\xff\x01 end 0\n@A end 1\n0\n'\"\\$`é\r", want: "x=\xff\x01 end 0\n@A end 1\n0\n'\"\\$`é\r\ny=\nz=@ABC a 3\nend 0\n\n"},
		{name: "multi-byte text", script: `say x äöü€`, want: "x=äöü€\n"},
		{name: "output beside the frames", script: `echo INFO; say a 1; printf '@@@'; say b 2; echo bye`, want: "a=1\nb=2\n"},
		{name: "status", script: `say a 1; echo broken >&2; exit 75`, want: "a=1\n", status: 75, errHas: "75: broken"},
		{name: "status of the last command", script: `false`, status: 1},
		{name: "subshells have no end of their own", script: `(exit 3); (exit 4) & wait; say a "$(exit 5)"; true | exit 6; exit 0`, want: "a=\n"},
		{name: "much stderr", script: `echo ` + stderr + `>&2; exit 3`, status: 3, errHas: stderr},
		{name: "killed", script: `say a 1; kill -9 $$`, want: "a=1\n", unknown: true, errHas: `signal "KILL"`},
		{name: "exec", script: `exec true`, unknown: true, errHas: "exit status 0"},
		{name: "syntax error", script: `say a 1; if`, unknown: true, errHas: "ended too early"},
		{name: "stdin not read", script: `say a 1`, in: strings.Repeat("x", 5<<20), want: "a=1\n"},
		{name: "a process left behind holds stdout", script: `sleep 100 & say a 1`, want: "a=1\n"},
		{name: "flood outside of frames", script: `head -c 2000000 /dev/zero; say a 1`, unknown: true, errHas: "outside of frames"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := runExchange(client, tt.script, strings.NewReader(tt.in))
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
			var status *exitError
			switch {
			case tt.status != 0:
				if !errors.As(err, &status) || status.Status != tt.status || errors.Is(err, errConnection) {
					t.Errorf("got error %v, want status %d", err, tt.status)
				}
			case tt.unknown:
				if !errors.Is(err, errConnection) || errors.As(err, &status) {
					t.Errorf("got error %v, want one of the connection", err)
				}
			case err != nil:
				t.Error(err)
			}
			if tt.errHas != "" && !strings.Contains(fmt.Sprint(err), tt.errHas) {
				t.Errorf("error %v lacks %q", err, tt.errHas)
			}
		})
	}
}

// runExchange runs a script and collects its frames as "name=body" lines.
func runExchange(client *sshClient, script string, in io.Reader) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var got strings.Builder
	err := client.Exchange(ctx, script, in, func(name string, body []byte) error {
		fmt.Fprintf(&got, "%s=%s\n", name, body)
		return nil
	})
	return got.String(), err
}

// Every login shell must take the command words alike, whatever it prints first.
func TestLoginShells(t *testing.T) {
	shells := [][]string{{"/bin/sh", "-c"}, {"bash", "-c"}}
	for _, s := range []string{"tcsh", "csh", "fish", "zsh", "ksh", "busybox sh"} {
		f := strings.Fields(s)
		if _, err := exec.LookPath(f[0]); err == nil { // `make test` has them all
			shells = append(shells, append(f, "-c"))
		}
	}
	for _, banner := range []string{"", "Welcome!\n", "no newline, @ and @@ ", "@AAAA end 1\n0\n"} {
		for _, shell := range shells {
			t.Run(shell[0]+" "+banner, func(t *testing.T) {
				t.Parallel()
				c := newTestCluster(t, func(c *testCluster) { c.Shell, c.Banner = shell, banner })
				client := c.Client()
				got, err := runExchange(client, `say a 'it'"'"'s $HOME!'; say b "$(cat)"`, strings.NewReader("data\n!x"))
				if want := "a=it's $HOME!\nb=data\n!x\n"; got != want || err != nil {
					t.Errorf("got %q, %v; want %q", got, err, want)
				}
				var out, errOut bytes.Buffer
				err = client.Stream(t.Context(), "echo 'out!'; echo err >&2; exit 3", nil, &out, &errOut, nil, nil)
				if status := (*exitError)(nil); !errors.As(err, &status) || status.Status != 3 || out.String() != "out!\n" || errOut.String() != "err\n" {
					t.Errorf("stream: %v, %q, %q", err, out.String(), errOut.String())
				}
				out.Reset()
				err = client.Stream(t.Context(), "read -r l; stty size; stty -a | grep -o ' echo '; cat >/dev/null; exit 4", strings.NewReader("x\n\x04"), &out, nil, &ttySize{91, 37}, nil)
				if status := (*exitError)(nil); !errors.As(err, &status) || status.Status != 4 || out.String() != "x\r\n37 91\r\n echo \r\n" {
					t.Errorf("terminal: %v, %q", err, out.String())
				}
			})
		}
	}
}

// Neither the script nor its data may have a size limit that a pod could reach.
func TestExchangeSizes(t *testing.T) { forEachSh(t, testExchangeSizes) }

func testExchangeSizes(t *testing.T, c *testCluster) {
	client := c.Client()
	var script strings.Builder
	for i := range 20000 {
		fmt.Fprintf(&script, "n=%d # filler\n", i)
	}
	script.WriteString("say n $n; cat >data; say size \"$(wc -c <data | tr -d ' ')\"; say sum \"$(sha256sum <data | cut -c1-64)\"\nsay big \"$(head -c 3000000 data | tr -c x y)\"")
	data := bytes.Repeat([]byte("0123456789abcdef\x00\xff\n'"), 250_000)
	got, err := runExchange(client, script.String(), bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("n=19999\nsize=%d\nsum=%x\nbig=%s\n", len(data), sha256.Sum256(data), strings.Repeat("y", 3_000_000))
	if script.Len() < 200<<10 || got != want {
		t.Fatalf("script of %d bytes: got %.200q, want %.200q", script.Len(), got, want)
	}
}

// A script cut anywhere runs nothing, not even its first command.
func TestScriptCut(t *testing.T) { forEachSh(t, testScriptCut) }

func testScriptCut(t *testing.T, c *testCluster) {
	client := c.Client()
	script := "touch \"$HOME/ran\"\n{ echo; }\ncat <<X\nx\nX\nsay a 1\n" + strings.Repeat("# filler\n", 20)
	prologue, err := render("prologue.sh.tmpl", struct{ Nonce string }{newNonce()})
	if err != nil {
		t.Fatal(err)
	}
	whole := len(group(prologue + script))
	cut := func(n int) {
		t.Helper()
		c.CutAfter(int64(n))
		if _, err := runExchange(client, script, nil); !errors.Is(err, errConnection) {
			t.Fatalf("cut after %d of %d bytes: %v", n, whole, err)
		}
		c.waitNoSession()
		if _, err := os.Stat(filepath.Join(c.Home, "ran")); err == nil {
			t.Fatalf("a script cut after %d of %d bytes was run", n, whole)
		}
	}
	for n := 0; n < whole; n += 1 + n%13 {
		cut(n)
	}
	for n := whole - 12; n < whole; n++ {
		cut(n)
	}
	c.CutAfter(-1)
	if _, err := runExchange(client, script, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(c.Home, "ran")); err != nil {
		t.Fatal(err)
	}
}

// An answer cut anywhere is never taken for a success.
func TestAnswerCut(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client()
	// The last frame is `end 0`: nonce (27), " end 1\n0\n" (9).
	const whole = 27 + len(" a 5\nhello\n") + 27 + len(" end 1\n0\n")
	for n := 0; n < whole; n++ {
		c.CutOutputAfter(int64(n))
		if got, err := runExchange(client, "say a hello", nil); !errors.Is(err, errConnection) {
			t.Fatalf("cut after %d of %d bytes: got %q, %v", n, whole, got, err)
		}
	}
	c.CutOutputAfter(-1)
	if _, err := runExchange(client, "say a hello", nil); err != nil {
		t.Fatal(err)
	}
}

func TestConcurrentExchanges(t *testing.T) {
	for _, max := range []int{10, 3, 1} {
		c := newTestCluster(t, func(c *testCluster) { c.MaxSessions = max })
		client := c.Client()
		held, err := client.Hold(t.Context(), "while read -r l; do say echo \"$l\"; done")
		if err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		n := 20
		if max == 1 {
			n = 2 // each waits for the room of the last
		}
		for i := range n {
			wg.Go(func() {
				data := strings.Repeat(fmt.Sprint(i, " "), 30000)
				got, err := runExchange(client, `say a "$(cat)"`, strings.NewReader(data))
				if got != "a="+data+"\n" || err != nil {
					t.Errorf("MaxSessions %d: exchange %d: %v, %.40q", max, i, err, got)
				}
			})
		}
		wg.Wait()
		if got := c.connects.Load(); got > 2 {
			t.Errorf("MaxSessions %d: %d connections", max, got)
		}
		held.Close()
	}
}

func TestHold(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := client.Hold(ctx, "say pid $$; while read -r l; do [ \"$l\" = bad ] && { echo why >&2; exit 9; }; [ \"$l\" = end ] && exit; say echo \"$l\"; done; touch eof")
	if err != nil {
		t.Fatal(err)
	}
	next := func(want string) {
		t.Helper()
		name, body, err := s.Next(t.Context())
		if got := name + "=" + string(body); got != want && want != "" || err != nil {
			t.Fatalf("got %q, %v; want %q", got, err, want)
		}
	}
	next("")
	for _, l := range []string{"a", "", "b  'c' \\"} {
		if err := s.Send(l); err != nil {
			t.Fatal(err)
		}
		next("echo=" + l)
	}
	if err := s.Send("a\nb"); err == nil {
		t.Fatal("a line with a newline was sent")
	}
	short, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer stop()
	if _, _, err := s.Next(short); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errConnection) {
		t.Fatalf("got %v, want a timeout", err)
	}
	s.Send("bad")
	if _, _, err := s.Next(t.Context()); err == nil || err.Error() != "remote script ended with status 9: why" {
		t.Fatalf("got %v", err)
	}

	s, _ = client.Hold(ctx, "while read -r l; do :; done")
	s.Send("a")
	s.stdin.Close()
	if _, _, err := s.Next(t.Context()); err != io.EOF {
		t.Fatalf("got %v, want EOF", err)
	}

	// Closed from here, the script sees the end and the server's session ends.
	s, _ = client.Hold(ctx, "say up 1; while read -r l; do :; done")
	next("up=1")
	s.Close()
	if _, _, err := s.Next(t.Context()); !errors.Is(err, errConnection) {
		t.Fatalf("got %v after Close", err)
	}
	s, _ = client.Hold(ctx, "say up 1; exec sleep 1000")
	next("up=1")
	cancel()
	if _, _, err := s.Next(t.Context()); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v after cancel", err)
	}
	c.waitNoSession()
}

// waitNoSession waits until the server runs no command any more.
func (c *testCluster) waitNoSession() {
	c.t.Helper()
	for end := time.Now().Add(60 * time.Second); c.open.Load() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			c.t.Fatalf("%d sessions still run", c.open.Load())
		}
	}
}

// The end of the context is obeyed at once, also while nothing moves, and the
// remote command is killed.
func TestExchangeCancelled(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err := client.Exchange(ctx, "sleep 1000", nil, nil)
	if !errors.Is(err, errConnection) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v", err)
	}
	c.waitNoSession()

	c.Freeze()
	for _, script := range []string{"true", "cat >/dev/null"} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		began := time.Now()
		err := client.Exchange(ctx, script, bytes.NewReader(make([]byte, 20<<20)), nil)
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took > 5*time.Second {
			t.Fatalf("frozen: %v after %s", err, took)
		}
	}
	c.Thaw()
	if _, err := runExchange(client, "true", nil); err != nil {
		t.Fatal(err)
	}
}

func TestExchangeErrors(t *testing.T) {
	client := newTestCluster(t).Client()
	mine := errors.New("mine")
	err := client.Exchange(t.Context(), "say a 1; say b 2; sleep 1000", nil, func(string, []byte) error { return mine })
	if err != mine {
		t.Errorf("got %v, want the callback's own", err)
	}
	// Input that fails must not look like input that ended.
	in := io.MultiReader(strings.NewReader("half"), failingReader{mine})
	err = client.Exchange(t.Context(), "cat >half; touch whole; say done 1", in, nil)
	if !errors.Is(err, mine) {
		t.Errorf("got %v, want the reader's", err)
	}
	if err := client.Exchange(t.Context(), "a\x00b", nil, nil); err == nil {
		t.Error("a NUL was sent")
	}
}

type failingReader struct{ err error }

func (f failingReader) Read([]byte) (int, error) { return 0, f.err }

func TestFrameReader(t *testing.T) {
	const nonce = "@NONCE"
	for _, tt := range []struct{ in, want string }{
		{"", "EOF"},
		{"noise", "EOF"},
		{"@NONCE a 1\nx\n", "a=x EOF"},
		{"noise@NONCE a 1\nx\n", "a=x EOF"},
		{"@N@NON@NONCE a 1\nx\n", "a=x EOF"},
		{"@NONCE a 0\n\nnoise@NONCE b 7\n@NONCE \n", "a= b=@NONCE  EOF"},
		{"@NONCE", "unexpected EOF"},
		{"@NONCE a 1", "unexpected EOF"},
		{"@NONCE a 1\n", "unexpected EOF"},
		{"@NONCE a 1\nx", "unexpected EOF"},
		{"@NONCE a 1\nxy", `frame "a" is longer than the 1 bytes announced`},
		{"@NONCEa 1\nx\n", `a frame begins with "a 1\n"`},
		{"@NONCE a\nx\n", `a frame begins with " a\n"`},
		{"@NONCE  1\nx\n", `a frame begins with "  1\n"`},
		{"@NONCE a -1\nx\n", `a frame begins with " a -1\n"`},
		{"@NONCE a b 1\nx\n", `a frame begins with " a b 1\n"`},
		{"@NONCE a 99999999999999999999\nx\n", `a frame begins with " a 99999999999999999999\n"`},
		{"@NONCE a 67108865\nx\n", `frame "a" has 67108865 bytes, more than 67108864`},
		{"@NONCE a 67108864\nx\n", "unexpected EOF"},
		{"@NONCE " + strings.Repeat("a", 600), "a frame's first line has no end"},
		{strings.Repeat("a", maxNoise+1), "more than 1048576 bytes outside of frames"},
	} {
		var got strings.Builder
		r := newFrameReader(strings.NewReader(tt.in), nonce)
		for {
			f, err := r.next()
			if err != nil {
				got.WriteString(err.Error())
				break
			}
			fmt.Fprintf(&got, "%s=%s ", f.name, f.body)
		}
		if got.String() != tt.want {
			t.Errorf("%.40q: got %q, want %q", tt.in, got.String(), tt.want)
		}
	}
}

func TestStream(t *testing.T) {
	c := newTestCluster(t, func(c *testCluster) { c.Banner = "hello\n" })
	client := c.Client()
	in := bytes.Repeat([]byte{0, 1, 0xff, '\n'}, 300_000)
	var out, errOut bytes.Buffer
	if err := client.Stream(t.Context(), "echo oops >&2; exec cat", bytes.NewReader(in), &out, &errOut, nil, nil); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(out.Bytes(), in) || errOut.String() != "oops\n" {
		t.Fatalf("%d bytes back of %d, stderr %q", out.Len(), len(in), errOut.String())
	}
	for script, want := range map[string]int{"exit 7": 7, "kill -9 $$": 137, "kill -TERM $$": 143, "exit 255": 255} {
		err := client.Stream(t.Context(), script, nil, nil, nil, nil, nil)
		if status := (*exitError)(nil); !errors.As(err, &status) || status.Status != want || errors.Is(err, errConnection) {
			t.Errorf("%s: got %v, want %d", script, err, want)
		}
	}
	// A stdin that never ends does not hold the stream up.
	r, w := io.Pipe()
	defer w.Close()
	if err := client.Stream(t.Context(), "exit 0", r, nil, nil, nil, nil); err != nil {
		t.Error(err)
	}
	// Whoever stops listening ends the remote command.
	pr, pw := io.Pipe()
	pr.Close()
	if err := client.Stream(t.Context(), "echo x; exec sleep 1000", nil, pw, nil, nil, nil); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v, want the writer's error", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := client.Stream(ctx, "exec tail -f /dev/null", nil, nil, nil, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	c.waitNoSession()
	pr, pw = io.Pipe()
	go func() {
		pr.Read(make([]byte, 1))
		c.Cut()
		io.Copy(io.Discard, pr)
	}()
	if err := client.Stream(t.Context(), "echo up; exec sleep 1000", nil, pw, nil, nil, nil); !errors.Is(err, errConnection) {
		t.Errorf("got %v after a cut", err)
	}
}

func TestStreamTerminal(t *testing.T) {
	client := newTestCluster(t).Client()
	resize := make(chan ttySize)
	out := newWatched()
	// Long lines and control characters in the script must pass the terminal.
	script := "x='" + strings.Repeat("y", 9000) + "\x03\x04\x1a'; echo ${#x}; while [ \"$(stty size)\" != '50 100' ]; do sleep 0.02; done; echo resized; read -r l; echo \"got $l\"; exit 5"
	in, typed := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- client.Stream(t.Context(), script, in, out, nil, &ttySize{80, 24}, resize)
	}()
	out.wait(t, "9003\r\n")
	resize <- ttySize{100, 50}
	out.wait(t, "resized\r\n")
	io.WriteString(typed, "hi\n")
	err := <-done
	if !strings.HasSuffix(out.String(), "got hi\r\n") {
		t.Errorf("got %q", out.String())
	}
	if status := (*exitError)(nil); !errors.As(err, &status) || status.Status != 5 {
		t.Errorf("got %v; %q", err, out.String())
	}
}

// watched is a buffer that tests can wait on.
type watched struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func newWatched() *watched { return &watched{} }

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.Write(p)
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.b.String()
}

func (w *watched) wait(t *testing.T, want string) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !strings.Contains(w.String(), want); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("got %q, want %q in it", w.String(), want)
		}
	}
}

func TestStreamLimits(t *testing.T) {
	for _, max := range []int{10, 3} {
		c := newTestCluster(t, func(c *testCluster) { c.MaxSessions = max })
		client := c.Client(func(cfg *SSHConfig) { cfg.StreamConnections = 2 })
		room := 2 * min(max, sessionsPerLink)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var ups []*watched
		for range room {
			up := newWatched()
			ups = append(ups, up)
			wg.Go(func() {
				if err := client.Stream(ctx, "echo up; exec sleep 1000", nil, up, nil, nil, nil); !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		}
		for _, up := range ups {
			up.wait(t, "up\n")
		}
		err := client.Stream(ctx, "true", nil, nil, nil, nil, nil)
		if err == nil || !strings.Contains(err.Error(), "all 2 stream connections") || errors.Is(err, errConnection) {
			t.Errorf("MaxSessions %d: one too many: %v", max, err)
		}
		// The loop's connection is not touched by all this.
		if _, err := runExchange(client, "true", nil); err != nil {
			t.Error(err)
		}
		if got := c.connects.Load(); got != 3 {
			t.Errorf("MaxSessions %d: %d connections, want 3", max, got)
		}
		cancel()
		wg.Wait()
		c.waitNoSession()
	}
}

func TestTunnelClient(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client()
	x, err := client.client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := x.Dial("tcp", c.Addr) // its own sshd
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	b := make([]byte, 8)
	if _, err := io.ReadFull(conn, b); err != nil || string(b) != "SSH-2.0-" {
		t.Fatalf("got %q, %v", b, err)
	}
	s, err := x.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	if out, err := s.Output("echo hi"); err != nil || string(out) != "hi\n" {
		t.Fatalf("got %q, %v", out, err)
	}
}
