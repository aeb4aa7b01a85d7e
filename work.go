package knoc

import (
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// work is what the loop knows of one pod: the API object, the directory on the
// cluster, the Slurm job. It is keyed by the pod's UID and belongs to the loop.
type work struct {
	meta podMeta

	// pod is the API server's newest copy, read-only; nil when it has none
	// (any more).
	pod *v1.Pod
	// known is when knoc saw the pod first; zero for one that was there at its start.
	known time.Time
	// absentLists counts the LISTs of the API server without this UID; two
	// make an orphan, whose job is stopped.
	absentLists int
	orphan      bool
	// deleted says that the object was deleted by us, or never needs to be.
	deleted bool

	// staged says that the pod's directory is on the cluster; unsure that an
	// exchange was cut that may have put it there. sealed: the directory can
	// never be submitted any more.
	staged, unsure, sealed bool
	// retry says that Slurm turned out not to have what sbatch was called for.
	retry bool
	// busy says that an exchange about this pod's submission is under way.
	busy bool
	// doubt is since when it is unknown whether Slurm has accepted the pod: sbatch
	// was called and told no job id. trouble is what it said instead.
	doubt    time.Time
	trouble  string
	tries    int
	retryAt  time.Time
	refused  *refusal
	waiting  *notYet
	jobID    string
	hint     bool      // jobID is only what the pod's annotation says: nothing is done to that job
	since    time.Time // when jobID became known
	extra    []string  // other jobs of this pod that wait in the queue
	reported bool      // event Submitted is written

	restart   int
	journal   []byte
	events    []event
	texts     map[string]string // what the events refer to in msg/
	turns     []string          // those of them that change without an event
	eventTime time.Time         // when the journal last grew, by our clock
	readAt    time.Time         // when it was last read, grown or not
	measured  int               // how many of them knoc's own metrics have seen
	told      int               // how many of the events were told to the API
	adopted   int               // how many of them were there when knoc started
	// queued is what was told last of the job's wait, at queuedAt.
	queued      string
	queuedAt    time.Time
	queuedTimes int

	// job is Slurm's word, from the newest squeue or sacct that knew the job;
	// alive the newest in which it had not ended.
	job, alive job
	jobAsOf    time.Time
	// ended is when Slurm first told that the job has ended; over says that
	// the journal was read to its end after that, so no more can come.
	ended time.Time
	over  bool
	// who says that it is known who cancelled the job, or that nobody will tell.
	who bool
	// absent is when squeue first did not list the job, absentAgain a time
	// 60 s later and more; zero: it is listed.
	absent, absentAgain time.Time
	lost                bool
	// unclear is why it cannot be told what became of the job, or whether there
	// is one; sacctFails counts the answers that were none. runaway is the state
	// that accounting still shows of a job that slurmctld does not know.
	unclear    string
	unclearWas bool // and an event was written
	sacctFails int
	runaway    string

	// stopping a job: when the command was sent, with which grace, when it was
	// cancelled outright.
	stopSent, cancelSent time.Time
	stopGrace            int64
	// checkAt is when the loop wants squeue's word on this job; checks counts
	// how often it did, for the back-off.
	checkAt time.Time
	checks  int

	// change is what the directory is to get next, not before changeAt; held are
	// the containers for which that cannot be made, by name.
	change   *change
	changeAt time.Time
	held     map[string]held
	// refresh is what the directory is to get of volumes; refreshProblem why one of
	// them stays as it is.
	refresh        *refresh
	refreshProblem string

	// parkAt is when parking may be thought of again; fed says that a parked pod
	// got something new, such as another image.
	parkAt time.Time
	fed    bool

	dirty    bool // the status must be folded anew
	status   v1.PodStatus
	notified time.Time
	removing bool
}

const (
	absentFor = 60 * time.Second // between two squeue without a job
	staleFor  = 35 * time.Second // attribute caches are mostly set to 30 s
)

// has says whether the journal has a line with this word.
func (w *work) has(word string) bool {
	for i := range w.events {
		if w.events[i].Word == word {
			return true
		}
	}
	return false
}

// claim is the id of the job that runs the pod, "" when none has started.
func (w *work) claim() string {
	for i := range w.events {
		if w.events[i].Word == "claim" && len(w.events[i].Args) > 0 {
			return w.events[i].Args[0]
		}
	}
	return ""
}

// deleting says that the pod's work must end: the object is marked for
// deletion or gone.
func (w *work) deleting() bool {
	return w.orphan || w.pod != nil && w.pod.DeletionTimestamp != nil
}

// grace is how long the containers may take to end, in seconds.
func (w *work) grace() int64 {
	if w.pod != nil && w.pod.DeletionGracePeriodSeconds != nil {
		return min(*w.pod.DeletionGracePeriodSeconds, longestGrace)
	}
	return w.meta.Grace
}

// newDeadline is the pod's activeDeadlineSeconds when it is lower than what the
// script has; else 0. The API server lets it only be set and lowered.
func (w *work) newDeadline() int64 {
	if w.pod == nil || !w.staged || w.hint || w.has("done") && !w.requeued() || w.pod.Spec.ActiveDeadlineSeconds == nil {
		return 0
	}
	d := *w.pod.Spec.ActiveDeadlineSeconds
	if w.meta.Deadline > 0 && d >= w.meta.Deadline {
		return 0
	}
	return d
}

// setJob takes a job for the pod's. What was known of another one, or that there
// seemed to be none, says nothing of it.
func (w *work) setJob(id string, now time.Time) {
	w.jobID, w.hint, w.since, w.doubt, w.refused = id, false, now, time.Time{}, nil
	w.job, w.alive, w.jobAsOf = job{}, job{}, time.Time{}
	w.ended, w.over, w.lost, w.who = time.Time{}, false, false, false
	w.clear()
	w.absent, w.absentAgain = time.Time{}, time.Time{}
	w.stopSent, w.cancelSent, w.dirty = time.Time{}, time.Time{}, true
}

// unheard says that Slurm runs the job and the journal does not have it yet, or
// not the start of all containers: its markers may be lost.
func (w *work) unheard() bool {
	return w.job.class() == running && (w.claim() == "" || w.status.Phase == v1.PodPending) && w.readAt.Before(w.jobAsOf)
}

// jobGone says that Slurm has no live job for the pod.
func (w *work) jobGone() bool { return !w.ended.IsZero() || w.lost }

// jobRuns says that the job has started, as far as is known: a signal reaches it.
// The journal may have grown since squeue was asked.
func (w *work) jobRuns() bool {
	return w.jobID != "" && (w.job.class() == running || w.claim() != "" && (w.job.class() != queued || w.eventTime.After(w.jobAsOf)))
}

// settled says that nothing more will happen: all there is to know is known.
func (w *work) settled() bool {
	return w.refused != nil || w.lost || w.over || w.has("done") && !w.ended.IsZero()
}

// read takes in a piece of a journal that was read at asked. It says whether
// there was anything new.
func (w *work) read(restart int, offset int64, data []byte, asked, now time.Time) bool {
	if restart < w.restart {
		return false
	}
	fresh := false
	w.readAt = asked
	if restart > w.restart && offset == 0 && len(data) > 0 {
		// The job was requeued and runs again: a journal of its own.
		w.restart, w.journal, w.told, w.adopted, w.measured = restart, nil, 0, 0, 0
	}
	if restart == w.restart && offset <= int64(len(w.journal)) && offset+int64(len(data)) > int64(len(w.journal)) {
		w.journal = append(w.journal, data[int64(len(w.journal))-offset:]...)
		w.events = parseJournal(w.journal)
		w.turns = nil
		for _, r := range newFacts(w.events).runs {
			if r.turns != "" {
				w.turns = append(w.turns, r.turns)
			}
		}
		w.eventTime, w.staged, w.dirty, fresh = now, true, true, true
		if id := w.claim(); id != "" && id != w.jobID {
			w.setJob(id, now) // whoever holds the claim runs the pod
		}
		w.hint, w.lost = false, false
		if w.has("done") {
			w.checkAt, w.checks = now.Add(500*time.Millisecond), 0
		}
	}
	if !w.ended.IsZero() && !asked.Before(w.ended.Add(w.staleness())) && !w.mayComeBack() {
		w.over, w.dirty = true, true
	}
	return fresh
}

// staleness is for how long after the job's end its journal may still look
// shorter than it is: a shared home remembers sizes and missing names. Where the
// end is there, or nothing ran, there is nothing to wait for.
func (w *work) staleness() time.Duration {
	if w.has("done") || w.claim() == "" && w.job.NodeList == "" {
		return 0
	}
	return staleFor
}

// mayComeBack says that Slurm may yet take a job that has ended back into its
// queue: one that may be requeued; but also one that no node could begin to run
// ("launch failed requeued held"), whatever sbatch was told. It does so soon, and
// squeue has not shown since that it did not.
func (w *work) mayComeBack() bool {
	return !w.ended.IsZero() && slurmStates[w.job.State].disruption && !w.deleting() &&
		(w.claim() == "" || w.pod != nil && mayRequeue(w.pod)) && w.jobAsOf.Before(w.ended.Add(staleFor))
}

// observe takes in Slurm's word on the job, asked for at that time.
func (w *work) observe(j job, asked time.Time) {
	if j.State != w.job.State || j.Reason != w.job.Reason || j.ID != w.job.ID {
		w.dirty = true
	}
	if j.By == "" && j.ID == w.job.ID {
		j.By = w.job.By // sacct told, squeue cannot
	}
	w.job, w.jobAsOf, w.hint = j, asked, false
	w.absent, w.absentAgain = time.Time{}, time.Time{}
	w.clear()
	if j.class() != ended {
		w.alive, w.ended, w.over, w.lost = j, time.Time{}, false, false
	} else if w.ended.IsZero() {
		w.ended = asked
	}
}

// requeued says that Slurm has taken the job back into the queue and the journal
// is that of its run before: squeue, asked after the journal last grew, says
// that the job waits.
func (w *work) requeued() bool {
	return w.claim() != "" && w.job.class() == queued && w.job.State != "CONFIGURING" && w.jobAsOf.After(w.eventTime)
}

// clear: somebody told what there was to know.
func (w *work) clear() {
	w.dirty = w.dirty || w.unclear != ""
	w.unclear, w.unclearWas, w.sacctFails, w.runaway = "", false, 0, ""
}

// asksWho says whether somebody else cancelled the job and it is open who: squeue
// does not tell, and a terminal status is never corrected.
func (w *work) asksWho() bool {
	return w.job.State == "CANCELLED" && w.job.By == "" && !w.who && w.stopSent.IsZero() && w.cancelSent.IsZero() && !w.deleting()
}

// view is what fold gets to see.
func (w *work) view(unreachable string) observed {
	o := observed{
		Journal: w.events, Restart: w.restart, Messages: w.texts, Job: w.job, Submitted: w.jobID != "",
		Refused: w.refused, Waiting: w.waiting, Lost: w.lost, Unreachable: unreachable,
		Unclear: w.unclear, Runaway: w.runaway,
	}
	if !w.ended.IsZero() && (!w.over || w.asksWho()) {
		o.Job = w.alive // what the job wrote last may still be unread
	}
	if o.Job.ID == "" {
		o.Job.ID = w.jobID
	}
	if w.parked() {
		o.Journal = untilStop(w.events)
	} else if w.requeued() {
		o.Journal = nil // it is of a run that is over
	}
	o.Images, o.Held = w.meta.Images, w.held
	if o.Waiting == nil && w.jobID == "" && w.trouble != "" {
		o.Waiting = &notYet{"SlurmSubmitFailed", w.trouble}
	}
	return o
}

// podWithStatus is a copy of the API server's pod with knoc's status and the
// annotations that knoc owns.
func (w *work) podWithStatus() *v1.Pod {
	pod := w.pod.DeepCopy()
	if w.status.Phase != "" {
		w.status.DeepCopyInto(&pod.Status)
	}
	if w.jobID != "" {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[AnnotationJobID] = w.jobID
	}
	return pod
}

// shown says whether the API server's copy has all that knoc wants it to have.
func (w *work) shown() bool {
	return equality.Semantic.DeepEqual(w.status, w.pod.Status) && (w.jobID == "" || w.pod.Annotations[AnnotationJobID] == w.jobID)
}

// unsent says that the API server's copy lacks something that it would take.
func (w *work) unsent() bool {
	return w.status.Phase != "" && !terminalPhase(w.pod.Status.Phase) && !w.shown()
}

// newerJob compares Slurm job ids as numbers.
func newerJob(a, b string) bool {
	x, errX := strconv.Atoi(a)
	y, errY := strconv.Atoi(b)
	return errX == nil && errY == nil && x > y
}
