package knoc

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// observed is all that is known of a pod's work; fold turns it into a status.
type observed struct {
	// Journal are the events of the newest restart count, in the order written.
	Journal []event
	// Restart is how often Slurm has run the job again.
	Restart int
	// Messages are what the journal's events refer to in msg/, by file name.
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
	// Runaway is the state in which accounting still shows a lost job.
	Runaway string
	// Unclear is why it cannot be told, for minutes now, what became of the job
	// or whether there is one. It changes no phase.
	Unclear string
	// Images are the images that each container was given, by its name; a run's
	// journal tells which of them it has.
	Images map[string][]string
	// Held is why a container that came later cannot be sent to the job, by name.
	Held map[string]held
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
	f.turn(o.Messages)
	end := ending(pod, &o, f)
	wait := waiting(pod, &o, f)

	s.ObservedGeneration = pod.Generation
	s.Reason, s.Message = "", ""
	c := containers{pod: pod, o: &o, f: f, end: end, wait: wait}
	s.InitContainerStatuses = c.statuses(pod.Spec.InitContainers, s.InitContainerStatuses, true)
	s.ContainerStatuses = c.statuses(pod.Spec.Containers, s.ContainerStatuses, false)
	s.EphemeralContainerStatuses = c.ephemeral(s.EphemeralContainerStatuses)
	switch {
	case end != nil:
		s.Phase, s.Reason, s.Message = end.phase, end.reason, end.message
	default:
		s.Phase = f.phase(&pod.Spec)
		if o.Job.suspended() { // as far as was heard
			s.Reason, s.Message = "SlurmJobSuspended", fmt.Sprintf("%s is %s", o.Job, strings.ToLower(o.Job.State))
		}
	}
	if end == nil && o.Unclear != "" && s.Reason == "" {
		s.Reason, s.Message = "SlurmJobUnclear", o.Unclear
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
	if len(s.ContainerStatuses) == 0 || len(o.Journal) > 0 || o.Refused != nil || o.Lost || o.Unclear != "" {
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

const deadlineText = "Pod was active on the node longer than the specified deadline"

// slurmPending is the waiting reason of containers whose job is in the queue.
const slurmPending = "SlurmPending"

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
	gone := over || o.Lost
	interrupted := f.interrupted(pod)
	// Whoever stopped the job first is why it ended.
	deadline := !f.deadline.IsZero() && (f.stopping.IsZero() || !f.stopping.Before(f.deadline))
	timelimit := !f.timelimit.IsZero() && (f.stopping.IsZero() || !f.stopping.Before(f.timelimit))
	switch {
	case o.Refused != nil:
		return failed(o.Refused.Reason, o.Refused.Message, false)
	case f.noids != "" && f.ended && len(f.runs) == 0 && !interrupted:
		return failed(noSubIDs, withoutIDs(f.noids)+"; add the user to /etc/subuid and /etc/subgid there, or run knoc with --without-subids=ignore", false)
	case f.full != "" && (f.ended || gone):
		return failed("Evicted", evicted(pod, f.full), false)
	case f.unmounted != "" && f.ended && len(f.runs) == 0 && !interrupted:
		return failed("FailedMount", o.mountError(f.unmounted), false)
	case f.noshare && f.ended && len(f.runs) == 0 && !interrupted:
		return failed("NoSharedProcessNamespace", "shareProcessNamespace: no common process namespace could be made on the compute node: it needs unshare (util-linux 2.35 or later), nsenter and user namespaces", false)
	case deadline && (f.ended || gone),
		f.ended && interrupted && pastDeadline(pod, o, f, f.stopping),
		over && !f.ended && (o.Job.State == "TIMEOUT" || o.Job.State == "DEADLINE") && pastDeadline(pod, o, f, o.Job.End):
		return failed("DeadlineExceeded", deadlineText, false)
	case timelimit && (f.ended || o.Lost || over && o.Job.State != "TIMEOUT"):
		return failed(slurmStates["TIMEOUT"].reason, fmt.Sprintf("%s %s", o.Job, slurmStates["TIMEOUT"].text), false)
	case f.ended && interrupted && (o.Lost || over && (o.Job.State == "COMPLETED" || o.Job.State == "FAILED")):
		return failed("SlurmJobStopped", fmt.Sprintf("%s was told to stop by a signal, and did", o.Job), false)
	case f.ended && interrupted && !over:
		return nil // Slurm will say who or what stopped it
	case f.ended && !interrupted && f.killed() && !gone:
		return nil // Slurm will say whether it was for want of memory
	case f.ended && !interrupted:
		end := failed("", "", false)
		end.at, end.killed, end.killedMessage = f.last, "ContainerStatusUnknown", "the journal lacks the container's exit"
		if f.code == 0 && f.succeeded(&pod.Spec) {
			end.phase = v1.PodSucceeded
		}
		if end.phase == v1.PodSucceeded && (f.oomUnclear || over && o.Job.State == "OUT_OF_MEMORY") {
			// The kernel killed a process, and neither it nor the exit codes tell whose.
			end.phase = v1.PodFailed
			killed := o.Job
			killed.State = "OUT_OF_MEMORY"
			end.reason, end.message = killed.ending()
		}
		return end
	case over:
		reason, message := o.Job.ending()
		return failed(reason, message, slurmStates[o.Job.State].disruption)
	case o.Lost:
		text := "and Slurm does not know it any more"
		if o.Runaway != "" {
			text = fmt.Sprintf("slurmctld does not know it any more, and accounting shows it as %s still", o.Runaway)
		}
		return failed("JobLost", fmt.Sprintf("%s ended without a trace: its journal on the cluster has no end, %s", o.Job, text), false)
	}
	return nil
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
	w := &v1.ContainerStateWaiting{Reason: creating(pod)}
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
		w.Message = o.Job.waiting()
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
	if spec.Lifecycle != nil && spec.Lifecycle.StopSignal != nil {
		s.StopSignal = spec.Lifecycle.StopSignal
	}
	r := c.f.runs[spec.Name]
	if r != nil && !r.unpulled {
		if images := c.o.Images[spec.Name]; int(r.image) < len(images) {
			s.Image = images[r.image] // until the container is started again with a new one
		}
		if d, ok := c.f.digests[spec.Name]; ok {
			s.ImageID = imageID(s.Image, d.Args[1], d.Args[2])
		} else if src, err := findImage(s.Image, nil); err == nil && src.Path != "" {
			s.ImageID = src.Path // a file on the cluster
		}
		s.ContainerID = c.id(spec.Name, r.attempt)
		// A requeued job counts on from its first run; should it not, a status
		// does not count back.
		s.RestartCount = max(old.RestartCount, r.attempt-r.skipped)
	}
	again := r != nil && !r.unpulled && s.ContainerID != old.ContainerID || r == nil && (c.o.class() == queued || c.o.Restart > 0)
	switch {
	case r != nil && r.before != nil:
		s.LastTerminationState.Terminated = c.terminated(spec.Name, r.before)
	case again && old.State.Running != nil:
		// The job runs again, or will: this is what became of its run before.
		s.LastTerminationState.Terminated = &v1.ContainerStateTerminated{
			ExitCode: unknownCode, Reason: "ContainerStatusUnknown", Message: "the job was requeued while the container ran",
			StartedAt: old.State.Running.StartedAt, ContainerID: old.ContainerID,
		}
	case again && old.State.Terminated != nil:
		s.LastTerminationState.Terminated = old.State.Terminated
	}
	switch {
	case r == nil, r.unpulled && c.end == nil:
		s.State.Waiting = c.waiting(spec)
	case r.unpulled:
		s.State.Terminated = &v1.ContainerStateTerminated{
			ExitCode: r.code, Reason: "ErrImagePull", Message: c.o.pullError(spec.Name),
			StartedAt: metav1.Time{Time: r.start}, FinishedAt: metav1.Time{Time: r.end},
		}
	case r.end.IsZero() && c.end == nil, c.mayGoOn(r):
		if c.f.up(spec) == nil {
			s.State.Waiting = &v1.ContainerStateWaiting{Reason: creating(c.pod)}
			break
		}
		s.State.Running = &v1.ContainerStateRunning{StartedAt: metav1.Time{Time: r.start}}
	case r.end.IsZero():
		gone := r.run
		gone.end, gone.code = c.end.at, unknownCode
		if gone.end.Before(gone.start) {
			gone.end = gone.start // clocks differ
		}
		s.State.Terminated = c.terminated(spec.Name, &gone)
		if !gone.oom {
			s.State.Terminated.Reason, s.State.Terminated.Message = c.end.killed, c.end.killedMessage
		}
	case r.killed == "update" && c.end == nil && !c.f.terminating(c.pod):
		// It starts again at once, whatever its policy.
		s.State.Waiting = c.waiting(spec)
		s.LastTerminationState.Terminated = c.terminated(spec.Name, &r.run)
	case r.unmounted && r.backoff > 0 && c.end == nil:
		t := c.terminated(spec.Name, &r.run)
		s.State.Waiting = &v1.ContainerStateWaiting{Reason: t.Reason, Message: t.Message}
		s.LastTerminationState.Terminated = t
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
	c.probed(spec, &s, r, init)
	return s
}

// probed sets started and ready, by the probes that the container has
// (UpdatePodStatus in pkg/kubelet/prober/prober_manager.go). A pod that is being
// stopped is not ready, nor is one whose job Slurm has suspended.
func (c *containers) probed(spec *v1.Container, s *v1.ContainerStatus, r *runs, init bool) {
	started := s.State.Running != nil && r != nil && (spec.StartupProbe == nil || r.started)
	s.Started = &started
	s.Ready = started && (spec.ReadinessProbe == nil || r.ready) && !c.f.terminating(c.pod) && !c.o.Job.suspended()
	if init && !isSidecar(spec) {
		s.Ready = s.State.Terminated != nil && s.State.Terminated.ExitCode == 0
	}
}

// mayGoOn says that a run that was told to stop is shown as running still: Slurm
// may be about to run the job again, as the pod allows, and a container that was
// shown as terminated cannot be shown as running again under every policy.
func (c *containers) mayGoOn(r *runs) bool {
	return c.end == nil && mayRequeue(c.pod) && !r.end.IsZero() && c.f.interrupted(c.pod) &&
		c.f.deadline.IsZero() && c.f.timelimit.IsZero() && !r.end.Before(c.f.stopping)
}

// waiting is the state of a container that has not been launched.
func (c *containers) waiting(spec *v1.Container) *v1.ContainerStateWaiting {
	w := *c.wait
	h, held := c.o.Held[spec.Name]
	switch p := c.f.pulls[spec.Name]; {
	case c.end != nil && c.end.reason != "":
		// kubectl get shows this word rather than the pod's.
		w.Reason, w.Message = c.end.reason, c.end.message
	case held && h.image == spec.Image:
		w.Reason, w.Message = h.Reason, h.Message
	case p != nil && p.never:
		w.Reason, w.Message = "ErrImageNeverPull", neverPull(spec.Image)
	case p != nil && p.failed:
		w.Reason, w.Message = "ErrImagePull", c.o.pullError(spec.Name)
		if p.waiting {
			w.Reason, w.Message = "ImagePullBackOff", fmt.Sprintf("Back-off pulling image %q: ErrImagePull: %s", spec.Image, w.Message)
		}
	}
	return &w
}

// pullError is what a runtime said of an image that it could not bring: its last
// words, which begin with FATAL.
func (o *observed) pullError(container string) string {
	text := strings.TrimSpace(o.text(container+".pull", ""))
	if i := strings.LastIndex(text, "FATAL:"); i >= 0 {
		text = strings.TrimSpace(text[i+len("FATAL:"):])
	}
	return cmp.Or(text, "the image cannot be pulled")
}

// neverPull is the kubelet's word on an image that is not there.
func neverPull(image string) string {
	return fmt.Sprintf("Container image %q is not present with pull policy of Never", image)
}

// mountError is what is wrong with a volume that should be on the compute node.
func (o *observed) mountError(volume string) string {
	return o.text(volume+".mount", fmt.Sprintf("MountVolume.SetUp failed for volume %q", volume))
}

// creating is the waiting reason of containers that the job has not come to.
func creating(pod *v1.Pod) string {
	if len(pod.Spec.InitContainers) > 0 {
		return "PodInitializing"
	}
	return "ContainerCreating"
}

func (c *containers) id(name string, attempt int32) string {
	return fmt.Sprintf("apptainer://%s/%s/%d", c.pod.UID, name, attempt)
}

func (c *containers) terminated(name string, r *run) *v1.ContainerStateTerminated {
	t := &v1.ContainerStateTerminated{
		ExitCode:    r.exit(),
		Reason:      "Error",
		StartedAt:   metav1.Time{Time: r.start},
		FinishedAt:  metav1.Time{Time: r.end},
		ContainerID: c.id(name, r.attempt),
	}
	if r.message {
		t.Message = c.o.text(fmt.Sprintf("%s.%d", name, r.attempt), "")
		// All of a pod's messages together are bounded too (normalizeStatus in
		// pkg/kubelet/status/status_manager.go).
		n := len(c.pod.Spec.InitContainers) + len(c.pod.Spec.Containers) + len(c.pod.Spec.EphemeralContainers)
		t.Message = shortened(t.Message, messagesLimit/max(n, 1))
	}
	outOfMemory := c.o.class() == ended && c.o.Job.State == "OUT_OF_MEMORY"
	alone := len(c.pod.Spec.InitContainers)+len(c.pod.Spec.Containers) == 1
	switch {
	case r.oom, outOfMemory && t.ExitCode == oomCode:
		t.Reason = "OOMKilled"
	case outOfMemory && t.ExitCode == 0 && alone && !r.end.IsZero():
		t.Reason, t.ExitCode = "OOMKilled", oomCode
	case t.ExitCode == 0:
		t.Reason = "Completed"
	case r.unmounted:
		t.Reason = "CreateContainerConfigError"
	}
	return t
}

const (
	textLimit     = 4096      // of one text in msg/, as the kubelet's for a termination message
	messagesLimit = 12 * 1024 // of a pod's termination messages together
)

// text is what a file in msg/ holds, or else another text.
func (o *observed) text(name, otherwise string) string {
	if text := o.Messages[name]; text != "" {
		return shortened(text, textLimit)
	}
	return otherwise
}

// shortened is at most n bytes of a text, in valid UTF-8.
func shortened(text string, n int) string {
	text = strings.ToValidUTF8(strings.ReplaceAll(text, "\x00", "?"), "?")
	if len(text) <= n {
		return text
	}
	return strings.ToValidUTF8(text[:n], "")
}

// ephemeral makes the statuses of ephemeral containers. A kubelet neither probes
// nor restarts them, and says of none that it has started or is ready.
func (c *containers) ephemeral(old []v1.ContainerStatus) []v1.ContainerStatus {
	var specs []v1.Container
	for i := range c.pod.Spec.EphemeralContainers {
		specs = append(specs, *asContainer(&c.pod.Spec.EphemeralContainers[i]))
	}
	list := c.statuses(specs, old, false)
	for i := range list {
		list[i].Started, list[i].Ready = nil, false
	}
	return list
}

func isSidecar(c *v1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == v1.ContainerRestartPolicyAlways
}

// mayRestart says whether a container that ended with that code may be started
// again: by its own rules, its own restart policy, or the pod's
// (ContainerShouldRestart in pkg/api/v1/pod).
func mayRestart(c *v1.Container, spec *v1.PodSpec, code int32) bool {
	for _, other := range slices.Concat(spec.InitContainers, spec.Containers) {
		for _, rule := range other.RestartPolicyRules {
			if rule.Action == v1.ContainerRestartRuleActionRestartAllContainers {
				return true
			}
		}
	}
	policy := spec.RestartPolicy
	if c.RestartPolicy != nil {
		for _, rule := range c.RestartPolicyRules {
			if on := rule.ExitCodes; on != nil && slices.Contains(on.Values, code) == (on.Operator == v1.ContainerRestartRuleOnExitCodesOpIn) {
				return true
			}
		}
		policy = v1.RestartPolicy(*c.RestartPolicy)
	}
	switch policy {
	case v1.RestartPolicyNever:
		return false
	case v1.RestartPolicyOnFailure:
		return code != 0
	}
	return true
}
