package knoc

import (
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// A pod that waits for nothing but images does not hold its allocation for ever:
// after parkAfter failed pulls its job is put back into the queue and held there
// (scontrol requeuehold), and let go again after parkFor for one more pull. The
// pod stays in ImagePullBackOff all the while. Nothing of it needs to be kept: a
// job that is held this way, with a journal that ends in such failures, is one.
const (
	parkAfter = 4
	parkFor   = maxPullBackoff
)

// maxPullBackoff is the longest wait between two pulls, as the kubelet's
// (MaxContainerBackOff in pkg/kubelet).
const maxPullBackoff = 5 * time.Minute

// starved says that a pod has tried to get its images that often, and nothing of
// it has work to do, or to lose. One try is enough for a job that was parked.
func (f *facts) starved(spec *v1.PodSpec, restart int) bool {
	need := parkAfter
	if restart > 0 {
		need = 1
	}
	enough := false
	for _, p := range f.pulls {
		if p.trying {
			return false
		}
		enough = enough || p.failed && (p.waiting || p.never) && p.failures >= need // so that back-off is what it shows
	}
	for name, r := range f.runs {
		p := f.pulls[name]
		init := slices.ContainsFunc(spec.InitContainers, func(c v1.Container) bool { return c.Name == name && !isSidecar(&c) })
		if r.end.IsZero() || !init && (p == nil || !p.failed) {
			return false
		}
	}
	return enough
}

// untilStop is a journal up to where its job was told to stop.
func untilStop(events []event) []event {
	if i := slices.IndexFunc(events, func(e event) bool { return e.Word == "stopping" }); i >= 0 {
		return events[:i]
	}
	return events
}

// noImage says that there was any failure to get an image: it is quickly told.
func (w *work) noImage() bool { return w.has("pullfailed") || w.has("neverpull") }

// parked says that the job was put back into the queue for want of an image.
func (w *work) parked() bool {
	return w.pod != nil && w.requeued() && w.noImage() && newFacts(untilStop(w.events)).starved(&w.pod.Spec, 1)
}

// parkWork parks a job, or lets a parked one go.
func (l *loop) parkWork(w *work, now time.Time, todo *plan) {
	if w.hint || w.pod == nil || !w.noImage() {
		return
	}
	if now.Before(w.parkAt) {
		l.at(w.parkAt)
		return
	}
	switch {
	case w.requeued():
		if !strings.Contains(strings.ToLower(w.job.Reason), "held") || !w.parked() {
			return
		}
		if then := w.eventTime.Add(parkFor); now.Before(then) && !w.fed {
			l.at(then)
			return
		}
		todo.release = append(todo.release, w)
	case w.jobRuns() && newFacts(w.events).starved(&w.pod.Spec, w.restart):
		todo.park = append(todo.park, w)
	}
}

// parkedThem takes in that jobs were parked or let go; what squeue says counts.
func (l *loop) parkedThem(todo plan, now time.Time) {
	for _, w := range todo.park {
		l.event(w, v1.EventTypeNormal, "SlurmJobHeld", "job "+w.jobID+" gives its allocation back while its images cannot be pulled; the next try is in "+parkFor.String())
		w.parkAt, w.checkAt, w.checks = now.Add(30*time.Second), now.Add(time.Second), 0
	}
	for _, w := range todo.release {
		w.fed, w.parkAt, w.checkAt, w.checks = false, now.Add(10*time.Second), now.Add(time.Second), 0
	}
}

// parkedJob is one for stop.sh.
type parkedJob struct {
	JobID      string
	MayRequeue bool // by the pod's own word
}

func parkable(works []*work) (jobs []parkedJob) {
	for _, w := range works {
		jobs = append(jobs, parkedJob{w.jobID, mayRequeue(w.pod)})
	}
	return jobs
}
