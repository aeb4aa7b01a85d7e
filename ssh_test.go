package knoc

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"
	"golang.org/x/crypto/ssh/knownhosts"
)

func TestParseHop(t *testing.T) {
	for in, want := range map[string]string{
		"u@h":                    "u@h:22",
		"u@h:2222":               "u@h:2222",
		"u@h:":                   "u@h:22",
		"u@10.0.0.1":             "u@10.0.0.1:22",
		"u@::1":                  "u@[::1]:22",
		"u@[::1]":                "u@[::1]:22",
		"u@[::1]:23":             "u@[::1]:23",
		"first.last@h.example":   "first.last@h.example:22",
		"":                       "error",
		"u@":                     "error",
		"@h":                     "error",
		"u@h:0":                  "error",
		"u@h:65536":              "error",
		"u@h:ssh":                "error",
		"u@h:1:2":                "error",
		"u@a@b":                  "error",
		"ssh://u@h":              "error",
		"u@h,v@i":                "u@h,v@i",
		"u@h -oProxyCommand=rm ": "error",
	} {
		if in == "u@h,v@i" {
			want = "error" // a list of jumps is split before
		}
		h, err := parseHop(in)
		got := h.String()
		if err != nil {
			got = "error"
			if !strings.Contains(err.Error(), "give user@host") {
				t.Errorf("%q: %v does not say how to mend it", in, err)
			}
		}
		if got != want {
			t.Errorf("%q: got %s (%v), want %s", in, got, err, want)
		}
	}
	if h, err := parseHop("h"); err != nil || !strings.HasSuffix(h.String(), "@h:22") || len(h.user) == 0 {
		t.Errorf("without a user: %v, %v", h, err)
	}
}

// newECDSAKey makes a key of another kind.
func newECDSAKey(t *testing.T) ssh.Signer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// newCert makes a certificate of key by the authority ca.
func newCert(t *testing.T, kind uint32, key, ca ssh.Signer, principals ...string) ssh.Signer {
	t.Helper()
	cert := &ssh.Certificate{Key: key.PublicKey(), CertType: kind, ValidPrincipals: principals, ValidBefore: ssh.CertTimeInfinity}
	if err := cert.SignCert(rand.Reader, ca); err != nil {
		t.Fatal(err)
	}
	s, err := ssh.NewCertSigner(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestHostKeys(t *testing.T) {
	ed, old, ec, ca := newTestKey(t), newTestKey(t), newECDSAKey(t), newTestKey(t)
	line := func(addr string, key ssh.Signer) string { return knownhosts.Line([]string{addr}, key.PublicKey()) }
	hashed := func(addr string, key ssh.Signer) string {
		return line(knownhosts.HashHostname(knownhosts.Normalize(addr)), key)
	}
	for _, tt := range []struct {
		name  string
		keys  []ssh.Signer // the server's
		known func(addr string) string
		// The error names these, FILE and LINE being the file and what to add.
		errHas []string
	}{
		{name: "known", keys: []ssh.Signer{ed}, known: func(a string) string { return line(a, ed) }},
		{name: "hashed", keys: []ssh.Signer{ed}, known: func(a string) string { return hashed(a, ed) }},
		{name: "one of two", keys: []ssh.Signer{ed}, known: func(a string) string { return line(a, old) + "\n" + line(a, ed) }},
		{name: "wildcard", keys: []ssh.Signer{ed}, known: func(a string) string {
			_, port, _ := net.SplitHostPort(a)
			return "[127.0.*]:" + port + strings.TrimPrefix(line("x", ed), "x")
		}},
		{name: "the less liked of two keys is known", keys: []ssh.Signer{ed, ec}, known: func(a string) string { return line(a, ec) }},
		{name: "the more liked of two keys is known", keys: []ssh.Signer{ed, ec}, known: func(a string) string { return line(a, ed) }},
		{name: "authority", keys: []ssh.Signer{ed, newCert(t, ssh.HostCert, ed, ca, "127.0.0.1")},
			known: func(a string) string { return "@cert-authority " + line(a, ca) }},
		{name: "certificate of an authority nobody knows, plain key known", keys: []ssh.Signer{ed, newCert(t, ssh.HostCert, ed, ca, "127.0.0.1")},
			known: func(a string) string { return line(a, ed) }},

		{name: "empty file", keys: []ssh.Signer{ed}, known: func(string) string { return "" },
			errHas: []string{"unknown", "FILE", "LINE", ssh.FingerprintSHA256(ed.PublicKey())}},
		{name: "another host", keys: []ssh.Signer{ed}, known: func(string) string { return line("example.com", ed) },
			errHas: []string{"unknown", "LINE"}},
		{name: "another port", keys: []ssh.Signer{ed}, known: func(string) string { return line("127.0.0.1:22", ed) },
			errHas: []string{"unknown", "LINE"}},
		{name: "changed", keys: []ssh.Signer{ed}, known: func(a string) string { return "# old\n" + line(a, old) },
			errHas: []string{"not the known one", "FILE:2", "LINE"}},
		{name: "changed, hashed", keys: []ssh.Signer{ed}, known: func(a string) string { return hashed(a, old) },
			errHas: []string{"not the known one", "FILE:1", "LINE"}},
		{name: "changed to another kind", keys: []ssh.Signer{ed}, known: func(a string) string { return line(a, ec) },
			errHas: []string{"not the known one", "FILE:1", "LINE"}},
		{name: "revoked", keys: []ssh.Signer{ed}, known: func(a string) string { return line(a, ed) + "\n@revoked " + line("*", ed) },
			errHas: []string{"revoked at FILE:2"}},
		{name: "certificate for another host", keys: []ssh.Signer{newCert(t, ssh.HostCert, ed, ca, "example.com")},
			known: func(a string) string { return "@cert-authority " + line(a, ca) }, errHas: []string{"LINE"}},
		{name: "certificate of another authority", keys: []ssh.Signer{newCert(t, ssh.HostCert, ed, old, "127.0.0.1")},
			known: func(a string) string { return "@cert-authority " + line(a, ca) }, errHas: []string{"LINE"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newTestCluster(t, func(c *testCluster) { c.HostKeys = tt.keys })
			c.writeFile(c.KnownHostsFile, tt.known(c.Addr)+"\n")
			client := c.Client()
			_, err := runExchange(client, "true", nil)
			if tt.errHas == nil {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			var refused *hostKeyError
			if !errors.As(err, &refused) || !errors.Is(err, errConnection) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("got %v", err)
			}
			for _, want := range tt.errHas {
				want = strings.NewReplacer("FILE", c.KnownHostsFile, "LINE", line(c.Addr, ed)).Replace(want)
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v\nlacks %q", err, want)
				}
			}
		})
	}
}

// The line in the error is all it takes, without a restart.
func TestHostKeyMended(t *testing.T) {
	c := newTestCluster(t)
	c.writeFile(c.KnownHostsFile, "")
	client := c.Client()
	_, err := runExchange(client, "true", nil)
	var refused *hostKeyError
	if !errors.As(err, &refused) {
		t.Fatal(err)
	}
	c.writeFile(c.KnownHostsFile, refused.msg[strings.LastIndex(refused.msg, ": ")+2:]+"\n")
	for err != nil { // until the pause after the failure is over
		time.Sleep(5 * time.Millisecond)
		if _, err = runExchange(client, "true", nil); err != nil && !errors.As(err, &refused) {
			t.Fatal(err)
		}
	}
}

func TestKeyFiles(t *testing.T) {
	dir := t.TempDir()
	c := newTestCluster(t)
	path := func(name string) string { return filepath.Join(dir, name) }
	secret := writeTestKey(t, path("secret"), "pass phrase")
	c.Allow(secret.PublicKey())
	writeTestKey(t, path("stranger"), "")
	c.writeFile(path("pub"), string(ssh.MarshalAuthorizedKey(secret.PublicKey())))
	c.writeFile(path("junk"), string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("x")})))
	c.writeFile(path("empty"), "")
	c.writeFile(path("right"), "pass phrase\n")
	c.writeFile(path("wrong"), "pass  phrase\n")
	for _, tt := range []struct {
		name, key, passphrase string
		errHas                string
	}{
		{name: "plain", key: c.KeyFile},
		{name: "plain, with a passphrase that is not needed", key: c.KeyFile, passphrase: path("right")},
		{name: "encrypted", key: path("secret"), passphrase: path("right")},
		{name: "no passphrase", key: path("secret"), errHas: "ssh key " + path("secret") + " is encrypted: name a file"},
		{name: "wrong passphrase", key: path("secret"), passphrase: path("wrong"), errHas: "the passphrase in " + path("wrong") + " is wrong"},
		{name: "missing passphrase", key: path("secret"), passphrase: path("none"), errHas: "open " + path("none")},
		{name: "missing", key: path("none"), errHas: "open " + path("none")},
		{name: "folder", key: dir, errHas: "is a directory"},
		{name: "public key", key: path("pub"), errHas: "must be a private key"},
		{name: "certificate", key: path("junk"), errHas: "must be a private key"},
		{name: "empty", key: path("empty"), errHas: "must be a private key"},
		{name: "no key at all", errHas: "SSH_AUTH_SOCK"},
		{name: "not let in", key: path("stranger"), errHas: "hpcuser@" + c.Addr + " accepts none of the keys offered (" + path("stranger") + ")"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cfg := c.Config()
			cfg.KeyFile, cfg.PassphraseFile = tt.key, tt.passphrase
			client, err := newSSH(cfg)
			if err == nil {
				defer client.Close()
				_, err = runExchange(client, "true", nil)
				if refused := (*authError)(nil); err != nil && !errors.As(err, &refused) {
					t.Errorf("got %v", err)
				}
			}
			if tt.errHas == "" && err == nil {
				return
			}
			if err == nil || tt.errHas == "" || !strings.Contains(err.Error(), tt.errHas) || strings.Contains(err.Error(), "\n") {
				t.Errorf("got %v, want %q", err, tt.errHas)
			}
		})
	}
}

func TestBadConfig(t *testing.T) {
	c := newTestCluster(t)
	bad := filepath.Join(t.TempDir(), "bad")
	c.writeFile(bad, "host ssh-ed25519 AAAA\n")
	for errHas, change := range map[string]func(*SSHConfig){
		"known_hosts files (/nonexistent)":     func(c *SSHConfig) { c.KnownHosts = []string{"/nonexistent"} },
		"known_hosts files (" + bad + ")":      func(c *SSHConfig) { c.KnownHosts = []string{bad} },
		`ssh address "u@"`:                     func(c *SSHConfig) { c.Address = "u@" },
		`ssh address ""`:                       func(c *SSHConfig) { c.Address = "" },
		`ssh address "u@jump:x"`:               func(c *SSHConfig) { c.Jumps = []string{"u@jump:x"} },
		"ssh certificate " + bad + "-cert.pub": func(c *SSHConfig) { c.KeyFile = bad },
	} {
		cfg := c.Config()
		if change(&cfg); cfg.KeyFile == bad {
			writeTestKey(t, bad, "")
			c.writeFile(bad+"-cert.pub", "junk")
		}
		if _, err := newSSH(cfg); err == nil || !strings.Contains(err.Error(), errHas) {
			t.Errorf("got %v, want %q", err, errHas)
		}
	}
}

func TestUserCertificate(t *testing.T) {
	c := newTestCluster(t)
	ca := newTestKey(t)
	c.Allow(ca.PublicKey())
	file := filepath.Join(t.TempDir(), "id")
	key := writeTestKey(t, file, "")
	cert := newCert(t, ssh.UserCert, key, ca, "hpcuser")
	c.writeFile(file+"-cert.pub", string(ssh.MarshalAuthorizedKey(cert.PublicKey())))
	client := c.Client(func(cfg *SSHConfig) { cfg.KeyFile = file })
	if _, err := runExchange(client, "true", nil); err != nil {
		t.Fatal(err)
	}
}

func TestAgent(t *testing.T) {
	c := newTestCluster(t)
	ring := agent.NewKeyring()
	dir, err := os.MkdirTemp("", "knoc") // a socket's path is at most 108 bytes
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go agent.ServeAgent(ring, conn)
		}
	}()
	t.Setenv("SSH_AUTH_SOCK", l.Addr().String())
	try := func(keyFile string) error {
		client := c.Client(func(cfg *SSHConfig) { cfg.KeyFile = keyFile })
		defer client.Close()
		_, err := runExchange(client, "true", nil)
		return err
	}
	if err := try(""); err == nil || !strings.Contains(err.Error(), "ssh-add") {
		t.Fatalf("an empty agent: %v", err)
	}
	if err := try(c.KeyFile); err != nil {
		t.Fatalf("an empty agent and a key: %v", err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	if err := ring.Add(agent.AddedKey{PrivateKey: key}); err != nil {
		t.Fatal(err)
	}
	pub, err := ssh.NewPublicKey(&key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	c.Allow(pub)
	if err := try(""); err != nil {
		t.Fatalf("the agent's key: %v", err)
	}
	stranger := filepath.Join(t.TempDir(), "stranger")
	writeTestKey(t, stranger, "")
	if err := try(stranger); err != nil {
		t.Fatalf("a key that is not let in, and the agent's: %v", err)
	}
	l.Close()
	if err := try(c.KeyFile); err != nil {
		t.Fatalf("a dead agent and a key: %v", err)
	}
	if err := try(""); err == nil || !strings.Contains(err.Error(), "ssh-agent at") {
		t.Fatalf("a dead agent: %v", err)
	}
}

func TestJumps(t *testing.T) {
	first, second, login := newTestCluster(t), newTestCluster(t), newTestCluster(t)
	cfg := login.Config()
	for _, c := range []*testCluster{first, second} {
		cfg.Jumps = append(cfg.Jumps, c.Config().Address)
		cfg.KnownHosts = append(cfg.KnownHosts, c.KnownHostsFile)
		key, err := readKey(login.KeyFile, "")
		if err != nil {
			t.Fatal(err)
		}
		c.Allow(key.PublicKey())
	}
	cfg.Keepalive = 50 * time.Millisecond
	client, err := newSSH(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	check := func() {
		t.Helper()
		var err error
		for range 100 {
			var got string
			if got, err = runExchange(client, "say home $HOME", nil); got == "home="+login.Home+"\n" {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
		t.Fatal(err)
	}
	check()
	if n := []int32{first.connects.Load(), second.connects.Load(), login.connects.Load()}; n[0] != 1 || n[1] != 1 || n[2] != 1 {
		t.Errorf("connections %v", n)
	}
	for _, c := range []*testCluster{first, second, login} {
		s, err := client.Hold(t.Context(), "read x")
		if err != nil {
			t.Fatal(err)
		}
		c.Cut()
		if _, _, err := s.Next(t.Context()); !errors.Is(err, errConnection) {
			t.Errorf("cut: %v", err)
		}
		check()
		if s, err = client.Hold(t.Context(), "read x"); err != nil {
			t.Fatal(err)
		}
		c.Freeze()
		if _, _, err := s.Next(t.Context()); !errors.Is(err, errConnection) {
			t.Errorf("frozen: %v", err)
		}
		c.Thaw()
		check()
	}
	client.Close()

	// Each hop's key is checked, and the error says which it is.
	for i, c := range []*testCluster{first, second, login} {
		bad := cfg
		bad.KnownHosts = nil
		for j, f := range append([]string{login.KnownHostsFile}, cfg.KnownHosts[1:]...) {
			if j != (i+1)%3 {
				bad.KnownHosts = append(bad.KnownHosts, f)
			}
		}
		client, err := newSSH(bad)
		if err != nil {
			t.Fatal(err)
		}
		_, err = runExchange(client, "true", nil)
		if refused := (*hostKeyError)(nil); !errors.As(err, &refused) || !strings.Contains(err.Error(), "connecting to hpcuser@"+c.Addr) {
			t.Errorf("unknown key of hop %d: %v", i, err)
		}
		client.Close()
	}
	login.listener.Close()
	bad, err := newSSH(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer bad.Close()
	if _, err = runExchange(bad, "true", nil); err == nil || !strings.Contains(err.Error(), "through hpcuser@"+second.Addr) || !strings.Contains(err.Error(), login.Addr) {
		t.Errorf("login node down: %v", err)
	}
}

// A cut that nobody tells us of is noticed by the missing keepalives.
func TestKeepalive(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client(func(cfg *SSHConfig) { cfg.Keepalive = 50 * time.Millisecond; cfg.ConnectTimeout = time.Second })
	held, err := client.Hold(t.Context(), "say up 1; while read -r l; do say l \"$l\"; done")
	if err != nil {
		t.Fatal(err)
	}
	held.Next(t.Context())
	stream := make(chan error, 1)
	up := newWatched()
	go func() { stream <- client.Stream(t.Context(), "echo up; exec sleep 1000", nil, up, nil, nil, nil) }()
	up.wait(t, "up\n")

	// As long as the other side answers, all is kept.
	time.Sleep(300 * time.Millisecond)
	if err := held.Send("x"); err != nil {
		t.Fatal(err)
	}
	if _, body, err := held.Next(t.Context()); string(body) != "x" || err != nil {
		t.Fatalf("got %q, %v", body, err)
	}
	c.Freeze()
	began := time.Now()
	if _, _, err := held.Next(t.Context()); !errors.Is(err, errConnection) || !strings.Contains(err.Error(), "silent for") {
		t.Fatalf("held: %v", err)
	}
	if err := <-stream; !errors.Is(err, errConnection) || !strings.Contains(err.Error(), "silent for") {
		t.Fatalf("stream: %v", err)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("noticed after %s", took)
	}
	// A connection made meanwhile hangs, within limits.
	if _, err := runExchange(client, "true", nil); !errors.Is(err, errConnection) || !strings.Contains(err.Error(), "no answer within 1s") {
		t.Fatalf("connecting to nobody: %v", err)
	}
	c.Thaw()
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, err = runExchange(client, "true", nil); err == nil {
			break
		} else if time.Since(began) > 30*time.Second {
			t.Fatal(err)
		}
	}
}

func TestReconnect(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client(func(cfg *SSHConfig) { cfg.Backoff = 100 * time.Millisecond })
	for range 20 {
		if _, err := runExchange(client, "true", nil); err != nil {
			t.Fatal(err)
		}
		c.Cut() // the next one may or may not have noticed
	}
	c.Refuse(true)
	c.Cut()
	_, first := runExchange(client, "true", nil)
	if !errors.Is(first, errConnection) {
		t.Fatalf("got %v", first)
	}
	// Within the pause, the error comes at once and nobody is bothered.
	n := c.connects.Load()
	for range 20 {
		if _, err := runExchange(client, "true", nil); !errors.Is(err, errConnection) {
			t.Fatalf("got %v", err)
		}
	}
	if c.connects.Load() != n {
		t.Error("connected within the pause")
	}
	if s := client.Stream(t.Context(), "true", nil, nil, nil, nil, nil); !errors.Is(s, errConnection) {
		t.Errorf("stream: %v", s)
	}
	c.Refuse(false)
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, err := runExchange(client, "true", nil); err == nil {
			break
		} else if time.Since(began) > 30*time.Second {
			t.Fatal(err)
		}
	}
}

// The caller's context counts while connecting too, for one caller only.
func TestConnectCancelled(t *testing.T) {
	c := newTestCluster(t)
	client := c.Client()
	c.Freeze()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	other := make(chan error, 1)
	go func() { _, err := runExchange(client, "true", nil); other <- err }()
	if err := client.Exchange(ctx, "true", nil, nil); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, errConnection) {
		t.Fatalf("got %v", err)
	}
	c.Thaw()
	if err := <-other; err != nil {
		t.Fatal(err)
	}
	if n := c.connects.Load(); n != 1 {
		t.Errorf("%d connections", n)
	}
}

// Close ends everything and leaves nothing running here.
func TestClose(t *testing.T) {
	c := newTestCluster(t)
	before := runtime.NumGoroutine()
	client := c.Client()
	s, err := client.Hold(t.Context(), "say up 1; read x")
	if err != nil {
		t.Fatal(err)
	}
	s.Next(t.Context())
	r, w := io.Pipe()
	stream := make(chan error, 1)
	up := newWatched()
	go func() {
		stream <- client.Stream(t.Context(), "echo up; cat", r, up, nil, &ttySize{80, 24}, make(chan ttySize))
	}()
	up.wait(t, "up")
	if err := client.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Next(t.Context()); !errors.Is(err, errConnection) {
		t.Errorf("held: %v", err)
	}
	if err := <-stream; !errors.Is(err, errConnection) {
		t.Errorf("stream: %v", err)
	}
	w.Close()
	if _, err := runExchange(client, "true", nil); !errors.Is(err, errConnection) {
		t.Errorf("after Close: %v", err)
	}
	c.waitNoSession()
	for began := time.Now(); runtime.NumGoroutine() > before; time.Sleep(5 * time.Millisecond) {
		if time.Since(began) > 30*time.Second {
			buf := make([]byte, 1<<20)
			t.Fatalf("%d goroutines, %d before:\n%s", runtime.NumGoroutine(), before, buf[:runtime.Stack(buf, true)])
		}
	}
}

// TestKeyAsText: the first KNoC's chart put the key itself into REMOTE_KEY.
func TestKeyAsText(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	text, err := os.ReadFile(c.KeyFile)
	if err != nil {
		t.Fatal(err)
	}
	client := c.Client(func(cfg *SSHConfig) { cfg.KeyFile = strings.TrimSpace(string(text)) })
	if _, err := runExchange(client, "exit 0", nil); err != nil {
		t.Errorf("the key as text is not taken: %v", err)
	}
	bad := strings.Replace(string(text), "A", "B", 20)
	cfg := c.Config()
	cfg.KeyFile = bad
	if _, err := newSSH(cfg); err == nil || strings.Contains(err.Error(), "BEGIN") {
		t.Errorf("a broken key as text: error %q, want one that does not quote it", err)
	}
}
