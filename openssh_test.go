//go:build testbed

package knoc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// TestOpenSSH shows that the in-process server of the other tests behaves as a
// real sshd where it matters:
//
//	. testbed/run/env && go test -tags testbed -run TestOpenSSH .
func TestOpenSSH(t *testing.T) {
	cfg := SSHConfig{Address: os.Getenv("KNOC_SSH"), KeyFile: os.Getenv("KNOC_SSH_KEY"), KnownHosts: []string{os.Getenv("KNOC_SSH_KNOWN_HOSTS")}}
	client, err := newSSH(cfg)
	if err != nil {
		t.Fatalf("%v; run testbed/up, then . testbed/run/env", err)
	}
	defer client.Close()
	data := strings.Repeat("0123456789abcde\n", 200_000)
	got, err := runExchange(client, `say size "$(wc -c | tr -d ' ')"`+strings.Repeat("\n# filler", 30_000), strings.NewReader(data))
	if want := fmt.Sprintf("size=%d\n", len(data)); got != want || err != nil {
		t.Fatalf("got %q, %v; want %q", got, err, want)
	}

	status := func(want int, err error) {
		t.Helper()
		if e := (*exitError)(nil); want != 0 && (!errors.As(err, &e) || e.Status != want) || want == 0 && err != nil {
			t.Errorf("got %v, want %d", err, want)
		}
	}
	for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -9 $$": 137, "kill -TERM $$": 143} {
		status(want, client.Stream(t.Context(), script, nil, nil, nil, nil, nil))
		status(want, client.Stream(t.Context(), script, nil, nil, nil, &ttySize{80, 24}, nil))
	}
	var out bytes.Buffer
	status(5, client.Stream(t.Context(), "read -r l; stty size; echo \"got $l\"; cat; exit 5", strings.NewReader("x\n\x04"), &out, nil, &ttySize{91, 37}, nil))
	if want := "x\r\n37 91\r\ngot x\r\n"; out.String() != want {
		t.Errorf("terminal: got %q, want %q", out.String(), want)
	}

	// Whatever ends before its command leaves nothing running.
	sleep := fmt.Sprintf("sleep 86400.%d", time.Now().UnixNano()%1e6)
	for name, f := range map[string]func(context.Context) error{
		"exchange": func(ctx context.Context) error { return client.Exchange(ctx, sleep, nil, nil) },
		"stream":   func(ctx context.Context) error { return client.Stream(ctx, sleep, nil, nil, nil, nil, nil) },
		"terminal": func(ctx context.Context) error {
			return client.Stream(ctx, sleep, nil, nil, nil, &ttySize{80, 24}, nil)
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		if err := f(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for began := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		got, err := runExchange(client, "say left \"$(pgrep -xf '"+sleep+"')\"", nil)
		if got == "left=\n" {
			break
		} else if time.Since(began) > 10*time.Second {
			t.Fatalf("got %q, %v", got, err)
		}
	}

	// A connection on which sshd allows no more sessions is avoided.
	x, err := client.client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for n := 0; ; n++ {
		s, err := x.NewSession()
		if refused := (*ssh.OpenChannelError)(nil); errors.As(err, &refused) && n >= 8 {
			break
		} else if err != nil || n > 10 {
			t.Fatalf("session %d: %v", n, err)
		}
		defer s.Close()
		if err := s.Start("exec sleep 60"); err != nil {
			t.Fatal(err)
		}
	}
	status(3, client.Stream(t.Context(), "exit 3", nil, nil, nil, nil, nil))
}
