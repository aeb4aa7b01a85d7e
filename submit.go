package knoc

import (
	"context"
	"errors"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// backoff is how long to wait before the n-th try: 1 s doubling to 30 s.
func backoff(n int) time.Duration {
	return min(time.Second<<min(n, 5), 30*time.Second)
}

// startSubmit stages and submits all pods that wait, in one exchange; what
// arrives in the meantime goes into the next.
func (l *loop) startSubmit(works []*work) {
	if len(works) == 0 || l.submitting {
		return
	}
	l.submitting = true
	pods := map[types.UID]*v1.Pod{} // those whose files must be made
	var list []submission
	for _, w := range works {
		w.busy = true
		switch {
		case w.deleting() && w.retry:
			list = append(list, submission{UID: w.meta.UID, Action: actionDrop})
		case w.deleting():
			list = append(list, submission{UID: w.meta.UID, Action: actionSeal})
		case w.retry:
			list = append(list, submission{UID: w.meta.UID, Action: actionRetry})
		case w.staged:
			list = append(list, submission{UID: w.meta.UID, Action: actionSubmit})
		default:
			// Where an exchange was cut, what it brought may be there and stays.
			if !w.unsure {
				w.meta = metaOf(w.pod)
			}
			pods[w.meta.UID] = asSent(w.pod, &w.meta)
		}
	}
	var stagings map[types.UID]staging
	var answers map[types.UID]reply
	l.async(10*time.Minute, func(ctx context.Context) (err error) {
		stagings = l.stageAll(ctx, pods)
		for uid, s := range stagings {
			if s.err == nil {
				list = append(list, submission{uid, s.files, actionSubmit})
			}
		}
		if len(list) > 0 {
			answers, err = l.remote.submit(ctx, list)
		}
		return err
	}, func(err error) {
		l.submitting = false
		now := l.now()
		for _, w := range works {
			w.busy, w.dirty = false, true
			s, isNew := stagings[w.meta.UID]
			if isNew && !w.unsure { // else what was sent before may be there
				w.meta.Sent = s.sent
			}
			if isNew && w.tries == 0 {
				for _, text := range s.ignored {
					l.event(w, v1.EventTypeWarning, "FieldIgnored", text)
				}
			}
			if isNew && s.err != nil {
				l.notStaged(w, s.err, now)
				continue
			}
			a, answered := answers[w.meta.UID]
			l.answered(w, a, answered, err, now)
		}
		l.hurry()
	})
}

// notStaged is for a pod whose files could not be made: it can never run, or
// not yet.
func (l *loop) notStaged(w *work, err error, now time.Time) {
	w.tries++
	w.retryAt = now.Add(backoff(w.tries))
	before := w.waiting
	w.waiting = nil
	var never *refusal
	var notNow *notYet
	switch {
	case errors.As(err, &never):
		w.refused = never
		l.event(w, v1.EventTypeWarning, never.Reason, never.Message)
	case errors.As(err, &notNow):
		// As a kubelet: what a volume lacks is an event only, what the
		// environment lacks is the container's waiting reason too.
		reason, waiting := "Failed", *notNow
		if notNow.Reason == "FailedMount" {
			reason, waiting.Reason = "FailedMount", "ContainerCreating"
		}
		if notNow.Reason == invalidImageName {
			reason = "InspectFailed"
		}
		if w.tries == 1 || before == nil || before.Message != notNow.Message {
			l.event(w, v1.EventTypeWarning, reason, notNow.Message)
			if notNow.Reason == invalidImageName {
				l.event(w, v1.EventTypeWarning, "Failed", "Error: "+invalidImageName)
			}
		}
		w.waiting = &waiting
		w.retryAt = now.Add(min(backoff(w.tries), 4*time.Second)) // healed within seconds
	default:
		w.waiting = &notYet{"StagingFailed", err.Error()}
	}
}

// answered takes in what an exchange told of one pod's submission.
func (l *loop) answered(w *work, a reply, told bool, err error, now time.Time) {
	before := w.waiting
	w.waiting, w.retry, w.checks = nil, false, 0
	w.tries++
	w.retryAt = now.Add(backoff(w.tries))
	if !told {
		// Cut somewhere. To ask again is safe: what is there stays, and sbatch
		// is not called twice.
		w.unsure, w.trouble = true, "the exchange was cut"
		if err != nil {
			w.trouble = err.Error()
		}
		l.log.Warn("submission was cut; trying again", "pod", w.meta.Namespace+"/"+w.meta.Name, "uid", w.meta.UID, "err", w.trouble)
		return
	}
	w.unsure, w.staged, w.trouble, w.doubt = false, a.outcome != unstaged, "", time.Time{}
	switch a.outcome {
	case submitted:
		l.metrics.submitted(w.known, now)
		w.setJob(a.Text, now)
		w.tries, w.checkAt = 0, now.Add(3*time.Second)
		l.log.Info("submitted", "pod", w.meta.Namespace+"/"+w.meta.Name, "uid", w.meta.UID, "job", w.jobID)
	case sealed:
		w.sealed, w.retryAt = true, time.Time{}
	case inDoubt:
		w.doubt, w.trouble, w.absent = now, a.Text, time.Time{}
	case staged:
		w.trouble = "not submitted yet: sbatch fails for other pods"
	case unstaged:
		const about = "the login node could not write the pod's files: "
		w.trouble = about + a.Text
		if a.Text == "" {
			break // the stream was cut
		}
		// A full disk, a quota, a file system that is read-only: it may pass.
		w.waiting = &notYet{"ContainerCreating", w.trouble}
		if before == nil || !strings.HasPrefix(before.Message, about) {
			l.event(w, v1.EventTypeWarning, "FailedMount", w.trouble)
		}
	}
	if w.trouble != "" {
		l.log.Warn("submission failed", "pod", w.meta.Namespace+"/"+w.meta.Name, "uid", w.meta.UID, "in doubt", a.outcome == inDoubt, "err", w.trouble)
	}
}

// notAccepted is for a pod that Slurm turns out not to have. What sbatch
// decides for good fails the pod with its own words; all else is tried again.
func (l *loop) notAccepted(w *work) {
	w.doubt, w.absent, w.retry = time.Time{}, time.Time{}, true
	w.retryAt = l.now().Add(backoff(w.tries))
	w.dirty = true
	if rejected(w.trouble) {
		w.refused = &refusal{"SlurmRejected", w.trouble}
		l.event(w, v1.EventTypeWarning, "SlurmRejected", w.trouble)
	}
}

// rejected says whether sbatch's error is slurmctld's decision about this very
// job, which no later try would change (the texts are those of
// slurm/slurm_errno.h). A limit on the number of jobs is none: it passes.
func rejected(text string) bool {
	if strings.Contains(text, "SubmitJob") || strings.Contains(text, "MaxJobs") {
		return false
	}
	for _, verdict := range []string{
		"Invalid partition", "Invalid account", "Invalid qos", "Invalid wckey", "Invalid feature", "Invalid generic resource",
		"Invalid node", "Invalid license", "Invalid reservation", "Requested reservation", "Requested node configuration is not available",
		"Requested time limit", "Requested partition configuration", "More processors requested", "Memory required by task",
		"Node count specification", "CPU count specification", "Job violates accounting/QOS policy", "group not permitted",
		"Access/permission denied", "Memory specification", "nvalid option", "unrecognized option", "nvalid --", "Invalid numeric value",
		"Batch script contains DOS line breaks", "Pathname of a file", "Unable to parse", "Invalid constraint", "Invalid dependency", "Job dependency problem",
	} {
		if strings.Contains(text, verdict) {
			return true
		}
	}
	return false
}
