package knoc

import "time"

// job is what Slurm's own text says of one job.
type job struct {
	ID        string // as Slurm prints it, without a cluster's name
	Name      string // knoc-<pod uid>
	State     string // the long state name without suffixes: "RUNNING"; "" was never seen
	Reason    string // Slurm's reason word, "" for None
	Partition string
	NodeList  string
	Start     time.Time // zero: unknown
	End       time.Time // zero: unknown or still running
	ExitCode  int       // of the batch script, from sacct only
	Signal    int       // from sacct only
	By        string    // uid of who cancelled it, from "CANCELLED by 1000" of sacct
}
