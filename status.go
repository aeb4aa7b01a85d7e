package knoc

import "time"

// event is one line of a journal: a fact that pod.sh appended on the compute node.
type event struct {
	Time time.Time
	Word string   // claim, host, start, exit, backoff, stopping, ack, done
	Args []string // fixed words, container names, integers, addresses
}

// observed is all that is known of a pod's work; fold turns it into a status.
type observed struct {
	// Journal are the events of the newest restart count, in the order written.
	Journal []event
	// Job is Slurm's last word on the job. A zero State: Slurm was never heard of it.
	Job job
	// Submitted says that a job id is known.
	Submitted bool
	// Refused is set for a pod that can never run.
	Refused *refusal
	// Waiting is why nothing was submitted yet, shown as the containers' waiting reason.
	Waiting *notYet
	// Lost says that the job ended without a trace (design: absent from the
	// journal, two squeue, scontrol and sacct).
	Lost bool
	// Unreachable is the error text while the cluster cannot be asked: cannot
	// tell. It never changes a phase.
	Unreachable string
}
