// Command bench measures knoc on the testbed beside the same done by hand in the
// same run, and prints one table. By hand means: ssh over a connection that is
// held open (ControlMaster), sbatch, and apptainer with the same image.
//
// All times are taken from one clock: containers touch files on the shared home,
// whose times are read there; what the API shows is when a watch tells it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	samples  = 5                // per row; the table shows medians
	statuses = 15               // samples of a 95th percentile
	patience = 5 * time.Minute  // for anything at all
	pause    = time.Second      // between samples
	apart    = 5 * time.Second  // slurmctld holds back a job that comes within 3 s of another (batch_sched_delay)
	window   = 60 * time.Second // in which commands and CPU are counted
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	b, err := newBench(ctx)
	if err == nil {
		err = b.run()
		b.close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type bench struct {
	ctx       context.Context
	client    kubernetes.Interface
	namespace string
	dir       string // of ssh's socket
	rows      [][]string

	mu   sync.Mutex
	seen map[string]map[string]time.Time // pod → what → when the watch told it
	more *sync.Cond
}

func newBench(ctx context.Context) (*bench, error) {
	for _, name := range []string{"KUBECONFIG", "KNOC_LOGIN", "KNOC_CLOUD_EXEC", "KNOC_SSH", "KNOC_IMAGE_BUSYBOX"} {
		if os.Getenv(name) == "" {
			return nil, fmt.Errorf("%s is not set: run it as make bench does, after . testbed/run/env", name)
		}
	}
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return nil, err
	}
	config.QPS, config.Burst = 500, 1000
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	b := &bench{ctx: ctx, client: client, namespace: fmt.Sprintf("bench-%d", os.Getpid()), dir: dir, seen: map[string]map[string]time.Time{}}
	b.more = sync.NewCond(&b.mu)
	_, err = client.CoreV1().Namespaces().Create(ctx, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: b.namespace}}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	if err := b.poll("the namespace's service account", func() (bool, error) {
		_, err := client.CoreV1().ServiceAccounts(b.namespace).Get(ctx, "default", metav1.GetOptions{})
		return err == nil, nil
	}); err != nil {
		return nil, err
	}
	w, err := client.CoreV1().Pods(b.namespace).Watch(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	go b.follow(w)
	return b, nil
}

func (b *bench) close() {
	zero := int64(0)
	_ = b.client.CoreV1().Namespaces().Delete(context.Background(), b.namespace, metav1.DeleteOptions{GracePeriodSeconds: &zero})
	_, _ = b.login("rm -rf bench-hand; rm -f \"$KNOC_SHIM_DIR\"/*")
	_ = exec.Command("ssh", "-o", "ControlPath="+b.dir+"/s", "-O", "exit", "x").Run()
	os.RemoveAll(b.dir)
}

// follow notes when the API shows what.
func (b *bench) follow(w watch.Interface) {
	for e := range w.ResultChan() {
		pod, ok := e.Object.(*v1.Pod)
		if !ok {
			continue
		}
		now := time.Now()
		b.mu.Lock()
		at := b.seen[pod.Name]
		if at == nil {
			at = map[string]time.Time{}
			b.seen[pod.Name] = at
		}
		what := string(pod.Status.Phase)
		if e.Type == watch.Deleted {
			what = "deleted"
		}
		if at[what].IsZero() {
			at[what] = now
		}
		b.mu.Unlock()
		b.more.Broadcast()
	}
}

// await waits until the watch has told it of the pod.
func (b *bench) await(pod, what string) (time.Time, error) {
	timer := time.AfterFunc(patience, b.more.Broadcast)
	defer timer.Stop()
	end := time.Now().Add(patience)
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.seen[pod][what].IsZero() {
		if time.Now().After(end) || b.ctx.Err() != nil {
			return time.Time{}, fmt.Errorf("pod %s was not %s within %v; the API has shown %v", pod, what, patience, b.seen[pod])
		}
		b.more.Wait()
	}
	return b.seen[pod][what], nil
}

func (b *bench) poll(what string, done func() (bool, error)) error {
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		ok, err := done()
		if err != nil || ok {
			return err
		}
		if time.Now().After(end) || b.ctx.Err() != nil {
			return fmt.Errorf("%s: not within %v", what, patience)
		}
	}
}

// login runs a line on the login node, past SSH.
func (b *bench) login(line string) (string, error) {
	return output(exec.CommandContext(b.ctx, os.Getenv("KNOC_LOGIN"), line))
}

// hand runs a line on the login node as a person would: over ssh, with a
// connection that is held open.
func (b *bench) hand(line string) (string, error) {
	user, port, _ := strings.Cut(os.Getenv("KNOC_SSH"), ":")
	return output(exec.CommandContext(b.ctx, os.Getenv("KNOC_CLOUD_EXEC"), "ssh", "-p", port, "-i", os.Getenv("KNOC_SSH_KEY"),
		"-o", "UserKnownHostsFile="+os.Getenv("KNOC_SSH_KNOWN_HOSTS"), "-o", "BatchMode=yes",
		"-o", "ControlMaster=auto", "-o", "ControlPersist=600", "-o", "ControlPath="+b.dir+"/s", user, line))
}

func output(cmd *exec.Cmd) (string, error) {
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%q: %w: %s", cmd.Args, err, strings.TrimSpace(stderr.String()))
	}
	return string(out), nil
}

// touched waits for a file below the HPC user's home and returns its time.
func (b *bench) touched(pattern string) (at time.Time, err error) {
	err = b.poll(pattern, func() (bool, error) {
		out, err := b.login("stat -c %.9Y " + pattern + " 2>/dev/null || true")
		if err != nil || strings.TrimSpace(out) == "" {
			return false, err
		}
		sec, nsec, _ := strings.Cut(strings.Fields(out)[0], ".")
		s, err1 := strconv.ParseInt(sec, 10, 64)
		n, err2 := strconv.ParseInt(nsec, 10, 64)
		if err1 != nil || err2 != nil {
			return false, fmt.Errorf("stat printed %q", out)
		}
		at = time.Unix(s, n)
		return true, nil
	})
	return at, err
}

// create makes a pod that runs a shell line; /d is an emptyDir.
func (b *bench) create(name, line string) (created time.Time, uid string, err error) {
	zero := int64(5)
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: v1.PodSpec{
			RestartPolicy: v1.RestartPolicyNever, TerminationGracePeriodSeconds: &zero,
			NodeSelector: map[string]string{"kubernetes.io/hostname": "knoc"},
			Tolerations:  []v1.Toleration{{Operator: v1.TolerationOpExists}},
			Volumes:      []v1.Volume{{Name: "d", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}}},
			Containers: []v1.Container{{
				Name: "main", Image: os.Getenv("KNOC_IMAGE_BUSYBOX"), Command: []string{"sh", "-c", line},
				VolumeMounts: []v1.VolumeMount{{Name: "d", MountPath: "/d"}},
			}},
		},
	}
	created = time.Now()
	pod, err = b.client.CoreV1().Pods(b.namespace).Create(b.ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return created, "", err
	}
	return created, string(pod.UID), nil
}

func (b *bench) delete(name string) error {
	return b.client.CoreV1().Pods(b.namespace).Delete(b.ctx, name, metav1.DeleteOptions{})
}

func inPod(uid, path string) string { return ".knoc/*/" + uid + "/" + path }

// script is a job by hand that runs the same line in the same image.
func script(dir, line string) string {
	return fmt.Sprintf("#!/bin/sh\nexec apptainer -q exec --no-https --containall --bind %s:/d docker://%s sh -c '%s'\n", dir, os.Getenv("KNOC_IMAGE_BUSYBOX"), line)
}

func (b *bench) sbatchByHand(name, line string) (submitted time.Time, err error) {
	dir := "$HOME/bench-hand/" + name
	submitted = time.Now()
	_, err = b.hand(fmt.Sprintf("mkdir -p %s && cd %s && sbatch --parsable -J hand-%s -o out <<'END'\n%sEND\n", dir, dir, name, script(strings.Replace(dir, "$HOME", "/home/hpcuser", 1), line)))
	return submitted, err
}

func (b *bench) run() error {
	// Both sides start warm: the image is in Apptainer's cache, ssh is connected.
	if _, err := b.sbatchByHand("warm", "touch /d/first"); err != nil {
		return err
	}
	if _, err := b.touched("bench-hand/warm/first"); err != nil {
		return err
	}
	for _, step := range []func() error{b.start, func() error { return b.status("1 pod alive", 0) }, func() error { return b.status("40 pods alive", 40) }, b.burst, b.end, b.load} {
		if err := step(); err != nil {
			b.print()
			return err
		}
	}
	b.print()
	return nil
}

// start: apply → the container's first line.
func (b *bench) start() error {
	var knoc, hand []time.Duration
	for i := range samples {
		name := fmt.Sprintf("start-%d", i)
		submitted, err := b.sbatchByHand(name, "touch /d/first")
		if err != nil {
			return err
		}
		at, err := b.touched("bench-hand/" + name + "/first")
		if err != nil {
			return err
		}
		hand = append(hand, at.Sub(submitted))
		time.Sleep(apart)

		created, uid, err := b.create(name, "touch /d/first; sleep 1")
		if err != nil {
			return err
		}
		if at, err = b.touched(inPod(uid, "vol/d/first")); err != nil {
			return err
		}
		knoc = append(knoc, at.Sub(created))
		if _, err := b.await(name, "Succeeded"); err != nil {
			return err
		}
		time.Sleep(apart)
	}
	b.row("apply → container's first line", median(knoc), median(hand), 1.3, "at most 1.3 × by hand")
	return nil
}

// status: what the API shows, and when, with others alive beside.
func (b *bench) status(label string, others int) error {
	prefix := fmt.Sprintf("s%d", others)
	for i := range others {
		if _, _, err := b.create(fmt.Sprintf("%s-alive-%d", prefix, i), "touch /d/first; sleep 900"); err != nil {
			return err
		}
	}
	// Two nodes of 8 CPUs hold 16 pods of one CPU: the others are queued, which
	// is alive too; what is measured must find room.
	for i := range min(others, 14) {
		if _, err := b.await(fmt.Sprintf("%s-alive-%d", prefix, i), "Running"); err != nil {
			return err
		}
	}
	var running, final []time.Duration
	for i := range statuses {
		name := fmt.Sprintf("%s-%d", prefix, i)
		_, uid, err := b.create(name, "touch /d/first; sleep 3; touch /d/last")
		if err != nil {
			return err
		}
		first, err := b.touched(inPod(uid, "vol/d/first"))
		if err != nil {
			return err
		}
		shown, err := b.await(name, "Running")
		if err != nil {
			return err
		}
		running = append(running, shown.Sub(first))
		last, err := b.touched(inPod(uid, "vol/d/last"))
		if err != nil {
			return err
		}
		if shown, err = b.await(name, "Succeeded"); err != nil {
			return err
		}
		final = append(final, shown.Sub(last))
	}
	for i := range others {
		if err := b.delete(fmt.Sprintf("%s-alive-%d", prefix, i)); err != nil {
			return err
		}
	}
	for i := range others {
		if _, err := b.await(fmt.Sprintf("%s-alive-%d", prefix, i), "deleted"); err != nil {
			return err
		}
	}
	b.limit("first line → Running in the API, "+label+", p95", p95(running), time.Second)
	b.limit("exit → final status in the API, "+label+", p95", p95(final), time.Second)
	return nil
}

// burst: 50 pods of true at once.
func (b *bench) burst() error {
	const n, rounds = 50, 5
	var knoc, hand []time.Duration
	for r := range rounds {
		began := time.Now()
		if _, err := b.hand(fmt.Sprintf("mkdir -p bench-hand/b%d && cd bench-hand/b%d && cat >job <<'END'\n%sEND\nfor i in $(seq %d); do sbatch --parsable -J hand-b%d -o /dev/null job; done", r, r, script("/tmp", "true"), n, r)); err != nil {
			return err
		}
		if err := b.poll("jobs by hand", func() (bool, error) {
			out, err := b.hand(fmt.Sprintf("squeue -h -t all -n hand-b%d -o %%T | grep -c COMPLETED || true", r))
			return strings.TrimSpace(out) == strconv.Itoa(n), err
		}); err != nil {
			return err
		}
		hand = append(hand, time.Since(began))
		time.Sleep(2 * pause)

		began = time.Now()
		for i := range n {
			if _, _, err := b.create(fmt.Sprintf("burst-%d-%d", r, i), "true"); err != nil {
				return err
			}
		}
		var last time.Time
		for i := range n {
			at, err := b.await(fmt.Sprintf("burst-%d-%d", r, i), "Succeeded")
			if err != nil {
				return err
			}
			if at.After(last) {
				last = at
			}
		}
		knoc = append(knoc, last.Sub(began))
		for i := range n {
			if err := b.delete(fmt.Sprintf("burst-%d-%d", r, i)); err != nil {
				return err
			}
		}
		time.Sleep(2 * pause)
	}
	k, h := median(knoc), median(hand)
	b.rows = append(b.rows, []string{"50 pods of true applied → last Succeeded", seconds(k), seconds(h), fmt.Sprintf("%.2f", k.Seconds()/h.Seconds()), "at most 1.3 × by hand + 1 s", verdict(k <= h*13/10+time.Second)})
	return nil
}

// end: delete of a running pod → job gone, object gone.
func (b *bench) end() error {
	var jobs, objects, hand []time.Duration
	gone := func(job string) (time.Time, error) {
		err := b.poll("end of job "+job, func() (bool, error) {
			out, err := b.login("squeue -h -t all -n " + job + " -o %T")
			state := strings.TrimSpace(out)
			return err == nil && state != "RUNNING" && state != "COMPLETING", err
		})
		return time.Now(), err
	}
	for i := range samples {
		name := fmt.Sprintf("end-%d", i)
		if _, err := b.sbatchByHand(name, "touch /d/first; sleep 900"); err != nil {
			return err
		}
		if _, err := b.touched("bench-hand/" + name + "/first"); err != nil {
			return err
		}
		time.Sleep(pause)
		began := time.Now()
		if _, err := b.hand("scancel -n hand-" + name); err != nil {
			return err
		}
		at, err := gone("hand-" + name)
		if err != nil {
			return err
		}
		hand = append(hand, at.Sub(began))

		_, uid, err := b.create(name, "touch /d/first; sleep 900")
		if err != nil {
			return err
		}
		if _, err := b.await(name, "Running"); err != nil {
			return err
		}
		time.Sleep(10 * pause)
		began = time.Now()
		if err := b.delete(name); err != nil {
			return err
		}
		if at, err = gone("knoc-" + uid); err != nil {
			return err
		}
		jobs = append(jobs, at.Sub(began))
		if at, err = b.await(name, "deleted"); err != nil {
			return err
		}
		objects = append(objects, at.Sub(began))
	}
	b.rows = append(b.rows, []string{"delete of a running pod → job gone", seconds(median(jobs)), seconds(median(hand)), ratio(median(jobs), median(hand)), "", ""})
	b.rows = append(b.rows, []string{"delete of a running pod → object gone", seconds(median(objects)), "", "", "", ""})
	return nil
}

// load: what 20 quiet pods cost.
func (b *bench) load() error {
	const n = 20
	for i := range n {
		if _, _, err := b.create(fmt.Sprintf("load-%d", i), "sleep 900"); err != nil {
			return err
		}
	}
	for i := range 14 {
		if _, err := b.await(fmt.Sprintf("load-%d", i), "Running"); err != nil {
			return err
		}
	}
	time.Sleep(15 * time.Second)
	shims := os.Getenv("KNOC_SHIM_DIR")
	if _, err := b.login(fmt.Sprintf("rm -f bench-calls; for c in sbatch squeue sacct scontrol scancel sinfo sstat; do printf '#!/bin/sh\\necho %%s >>/home/hpcuser/bench-calls\\nexec /usr/bin/%%s \"$@\"\\n' $c $c >%s/$c; chmod +x %s/$c; done", shims, shims)); err != nil {
		return err
	}
	pid, err := knocPID()
	if err != nil {
		return err
	}
	before, _, err := usage(pid)
	if err != nil {
		return err
	}
	time.Sleep(window)
	after, rss, err := usage(pid)
	if err != nil {
		return err
	}
	out, err := b.login(fmt.Sprintf("wc -l <bench-calls; rm -f bench-calls %s/*", shims))
	if err != nil {
		return err
	}
	calls, _ := strconv.Atoi(strings.TrimSpace(out))
	b.rows = append(b.rows,
		[]string{"Slurm commands a minute, 20 pods alive", strconv.Itoa(calls), "", "", "at most 6", verdict(calls <= 6)},
		[]string{"knoc's CPU-seconds a minute, 20 pods alive", seconds(after - before), "", "", "", ""},
		[]string{"knoc's RSS, 20 pods alive", fmt.Sprintf("%d MiB", rss>>20), "", "", "", ""})
	return nil
}

// knocPID finds the process that runs the testbed's binary.
func knocPID() (string, error) {
	exes, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range exes {
		if to, err := os.Readlink(exe); err == nil && to == os.Getenv("KNOC_BIN") {
			return filepath.Base(filepath.Dir(exe)), nil
		}
	}
	return "", fmt.Errorf("no process runs %s", os.Getenv("KNOC_BIN"))
}

// usage reads CPU time and resident memory of a process (proc(5)).
func usage(pid string) (cpu time.Duration, rss int64, err error) {
	data, err := os.ReadFile("/proc/" + pid + "/stat")
	if err != nil {
		return 0, 0, err
	}
	_, rest, _ := strings.Cut(string(data), ") ")
	f := strings.Fields(rest)
	user, err1 := strconv.ParseInt(f[11], 10, 64)
	system, err2 := strconv.ParseInt(f[12], 10, 64)
	pages, err3 := strconv.ParseInt(f[21], 10, 64)
	if err1 != nil || err2 != nil || err3 != nil {
		return 0, 0, fmt.Errorf("/proc/%s/stat: %q", pid, data)
	}
	const tick = 10 * time.Millisecond // USER_HZ is 100 on every Linux
	return time.Duration(user+system) * tick, pages * int64(os.Getpagesize()), nil
}

func (b *bench) row(what string, knoc, hand time.Duration, limit float64, want string) {
	b.rows = append(b.rows, []string{what, seconds(knoc), seconds(hand), ratio(knoc, hand), want, verdict(knoc.Seconds() <= limit*hand.Seconds())})
}

func (b *bench) limit(what string, knoc, limit time.Duration) {
	b.rows = append(b.rows, []string{what, seconds(knoc), "", "", "at most " + seconds(limit), verdict(knoc <= limit)})
}

func (b *bench) print() {
	fmt.Println("| what | knoc | by hand | ratio | wanted | |\n| --- | --- | --- | --- | --- | --- |")
	for _, row := range b.rows {
		fmt.Println("| " + strings.Join(row, " | ") + " |")
	}
}

func verdict(ok bool) string {
	if ok {
		return "ok"
	}
	return "NOT REACHED"
}

func seconds(d time.Duration) string         { return fmt.Sprintf("%.2f s", d.Seconds()) }
func ratio(a, b time.Duration) string        { return fmt.Sprintf("%.2f", a.Seconds()/b.Seconds()) }
func median(d []time.Duration) time.Duration { return quantile(d, 0.5) }
func p95(d []time.Duration) time.Duration    { return quantile(d, 0.95) }
func quantile(d []time.Duration, q float64) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[min(len(d)-1, int(q*float64(len(d))))]
}
