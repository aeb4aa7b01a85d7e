package knoc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// startSqueue asks for all jobs: periodically while one may be alive, and out
// of turn when a job's state is wanted and the allowance permits.
func (l *loop) startSqueue(now time.Time, todo plan) {
	if l.asking || !todo.live {
		return
	}
	next := l.squeueAt.Add(squeueEvery)
	if !todo.check.IsZero() {
		wanted := later(todo.check, l.squeueAt.Add(500*time.Millisecond))
		if wanted = later(wanted, l.squeueBudget.when(now)); wanted.Before(next) {
			next = wanted
		}
	}
	if l.squeueFails > 0 { // a slurmctld that is away is not asked all the time
		next = l.squeueAt.Add(backoff(l.squeueFails))
	}
	if now.Before(next) {
		l.at(next)
		return
	}
	l.asking, l.squeueAt = true, now
	l.squeueBudget.take(now)
	var jobs []job
	l.async(slurmLimit+30*time.Second, func(ctx context.Context) (err error) {
		jobs, err = l.remote.squeue(ctx)
		return err
	}, func(err error) {
		l.asking = false
		l.slurmHeard(err)
		if err != nil {
			l.log.Warn("squeue", "err", err)
			l.squeueAt = l.now()
			l.squeueFails++
			return
		}
		l.squeueFails = 0
		l.squeued(jobs, now)
	})
}

// squeued takes in a whole answer of squeue that was asked for at asked.
func (l *loop) squeued(jobs []job, asked time.Time) {
	byUID := map[types.UID][]job{}
	for _, j := range jobs {
		uid, _ := strings.CutPrefix(j.Name, jobPrefix)
		byUID[types.UID(uid)] = append(byUID[types.UID(uid)], j)
	}
	adopt := map[types.UID]string{}
	for uid, w := range l.works {
		mine := byUID[uid]
		switch {
		case w.busy || asked.Before(w.since) || w.jobID == "" && (w.doubt.IsZero() || asked.Before(w.doubt)):
			continue // the answer is older than what is known
		case w.jobID == "" && len(mine) > 0:
			w.setJob(first(mine).ID, asked)
			adopt[uid] = w.jobID
			l.log.Info("found by name", "pod", w.meta.Namespace+"/"+w.meta.Name, "uid", uid, "job", w.jobID)
		case w.jobID == "":
			w.absent = asked
			continue
		case len(mine) > 0 && w.claim() == "" && (w.hint || first(mine).class() != ended && !lives(mine, w.jobID)):
			w.setJob(first(mine).ID, asked) // accepted twice: the one that lives will run the pod
		}
		listed := false
		w.extra = nil
		for _, j := range mine {
			if j.ID == w.jobID {
				listed = true
				w.observe(j, asked)
			} else if j.class() == queued {
				w.extra = append(w.extra, j.ID) // accepted twice: one is enough
			}
		}
		if !listed {
			l.absent(w, asked)
		}
		if !w.checkAt.After(asked) {
			w.checks++
			w.checkAt = asked.Add(backoff(w.checks - 1))
		}
	}
	l.writeDown(adopt)
	l.hurry() // the watch reads the journals of jobs that have ended
}

// lives says whether the job is among those that have not ended.
func lives(jobs []job, id string) bool {
	return slices.ContainsFunc(jobs, func(j job) bool { return j.ID == id && j.class() != ended })
}

// first picks the job that runs a pod where no claim tells: one that lives
// before one that has ended, the older before the newer.
func first(jobs []job) job {
	best := jobs[0]
	for _, j := range jobs[1:] {
		better := newerJob(best.ID, j.ID)
		if lives, bests := j.class() != ended, best.class() != ended; lives != bests {
			better = lives
		}
		if better {
			best = j
		}
	}
	return best
}

// absent is for a job that squeue did not list. Once is nothing; twice, a
// minute apart, asks sacct and scontrol. Where the journal is complete the job
// has simply been forgotten; sacct is asked only if its end is a riddle still.
func (l *loop) absent(w *work, asked time.Time) {
	switch {
	case w.jobGone():
		w.jobAsOf = later(w.jobAsOf, asked) // forgotten: it does not come back
	case w.has("done") && terminalPhase(w.status.Phase):
		w.ended, w.over, w.dirty = asked, true, true
	case w.has("done") && w.absent.IsZero():
		w.absent, w.absentAgain = asked, asked
	case w.absent.IsZero():
		w.absent = asked
	case asked.Sub(w.absent) >= absentFor:
		w.absentAgain = asked
	}
}

// newestRun is accounting's record of a job's last run: one that has not begun
// comes after those that have.
func newestRun(jobs []job, id string) (last job, found bool) {
	for _, j := range jobs {
		if j.ID == id && (!found || j.Start.IsZero() || !last.Start.IsZero() && !j.Start.Before(last.Start)) {
			last, found = j, true
		}
	}
	return last, found
}

// writeDown keeps job ids that were found by name, for the next start.
func (l *loop) writeDown(ids map[types.UID]string) {
	if len(ids) == 0 {
		return
	}
	l.async(time.Minute, func(ctx context.Context) error { return l.remote.adopt(ctx, ids) }, func(err error) {
		if err != nil {
			l.log.Warn("writing down job ids that were found by name; the next start will look again", "err", err)
		}
	})
}

// startSacct asks the accounting database for jobs that squeue does not have:
// submissions in doubt and jobs that may be lost. All in one question, seldom.
func (l *loop) startSacct(now time.Time, works []*work) {
	if len(works) == 0 || l.sacctBusy {
		return
	}
	if next := l.sacctBudget.when(now); now.Before(next) {
		l.at(next)
		return
	}
	l.sacctBusy = true
	l.sacctBudget.take(now)
	const chunk = 100 // names in one call: its argv has a limit
	works = works[:min(len(works), chunk)]
	var ids []string
	var uids []types.UID
	missing := map[types.UID]string{} // job ids that scontrol is asked about too
	for _, w := range works {
		if w.jobID == "" {
			uids = append(uids, w.meta.UID)
			continue
		}
		ids = append(ids, w.jobID)
		if !w.absentAgain.IsZero() {
			missing[w.meta.UID] = w.jobID
		}
	}
	var jobs []job
	disabled := false
	unknown := map[types.UID]bool{} // to scontrol
	l.async(2*slurmLimit+time.Minute, func(ctx context.Context) (err error) {
		jobs, err = l.remote.sacct(ctx, ids, uids)
		if errors.Is(err, errNoAccounting) {
			disabled, err = true, nil // so nothing is known of any job: that is an answer
		}
		if err != nil {
			return err
		}
		for uid, id := range missing {
			known, err := l.remote.knows(ctx, uid, id)
			if err != nil {
				return err
			}
			unknown[uid] = !known
		}
		return nil
	}, func(err error) {
		l.sacctBusy = false
		if err != nil {
			l.log.Warn("sacct: cannot tell what became of jobs that squeue does not list", "err", err)
			for _, w := range works {
				l.unanswered(w, err)
			}
			return
		}
		l.accounted(works, jobs, disabled, unknown, now)
	})
}

// unanswered is for a job that only accounting could tell about, and does not: a
// pod that waits for that says so, from the second time on.
func (l *loop) unanswered(w *work, err error) {
	if l.works[w.meta.UID] != w || w.absent.IsZero() || w.jobGone() {
		return
	}
	if w.sacctFails++; w.sacctFails < 2 {
		return
	}
	text := fmt.Sprintf("%s is not in squeue any more, and what became of it cannot be told: %s", job{ID: w.jobID}, err)
	if w.jobID == "" {
		text = fmt.Sprintf("whether Slurm has accepted the pod cannot be told: %s", err)
	}
	if text != w.unclear {
		w.unclear, w.dirty = text, true
	}
	if !w.unclearWas {
		w.unclearWas = true
		l.event(w, v1.EventTypeWarning, "SlurmJobUnclear", text)
	}
}

// runawayAfter is how long accounting may show a job as alive that slurmctld
// does not know: its news may be under way to slurmdbd. A pod that is to go does
// not wait for that.
const runawayAfter = 10 * time.Minute

// accounted takes in sacct's answer about works.
func (l *loop) accounted(works []*work, jobs []job, disabled bool, unknown map[types.UID]bool, asked time.Time) {
	byUID := map[types.UID][]job{}
	for _, j := range jobs {
		uid, _ := strings.CutPrefix(j.Name, jobPrefix)
		byUID[types.UID(uid)] = append(byUID[types.UID(uid)], j)
	}
	adopt := map[types.UID]string{}
	for _, w := range works {
		mine := byUID[w.meta.UID]
		switch {
		case w.busy || l.works[w.meta.UID] != w:
			// it has changed in the meantime
		case w.asksWho():
			for _, j := range mine {
				if j.ID == w.jobID && j.class() == ended {
					w.observe(j, asked)
				}
			}
			if disabled || w.job.By != "" {
				w.who, w.dirty = true, true // else sacct lags behind: ask again
			}
		case w.absent.IsZero():
			// it was heard of in the meantime
		case w.jobID == "" && len(mine) > 0:
			j := first(mine)
			w.setJob(j.ID, asked)
			w.observe(j, asked)
			adopt[w.meta.UID] = j.ID
		case w.jobID == "":
			l.notAccepted(w)
		default:
			// A job that was run again has a record for each run.
			last, found := newestRun(mine, w.jobID)
			since := w.absent
			if found && last.class() == ended {
				w.observe(last, asked)
			}
			switch {
			case w.jobGone():
			case found && unknown[w.meta.UID] && last.class() != cannotTell && (w.deleting() || asked.Sub(since) >= runawayAfter):
				w.lost, w.runaway, w.dirty = true, last.State, true
				l.log.Warn("job is lost: squeue and scontrol do not know it, and accounting takes it for alive", "pod", w.meta.Namespace+"/"+w.meta.Name, "job", w.jobID, "state", last.State)
			case w.has("done") && (!found || asked.Sub(w.absent) >= absentFor):
				w.lost, w.dirty = true, true // Slurm will not say more of an end that is known
			case !found && unknown[w.meta.UID]:
				w.lost, w.dirty = true, true
				l.log.Warn("job is lost: squeue, scontrol and sacct do not know it and its journal has no end", "pod", w.meta.Namespace+"/"+w.meta.Name, "job", w.jobID)
			}
		}
	}
	l.writeDown(adopt)
	l.hurry()
}
