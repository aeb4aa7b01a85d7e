package knoc

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// observed is all that is known of a pod's work; fold turns it into a status.
type observed struct {
	// Journal are the events of the newest restart count, in the order written.
	Journal []event
	// Messages are what containers left in msg/, by "<container>.<attempt>".
	Messages map[string]string
	// Job is Slurm's last word on the job. A zero State: Slurm was never heard
	// of it. A state that has ended is final: whoever fills it in has read the
	// journal once more afterwards, past the caches of a network file system,
	// since a journal without its end then makes the pod Failed.
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

// class is what Slurm says now; while it cannot be asked, nothing.
func (o *observed) class() stateClass {
	if o.Unreachable != "" {
		return cannotTell
	}
	return o.Job.class()
}

// fold says what Kubernetes is to see of a pod, from what was observed of its
// work and from the status that the API server has. It keeps all that is not
// knoc's there: the QoS class, other controllers' conditions, what it does not
// know.
//
// Phases are the kubelet's (getPhase in pkg/kubelet/kubelet_pods.go), but a
// terminal one needs more than containers that ended: the journal's end, or
// Slurm's word that the job is over. A terminal phase never changes again.
func fold(pod *v1.Pod, o observed) v1.PodStatus {
	s := *pod.Status.DeepCopy()
	if terminalPhase(s.Phase) || !o.news(&s) {
		return s
	}
	f := newFacts(o.Journal)
	end := ending(pod, &o, f)
	wait := waiting(pod, &o, f)

	s.ObservedGeneration = pod.Generation
	s.Reason, s.Message = "", ""
	c := containers{pod: pod, o: &o, f: f, end: end, wait: wait}
	s.InitContainerStatuses = c.statuses(pod.Spec.InitContainers, s.InitContainerStatuses, true)
	s.ContainerStatuses = c.statuses(pod.Spec.Containers, s.ContainerStatuses, false)
	switch {
	case end != nil:
		s.Phase, s.Reason, s.Message = end.phase, end.reason, end.message
	default:
		s.Phase = f.phase(&pod.Spec)
	}
	if s.StartTime == nil {
		if start := startTime(&o, f); !start.IsZero() {
			s.StartTime = &metav1.Time{Time: start}
		}
	}
	if ips := f.addresses(); len(ips) > 0 {
		s.HostIP, s.PodIP, s.HostIPs, s.PodIPs = ips[0], ips[0], nil, nil
		for _, ip := range ips {
			s.HostIPs = append(s.HostIPs, v1.HostIP{IP: ip})
			s.PodIPs = append(s.PodIPs, v1.PodIP{IP: ip})
		}
	}
	setConditions(pod, &s, &o, f, end)
	return s
}

func terminalPhase(p v1.PodPhase) bool { return p == v1.PodSucceeded || p == v1.PodFailed }

// news says whether anything is known beyond what the API server's status, made
// of an earlier observation, already says.
func (o *observed) news(s *v1.PodStatus) bool {
	if len(s.ContainerStatuses) == 0 || len(o.Journal) > 0 || o.Refused != nil || o.Lost {
		return true
	}
	class := o.class()
	switch {
	case o.Unreachable != "":
		return false
	case class == queued, class == ended:
		return true
	case s.Phase == v1.PodRunning:
		return false // the journal that said so cannot be seen
	case o.Submitted && o.Job.State == "":
		// Just submitted, or knoc has just started.
		w := s.ContainerStatuses[0].State.Waiting
		return s.StartTime == nil && w != nil && w.Reason != slurmPending
	}
	return !o.Submitted || class == running
}

// slurmPending is the waiting reason of containers whose job is in the queue.
const slurmPending = "SlurmPending"

// facts are a journal read as a whole.
type facts struct {
	claimed  time.Time
	stopping time.Time
	last     time.Time // of the last event
	ips      []string
	runs     map[string]*runs // by container
	ended    bool             // the journal has its end
	code     int32            // of done
}

// runs are the newest run of a container and the one before.
type runs struct {
	run
	before *run
}

type run struct {
	attempt    int32
	start, end time.Time // end is zero while it runs
	code       int32
	backoff    time.Duration // until the next run; zero: none was announced
}

func newFacts(journal []event) *facts {
	f := &facts{runs: map[string]*runs{}}
	for _, e := range journal {
		f.last = e.Time
		switch e.Word {
		case "claim":
			f.claimed = e.Time
		case "host":
			if len(e.Args) > 0 {
				f.ips = e.Args[1:]
			}
		case "start":
			f.begin(e)
		case "exit":
			// An exit whose start was not readable shows that there was one.
			f.begin(e)
			if r := f.current(e); r != nil && r.end.IsZero() {
				r.end, r.code = e.Time, e.num(2)
			}
		case "backoff":
			if r := f.current(e); r != nil && !r.end.IsZero() {
				r.backoff = time.Duration(e.num(2)) * time.Second
			}
		case "stopping":
			if f.stopping.IsZero() {
				f.stopping = e.Time
			}
		case "done":
			f.ended, f.code = true, e.num(0)
			return f
		}
	}
	return f
}

// begin notes the run of a "start" or "exit", unless it is known already.
func (f *facts) begin(e event) {
	if len(e.Args) < 2 {
		return
	}
	r := f.runs[e.Args[0]]
	switch n := e.num(1); {
	case r == nil:
		f.runs[e.Args[0]] = &runs{run: run{attempt: n, start: e.Time}}
	case n > r.attempt:
		before := r.run
		if before.end.IsZero() {
			before.end, before.code = e.Time, unknownCode
		}
		f.runs[e.Args[0]] = &runs{run: run{attempt: n, start: e.Time}, before: &before}
	}
}

// current is the container's newest run, if that is the one of the event.
func (f *facts) current(e event) *runs {
	if len(e.Args) < 3 {
		return nil
	}
	if r := f.runs[e.Args[0]]; r != nil && r.attempt == e.num(1) {
		return r
	}
	return nil
}

// unknownCode is the exit code of a container whose own is not known, as the
// kubelet's (TerminatePod in pkg/kubelet/status/status_manager.go).
const unknownCode = 137

// addresses are the compute node's, at most one of each family, as the API
// server takes no more (validatePodIPs in pkg/apis/core/validation).
func (f *facts) addresses() []string {
	var ips []string
	var v4, v6 bool
	for _, text := range f.ips {
		ip, err := netip.ParseAddr(text)
		if err != nil || ip.Zone() != "" || ip.Is4In6() || ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast() {
			continue
		}
		if seen := map[bool]*bool{true: &v4, false: &v6}[ip.Is4()]; !*seen {
			*seen = true
			ips = append(ips, ip.String())
		}
	}
	return ips
}

// podEnd is how a pod's work ended.
type podEnd struct {
	phase           v1.PodPhase
	reason, message string
	disruption      bool
	at              time.Time
	// killed is the reason of the containers that were running then.
	killed, killedMessage string
}

// ending decides whether a pod's work is over, and how; nil: not, or not known.
func ending(pod *v1.Pod, o *observed, f *facts) *podEnd {
	failed := func(reason, message string, disruption bool) *podEnd {
		at := o.Job.End
		if at.IsZero() {
			at = f.last
		}
		return &podEnd{v1.PodFailed, reason, message, disruption, at, reason, message}
	}
	over := o.class() == ended
	// The journal may say that the job was told to stop though nobody deleted the
	// pod. Its containers may well exit with 0 then, with their work undone.
	interrupted := !f.stopping.IsZero() && pod.DeletionTimestamp == nil
	switch {
	case o.Refused != nil:
		return failed(o.Refused.Reason, o.Refused.Message, false)
	case f.ended && interrupted && pastDeadline(pod, o, f, f.stopping),
		over && !f.ended && o.Job.State == "TIMEOUT" && pastDeadline(pod, o, f, o.Job.End):
		return failed("DeadlineExceeded", "Pod was active on the node longer than the specified deadline", false)
	case f.ended && interrupted && (o.Lost || over && (o.Job.State == "COMPLETED" || o.Job.State == "FAILED")):
		return failed("SlurmJobStopped", fmt.Sprintf("%s was told to stop by a signal, and did", o.Job), false)
	case f.ended && interrupted && !over:
		return nil // Slurm will say who or what stopped it
	case f.ended && !interrupted && f.killed() && !over && !o.Lost:
		return nil // Slurm will say whether it was for want of memory
	case f.ended && !interrupted:
		end := failed("", "", false)
		end.at, end.killed, end.killedMessage = f.last, "ContainerStatusUnknown", "the journal lacks the container's exit"
		if f.code == 0 && f.succeeded(&pod.Spec) {
			end.phase = v1.PodSucceeded
		}
		return end
	case over:
		reason, message := o.Job.ending()
		return failed(reason, message, slurmStates[o.Job.State].disruption)
	case o.Lost:
		return failed("JobLost", fmt.Sprintf("%s ended without a trace: its journal on the cluster has no end, and Slurm does not know it any more", o.Job), false)
	}
	return nil
}

// killed: a container's last run ended as by SIGKILL.
func (f *facts) killed() bool {
	for _, r := range f.runs {
		if !r.end.IsZero() && r.code == 137 {
			return true
		}
	}
	return false
}

// succeeded: every app container's last run ended with 0, and no init
// container's with another code.
func (f *facts) succeeded(spec *v1.PodSpec) bool {
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if r := f.runs[c.Name]; r != nil && r.code != 0 && !isSidecar(c) {
			return false
		}
	}
	for _, c := range spec.Containers {
		if r := f.runs[c.Name]; r == nil || r.end.IsZero() || r.code != 0 {
			return false
		}
	}
	return len(spec.Containers) > 0
}

// pastDeadline: at that time the job had run for activeDeadlineSeconds.
func pastDeadline(pod *v1.Pod, o *observed, f *facts, at time.Time) bool {
	start := f.claimed
	if start.IsZero() {
		start = o.Job.Start
	}
	deadline := pod.Spec.ActiveDeadlineSeconds
	return deadline != nil && !start.IsZero() && at.Sub(start) >= time.Duration(*deadline)*time.Second
}

// startTime is when the job got its nodes: waiting in the queue does not count.
func startTime(o *observed, f *facts) time.Time {
	if !f.claimed.IsZero() {
		return f.claimed
	}
	if c := o.class(); c == running || c == ended {
		return o.Job.Start
	}
	return time.Time{}
}

// waiting is the state of containers that have not started.
func waiting(pod *v1.Pod, o *observed, f *facts) *v1.ContainerStateWaiting {
	w := &v1.ContainerStateWaiting{Reason: "ContainerCreating"}
	if len(pod.Spec.InitContainers) > 0 {
		w.Reason = "PodInitializing"
	}
	switch {
	case !f.last.IsZero():
		// the job is at work
	case !o.Submitted && o.Waiting != nil:
		w.Reason, w.Message = o.Waiting.Reason, o.Waiting.Message
	case o.Submitted && o.class() != running:
		w.Reason = slurmPending
		if o.Job.State == "" {
			w.Message = o.Job.String() + " was submitted"
			break
		}
		w.Message = fmt.Sprintf("%s is %s", o.Job, strings.ToLower(strings.ReplaceAll(o.Job.State, "_", " ")))
		if o.Job.Partition != "" {
			w.Message += " in partition " + o.Job.Partition
		}
		if o.Job.Reason != "" {
			w.Message += ": " + o.Job.Reason
		}
	}
	return w
}

// containers makes the statuses of a pod's containers.
type containers struct {
	pod  *v1.Pod
	o    *observed
	f    *facts
	end  *podEnd
	wait *v1.ContainerStateWaiting
}

func (c *containers) statuses(specs []v1.Container, old []v1.ContainerStatus, init bool) []v1.ContainerStatus {
	var list []v1.ContainerStatus
	for i := range specs {
		var before v1.ContainerStatus
		for _, s := range old {
			if s.Name == specs[i].Name {
				before = s
			}
		}
		list = append(list, c.status(&specs[i], before, init))
	}
	return list
}

// status is one container's, made from the one that the API server has, so that
// fields of others stay.
func (c *containers) status(spec *v1.Container, old v1.ContainerStatus, init bool) v1.ContainerStatus {
	s := old
	s.Name, s.Image, s.State = spec.Name, spec.Image, v1.ContainerState{}
	r := c.f.runs[spec.Name]
	if r != nil {
		s.ContainerID = c.id(spec.Name, r.attempt)
		// A requeued job counts from 0 again; a status does not.
		s.RestartCount = max(old.RestartCount, r.attempt)
		if r.before != nil {
			s.LastTerminationState.Terminated = c.terminated(spec.Name, r.before)
		}
	}
	switch {
	case r == nil:
		w := *c.wait
		if c.end != nil && c.end.reason != "" {
			// kubectl get shows this word rather than the pod's.
			w.Reason, w.Message = c.end.reason, c.end.message
		}
		s.State.Waiting = &w
	case r.end.IsZero() && c.end == nil:
		s.State.Running = &v1.ContainerStateRunning{StartedAt: metav1.Time{Time: r.start}}
	case r.end.IsZero():
		gone := r.run
		gone.end, gone.code = c.end.at, unknownCode
		if gone.end.Before(gone.start) {
			gone.end = gone.start // clocks differ
		}
		s.State.Terminated = c.terminated(spec.Name, &gone)
		s.State.Terminated.Reason, s.State.Terminated.Message = c.end.killed, c.end.killedMessage
	case r.backoff > 0 && c.end == nil:
		s.State.Waiting = &v1.ContainerStateWaiting{
			Reason: "CrashLoopBackOff",
			Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)",
				r.backoff, spec.Name, c.pod.Name, c.pod.Namespace, c.pod.UID),
		}
		s.LastTerminationState.Terminated = c.terminated(spec.Name, &r.run)
	default:
		s.State.Terminated = c.terminated(spec.Name, &r.run)
	}
	// The API server refuses a container that leaves the terminated state against
	// its restart policy (ValidateContainerStateTransition), as it may seem to
	// when Slurm runs the job again. Until it ends again it stays as it was.
	if t := old.State.Terminated; t != nil && s.State.Terminated == nil && !mayRestart(spec, &c.pod.Spec, t.ExitCode) {
		s = old
	}
	isRunning := s.State.Running != nil
	s.Started, s.Ready = &isRunning, isRunning
	if init && !isSidecar(spec) {
		s.Ready = s.State.Terminated != nil && s.State.Terminated.ExitCode == 0
	}
	return s
}

func (c *containers) id(name string, attempt int32) string {
	return fmt.Sprintf("apptainer://%s/%s/%d", c.pod.UID, name, attempt)
}

func (c *containers) terminated(name string, r *run) *v1.ContainerStateTerminated {
	t := &v1.ContainerStateTerminated{
		ExitCode:    r.code,
		Reason:      "Error",
		Message:     strings.ToValidUTF8(c.o.Messages[fmt.Sprintf("%s.%d", name, r.attempt)], "?"),
		StartedAt:   metav1.Time{Time: r.start},
		FinishedAt:  metav1.Time{Time: r.end},
		ContainerID: c.id(name, r.attempt),
	}
	switch {
	case r.code == 0:
		t.Reason = "Completed"
	case r.code == 137 && c.o.Job.State == "OUT_OF_MEMORY":
		t.Reason = "OOMKilled"
	}
	return t
}

func isSidecar(c *v1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways
}

// mayRestart is the restart policy: the container's own, or the pod's.
func mayRestart(c *v1.Container, spec *v1.PodSpec, code int32) bool {
	policy := string(spec.RestartPolicy)
	if c.RestartPolicy != nil {
		policy = string(*c.RestartPolicy)
	}
	switch v1.RestartPolicy(policy) {
	case v1.RestartPolicyNever:
		return false
	case v1.RestartPolicyOnFailure:
		return code != 0
	}
	return true
}

// phase is the kubelet's getPhase for a pod whose work is not known to be over:
// Pending until every container has started, Running from then on.
func (f *facts) phase(spec *v1.PodSpec) v1.PodPhase {
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if r := f.runs[c.Name]; r == nil || r.end.IsZero() && !isSidecar(c) {
			return v1.PodPending
		}
	}
	for _, c := range spec.Containers {
		if f.runs[c.Name] == nil {
			return v1.PodPending
		}
	}
	return v1.PodRunning
}
