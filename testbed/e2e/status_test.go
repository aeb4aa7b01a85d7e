//go:build testbed

package e2e

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// events are those of a pod, a line each, in the order of their first time:
// "<type> <reason> <field path>: <message> x<count>".
func (p *pod) events() []string {
	p.t.Helper()
	var list v1.EventList
	if err := json.Unmarshal([]byte(p.kubectl("get", "events", "--field-selector", "involvedObject.uid="+string(p.uid), "-o", "json")), &list); err != nil {
		p.t.Fatal(err)
	}
	slices.SortStableFunc(list.Items, func(a, b v1.Event) int { return a.CreationTimestamp.Compare(b.CreationTimestamp.Time) })
	var lines []string
	for _, e := range list.Items {
		if e.Source.Component == "knoc" {
			lines = append(lines, fmt.Sprintf("%s %s %s: %s x%d", e.Type, e.Reason, e.InvolvedObject.FieldPath, e.Message, max(e.Count, 1)))
		}
	}
	return lines
}

// awaitEvent waits for an event whose line has the text.
func (p *pod) awaitEvent(text string) {
	p.t.Helper()
	var lines []string
	if !inTime(func() bool {
		lines = p.events()
		return slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, text) })
	}) {
		p.t.Errorf("no event %q about pod %s:\n%s", text, p.name, strings.Join(lines, "\n"))
	}
}

func TestEventsOfAPod(t *testing.T) {
	t.Parallel()
	k := startKnoc(t, "knoc-events")
	n := newNamespaceOn(t, "knoc-events")
	p := n.createOne(n.shell("pod", "exit 3", restart(v1.RestartPolicyOnFailure), initContainer("first", "true")))
	held := n.createOne(n.shell("held", "true", flags("--hold")))
	p.await("a back-off", func(o *v1.Pod) bool {
		w := status(o, "main").State.Waiting
		return w != nil && w.Reason == "CrashLoopBackOff"
	})
	for _, want := range []string{
		"Normal Submitted : Submitted as Slurm job " + p.awaitJob(),
		"Normal Started spec.initContainers{first}: Container started x1",
		"Normal Pulled spec.containers{main}: Successfully pulled image", // the policy of a latest tag
		"Normal Created spec.containers{main}: Container created x1",
		"Normal Started spec.containers{main}: Container started x1",
		"Warning BackOff spec.containers{main}: Back-off restarting failed container main in pod pod_" + n.name,
	} {
		p.awaitEvent(want)
	}
	held.awaitEvent("Normal Queued : Slurm job " + held.awaitJob() + " is pending in partition batch: JobHeldUser")
	// The journal is read again from its beginning: nothing of it is told again.
	k.stop(syscall.SIGKILL)
	k.start()
	k.awaitServing()
	p.await("a second run", func(o *v1.Pod) bool { return status(o, "main").RestartCount > 0 })
	p.awaitEvent("Container started x2")
	for _, l := range p.events() {
		if strings.Contains(l, "{first}") && !strings.HasSuffix(l, " x1") || strings.Contains(l, "Started") && strings.HasSuffix(l, " x3") || strings.Contains(l, "Submitted") && !strings.HasSuffix(l, " x1") {
			t.Errorf("told again: %s", l)
		}
	}
}

// The job's own journal only says that there is a text.
func TestTextsAreReadFromTheCluster(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "until [ -e /v/go ]; do sleep 0.2; done; exit 4", emptyDir("v", "/v")))
	p.awaitPhase(v1.PodRunning)
	login(t, "cd "+p.dir()+` && printf '1 done 0\n\377 bye' >msg/main.0 && echo "$(date +%s) message main 0" >>journal.0 && : >vol/v/go`)
	o := p.awaitEnd()
	if got := status(o, "main").State.Terminated.Message; got != "1 done 0\n? bye" || o.Status.Phase != v1.PodFailed || exitCode(o, "main") != 4 {
		t.Errorf("phase %s, exit code %d, message %q", o.Status.Phase, exitCode(o, "main"), got)
	}
}

func TestRequeue(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	requeue := func(p *v1.Pod) { p.Annotations["slurm-job.knoc.io/requeue"] = "true" }
	script := "echo run; [ $(wc -l </runs/runs) -lt 2 ] || exit 0; sleep 1000"
	again := n.createOne(n.shell("again", script, counted, requeue))
	again.requeued = true
	never := n.createOne(n.shell("never", "sleep 1000"))
	again.awaitLog("run")
	never.awaitPhase(v1.PodRunning)
	id := again.awaitJob()
	if f := scontrol(t, id); f["Requeue"] != "1" {
		t.Errorf("job %s has Requeue=%s", id, f["Requeue"])
	}
	if f := scontrol(t, never.awaitJob()); f["Requeue"] != "0" {
		t.Errorf("job %s has Requeue=%s", never.awaitJob(), f["Requeue"])
	}
	login(t, "scontrol requeue "+id)
	o := again.await("Pending again, with the reason", func(o *v1.Pod) bool {
		w := status(o, "main").State.Waiting
		return o.Status.Phase == v1.PodPending && w != nil && strings.Contains(w.Message, "job "+id+" is ")
	})
	if w := status(o, "main").State.Waiting; w.Reason != "SlurmPending" {
		t.Errorf("waiting: %+v", w)
	}
	// Slurm waits two minutes before it runs the job again.
	loginRoot(t, "scontrol update JobId="+id+" StartTime=now")
	o = again.awaitEnd()
	s := status(o, "main")
	if o.Status.Phase != v1.PodSucceeded || s.RestartCount != 1 || jobID(o) != id || !strings.HasSuffix(s.ContainerID, "/main/1") {
		t.Errorf("%s (%s: %s), %d restarts, job %s, %s", o.Status.Phase, o.Status.Reason, o.Status.Message, s.RestartCount, jobID(o), s.ContainerID)
	}
	if last := s.LastTerminationState.Terminated; last == nil || last.ExitCode == 0 {
		t.Errorf("the run before: %+v", last)
	}
	if logs := login(t, "cat "+again.dir()+"/log/main.0 "+again.dir()+"/log/main.1"); logs != "run\nrun" {
		t.Errorf("logs of both runs: %q", logs)
	}
}

func TestSuspendedJob(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "while :; do sleep 0.5; done"))
	p.awaitPhase(v1.PodRunning)
	id := p.awaitJob()
	loginRoot(t, "scontrol suspend "+id)
	o := p.await("a word about it", func(o *v1.Pod) bool { return o.Status.Reason == "SlurmJobSuspended" })
	if o.Status.Phase != v1.PodRunning || status(o, "main").Ready || o.Status.Message != "job "+id+" is suspended" {
		t.Errorf("%s, ready %v, %q", o.Status.Phase, status(o, "main").Ready, o.Status.Message)
	}
	loginRoot(t, "scontrol resume "+id)
	p.await("ready again", func(o *v1.Pod) bool { return status(o, "main").Ready && o.Status.Reason == "" })
}

func TestCancelledBySomebody(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "while :; do sleep 0.5; done"))
	p.awaitPhase(v1.PodRunning)
	loginRoot(t, "scancel "+p.awaitJob())
	o := p.awaitEnd()
	want := "was cancelled"
	if accounting() {
		want = "was cancelled by uid 0"
	}
	if o.Status.Phase != v1.PodFailed || o.Status.Reason != "SlurmJobCancelled" || !strings.Contains(o.Status.Message, want) {
		t.Errorf("%s, %s: %s", o.Status.Phase, o.Status.Reason, o.Status.Message)
	}
}

// A process that the kernel kills for memory: the container's first, or a child
// of it whose end it does not care about.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	small := func(p *v1.Pod) {
		p.Spec.Containers[0].Resources.Requests = v1.ResourceList{"memory": resource.MustParse("100Mi")}
	}
	first := n.createOne(n.shell("first", "exec tail /dev/zero", small))
	child := n.createOne(n.shell("child", "tail /dev/zero; echo it ended with $?; sleep 3; exit 0", small))
	for _, p := range []*pod{first, child} {
		o := p.awaitEnd()
		s := status(o, "main").State.Terminated
		if p == child && login(t, "grep -c 'note oom' "+p.dir()+"/pod.sh || :") == "0" {
			t.Log("pod.sh does not count what the kernel kills: a child's end cannot be told")
			continue
		}
		if o.Status.Phase != v1.PodFailed || s == nil || s.Reason != "OOMKilled" || s.ExitCode != 137 {
			t.Errorf("pod %s: %s (%s: %s), %+v", p.name, o.Status.Phase, o.Status.Reason, o.Status.Message, s)
		}
	}
}

// Fifty pods at once: no event is lost to a rate limit.
func TestEventsOfFiftyPods(t *testing.T) {
	n := newNamespace(t)
	var manifests []*v1.Pod
	for i := range 50 {
		manifests = append(manifests, n.shell(fmt.Sprintf("pod%d", i), "true"))
	}
	pods := n.create(manifests...)
	for _, p := range pods {
		p.awaitPhase(v1.PodSucceeded)
	}
	var missing string
	if !inTime(func() bool {
		got := kubectl(t, "-n", n.name, "get", "events", "-o", `jsonpath={range .items[*]}{.reason} {.involvedObject.name};{end}`)
		missing = ""
		for _, p := range pods {
			for _, reason := range []string{"Submitted", "Pulled", "Created", "Started"} {
				if !strings.Contains(got, reason+" "+p.name+";") {
					missing += " " + reason + " " + p.name
				}
			}
		}
		return missing == ""
	}) {
		t.Errorf("no events%s", missing)
	}
}

// What others write on a pod stays, whatever knoc writes.
func TestForeignThingsStay(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "until [ -e /v/go ]; do sleep 0.2; done", emptyDir("v", "/v"), func(p *v1.Pod) {
		p.Spec.ReadinessGates = []v1.PodReadinessGate{{ConditionType: "example.com/gate"}}
	}))
	p.await("running, its gate closed", func(o *v1.Pod) bool { return status(o, "main").Ready && condition(o, v1.PodReady) == v1.ConditionFalse })
	p.kubectl("label", "pod", "pod", "example.com/label=mine")
	p.kubectl("annotate", "pod", "pod", "example.com/note=mine")
	p.kubectl("patch", "pod", "pod", "--subresource=status", "--type=strategic", "-p", `{"status":{"conditions":[{"type":"example.com/gate","status":"True"},{"type":"example.com/other","status":"False","reason":"Mine"}]}}`)
	qos := p.await("ready", func(o *v1.Pod) bool { return condition(o, v1.PodReady) == v1.ConditionTrue }).Status.QOSClass
	login(t, "cd "+p.dir()+"/vol/v && : >go")
	o := p.awaitPhase(v1.PodSucceeded)
	if o.Labels["example.com/label"] != "mine" || o.Annotations["example.com/note"] != "mine" || o.Status.QOSClass != qos || qos == "" ||
		condition(o, "example.com/gate") != v1.ConditionTrue || condition(o, "example.com/other") != v1.ConditionFalse || condition(o, v1.PodScheduled) != v1.ConditionTrue {
		t.Errorf("labels %v, annotations %v, QoS class %s, conditions %+v", o.Labels, o.Annotations, o.Status.QOSClass, o.Status.Conditions)
	}
}

func condition(p *v1.Pod, kind v1.PodConditionType) v1.ConditionStatus {
	for _, c := range p.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return ""
}

func TestImageThatIsNotThere(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "true", restart(v1.RestartPolicyAlways), func(p *v1.Pod) {
		p.Spec.Containers[0].Image = strings.Replace(env("KNOC_IMAGE_BUSYBOX"), "busybox", "missing", 1)
	}))
	o := p.await("a word about it", func(o *v1.Pod) bool {
		w := status(o, "main").State.Waiting
		return w != nil && (w.Reason == "ErrImagePull" || w.Reason == "ImagePullBackOff")
	})
	if w := status(o, "main").State.Waiting; o.Status.Phase != v1.PodPending || !strings.Contains(w.Message, "missing") {
		t.Errorf("%s, %+v", o.Status.Phase, w)
	}
	p.awaitEvent("Warning Failed spec.containers{main}: Failed to pull image")
	p.awaitEvent("Warning Failed spec.containers{main}: Error: ErrImagePull")
}
