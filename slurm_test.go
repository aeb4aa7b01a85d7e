package knoc

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

func recorded(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "slurm", name))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func at(sec int64) time.Time {
	if sec == 0 {
		return time.Time{}
	}
	return time.Unix(sec, 0)
}

func TestParseSqueue(t *testing.T) {
	got, err := parseSqueue(recorded(t, "squeue-26.05.txt"))
	if err != nil {
		t.Fatal(err)
	}
	want := []job{
		{ID: "6", Name: "knoc-cancelled", State: "CANCELLED", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072923)},
		{ID: "7", Name: "knoc-cancelled-pending", State: "CANCELLED", Reason: "JobHeldUser", Partition: "batch", Start: at(1796072923), End: at(1796072923)},
		{ID: "2", Name: "knoc-ok", State: "COMPLETED", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072922)},
		{ID: "3", Name: "knoc-fail", State: "FAILED", Reason: "NonZeroExitCode", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072922)},
		{ID: "4", Name: "knoc-killed", State: "FAILED", Reason: "RaisedSignal:9(Killed)", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072922)},
		{ID: "10", Name: "knoc-oom", State: "OUT_OF_MEMORY", Reason: "OutOfMemory", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072923)},
		{ID: "11_[2-3%1]", Name: "knoc-array", State: "PENDING", Reason: "JobArrayTaskLimit", Partition: "batch"},
		{ID: "16", Name: "knoc-suspend", State: "PENDING", Reason: "Priority", Partition: "batch"},
		{ID: "15", Name: "knoc-resources", State: "PENDING", Reason: "Resources", Partition: "batch"},
		{ID: "14", Name: "knoc-big", State: "PENDING", Reason: "PartitionConfig", Partition: "batch"},
		{ID: "5", Name: "knoc-held", State: "PENDING", Reason: "JobHeldUser", Partition: "batch"},
		{ID: "8", Name: "knoc-term", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796072922)},
		{ID: "9", Name: "knoc-timeout", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796072922)},
		{ID: "11_1", Name: "knoc-array", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796072922)},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	got, err = parseSqueue(recorded(t, "squeue-22.05.txt"))
	if err != nil {
		t.Fatal(err)
	}
	want = []job{
		{ID: "10", Name: "knoc-cancelled", State: "CANCELLED", Partition: "batch", NodeList: "n1", Start: at(1796073831), End: at(1796073835)},
		{ID: "11", Name: "knoc-cancelled-pending", State: "CANCELLED", Reason: "JobHeldUser", Partition: "batch", Start: at(1796073835), End: at(1796073835)},
		{ID: "6", Name: "knoc-ok", State: "COMPLETED", Partition: "batch", NodeList: "n1", Start: at(1796073831), End: at(1796073831)},
		{ID: "15_1", Name: "knoc-array", State: "COMPLETED", Partition: "batch", NodeList: "n2", Start: at(1796073831), End: at(1796073891)},
		{ID: "7", Name: "knoc-fail", State: "FAILED", Reason: "NonZeroExitCode", Partition: "batch", NodeList: "n1", Start: at(1796073831), End: at(1796073831)},
		{ID: "8", Name: "knoc-killed", State: "FAILED", Reason: "JobLaunchFailure", Partition: "batch", NodeList: "n1", Start: at(1796073831), End: at(1796073831)},
		{ID: "19", Name: "knoc-gpu", State: "FAILED", Reason: "BadConstraints", Partition: "batch", Start: at(1796073830), End: at(1796073830)},
		{ID: "12", Name: "knoc-oom", State: "OUT_OF_MEMORY", Reason: "OutOfMemory", Partition: "batch", NodeList: "n1", Start: at(1796073831), End: at(1796073832)},
		{ID: "15_3", Name: "knoc-array", State: "PENDING", Reason: "JobArrayTaskLimit", Partition: "batch"},
		{ID: "18", Name: "knoc-big", State: "PENDING", Reason: "BeginTime", Partition: "batch"},
		{ID: "13", Name: "knoc-requeued", State: "PENDING", Reason: "job requeued in held state", Partition: "batch"},
		{ID: "9", Name: "knoc-held", State: "PENDING", Reason: "JobHeldUser", Partition: "batch"},
		{ID: "15_2", Name: "knoc-array", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796073891)},
		{ID: "14", Name: "knoc-timeout", State: "TIMEOUT", Reason: "TimeLimit", Partition: "batch", NodeList: "n1", Start: at(1796073831), End: at(1796073902)},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
}

func TestParseSqueueLines(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []job
		err  string
	}{
		"nothing":           {text: ""},
		"reason with a bar": {text: "5|PENDING|a|b|p||N/A|N/A|knoc-u\n", want: []job{{ID: "5", Name: "knoc-u", State: "PENDING", Reason: "a|b", Partition: "p"}}},
		"federation":        {text: "5;east|RUNNING|None|p|n1|Unknown|N/A|knoc-u\n", want: []job{{ID: "5", Name: "knoc-u", State: "RUNNING", Partition: "p", NodeList: "n1"}}},
		"no newline, null":  {text: "5|COMPLETING|(null)|p|n[1-2]|7|8|knoc-u", want: []job{{ID: "5", Name: "knoc-u", State: "COMPLETING", Partition: "p", NodeList: "n[1-2]", Start: at(7)}}},
		"local time":        {text: "5|COMPLETED|None|p|n1|2026-11-30T21:00:00|Unknown|knoc-u", want: []job{{ID: "5", Name: "knoc-u", State: "COMPLETED", Partition: "p", NodeList: "n1"}}},
		"not UTF-8":         {text: "5|PENDING|\xff|p||N/A|N/A|knoc-u", want: []job{{ID: "5", Name: "knoc-u", State: "PENDING", Reason: "?", Partition: "p"}}},
		"noise":             {text: "Welcome!\n\n|\n"},
		"cut":               {text: "5|RUNNING|None|p", err: "lacks fields"},
		"another's name":    {text: "4|RUNNING|None|p|n1|7|8|knoc-t\n9|RUNNING|None|p|n1|7|8|odd\n12|name\n", want: []job{{ID: "4", Name: "knoc-t", State: "RUNNING", Partition: "p", NodeList: "n1", Start: at(7)}}},
	} {
		got, err := parseSqueue([]byte(c.text))
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Fatalf("%s: error %v, want %q", name, err, c.err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Fatalf("%s: %s", name, d)
		}
	}
}

func TestParseSacct(t *testing.T) {
	got, err := parseSacct(recorded(t, "sacct-26.05.txt"))
	if err != nil {
		t.Fatal(err)
	}
	want := []job{
		{ID: "2", Name: "knoc-ok", State: "COMPLETED", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072922)},
		{ID: "3", Name: "knoc-fail", State: "FAILED", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072922), ExitCode: 3},
		{ID: "4", Name: "knoc-killed", State: "FAILED", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072922), Signal: 9},
		{ID: "6", Name: "knoc-cancelled", State: "CANCELLED", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072923), By: "20077"},
		{ID: "8", Name: "knoc-term", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796072922)},
		{ID: "9", Name: "knoc-timeout", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796072922)},
		{ID: "10", Name: "knoc-oom", State: "OUT_OF_MEMORY", Partition: "batch", NodeList: "n1", Start: at(1796072922), End: at(1796072923), Signal: 125},
		{ID: "14", Name: "knoc-big", State: "PENDING", Partition: "batch"},
		{ID: "15", Name: "knoc-resources", State: "PENDING", Partition: "batch"},
		{ID: "16", Name: "knoc-suspend", State: "PENDING", Partition: "batch"},
		{ID: "17", Name: "knoc-array", State: "RUNNING", Partition: "batch", NodeList: "n1", Start: at(1796072922)},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
	got, err = parseSacct(recorded(t, "sacct-22.05.txt"))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 10 {
		t.Fatalf("%d jobs, want 10", len(got))
	}
	requeued := job{ID: "13", Name: "knoc-requeued", State: "REQUEUED", Partition: "batch", NodeList: "n1"}
	if d := cmp.Diff(requeued, got[5]); d != "" {
		t.Fatal(d)
	}
}

func TestParseSacctLines(t *testing.T) {
	for name, c := range map[string]struct {
		text string
		want []job
		err  string
	}{
		"nothing": {text: ""},
		"array task, federation, cut state": {
			text: "123_4;east|CANCELLED+|0:15|7|8|p|n1|knoc-u\n",
			want: []job{{ID: "123_4", Name: "knoc-u", State: "CANCELLED", Partition: "p", NodeList: "n1", Start: at(7), End: at(8), Signal: 15}},
		},
		"step":      {text: "12.batch|COMPLETED|0:0|7|8|||batch\n"},
		"exit code": {text: "12|COMPLETED|zero|7|8|p|n1|knoc-u\n", err: `exit code "zero" of job 12`},
		"cut":       {text: "12|COMPLETED|0:0|7\n", err: "lacks fields"},
	} {
		got, err := parseSacct([]byte(c.text))
		if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
			t.Fatalf("%s: error %v, want %q", name, err, c.err)
		}
		if d := cmp.Diff(c.want, got); d != "" {
			t.Fatalf("%s: %s", name, d)
		}
	}
	if _, err := parseSacct([]byte("Slurm accounting storage is disabled\n")); !errors.Is(err, errNoAccounting) {
		t.Fatalf("disabled accounting gave %v", err)
	}
}

func TestParseJobID(t *testing.T) {
	for text, want := range map[string]string{"123\n": "123", "123": "123", "123;east\n": "123"} {
		if got, err := parseJobID([]byte(text)); err != nil || got != want {
			t.Fatalf("%q: %q, %v; want %q", text, got, err, want)
		}
	}
	for _, text := range []string{"", "\n", "0\n", "-1", "Submitted batch job 123\n", "123 \n", "hello\n123\n", "123\n124\n", "123;a b\n", "123;\n", "12a"} {
		if got, err := parseJobID([]byte(text)); err == nil {
			t.Fatalf("%q was taken for job %q", text, got)
		}
	}
}

func TestParseSinfo(t *testing.T) {
	for _, name := range []string{"sinfo-22.05.txt", "sinfo-26.05.txt"} {
		got, err := parseSinfo(recorded(t, name))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(nodeResources{Nodes: 2, CPUs: 16, MemoryMB: 16000, GPUs: map[string]int64{"nvidia.com/gpu": 4}}, got); d != "" {
			t.Fatalf("%s: %s", name, d)
		}
	}
	for gres, want := range map[string]map[string]int64{
		"(null)":                       {},
		"":                             {},
		"gpu":                          {"nvidia.com/gpu": 1},
		"gpu:a100":                     {"nvidia.com/gpu": 1},
		"gpu:2,shard:8":                {"nvidia.com/gpu": 2},
		"gpu:a100:4(S:0-1)":            {"nvidia.com/gpu": 4},
		"gpu:a100:4(S:0,1),gpu:t4:2":   {"nvidia.com/gpu": 6},
		"fpga:1,gpu:mi250:8(IDX:0-7)":  {"amd.com/gpu": 8},
		"gpu:0":                        {},
		"gpu:amd_mi300x:8,gpu:h100:-1": {"amd.com/gpu": 8},
		"gpumem:80":                    {},
	} {
		got, err := parseSinfo([]byte("n1|idle|8|1000|" + gres + "\n"))
		if err != nil || !maps.Equal(got.GPUs, want) {
			t.Fatalf("%q: %v, %v; want %v", gres, got.GPUs, err, want)
		}
	}
	for _, text := range []string{"n1|idle|8|1000", "n1|idle|x|1000|gpu:1", "n1|idle|8|x|gpu:1", "slurm_load_partitions: error"} {
		if got, err := parseSinfo([]byte(text)); err == nil {
			t.Fatalf("%q gave %v", text, got)
		}
	}
	if got, err := parseSinfo([]byte("n1|idle|8+|1000+|(null)\nn1|idle|8+|1000+|(null)\n")); err != nil || got.CPUs != 8 || got.MemoryMB != 1000 {
		t.Fatalf("least values: %v, %v", got, err)
	}
}

func TestUsable(t *testing.T) {
	for _, s := range []string{"idle", "mixed", "allocated", "allocated+", "completing", "planned", "idle~", "idle#", "mixed-", "mixed$", "reserved", "idle@", "idle^", "powering_up", "powered_down"} {
		if !usable(s) {
			t.Fatalf("%s leaves the capacity", s)
		}
	}
	for _, s := range []string{"down", "down*", "DOWN~", "drained", "draining", "drained*", "drng", "idle*", "mixed*", "unknown*", "unk*", "unknown", "fail", "failing", "future", "inval", "maint", "maint*", "", "*"} {
		if usable(s) {
			t.Fatalf("%s counts as capacity", s)
		}
	}
}

func TestSlurmStates(t *testing.T) {
	want := map[string]struct {
		class      stateClass
		reason     string
		disruption bool
	}{
		"PENDING": {class: queued}, "CONFIGURING": {class: queued}, "REQUEUED": {class: queued}, "REQUEUE_FED": {class: queued},
		"REQUEUE_HOLD": {class: queued}, "RESV_DEL_HOLD": {class: queued}, "SPECIAL_EXIT": {class: queued},
		"RUNNING": {class: running}, "SUSPENDED": {class: running}, "STOPPED": {class: running}, "COMPLETING": {class: running},
		"STAGE_OUT": {class: running}, "SIGNALING": {class: running}, "RESIZING": {class: running},
		"COMPLETED":     {ended, "JournalIncomplete", false},
		"FAILED":        {ended, "SlurmJobFailed", false},
		"CANCELLED":     {ended, "SlurmJobCancelled", false},
		"TIMEOUT":       {ended, "SlurmTimeLimit", false},
		"DEADLINE":      {ended, "SlurmTimeLimit", false},
		"OUT_OF_MEMORY": {ended, "OOMKilled", false},
		"NODE_FAIL":     {ended, "SlurmNodeFail", true},
		"BOOT_FAIL":     {ended, "SlurmBootFail", true},
		"PREEMPTED":     {ended, "SlurmPreempted", true},
		"REVOKED":       {ended, "SlurmRevoked", true},
	}
	for state, w := range want {
		row := slurmStates[state]
		if row.class != w.class || row.reason != w.reason || row.disruption != w.disruption {
			t.Errorf("%s: %+v, want %+v", state, row, w)
		}
		if (row.class == ended) != (row.text != "") {
			t.Errorf("%s: text %q", state, row.text)
		}
	}
	if d := cmp.Diff(slices.Sorted(maps.Keys(want)), slices.Sorted(maps.Keys(slurmStates))); d != "" {
		t.Error(d)
	}
	for _, s := range []string{"", "LAUNCH_FAILED", "running"} {
		if c := (job{State: s}).class(); c != cannotTell {
			t.Errorf("state %q is of class %v, want cannot tell", s, c)
		}
	}
}

func TestEnding(t *testing.T) {
	for _, c := range []struct {
		job  job
		want string
	}{
		{job{ID: "7", State: "CANCELLED", By: "1000"}, "job 7 was cancelled by uid 1000"},
		{job{ID: "7", State: "FAILED", ExitCode: 2, NodeList: "n1", Reason: "NonZeroExitCode"}, "job 7 failed before its containers ended (exit code 2) on n1: NonZeroExitCode"},
		{job{ID: "7", State: "FAILED", Signal: 9}, "job 7 failed before its containers ended (signal 9)"},
		{job{State: "NODE_FAIL", NodeList: "n1"}, "the job lost its compute node on n1"},
	} {
		if _, got := c.job.ending(); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

func FuzzParseSqueue(f *testing.F) {
	seed, err := os.ReadFile(filepath.Join("testdata", "slurm", "squeue-26.05.txt"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte("5;east|RUNNING|a|b|p|n1|Unknown|-1|knoc-u"))
	f.Fuzz(func(t *testing.T, data []byte) {
		jobs, err := parseSqueue(data)
		if err != nil && jobs != nil {
			t.Fatalf("jobs beside the error %v", err)
		}
		for _, j := range jobs {
			if !strings.HasPrefix(j.Name, jobPrefix) || j.ID == "" || strings.ContainsAny(j.ID, "|;\n") {
				t.Fatalf("%+v of %q", j, data)
			}
			if j.class() != ended && !j.End.IsZero() {
				t.Fatalf("a job that has not ended has an end: %+v", j)
			}
		}
	})
}

// The table of states, a row each: what becomes of a pod that waits, of one whose
// container runs, and of one whose journal has its end with exit code 0.
func TestSlurmStatesOfPods(t *testing.T) {
	const (
		waits  = "Pending; a SlurmPending"
		runs   = "Running; a running ready"
		ends   = "Succeeded; a Completed 0"
		begins = "Pending; a ContainerCreating"
	)
	failed := func(reason string) string { return "Failed " + reason + "; a " + reason }
	rows := map[string]struct {
		waiting, running, done string
		disruption             bool
	}{
		"PENDING":       {waits, runs, ends, false},
		"CONFIGURING":   {waits, runs, ends, false},
		"REQUEUED":      {waits, runs, ends, false},
		"REQUEUE_FED":   {waits, runs, ends, false},
		"REQUEUE_HOLD":  {waits, runs, ends, false},
		"RESV_DEL_HOLD": {waits, runs, ends, false},
		"SPECIAL_EXIT":  {waits, runs, ends, false},
		"RUNNING":       {begins, runs, ends, false},
		"COMPLETING":    {begins, runs, ends, false},
		"STAGE_OUT":     {begins, runs, ends, false},
		"SIGNALING":     {begins, runs, ends, false},
		"RESIZING":      {begins, runs, ends, false},
		"SUSPENDED":     {"Pending SlurmJobSuspended; a ContainerCreating", "Running SlurmJobSuspended; a running unready", ends, false},
		"STOPPED":       {"Pending SlurmJobSuspended; a ContainerCreating", "Running SlurmJobSuspended; a running unready", ends, false},
		"COMPLETED":     {failed("JournalIncomplete"), failed("JournalIncomplete") + " 137", ends, false},
		"FAILED":        {failed("SlurmJobFailed"), failed("SlurmJobFailed") + " 137", ends, false},
		"CANCELLED":     {failed("SlurmJobCancelled"), failed("SlurmJobCancelled") + " 137", ends, false},
		"TIMEOUT":       {failed("SlurmTimeLimit"), failed("SlurmTimeLimit") + " 137", ends, false},
		"DEADLINE":      {failed("SlurmTimeLimit"), failed("SlurmTimeLimit") + " 137", ends, false},
		"OUT_OF_MEMORY": {failed("OOMKilled"), failed("OOMKilled") + " 137", "Failed OOMKilled; a OOMKilled 137", false},
		"NODE_FAIL":     {failed("SlurmNodeFail"), failed("SlurmNodeFail") + " 137", ends, true},
		"BOOT_FAIL":     {failed("SlurmBootFail"), failed("SlurmBootFail") + " 137", ends, true},
		"PREEMPTED":     {failed("SlurmPreempted"), failed("SlurmPreempted") + " 137", ends, true},
		"REVOKED":       {failed("SlurmRevoked"), failed("SlurmRevoked") + " 137", ends, true},
		"A_NEW_WORD":    {waits, runs, ends, false}, // cannot tell
	}
	for state := range slurmStates {
		if _, ok := rows[state]; !ok {
			t.Errorf("no row for %s", state)
		}
	}
	for state, want := range rows {
		j := job{ID: "7", State: state, End: at(300)}
		for text, want := range map[string]string{"": want.waiting, "claim 7; start a 0": want.running, "claim 7; start a 0; exit a 0 0; done 0": want.done} {
			s := fold(foldPod(v1.RestartPolicyNever, "a"), observed{Submitted: true, Job: j, Journal: journal(text)})
			if got := brief(s); got != want {
				t.Errorf("%s, %q: %s, want %s", state, text, got, want)
			}
		}
		s := fold(foldPod(v1.RestartPolicyNever, "a"), observed{Submitted: true, Job: j, Journal: journal("claim 7; start a 0")})
		if got := slices.ContainsFunc(s.Conditions, func(c v1.PodCondition) bool { return c.Type == v1.DisruptionTarget }); got != want.disruption {
			t.Errorf("%s: DisruptionTarget %v", state, got)
		}
		if j.suspended() {
			continue
		}
		// Where the cluster cannot be asked nothing changes.
		pod := foldPod(v1.RestartPolicyNever, "a")
		pod.Status = fold(pod, observed{Submitted: true, Job: job{ID: "7", State: "RUNNING"}, Journal: journal("claim 7; start a 0")})
		if d := cmp.Diff(pod.Status, fold(pod, observed{Submitted: true, Job: j, Journal: journal("claim 7; start a 0"), Unreachable: "timeout"})); d != "" {
			t.Errorf("%s, unreachable: %s", state, d)
		}
	}
	named := fold(foldPod(v1.RestartPolicyNever, "a"), observed{Submitted: true, Job: job{ID: "7", State: "CANCELLED", By: "1000"}})
	if named.Message != "job 7 was cancelled by uid 1000" {
		t.Errorf("message %q", named.Message)
	}
	lost := fold(foldPod(v1.RestartPolicyNever, "a"), observed{Submitted: true, Lost: true, Job: job{ID: "7"}, Journal: journal("claim 7; start a 0; exit a 0 0")})
	if got := brief(lost); got != "Failed JobLost; a Completed 0" {
		t.Errorf("lost: %s", got)
	}
}
