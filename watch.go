package knoc

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// How often the watch looks for markers. A look is one line each way and a
// directory listing: it starts no process on the login node.
const (
	watchFast  = 250 * time.Millisecond // a pod starts or stops
	watchSlow  = 500 * time.Millisecond // pods run
	watchIdle  = 2 * time.Second        // there is nothing to see
	watchLimit = 60 * time.Second       // for one answer
)

// watch looks for markers and reads journals until ctx ends. One held session
// serves it, or an exchange each time under --poll.
func (l *loop) watch(ctx context.Context) {
	for tries := 0; ctx.Err() == nil; tries++ {
		began := l.now()
		err := l.watchSession(ctx, func() { l.post(ctx, l.directoryIsThere) })
		if ctx.Err() != nil {
			return
		}
		l.log.Warn("the watch was interrupted; starting it again", "err", err)
		l.post(ctx, func() {
			if l.heard(err); errors.Is(err, errFenced) {
				l.fatal = err
			}
		})
		if l.now().Sub(began) > time.Minute {
			tries = 0
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff(tries) / 2):
		}
	}
}

// asker answers the requests of watch.sh, in one go.
type asker interface {
	ask(ctx context.Context, requests []string, each func(name string, body []byte) error) error
	close()
}

// watchSession calls works when the session has answered once.
func (p *KNOCProvider) watchSession(ctx context.Context, works func()) error {
	a, err := p.remote.watch(ctx, p.cfg.Poll)
	if err != nil {
		return err
	}
	defer a.close()
	// Markers may have been removed by a session that was cut before it read:
	// a new session reads everything past what is known.
	missing := map[textName]time.Time{}
	seen, err := p.readJournals(ctx, a, p.unread(true), true, missing)
	if err != nil {
		return err
	}
	// A marker says that there is something to read. Where nothing is seen yet, a
	// stale cache is in the way: the journal is read at each look until it is.
	type unseen struct {
		restart int
		until   time.Time
	}
	again := map[types.UID]unseen{}
	answered := false
	for uid, restart := range seen.held {
		again[uid] = unseen{restart, p.now().Add(2 * staleFor)}
	}
	for {
		restarts := map[types.UID]int{}
		if err := a.ask(ctx, []string{"marks"}, func(name string, body []byte) error {
			if name == "marks" {
				for _, mark := range strings.Fields(string(body)) {
					if uid, restart, ok := parseMark(mark); ok {
						restarts[uid] = max(restarts[uid], restart)
					}
				}
			}
			return nil
		}); err != nil {
			return err
		}
		p.looked.Store(time.Now().UnixNano())
		if !answered {
			answered = true
			works()
		}
		want := p.unread(false)
		for uid, restart := range restarts {
			again[uid] = unseen{restart, p.now().Add(2 * staleFor)}
		}
		for uid, u := range again {
			want[uid] = p.position(uid, u.restart)
		}
		seen, err := p.readJournals(ctx, a, want, false, missing)
		if err != nil {
			return err
		}
		for uid, u := range again {
			if seen.some[uid] || p.now().After(u.until) {
				delete(again, uid)
			}
		}
		for uid, restart := range seen.held {
			again[uid] = unseen{restart, p.now().Add(2 * staleFor)}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.look:
		case <-time.After(p.pace()):
		}
	}
}

// parseMark takes a marker's name apart: changed/<uid>.<restart>-<number>.
func parseMark(mark string) (uid types.UID, restart int, ok bool) {
	name, ok := strings.CutPrefix(mark, "changed/")
	id, rest, _ := strings.Cut(name, ".")
	number, _, dash := strings.Cut(rest, "-")
	restart, err := strconv.Atoi(number)
	return types.UID(id), restart, ok && dash && err == nil && restart >= 0 && validUID(types.UID(id))
}

// position is where a journal is to be read from.
type position struct {
	restart int
	offset  int64
}

// position of a pod's journal of that restart count.
func (p *KNOCProvider) position(uid types.UID, restart int) position {
	p.mu.RLock()
	defer p.mu.RUnlock()
	if w := p.works[uid]; w != nil && w.restart == restart {
		return position{restart, int64(len(w.journal))}
	}
	return position{restart, 0}
}

// unread are the journals to be read without a marker: those of jobs that have
// ended, whose last lines decide; of jobs that run unheard; all that may grow
// when all is set.
func (p *KNOCProvider) unread(all bool) map[types.UID]position {
	p.mu.RLock()
	defer p.mu.RUnlock()
	want := map[types.UID]position{}
	for uid, w := range p.works {
		if !w.over && (!w.ended.IsZero() || w.unheard() || all && w.staged && !w.settled()) {
			want[uid] = position{w.restart, int64(len(w.journal))}
		}
	}
	return want
}

// sight is what readJournals found.
type sight struct {
	some map[types.UID]bool // journals in which there was anything
	held map[types.UID]int  // and those to be read once more for their texts
}

// readJournals reads and hands the pieces to the loop, together with the texts
// that they refer to. A piece whose texts are not there yet waits for them, for
// a moment: missing knows since when.
func (p *KNOCProvider) readJournals(ctx context.Context, a asker, want map[types.UID]position, all bool, missing map[textName]time.Time) (sight, error) {
	seen := sight{map[types.UID]bool{}, map[types.UID]int{}}
	if len(want) == 0 {
		return seen, nil
	}
	var requests []string
	for uid, at := range want {
		requests = append(requests, fmt.Sprintf("read %s %d %d", uid, at.restart, at.offset))
		if all {
			requests = append(requests, fmt.Sprintf("newest %s %d", uid, at.restart)) // requeued in the meantime?
		}
	}
	asked := p.now()
	type piece struct {
		uid   types.UID
		at    position
		text  []byte
		texts map[string]string
	}
	var pieces []piece
	err := a.ask(ctx, requests, func(name string, body []byte) error {
		word := strings.Split(name, ".")
		if len(word) != 4 || word[0] != "journal" {
			return nil
		}
		restart, err1 := strconv.Atoi(word[2])
		offset, err2 := strconv.ParseInt(word[3], 10, 64)
		if err1 == nil && err2 == nil {
			pieces = append(pieces, piece{types.UID(word[1]), position{restart, offset}, body, nil})
		}
		return nil
	})
	var names []textName
	for _, r := range pieces {
		for _, file := range p.textsIn(r.uid, r.at, r.text) {
			names = append(names, textName{r.uid, file})
		}
	}
	texts, textErr := readTexts(ctx, a, names)
	if err == nil {
		err = textErr
	}
	kept := pieces[:0]
	for _, r := range pieces {
		complete := true
		for _, file := range p.textsIn(r.uid, r.at, r.text) {
			name := textName{r.uid, file}
			text, there := texts[name]
			switch since := missing[name]; {
			case there:
				delete(missing, name)
				if r.texts == nil {
					r.texts = map[string]string{}
				}
				r.texts[file] = text
			case since.IsZero():
				missing[name], complete = asked, false
			case asked.Sub(since) < textPatience:
				complete = false
			}
		}
		if !complete {
			seen.held[r.uid] = max(seen.held[r.uid], r.at.restart)
			continue
		}
		if len(r.text) > 0 {
			seen.some[r.uid] = true
		}
		kept = append(kept, r)
	}
	for name, since := range missing {
		if asked.Sub(since) > 10*textPatience {
			delete(missing, name)
		}
	}
	if len(kept) > 0 {
		p.post(ctx, func() {
			now := p.now()
			for _, r := range kept {
				if w := p.works[r.uid]; w != nil {
					w.takeTexts(r.texts)
					w.read(r.at.restart, r.at.offset, r.text, asked, now)
				}
			}
		})
	}
	return seen, err
}

// pace is how long until the next look.
func (p *KNOCProvider) pace() time.Duration {
	if p.cfg.Poll > 0 {
		return p.cfg.Poll
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	pace, now := watchIdle, p.now()
	for _, w := range p.works {
		if w.settled() || w.jobID == "" && !w.busy {
			continue
		}
		pace = min(pace, watchSlow)
		recent := now.Sub(w.eventTime) < 3*time.Second
		starting := w.busy || w.claim() == "" && w.job.class() != queued
		if recent || starting || w.deleting() {
			return watchFast
		}
	}
	return pace
}

// watch starts watch.sh: held, or once per ask when it polls.
func (r *remote) watch(ctx context.Context, poll time.Duration) (asker, error) {
	epoch := r.currentEpoch()
	script, err := render("watch.sh.tmpl", map[string]any{"Dir": r.dir, "Epoch": epoch})
	if err != nil {
		return nil, err
	}
	if poll > 0 {
		return &poller{r, script, epoch}, nil
	}
	s, err := r.ssh.Hold(ctx, script)
	if err != nil {
		return nil, err
	}
	return holder{r, s, epoch}, nil
}

type holder struct {
	remote *remote
	s      *session
	epoch  string
}

func (h holder) close() { h.s.Close() }

func (h holder) ask(ctx context.Context, requests []string, each func(string, []byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, watchLimit)
	defer cancel()
	for _, line := range append(requests, "done") {
		if err := h.s.Send(line); err != nil {
			return h.remote.fenced(err, h.epoch)
		}
	}
	for {
		name, body, err := h.s.Next(ctx)
		if err != nil {
			return h.remote.fenced(err, h.epoch)
		}
		if name == "done" {
			return nil
		}
		if err := each(name, body); err != nil {
			return err
		}
	}
}

type poller struct {
	remote *remote
	script string
	epoch  string
}

func (p *poller) close() {}

func (p *poller) ask(ctx context.Context, requests []string, each func(string, []byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, watchLimit)
	defer cancel()
	in := strings.NewReader(strings.Join(requests, "\n") + "\n")
	return p.remote.fenced(p.remote.ssh.Exchange(ctx, p.script, in, each), p.epoch)
}
