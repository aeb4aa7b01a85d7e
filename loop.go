package knoc

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
)

// How often the loop asks Slurm. squeue is asked periodically and, while an event
// makes its word wanted (a job was stopped, a submission is in doubt), out of turn
// from an allowance that fills every 3 s. One question serves all pods, so what a
// site sees does not grow with their number; with quiet pods it is two a minute.
const (
	squeueEvery = 30 * time.Second
	sinfoEvery  = 60 * time.Second
	listApart   = 5 * time.Second  // two LISTs that must both lack a UID
	resendAfter = 10 * time.Second // a status that the API does not show
	stopSlack   = 15 * time.Second // after the grace period, before scancel
	whoWithin   = 75 * time.Second // sacct may be asked once in 60 s
)

// loop is the state of run that no other goroutine sees.
type loop struct {
	*KNOCProvider
	ctx   context.Context
	fatal error

	submitting, preparing, stopping, removing, listing, asking, sizing bool

	squeueBudget, sacctBudget budget
	squeueAt, sinfoAt, listAt time.Time // when last asked
	squeueFails               int       // in a row
	stopAt, removeAt          time.Time // not before, after an error
	sacctBusy                 bool
	sshTrouble, slurmTrouble  string
	dirTrouble                string    // the node's directory is gone or cannot be used
	dirSince, healAt          time.Time // since when; not to be made again before
	healing                   bool
	refreshing                bool
	refreshAt                 time.Time      // when volumes' objects are read again
	steady                    map[string]any // the immutable ones among them
	apiChanged                bool
	wakeup                    time.Time // when reconcile wants to run again
}

// budget is a token bucket.
type budget struct {
	tokens, burst float64
	every         time.Duration // a token comes this often
	at            time.Time
}

// when says from when on a token is there.
func (b *budget) when(now time.Time) time.Time {
	if b.at.IsZero() {
		b.at, b.tokens = now, b.burst
	}
	b.tokens = min(b.burst, b.tokens+float64(now.Sub(b.at))/float64(b.every))
	b.at = now
	if b.tokens >= 1 {
		return now
	}
	return now.Add(time.Duration((1 - b.tokens) * float64(b.every)))
}

// take spends a token; periodic calls may overdraw.
func (b *budget) take(now time.Time) { b.when(now); b.tokens-- }

// run reads the remote directories, then reconciles until ctx ends, another
// knoc takes over (errFenced), or starting turns out to be impossible. The pod
// informer may still be behind: a pod that it does not have is asked for by LIST
// before anything is done about it.
func (p *KNOCProvider) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer p.ssh.Close()
	l := &loop{KNOCProvider: p, ctx: ctx, apiChanged: true,
		squeueBudget: budget{burst: 10, every: 3 * time.Second},
		sacctBudget:  budget{burst: 2, every: 60 * time.Second},
	}
	if err := l.adopt(); err != nil {
		return err
	}
	close(p.isReady)
	go p.notifier.run(ctx)
	go l.watch(ctx)
	return l.loop()
}

// adopt reads the remote directories; while SSH does not answer it tries again.
func (l *loop) adopt() error {
	for wait := time.Second; ; wait = min(2*wait, 30*time.Second) {
		asked := l.now()
		all, err := l.remote.start(l.ctx)
		if err == nil {
			texts := l.adoptTexts(all)
			l.sshTrouble = ""
			l.mu.Lock()
			defer l.mu.Unlock()
			for _, f := range all {
				w := l.works[f.Meta.UID]
				if w == nil {
					w = &work{meta: f.Meta}
					l.works[f.Meta.UID] = w
				}
				w.staged, w.jobID, w.dirty = true, f.JobID, true
				w.takeTexts(texts[f.Meta.UID])
				w.read(f.Restart, 0, f.Journal, asked, asked)
				w.restart = max(w.restart, f.Restart)
				w.reported, w.adopted = w.jobID != "", len(w.events)
			}
			l.log.Info("adopted", "directory", l.remote.dir, "epoch", l.remote.currentEpoch(), "pods", len(all))
			l.setState()
			return nil
		}
		if l.ctx.Err() != nil {
			return l.ctx.Err()
		}
		if !errors.Is(err, errConnection) || finalSSH(err) {
			return err
		}
		l.log.Warn("the login node cannot be reached; trying again", "err", err, "in", wait)
		l.mu.Lock()
		l.sshTrouble = err.Error()
		l.setState()
		l.mu.Unlock()
		select {
		case <-l.ctx.Done():
			return l.ctx.Err()
		case <-time.After(wait):
		}
	}
}

// finalSSH says whether an error of the connection needs somebody to change
// something: a host key that is not trusted, a key that is not accepted. At the
// start that ends knoc; later it may be the site's fault, and pass.
func finalSSH(err error) bool {
	var host *hostKeyError
	var login *authError
	return errors.As(err, &host) || errors.As(err, &login)
}

// loop runs calls and reconciles, each time with the lock held.
func (l *loop) loop() error {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		var call func()
		select {
		case <-l.ctx.Done():
			return l.ctx.Err()
		case call = <-l.calls:
		case <-l.kicked:
			l.apiChanged = true
		case <-timer.C:
		}
		l.mu.Lock()
		for call != nil { // all that waits, then one look at everything
			call()
			select {
			case call = <-l.calls:
			default:
				call = nil
			}
		}
		now := l.now()
		l.wakeup = now.Add(time.Second)
		if l.fatal == nil {
			l.reconcile(now)
		}
		wakeup, fatal := l.wakeup, l.fatal
		l.mu.Unlock()
		if fatal != nil {
			return fatal
		}
		timer.Reset(max(10*time.Millisecond, wakeup.Sub(l.now())))
	}
}

// post has the loop run f. Only goroutines other than the loop's may call it.
func (p *KNOCProvider) post(ctx context.Context, f func()) {
	select {
	case p.calls <- f:
	case <-ctx.Done():
	}
}

// async runs an exchange apart from the loop and its result within.
func (l *loop) async(limit time.Duration, exchange func(ctx context.Context) error, then func(err error)) {
	go func() {
		ctx, cancel := context.WithTimeout(l.ctx, limit)
		defer cancel()
		err := exchange(ctx)
		l.post(l.ctx, func() {
			if errors.Is(err, errFenced) {
				l.fatal = err
				return
			}
			l.heard(err)
			then(err)
		})
	}()
}

// heard keeps what an exchange tells of the connection.
func (l *loop) heard(err error) {
	trouble := ""
	if errors.Is(err, errConnection) {
		trouble = err.Error()
	}
	if exit := (*exitError)(nil); errors.As(err, &exit) && exit.Status == exitCantCreate {
		l.directoryIsGone(exit)
	}
	if trouble != l.sshTrouble {
		l.sshTrouble = trouble
		l.setState()
	}
}

// setState publishes the cluster's state for the node object.
func (l *loop) setState() {
	problem := cmp.Or(l.sshTrouble, l.dirTrouble, l.slurmTrouble)
	if problem != l.state.Problem {
		if problem != "" {
			l.log.Warn("the cluster cannot be asked; pods keep their status", "err", problem)
		} else {
			l.log.Info("the cluster answers again")
		}
		for _, w := range l.works {
			w.dirty = true
		}
		l.state.Problem = problem
	}
	l.changed()
}

// at asks for reconcile to run no later than then.
func (l *loop) at(then time.Time) {
	if then.Before(l.wakeup) {
		l.wakeup = then
	}
}

// reconcile compares, decides, and starts what must be done. It never blocks.
func (l *loop) reconcile(now time.Time) {
	if l.apiChanged && l.api != nil {
		l.apiChanged = false
		l.syncAPI()
	}
	var todo plan
	for _, w := range l.works {
		l.decide(w, now, &todo)
	}
	l.startSubmit(todo.submit)
	l.startPrepare(todo.prepare)
	l.startStop(todo)
	l.startRefresh(now)
	l.startRemove(todo.remove)
	l.startList(now, todo.list)
	l.startSqueue(now, todo)
	l.startSacct(now, todo.sacct)
	l.startSinfo(now)
	l.startHeal(now)
	for _, w := range l.works {
		l.publish(w, now)
	}
}

// plan collects what decide finds to do, so that one exchange serves all pods.
type plan struct {
	submit   []*work
	prepare  []preparing // changes to be made
	changes  []*work     // that are to be sent
	commands []command
	park     []*work // jobs to be put back into the queue, and held
	release  []*work // of these, those that are to run again
	// parkJobs and releaseJobs are the same for the exchange, which is not the loop's.
	parkJobs, releaseJobs []parkedJob
	cancel                []string // jobs to be cancelled outright
	pending               []string // jobs to be cancelled unless they have started
	remove                []*work
	sacct                 []*work
	list                  bool
	live                  bool      // some job may be alive
	check                 time.Time // when squeue's word is wanted; zero: not
}

func (t *plan) wantSqueue(at time.Time) {
	if t.check.IsZero() || at.Before(t.check) {
		t.check = at
	}
}

// syncAPI takes in the informer's pods.
func (l *loop) syncAPI() {
	seen := map[types.UID]bool{}
	for _, pod := range l.api.Pods() {
		seen[pod.UID] = true
		w := l.works[pod.UID]
		if w == nil {
			if terminalPhase(pod.Status.Phase) && pod.DeletionTimestamp == nil || !validUID(pod.UID) {
				continue // ended before, and its directory is gone
			}
			w = &work{meta: metaOf(pod), known: l.now()}
			if id := pod.Annotations[AnnotationJobID]; id != "" && len(pod.Status.ContainerStatuses) > 0 {
				// It was submitted once and its directory is gone: whatever
				// became of it, it must not run a second time. Without a
				// status the annotation was copied from another pod.
				w.jobID, w.hint, w.reported = id, true, true
			}
			l.works[pod.UID] = w
		}
		if w.pod != pod {
			w.pod, w.dirty, w.absentLists = pod, true, 0
		}
	}
	for uid, w := range l.works {
		if w.pod != nil && !seen[uid] {
			w.pod, w.dirty = nil, true
		}
	}
}

// decide is the heart of knoc: what is to be done about one pod now.
func (l *loop) decide(w *work, now time.Time, todo *plan) {
	if w.removing || w.busy {
		return
	}
	todo.pending = append(todo.pending, w.extra...)
	l.changeWork(w, now, todo)
	if l.api != nil && w.pod == nil && !w.orphan && !w.deleted {
		todo.list = true // the informer may have missed it, or be behind
	}
	switch {
	case w.deleting() && (!w.staged && !w.unsure && w.jobID == "" || w.refused != nil || w.jobGone()):
		l.finish(w, now, todo)

	case w.deleted && w.pod == nil && !w.staged && !w.unsure:
		delete(l.works, w.meta.UID)

	case w.deleted && w.pod == nil:
		todo.remove = append(todo.remove, w)

	case w.refused != nil || w.jobGone():
		// Nothing more will happen; the directory stays for its logs. Only who
		// cancelled a job may be open: sacct knows, if it does soon.
		if !w.over && w.mayComeBack() {
			todo.live = true
			todo.wantSqueue(later(w.ended.Add(staleFor), w.checkAt))
		}
		if w.over && w.asksWho() {
			if late := w.ended.Add(whoWithin); now.Before(late) {
				todo.sacct = append(todo.sacct, w)
				l.at(late)
			} else {
				w.who, w.dirty = true, true
			}
		}

	case w.jobID == "" && w.doubt.IsZero():
		// Slurm does not have it, as far as is known.
		switch {
		case w.deleting() && w.sealed:
			l.finish(w, now, todo)
		case w.pod == nil && !w.deleting():
			// an orphan in a moment
		case now.Before(w.retryAt):
			l.at(w.retryAt)
		default:
			todo.submit = append(todo.submit, w)
		}

	case w.jobID == "":
		// In doubt: squeue asked after the doubt began finds it by name, or
		// else sacct does (see squeued and accounted).
		todo.live = true
		if w.absent.IsZero() {
			todo.wantSqueue(later(w.doubt.Add(2*time.Second), w.checkAt))
		} else {
			todo.sacct = append(todo.sacct, w)
		}

	default:
		todo.live = true
		if w.deleting() && !w.hint && w.absent.IsZero() {
			l.stopWork(w, now, todo) // while squeue does not list it, its id may be another's
		} else if d := w.newDeadline(); d > 0 {
			todo.commands = append(todo.commands, command{string(w.meta.UID), w.jobID, "deadline", "-", d, w.jobRuns()})
		} else {
			l.parkWork(w, now, todo)
		}
		l.follow(w, now, todo)
	}
}

// follow wants Slurm's word on a submitted job at the moments when the journal
// cannot tell.
func (l *loop) follow(w *work, now time.Time, todo *plan) {
	switch {
	case !w.absentAgain.IsZero():
		todo.sacct = append(todo.sacct, w) // is it lost?
	case !w.absent.IsZero():
		todo.wantSqueue(w.absent.Add(absentFor))
	case w.has("done") || w.deleting() && !w.stopSent.IsZero():
		// It ends at any moment, or has: a deletion waits for that.
		// And fold may need Slurm's word on how: see OOMKilled and stopping.
		if w.deleting() || !terminalPhase(w.status.Phase) {
			todo.wantSqueue(w.checkAt)
		}
	case w.claim() == "" && w.job.State == "":
		todo.wantSqueue(w.checkAt) // queued? tell why
	}
}

// stopWork ends a job: queued ones are cancelled, running ones are told to stop
// with their grace period and cancelled when they do not.
func (l *loop) stopWork(w *work, now time.Time, todo *plan) {
	grace := w.grace()
	deadline := w.stopSent.Add(time.Duration(w.stopGrace)*time.Second + stopSlack)
	switch {
	case w.stopSent.IsZero() || grace < w.stopGrace:
		// A job that waits may start at this very moment: then it finds the command.
		runs := w.jobRuns()
		todo.commands = append(todo.commands, command{string(w.meta.UID), w.jobID, "stop", "-", grace, runs})
		if !runs {
			todo.pending = append(todo.pending, w.jobID)
		}
	case w.job.class() == queued && w.job.State != "CONFIGURING" && w.jobAsOf.After(later(w.stopSent, w.cancelSent)):
		// The cancelling was lost, or did not find it in state PENDING.
		if w.job.State == "PENDING" {
			todo.pending = append(todo.pending, w.jobID)
		} else {
			todo.cancel = append(todo.cancel, w.jobID)
		}
	case !now.Before(later(deadline, w.cancelSent.Add(30*time.Second))):
		todo.cancel = append(todo.cancel, w.jobID)
	default:
		l.at(later(deadline, w.cancelSent.Add(30*time.Second)))
	}
}

// finish ends a deletion: the API object goes once it shows how the pod ended
// (or after a few seconds), the directory after the object.
func (l *loop) finish(w *work, now time.Time, todo *plan) {
	if !w.ended.IsZero() && !w.over && now.Before(w.ended.Add(5*time.Second)) {
		l.at(w.ended.Add(5 * time.Second)) // the journal's last lines are on their way
		return
	}
	if w.pod == nil || w.orphan || l.api == nil {
		w.deleted = true
		if w.pod != nil && l.api == nil {
			// The classic API has no object of its own: virtual-kubelet
			// removes it when it sees the terminal status.
			l.publish(w, now)
		}
		todo.remove = append(todo.remove, w)
		return
	}
	// Whoever waits for this pod wants to see how it ended: the status goes
	// first, though not for ever.
	if w.staged && (w.dirty || w.unsent() && (w.notified.IsZero() || now.Before(w.notified.Add(3*time.Second)))) {
		l.at(later(now, w.notified.Add(3*time.Second)))
		return
	}
	if w.deleted {
		return // the informer will tell
	}
	if now.Before(w.retryAt) {
		l.at(w.retryAt)
		return
	}
	w.busy = true
	pod := w.pod
	go func() {
		ctx, cancel := context.WithTimeout(l.ctx, 30*time.Second)
		defer cancel()
		err := l.api.Delete(ctx, pod)
		l.post(l.ctx, func() {
			w.busy = false
			if err != nil {
				l.log.Warn("deleting a pod whose job is gone; trying again", "pod", pod.Namespace+"/"+pod.Name, "err", err)
				w.retryAt = l.now().Add(2 * time.Second)
				return
			}
			w.deleted = true
		})
	}()
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// publish folds what is known into a status and has virtual-kubelet send it,
// again and again until the API server shows it.
func (l *loop) publish(w *work, now time.Time) {
	if w.pod == nil || w.deleted && l.api != nil {
		return
	}
	if w.dirty {
		w.dirty = false
		status := fold(w.pod, w.view(l.state.Problem))
		if w.status.Phase != status.Phase && status.Phase != "" {
			l.log.Info("pod", "pod", w.pod.Namespace+"/"+w.pod.Name, "phase", status.Phase, "reason", status.Reason, "job", w.jobID)
		}
		if !equality.Semantic.DeepEqual(status, w.status) {
			w.status, w.notified = status, time.Time{}
			if n := len(w.events); n > w.measured {
				l.metrics.status(w.events[max(w.measured, w.adopted):max(n, w.adopted)], now)
				w.measured = n
			}
		}
		l.tell(w, now)
	}
	if !w.unsent() {
		return
	}
	if again := w.notified.Add(resendAfter); now.Before(again) {
		l.at(again)
		return
	}
	w.notified = now
	l.notifier.send(w.podWithStatus())
}

func inPartition(partition string) string {
	if partition == "" {
		return ""
	}
	return " in partition " + partition
}

func (l *loop) event(w *work, eventtype, reason, message string) {
	if l.api != nil && w.pod != nil {
		l.api.Event(w.pod, "", eventtype, reason, message)
	}
}

// startStop sends commands and cancels, for all pods in one exchange.
func (l *loop) startStop(todo plan) {
	if l.stopping || len(todo.commands)+len(todo.cancel)+len(todo.pending)+len(todo.changes)+len(todo.park)+len(todo.release) == 0 {
		return
	}
	if l.now().Before(l.stopAt) {
		l.at(l.stopAt)
		return
	}
	l.stopping = true
	var changes []change
	var changed map[types.UID]bool
	for _, w := range todo.changes {
		changes = append(changes, *w.change)
	}
	todo.parkJobs, todo.releaseJobs = parkable(todo.park), parkable(todo.release)
	l.async(3*time.Minute, func(ctx context.Context) (err error) {
		changed, err = l.remote.stop(ctx, todo, changes)
		return err
	}, func(err error) {
		l.stopping = false
		now := l.now()
		l.changesSent(todo.changes, changes, changed, now)
		// scancel's status tells nothing of a single job: what squeue says of
		// it counts. Only an exchange that was cut, or found no directory, is sent again.
		if exit := (*exitError)(nil); err != nil && (!errors.As(err, &exit) || exit.Status == exitCantCreate) {
			l.stopAt = now.Add(2 * time.Second)
			return
		}
		l.parkedThem(todo, now)
		for _, w := range l.works {
			for _, c := range todo.commands {
				if c.UID != string(w.meta.UID) {
					continue
				}
				switch c.Verb {
				case "deadline":
					w.meta.Deadline = c.Number
				case "stop":
					w.stopSent, w.stopGrace = now, c.Number
					w.checkAt, w.checks = now.Add(700*time.Millisecond), 0
				}
			}
			w.extra = nil // squeue will show those that are still there
			if slices.Contains(todo.pending, w.jobID) {
				w.stopSent, w.stopGrace = now, w.grace()
				w.checkAt, w.checks = now.Add(300*time.Millisecond), 0
			}
			if slices.Contains(todo.cancel, w.jobID) {
				w.cancelSent, w.checkAt, w.checks = now, now.Add(time.Second), 0
			}
		}
		l.hurry()
	})
}

// startRemove removes directories of pods that are gone.
func (l *loop) startRemove(works []*work) {
	if len(works) == 0 || l.removing {
		return
	}
	if l.now().Before(l.removeAt) {
		l.at(l.removeAt)
		return
	}
	l.removing = true
	var uids, gone []types.UID
	for _, w := range works {
		w.removing = true
		uids = append(uids, w.meta.UID)
	}
	l.async(5*time.Minute, func(ctx context.Context) (err error) {
		gone, err = l.remote.remove(ctx, uids)
		return err
	}, func(err error) {
		l.removing = false
		for _, uid := range gone {
			delete(l.works, uid)
		}
		for _, w := range works {
			w.removing = false
		}
		if err != nil || len(gone) < len(uids) {
			l.removeAt = l.now().Add(5 * time.Second)
			l.log.Warn("removing directories of pods that are gone; trying again", "pods", len(uids)-len(gone), "err", err)
		}
	})
}

// startList asks the API server itself for pods that the informer does not have.
func (l *loop) startList(now time.Time, wanted bool) {
	if !wanted || l.listing || l.api == nil {
		return
	}
	if next := l.listAt.Add(listApart); now.Before(next) {
		l.at(next)
		return
	}
	l.listing, l.listAt = true, now
	go func() {
		ctx, cancel := context.WithTimeout(l.ctx, 30*time.Second)
		defer cancel()
		pods, err := l.api.List(ctx)
		l.post(l.ctx, func() {
			l.listing = false
			if err != nil {
				l.log.Warn("listing the node's pods", "err", err)
				return
			}
			has := map[types.UID]bool{}
			for _, pod := range pods {
				has[pod.UID] = true
			}
			for uid, w := range l.works {
				if w.pod != nil || w.orphan || has[uid] {
					w.absentLists = 0
					continue
				}
				if w.absentLists++; w.absentLists >= 2 {
					w.orphan = true
					l.log.Info("pod is gone from the API; ending its job", "pod", w.meta.Namespace+"/"+w.meta.Name, "uid", uid, "job", w.jobID)
				}
			}
		})
	}()
}

// startSinfo keeps the node's capacity, and is the heartbeat of slurmctld when
// no job asks for squeue.
func (l *loop) startSinfo(now time.Time) {
	if l.sizing {
		return
	}
	if next := l.sinfoAt.Add(sinfoEvery); now.Before(next) {
		l.at(next)
		return
	}
	l.sizing, l.sinfoAt = true, now
	var resources nodeResources
	var images []v1.ContainerImage
	l.async(slurmLimit+30*time.Second, func(ctx context.Context) (err error) {
		resources, images, err = l.remote.sinfo(ctx, l.cfg.Partition)
		return err
	}, func(err error) {
		l.sizing = false
		if err != nil {
			l.sinfoAt = l.now().Add(20*time.Second - sinfoEvery)
		}
		l.slurmHeard(err)
		if err == nil {
			l.state.Resources, l.state.Images, l.state.Known = resources, images, true
			l.setState()
		}
	})
}

// slurmHeard keeps what a Slurm command tells of slurmctld.
func (l *loop) slurmHeard(err error) {
	trouble := ""
	if e := (*slurmError)(nil); errors.As(err, &e) {
		trouble = e.Error()
	} else if err != nil {
		return // of SSH, or of a parser: nothing about slurmctld
	}
	if trouble != l.slurmTrouble {
		l.slurmTrouble = trouble
		l.setState()
	}
}

// hurry has the watch look now, since something is about to happen.
func (l *loop) hurry() { poke(l.look) }
