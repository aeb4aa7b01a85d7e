package knoc

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
