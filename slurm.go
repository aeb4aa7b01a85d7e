package knoc

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The columns that the query script asks for. The script exports
// SLURM_TIME_FORMAT=%s, so that times come as Unix seconds: squeue and sacct
// print local time without a zone otherwise (squeue(1), sacct(1)). A job's name
// comes last, because the same user's other jobs may have any bytes in theirs.
const (
	squeueFormat = "%i|%T|%r|%P|%N|%S|%e|%j"
	sacctFormat  = "JobIDRaw,State,ExitCode,Start,End,Partition,NodeList,JobName" // with -X -P -n
	sinfoFormat  = "%N|%T|%c|%m|%G"                                               // with --Node
)

// jobPrefix and the pod's UID are a job's name.
const jobPrefix = "knoc-"

// errNoAccounting is sacct's answer at a site without slurmdbd. It is an
// answer: sacct has no memory that could know more, whereas any other error of
// sacct leaves open what became of a job.
var errNoAccounting = errors.New("slurm accounting storage is disabled")

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

// parseSqueue reads lines of squeueFormat (--noheader --states=all). Jobs that
// are not knoc's are left out. A line that begins as a record and is none is part
// of another job's name, which may have any bytes; with no record at all it is an
// error, since every job that is missed here seems to be gone.
func parseSqueue(data []byte) ([]job, error) {
	var jobs []job
	var odd string
	records := 0
	for line := range textLines(data) {
		f := strings.Split(line, "|")
		n := len(f)
		name := f[n-1]
		if n >= 8 && jobID.MatchString(f[0]) {
			records++
		}
		if !jobID.MatchString(f[0]) || n >= 8 && !strings.HasPrefix(name, jobPrefix) {
			continue // part of another job's name, or another job
		}
		if n < 8 {
			odd = line
			continue
		}
		// A reason is mostly a word, but plugins put free text there.
		j := job{ID: bareID(f[0]), Name: name, Reason: known(strings.Join(f[2:n-5], "|")), Partition: f[n-5], NodeList: known(f[n-4])}
		j.setState(f[1])
		j.setTimes(f[n-3], f[n-2])
		jobs = append(jobs, j)
	}
	if odd != "" && records == 0 {
		return nil, fmt.Errorf("squeue printed %q, which lacks fields of %q", odd, squeueFormat)
	}
	return jobs, nil
}

// parseSacct reads lines of sacctFormat (-X -P -n). Its stderr may be handed
// over too: the answer of a site without accounting is errNoAccounting.
func parseSacct(data []byte) ([]job, error) {
	if strings.Contains(strings.ToLower(string(data)), errNoAccounting.Error()) {
		return nil, errNoAccounting
	}
	var jobs []job
	for line := range textLines(data) {
		f := strings.SplitN(line, "|", 8)
		if !jobID.MatchString(f[0]) || len(f) == 8 && !strings.HasPrefix(f[7], jobPrefix) {
			continue // a step such as 12.batch, part of another job's name, or another job
		}
		if len(f) < 8 {
			return nil, fmt.Errorf("sacct printed %q, which lacks fields of %q", line, sacctFormat)
		}
		j := job{ID: bareID(f[0]), Name: f[7], Partition: f[5], NodeList: known(f[6])}
		j.setState(f[1])
		j.setTimes(f[3], f[4])
		code, signal, ok := strings.Cut(f[2], ":")
		var errs [2]error
		j.ExitCode, errs[0] = strconv.Atoi(code)
		j.Signal, errs[1] = strconv.Atoi(signal)
		if !ok || errs[0] != nil || errs[1] != nil {
			return nil, fmt.Errorf("sacct printed exit code %q of job %s; want <code>:<signal>", f[2], f[0])
		}
		jobs = append(jobs, j)
	}
	return jobs, nil
}

// jobID is a job's number, a task of an array (12_3, 12_[1-4]) or a component
// of a heterogeneous job (12+1), perhaps with the cluster's name after it.
var jobID = regexp.MustCompile(`^[1-9][0-9]*([_+][^;|.]*)?(;[^;|]+)?$`)

// parsable is the whole of what sbatch --parsable prints: "12" or "12;cluster".
var parsable = regexp.MustCompile(`^([1-9][0-9]*)(;[^;\s]+)?\n?$`)

// parseJobID reads the answer of sbatch --parsable. Anything around the id is
// an error: a number found in other text may be anything.
func parseJobID(data []byte) (string, error) {
	m := parsable.FindSubmatch(data)
	if m == nil {
		return "", fmt.Errorf("sbatch --parsable printed %q, which is no job id", data)
	}
	return string(m[1]), nil
}

func bareID(s string) string {
	id, _, _ := strings.Cut(s, ";")
	return id
}

// textLines are the lines that are not empty, in valid UTF-8, as the API
// server takes no other text.
func textLines(data []byte) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for line := range strings.Lines(strings.ToValidUTF8(string(data), "?")) {
			if line = strings.TrimRight(line, "\r\n"); line != "" && !yield(line) {
				return
			}
		}
	}
}

// known drops Slurm's words for no value.
func known(s string) string {
	switch s {
	case "None", "N/A", "(null)", "Unknown", "None assigned", "NONE":
		return ""
	}
	return s
}

// setState takes "CANCELLED by 1000" and "CANCELLED+" (cut by sacct) apart.
func (j *job) setState(s string) {
	s, by, _ := strings.Cut(s, " by ")
	j.State, j.By = strings.TrimRight(strings.ToUpper(s), "+ "), by
}

// setTimes takes times in Unix seconds. What Slurm prints of a job that waits
// or runs are guesses: an expected start, an end at the time limit.
func (j *job) setTimes(start, end string) {
	class := j.class()
	if class != queued {
		j.Start = unixTime(start)
	}
	if class == ended {
		j.End = unixTime(end)
	}
}

// unixTime is zero for "N/A", "Unknown", "None" and anything else without a time.
func unixTime(s string) time.Time {
	if sec, err := strconv.ParseInt(s, 10, 64); err == nil && sec > 0 {
		return time.Unix(sec, 0)
	}
	return time.Time{}
}

// stateClass is what a job's state says of the pod's work.
type stateClass int

const (
	cannotTell stateClass = iota // never changes a phase
	queued
	running
	ended
)

// slurmState is one row of the table of states.
type slurmState struct {
	class stateClass
	// Reason and text describe a pod whose job ended so while its journal has
	// no end. The text goes on after "job 123 ".
	reason, text string
	// disruption: not the pod's doing; a Job's podFailurePolicy may ignore it.
	disruption bool
}

// slurmStates are the states of squeue(1), JOB STATE CODES. A word that is not
// here cannot be told.
var slurmStates = map[string]slurmState{
	"PENDING":       {class: queued},
	"CONFIGURING":   {class: queued}, // has nodes, which may still be booting
	"REQUEUED":      {class: queued},
	"REQUEUE_FED":   {class: queued},
	"REQUEUE_HOLD":  {class: queued},
	"RESV_DEL_HOLD": {class: queued},
	"SPECIAL_EXIT":  {class: queued}, // requeued and held

	"RUNNING":    {class: running},
	"SUSPENDED":  {class: running},
	"STOPPED":    {class: running},
	"COMPLETING": {class: running}, // some processes may still be there
	"STAGE_OUT":  {class: running},
	"SIGNALING":  {class: running},
	"RESIZING":   {class: running},

	"COMPLETED":     {ended, "JournalIncomplete", "completed, but its journal on the cluster has no end: the containers' exit codes are not known", false},
	"FAILED":        {ended, "SlurmJobFailed", "failed before its containers ended", false},
	"CANCELLED":     {ended, "SlurmJobCancelled", "was cancelled", false},
	"TIMEOUT":       {ended, "SlurmTimeLimit", "reached its time limit", false},
	"DEADLINE":      {ended, "SlurmTimeLimit", "was removed at its --deadline", false},
	"OUT_OF_MEMORY": {ended, "OOMKilled", "used more memory than it was given", false},
	"NODE_FAIL":     {ended, "SlurmNodeFail", "lost its compute node", true},
	"BOOT_FAIL":     {ended, "SlurmBootFail", "got a compute node that did not start", true},
	"PREEMPTED":     {ended, "SlurmPreempted", "was preempted", true},
	"REVOKED":       {ended, "SlurmRevoked", "was revoked, as another cluster of the federation runs it", true},
}

func (j job) class() stateClass { return slurmStates[j.State].class }

// suspended says that the job keeps its place and its processes are held.
func (j job) suspended() bool { return j.State == "SUSPENDED" || j.State == "STOPPED" }

// ending is the pod's reason and message for a job that ended without an end in
// its journal.
func (j job) ending() (reason, message string) {
	s := slurmStates[j.State]
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", j, s.text)
	if j.By != "" {
		fmt.Fprintf(&b, " by uid %s", j.By)
	}
	if j.State == "FAILED" && j.Signal != 0 {
		fmt.Fprintf(&b, " (signal %d)", j.Signal)
	} else if j.State == "FAILED" && j.ExitCode != 0 {
		fmt.Fprintf(&b, " (exit code %d)", j.ExitCode)
	}
	if j.NodeList != "" {
		fmt.Fprintf(&b, " on %s", j.NodeList)
	}
	if j.Reason != "" && j.State != "CANCELLED" { // there it is of its time in the queue
		fmt.Fprintf(&b, ": %s", j.Reason)
	}
	return s.reason, b.String()
}

// waiting tells of a job in the queue.
func (j job) waiting() string {
	text := fmt.Sprintf("%s is %s", j, strings.ToLower(strings.ReplaceAll(j.State, "_", " ")))
	if j.Partition != "" {
		text += " in partition " + j.Partition
	}
	if j.Reason != "" {
		text += ": " + j.Reason
	}
	return text
}

// String names the job in messages.
func (j job) String() string {
	if j.ID == "" {
		return "the job"
	}
	return "job " + j.ID
}

// nodeResources is what a partition's usable nodes have together.
type nodeResources struct {
	Nodes    int
	CPUs     int64
	MemoryMB int64
	GPUs     map[string]int64 // by resource name, such as nvidia.com/gpu
}

// parseSinfo adds up lines of sinfoFormat (--noheader --Node). A node is listed
// once for each of its partitions, and counted once.
func parseSinfo(data []byte) (nodeResources, error) {
	total := nodeResources{GPUs: map[string]int64{}}
	seen := map[string]bool{}
	for line := range textLines(data) {
		f := strings.Split(line, "|")
		if len(f) != 5 {
			return nodeResources{}, fmt.Errorf("sinfo printed %q; want the fields of %q", line, sinfoFormat)
		}
		if seen[f[0]] || !usable(f[1]) {
			continue
		}
		seen[f[0]] = true
		// The least of several nodes is printed as "16+".
		cpus, err := strconv.ParseInt(strings.TrimSuffix(f[2], "+"), 10, 64)
		if err != nil {
			return nodeResources{}, fmt.Errorf("sinfo printed %q CPUs of node %s; want a number", f[2], f[0])
		}
		memory, err := strconv.ParseInt(strings.TrimSuffix(f[3], "+"), 10, 64)
		if err != nil {
			return nodeResources{}, fmt.Errorf("sinfo printed %q MB of memory of node %s; want a number", f[3], f[0])
		}
		total.Nodes++
		total.CPUs += cpus
		total.MemoryMB += memory
		addGPUs(total.GPUs, f[4])
	}
	return total, nil
}

// usable says whether a node in this state gets new work, now or once it is
// free, powered up or rebooted (sinfo(1), NODE STATE CODES).
func usable(state string) bool {
	word := strings.TrimRight(state, "*~#!%$@^-+")
	if strings.Contains(state[len(word):], "*") {
		return false // does not respond
	}
	word, _, _ = strings.Cut(strings.ToLower(word), "+")
	return !slices.Contains([]string{
		"", "blocked", "down", "drain", "drained", "draining", "drng", "error", "fail", "failing", "future",
		"inval", "maint", "no_respond", "npc", "perfctrs", "unk", "unknown",
	}, word)
}

var (
	gresNote = regexp.MustCompile(`\([^)]*\)`) // (S:0-1), (IDX:0,2)
	// amdGPU finds GRES types such as mi250 or amd_mi300x. A GRES without a type
	// says nothing of its maker and counts as the usual one.
	amdGPU = regexp.MustCompile(`(?i)^(amd|mi[0-9]|gfx|radeon|instinct)`)
)

const (
	nvidiaGPU = "nvidia.com/gpu"
	amdGPUs   = "amd.com/gpu"
)

// addGPUs counts the GPUs of a GRES text such as gpu:a100:4(S:0-1),shard:8.
func addGPUs(count map[string]int64, gres string) {
	for item := range strings.SplitSeq(gresNote.ReplaceAllString(gres, ""), ",") {
		f := strings.Split(item, ":")
		if f[0] != "gpu" {
			continue
		}
		n, err := strconv.ParseInt(f[len(f)-1], 10, 64)
		if err != nil {
			n = 1 // "gpu" and "gpu:a100" are one
		}
		name := nvidiaGPU
		if len(f) > 1 && amdGPU.MatchString(f[1]) {
			name = amdGPUs
		}
		if n > 0 {
			count[name] += n
		}
	}
}
