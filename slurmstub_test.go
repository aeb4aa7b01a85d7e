package knoc

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// InstallSlurm puts the fake Slurm and apptainer of testdata/stubs into Bin;
// slurm.lib there says how a test steers them.
func (c *testCluster) InstallSlurm() {
	c.t.Helper()
	files, err := filepath.Glob("testdata/stubs/*")
	if err != nil || len(files) == 0 {
		c.t.Fatalf("no stubs: %v", err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			c.t.Fatal(err)
		}
		c.Stub(filepath.Base(f), string(text))
	}
	if err := os.Symlink("apptainer", filepath.Join(c.Bin, "singularity")); err != nil {
		c.t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(c.Home, ".slurm", "job"), 0o700); err != nil {
		c.t.Fatal(err)
	}
}

// Slurm writes a file of ~/.slurm that steers the fake Slurm, such as "hold";
// see testdata/stubs/slurm.lib.
func (c *testCluster) Slurm(name, text string) {
	c.t.Helper()
	// By rename: a command that looks at this moment sees all of it or nothing.
	file := filepath.Join(c.Home, ".slurm", name)
	c.writeFile(file+".new", text)
	if err := os.Rename(file+".new", file); err != nil {
		c.t.Fatal(err)
	}
}

// NoSlurm removes such a file.
func (c *testCluster) NoSlurm(name string) {
	c.t.Helper()
	if err := os.Remove(filepath.Join(c.Home, ".slurm", name)); err != nil {
		c.t.Fatal(err)
	}
}

// SlurmCalls are the calls of one command so far, a line each.
func (c *testCluster) SlurmCalls(command string) []string {
	c.t.Helper()
	text, err := os.ReadFile(filepath.Join(c.Home, ".slurm", "calls"))
	if err != nil && !os.IsNotExist(err) {
		c.t.Fatal(err)
	}
	var calls []string
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, command+" ") || line == command+"\n" {
			calls = append(calls, strings.TrimSpace(line))
		}
	}
	return calls
}

// JobFile is what the fake Slurm holds of a job, such as "state"; "" for nothing.
func (c *testCluster) JobFile(id, name string) string {
	text, _ := os.ReadFile(filepath.Join(c.Home, ".slurm", "job", id, name))
	return strings.TrimSpace(string(text))
}

// WaitState waits until a job has one of the states.
func (c *testCluster) WaitState(id string, states ...string) {
	c.t.Helper()
	for end := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		got := c.JobFile(id, "state")
		for _, s := range states {
			if s == got {
				return
			}
		}
		if time.Now().After(end) {
			c.t.Fatalf("job %s is %q, want %q; its output:\n%s", id, got, states, c.Sh("cat \"$(cat ~/.slurm/job/"+id+"/output)\""))
		}
	}
}

// The fake Slurm must behave as the real one does where tests rely on it.
func TestFakeSlurm(t *testing.T) {
	t.Parallel()
	c := newTestCluster(t)
	c.InstallSlurm()
	query := func() string {
		return strings.TrimSpace(c.Sh("SLURM_TIME_FORMAT=%s squeue --noheader --states=all --user=hpcuser --format='%i|%T|%r|%P|%N|%j'"))
	}
	equal := func(got, want string) {
		t.Helper()
		if got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	c.writeFile(filepath.Join(c.Home, "s"), "#!/bin/sh\n#SBATCH --job-name=knoc-a\n#SBATCH '--comment=default/a b'\n#SBATCH --mem=100M\n"+
		"trap 'echo usr1' USR1; trap 'echo term; exit 7' TERM; env >env.$SLURM_JOB_ID; : >up\nwhile :; do sleep 0.05; done\n")
	c.Slurm("hold", "")
	equal(c.Sh("FOO=bar sbatch --parsable --no-requeue --export=NONE --output=$HOME/out s"), "1\n")
	equal(query(), "1|PENDING|Priority|debug||knoc-a")
	equal(c.JobFile("1", "comment"), "default/a b")
	equal(c.Sh("sbatch --parsable -J other s"), "2\n")
	c.Sh("scancel --state=PENDING 2")
	c.WaitState("2", "CANCELLED")
	c.NoSlurm("hold")
	c.WaitState("1", "RUNNING")
	c.Sh("while [ ! -e up ]; do sleep 0.01; done")
	equal(c.Sh("grep -c '^SLURM_JOB_ID=1$\\|^SLURMD_NODENAME=n1$\\|^SLURM_JOB_NAME=knoc-a$' env.1"), "3\n")
	equal(c.Sh("grep -c 'FOO\\|SLURM_RESTART_COUNT' env.1 || true"), "0\n")
	equal(strings.TrimSpace(c.Sh("srun --jobid=1 --overlap --quiet sh -c 'echo $SLURM_JOB_ID'")), "1")
	c.Sh("scancel --state=PENDING 1; scancel --batch --signal=USR1 1")
	c.Sh("while ! grep -q usr1 out; do sleep 0.01; done")
	equal(c.JobFile("1", "state"), "RUNNING")
	c.Sh("scontrol requeue 1")
	c.Sh("while ! grep -q SLURM_RESTART_COUNT=1 env.1; do sleep 0.01; done")
	c.WaitState("1", "RUNNING")
	c.Sh("scancel 1")
	c.WaitState("1", "CANCELLED")
	equal(c.Sh("grep -v Terminated out"), "usr1\nterm\n")

	// A script that ignores TERM is killed, with all it started.
	c.Slurm("killwait", "0.1")
	c.writeFile(filepath.Join(c.Home, "s"), "#!/bin/sh\ntrap '' TERM\n: >up3\nsetsid sleep 1000 & sleep 1000; sleep 1000")
	c.Sh("sbatch -J knoc-b s; while [ ! -e up3 ]; do sleep 0.01; done; scancel --name=knoc-b --user=me")
	c.WaitState("3", "CANCELLED")
	equal(c.Sh(". bin/slurm.lib; processes 3"), "")

	c.writeFile(filepath.Join(c.Home, "s"), "#!/bin/sh\nexit $1")
	c.Sh("sbatch -J knoc-c s 0; sbatch -J knoc-d s 3")
	c.WaitState("4", "COMPLETED")
	c.WaitState("5", "FAILED")
	equal(query(), "1|CANCELLED|None|debug|n1|knoc-a\n2|CANCELLED|Priority|debug||other\n3|CANCELLED|None|debug|n1|knoc-b\n4|COMPLETED|None|debug|n1|knoc-c\n5|FAILED|NonZeroExitCode|debug|n1|knoc-d")
	equal(c.Sh("sacct -X -P -n --name=knoc-d,knoc-c --format=JobIDRaw,State,ExitCode,NodeList,JobName"), "4|COMPLETED|0:0|n1|knoc-c\n5|FAILED|3:0|n1|knoc-d\n")
	equal(c.Sh("sacct -n -P -X -j 1 -o State | sed 's/ by [0-9]*/ by UID/'"), "CANCELLED by UID\n")
	equal(c.Sh("sinfo --noheader --Node --format='%N|%T|%c|%m|%G'"), "n1|idle|8|8000|gpu:2\n")
	equal(c.Sh("scontrol -o show job 5 | grep -o 'JobState=[A-Z]*'"), "JobState=FAILED\n")

	// Faults.
	c.Slurm("minjobage", "0")
	equal(query(), "")
	equal(c.Sh("scontrol show job 5 2>&1 || echo $?"), "slurm_load_jobs error: Invalid job id specified\n1\n")
	c.Slurm("sbatch.fail-but-accept", "")
	equal(c.Sh("sbatch --parsable s 0 2>&1 || echo $?"), "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n1\n")
	c.WaitState("6", "COMPLETED")
	c.Slurm("sbatch.error-once", "sbatch: error: no\n")
	equal(c.Sh("sbatch --parsable s 0 2>&1 || sbatch --parsable s 0"), "sbatch: error: no\n7\n")
	c.Slurm("squeue.error", "squeue: error: down\n")
	equal(c.Sh("squeue 2>&1 || echo $?"), "squeue: error: down\n1\n")
	c.Slurm("sacct.disabled", "")
	equal(c.Sh("sacct 2>&1 || true"), "Slurm accounting storage is disabled\n")
	if got := len(c.SlurmCalls("sbatch")); got != 8 {
		t.Errorf("%d calls of sbatch: %q", got, c.SlurmCalls("sbatch"))
	}

	equal(c.Sh(`APPTAINERENV_A="x  y" apptainer --quiet exec --containall --mount type=bind,source=/a,destination=/b --pwd / docker://busybox sh -c 'echo "$A $PWD $1"' sh z; apptainer exec i:// sh -c 'exit 3' || echo $?`),
		"x  y / z\n3\n")
	equal(c.Sh("apptainer run docker://missing:1 2>/dev/null || echo $?"), "255\n")
}
