package knoc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// sessionsPerLink keeps two of sshd's default MaxSessions (10) free: it
	// counts a session until its last process has gone, a moment longer than we do.
	sessionsPerLink = 8
	// refusedFor is how long we believe that sshd allows no more sessions on a
	// link than were open when it refused one.
	refusedFor = 2 * time.Second
	// idleFor is how long a link without sessions is kept.
	idleFor = 2 * time.Minute
)

// pool is a set of connections for one purpose.
type pool struct {
	c    *sshClient
	name string
	max  int  // connections
	wait bool // when all is in use: wait, or say so

	mu      sync.Mutex
	closed  bool
	links   []*link
	dialing *dialing
	changed chan struct{} // closed, and made anew, when a session may have become free
	refused error         // the server's last refusal of a session

	// Between failed attempts to connect, half a second to half a minute must
	// pass; whoever asks in between gets the last error at once.
	backoff  wait.Backoff
	next     time.Time
	lastDial error
}

// room is how many sessions we would have on the link.
func (l *link) room() int {
	if time.Now().Before(l.limitUntil) {
		return l.limit
	}
	return sessionsPerLink
}

// dialing is an attempt to connect on which several callers may wait.
type dialing struct {
	done chan struct{}
	err  error
}

func newPool(c *sshClient, name string, max int, wait bool) *pool {
	p := &pool{c: c, name: name, max: max, wait: wait, changed: make(chan struct{})}
	p.resetBackoff()
	return p
}

func (p *pool) resetBackoff() {
	p.next, p.lastDial = time.Time{}, nil
	p.backoff = wait.Backoff{Duration: p.c.cfg.Backoff, Factor: 2, Jitter: 0.2, Steps: 100, Cap: 30 * time.Second}
}

// acquire gives a link with room for a session, which must be released.
func (p *pool) acquire(ctx context.Context) (*link, error) {
	for {
		p.mu.Lock()
		if p.closed {
			p.mu.Unlock()
			return nil, fmt.Errorf("%w: closed", errConnection)
		}
		for _, l := range p.links {
			if l.open < l.room() {
				l.open++
				if l.idle != nil {
					l.idle.Stop()
				}
				p.mu.Unlock()
				return l, nil
			}
		}
		alive := len(p.links)
		if p.dialing == nil && alive < p.max {
			if time.Now().After(p.next) {
				p.dialing = &dialing{done: make(chan struct{})}
				go p.dial(p.dialing)
			} else if alive == 0 || !p.wait {
				err := p.lastDial
				p.mu.Unlock()
				return nil, fmt.Errorf("%w: %w", errConnection, err)
			}
		}
		if p.dialing == nil && !p.wait {
			err := fmt.Errorf("all %d %s connections to %s are busy: try again when some logs -f, exec or port-forward have ended, or allow more connections",
				p.max, p.name, p.c.hops[len(p.c.hops)-1])
			if p.refused != nil {
				err = fmt.Errorf("%w (its sshd said: %w)", err, p.refused)
			}
			p.mu.Unlock()
			return nil, err
		}
		d, changed := p.dialing, p.changed
		p.mu.Unlock()

		var dialed chan struct{}
		if d != nil {
			dialed = d.done
		}
		timer := time.NewTimer(refusedFor / 20) // a limit may be over
		select {
		case <-dialed:
			if d.err != nil && (alive == 0 || !p.wait) {
				timer.Stop()
				return nil, fmt.Errorf("%w: %w", errConnection, d.err)
			}
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, fmt.Errorf("%w: waiting for a %s connection: %w", errConnection, p.name, context.Cause(ctx))
		}
		timer.Stop()
	}
}

// any is a living link, full or not, which is kept from now on; nil if there is
// none.
func (p *pool) any() *link {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.links) == 0 {
		return nil
	}
	p.links[0].pinned = true
	return p.links[0]
}

// pin keeps a link that somebody outside holds.
func (p *pool) pin(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.pinned = true
}

// dial makes one more link. It does not end with the context of whoever asked
// first: the others wait for it too.
func (p *pool) dial(d *dialing) {
	l, err := p.c.connect()
	p.c.metrics.connect(err)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dialing = nil
	if err != nil {
		level := slog.LevelWarn
		if p.lastDial != nil && p.lastDial.Error() == err.Error() {
			level = slog.LevelDebug // said already
		}
		p.lastDial, p.next = err, time.Now().Add(p.backoff.Step())
		p.c.log.Log(p.c.ctx, level, "ssh connection failed", "for", p.name, "err", err, "next", time.Until(p.next).Round(time.Millisecond))
	} else if p.closed {
		l.kill(errors.New("closed"))
		err = errors.New("closed")
	} else {
		p.resetBackoff()
		p.links = append(p.links, l)
		go func() {
			<-l.dead
			p.c.log.Info("ssh connection ended", "for", p.name, "why", l.why())
			p.drop(l)
		}()
	}
	d.err = err
	close(d.done)
	p.wake()
}

// wake lets all who wait look again. The mutex is held.
func (p *pool) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *pool) drop(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.links = slices.DeleteFunc(p.links, func(x *link) bool { return x == l })
	p.wake()
}

// release gives a session's room back.
func (p *pool) release(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.open--
	if l.open == 0 && !l.pinned && !p.wait {
		l.idle = time.AfterFunc(idleFor, func() { p.closeIdle(l) })
	}
	p.wake()
}

// closeIdle ends a stream connection that nobody used for a while.
func (p *pool) closeIdle(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.open > 0 || l.pinned {
		return
	}
	p.links = slices.DeleteFunc(p.links, func(x *link) bool { return x == l })
	l.kill(errors.New("nobody uses it"))
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, l := range p.links {
		l.kill(errors.New("knoc closed it"))
	}
	p.wake()
}

// lease is a session and the room it takes on its link.
type lease struct {
	*ssh.Session
	link    *link
	release func() // once, when the session is closed
}

// open opens a session and lets prepare set it up and start its command. Both
// are cheap to repeat, as long as no script was sent: a link found dead is
// replaced, and one on which the server allows no more sessions is avoided for
// a while.
func (p *pool) open(ctx context.Context, prepare func(*ssh.Session) error) (*lease, error) {
	for tries := 0; ; {
		l, err := p.acquire(ctx)
		if err != nil {
			return nil, err
		}
		s, err := p.openOn(ctx, l, prepare)
		if err == nil {
			return s, nil
		}
		var refused *ssh.OpenChannelError
		switch {
		case ctx.Err() != nil:
			return nil, fmt.Errorf("%w: opening a session: %w", errConnection, context.Cause(ctx))
		case errors.As(err, &refused):
			// sshd answers so when MaxSessions is reached (session.c of OpenSSH).
			p.mu.Lock()
			p.refused, l.limit, l.limitUntil = err, min(l.open, l.room()-1), time.Now().Add(refusedFor)
			if l.open == 0 {
				// One that has just ended, as we see it, is still being cleared away.
				l.limitUntil = time.Now().Add(refusedFor / 20)
			}
			p.mu.Unlock()
		case !l.isDead(100 * time.Millisecond):
			// The server said no, or closed this one session.
			return nil, fmt.Errorf("%w: opening a session: %w", errConnection, err)
		default:
			p.drop(l)
			if tries++; tries > 1 {
				return nil, fmt.Errorf("%w: opening a session: %w", errConnection, l.why())
			}
		}
	}
}

// openOn opens and prepares a session on l. The answers of the server are
// awaited elsewhere, so that the end of ctx is obeyed at once.
func (p *pool) openOn(ctx context.Context, l *link, prepare func(*ssh.Session) error) (*lease, error) {
	type result struct {
		s   *ssh.Session
		err error
	}
	got := make(chan result, 1)
	go func() {
		s, err := l.client.NewSession()
		if err == nil {
			if err = prepare(s); err != nil {
				s.Close()
			}
		}
		got <- result{s, err}
	}()
	select {
	case r := <-got:
		if r.err != nil {
			p.release(l)
			return nil, r.err
		}
		return &lease{r.s, l, sync.OnceFunc(func() { p.release(l) })}, nil
	case <-ctx.Done():
		go func() {
			if r := <-got; r.err == nil {
				r.s.Close()
			}
			p.release(l)
		}()
		return nil, context.Cause(ctx)
	}
}
