package knoc

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// podEvent is an event about a pod, or about one of its containers.
type podEvent struct {
	container             string // "" for the pod
	kind, reason, message string
}

// tell writes what became known of a pod since the last time as events. Each
// comes once: told counts the journal's events that were looked at. After a
// restart of knoc the journal is read again from its beginning; what of it the
// status in the API server shows already was told before (see shown). A knoc
// that dies between the two may tell an event twice.
func (l *loop) tell(w *work, now time.Time) {
	if l.api == nil || w.pod == nil {
		return
	}
	if w.jobID != "" && !w.reported {
		w.reported = true
		l.event(w, v1.EventTypeNormal, "Submitted", "Submitted as Slurm job "+w.jobID+inPartition(l.cfg.Partition))
		w.notified = time.Time{}
	}
	l.tellQueued(w, now)
	if w.told >= len(w.events) {
		return
	}
	var was *shown
	if w.told < w.adopted {
		was = shownBy(&w.pod.Status)
	}
	o := w.view("")
	for i, list := range eventsOf(w.pod, &o, w.events, w.told) {
		e := w.events[w.told+i]
		if w.told+i < w.adopted && (was.has(e) || e.Word == "unhealthy" && now.Sub(e.Time) > time.Minute) {
			continue
		}
		for _, x := range list {
			l.api.Event(w.pod, x.container, x.kind, x.reason, x.message)
		}
	}
	w.told = len(w.events)
}

const (
	// The API server's clients drop a pod's events past 25, and then past one in
	// 5 minutes (EventSourceObjectSpamFilter in client-go): a job whose reason
	// changes all day must not use that up before the pod has started.
	queuedAtOnce = 4
	queuedEvery  = 10 * time.Minute
)

// tellQueued tells why the job waits, whenever Slurm's reason changes.
func (l *loop) tellQueued(w *work, now time.Time) {
	if w.jobID == "" || w.job.class() != queued || w.job.State == "CONFIGURING" {
		return
	}
	text := w.job.waiting()
	if w.queued == "" && slices.ContainsFunc(w.pod.Status.ContainerStatuses, func(c v1.ContainerStatus) bool {
		return c.State.Waiting != nil && c.State.Waiting.Message == text
	}) {
		w.queued = text // told by the knoc before this one
	}
	if text == w.queued || w.queuedTimes >= queuedAtOnce && now.Before(w.queuedAt.Add(queuedEvery)) {
		return
	}
	w.queued, w.queuedAt = text, now
	w.queuedTimes++
	l.event(w, v1.EventTypeNormal, "Queued", "Slurm "+text)
}

// eventsOf are the events that a kubelet would write for a journal from one of
// its entries on, a list for each entry. Reasons and texts are the kubelet's
// (pkg/kubelet/events, kuberuntime, images, prober).
func eventsOf(pod *v1.Pod, o *observed, journal []event, from int) [][]podEvent {
	var lists [][]podEvent
	pulled := map[string]bool{} // since the container's last start
	ran := map[string]int32{}   // the last attempt that started
	for i, e := range journal {
		var list []podEvent
		var name string
		if len(e.Args) > 0 {
			name = e.Args[0]
		}
		c := anyContainer(pod, name)
		say := func(kind, reason, form string, args ...any) {
			list = append(list, podEvent{name, kind, reason, fmt.Sprintf(form, args...)})
		}
		switch {
		case e.Word == "deadline":
			list = append(list, podEvent{"", v1.EventTypeNormal, "DeadlineExceeded", deadlineText})
		case e.Word == "timelimit":
			list = append(list, podEvent{"", v1.EventTypeWarning, slurmStates["TIMEOUT"].reason, o.Job.String() + " is about to reach its time limit"})
		case e.Word == "noids":
			list = append(list, podEvent{"", v1.EventTypeWarning, noSubIDs, withoutIDs(name)})
		case e.Word == "nodev":
			list = append(list, podEvent{"", v1.EventTypeWarning, "NoTerminationMessage", noDev})
		case e.Word == "full":
			list = append(list, podEvent{"", v1.EventTypeWarning, "Evicted", evicted(pod, name)})
		case e.Word == "nomount":
			list = append(list, podEvent{"", v1.EventTypeWarning, "FailedMount", o.mountError(name)})
		case c == nil:
			// a word about the whole pod, or about none of its containers
		case e.Word == "pull":
			say(v1.EventTypeNormal, "Pulling", "Pulling image %q", c.Image)
		case e.Word == "pulled":
			pulled[name] = true
			took := time.Duration(e.num(1)) * time.Millisecond
			text := fmt.Sprintf("Successfully pulled image %q in %v", c.Image, took)
			if len(e.Args) > 3 {
				text += fmt.Sprintf(" (%v including waiting). Image size: %d bytes.", time.Duration(e.num(2))*time.Millisecond, int64(e.num(3))<<10)
			}
			say(v1.EventTypeNormal, "Pulled", "%s", text)
		case e.Word == "pullfailed":
			say(v1.EventTypeWarning, "Failed", "Failed to pull image %q: %s", c.Image, o.pullError(name))
			say(v1.EventTypeWarning, "Failed", "Error: ErrImagePull")
		case e.Word == "neverpull":
			say(v1.EventTypeWarning, "ErrImageNeverPull", "%s", neverPull(c.Image))
			say(v1.EventTypeWarning, "Failed", "Error: ErrImageNeverPull")
		case e.Word == "pullwait":
			say(v1.EventTypeNormal, "BackOff", "Back-off pulling image %q", c.Image)
			say(v1.EventTypeWarning, "Failed", "Error: ImagePullBackOff")
		case e.Word == "start":
			if !pulled[name] {
				say(v1.EventTypeNormal, "Pulled", "Container image %q already present on machine and can be accessed by the pod", c.Image)
			}
			pulled[name], ran[name] = false, e.num(1)
			say(v1.EventTypeNormal, "Created", "Container created")
			say(v1.EventTypeNormal, "Started", "Container started")
		case e.Word == "unmounted":
			say(v1.EventTypeWarning, "Failed", "Error: %s", o.text(e.text(), "CreateContainerConfigError"))
		case e.Word == "backoff":
			if n, ok := ran[name]; !ok || n != e.num(1) {
				say(v1.EventTypeNormal, "BackOff", "Back-off pulling image %q", c.Image)
				say(v1.EventTypeWarning, "Failed", "Error: ImagePullBackOff")
				break
			}
			say(v1.EventTypeWarning, "BackOff", "Back-off restarting failed container %s in pod %s_%s(%s)", name, pod.Name, pod.Namespace, pod.UID)
		case e.Word == "unhealthy" && e.num(3) == 0:
			say(v1.EventTypeWarning, "ProbeWarning", "%s probe warning: %s", capital(e.Args[2]), o.text(e.text(), ""))
		case e.Word == "unhealthy":
			say(v1.EventTypeWarning, "Unhealthy", "%s probe failed: %s", capital(e.Args[2]), o.text(e.text(), ""))
		case e.Word == "hook" && e.num(3) != 0 && e.Args[2] == "post":
			say(v1.EventTypeWarning, "FailedPostStartHook", "PostStartHook failed")
		case e.Word == "hook" && e.num(3) != 0:
			say(v1.EventTypeWarning, "FailedPreStopHook", "PreStopHook failed")
		case e.Word == "kill":
			say(v1.EventTypeNormal, "Killing", "%s", killing(pod, c, e.Args[2]))
		}
		if i >= from {
			lists = append(lists, list)
		}
	}
	return lists
}

// killing is why a container is ended.
func killing(pod *v1.Pod, c *v1.Container, why string) string {
	subject := "Container " + c.Name
	policy := pod.Spec.RestartPolicy
	if c.RestartPolicy != nil {
		policy = v1.RestartPolicy(*c.RestartPolicy)
	}
	after := ", will be restarted"
	if policy == v1.RestartPolicyNever && why != "update" {
		after = ""
	}
	if slices.ContainsFunc(pod.Spec.InitContainers, func(i v1.Container) bool { return i.Name == c.Name }) {
		subject, after = "Init container "+c.Name, ""
	}
	switch why {
	case "liveness", "startup":
		return subject + " failed " + why + " probe" + after
	case "update":
		return subject + " definition changed" + after
	case "hook":
		return "FailedPostStartHook"
	}
	return "Stopping container " + c.Name
}

func capital(word string) string { return strings.ToUpper(word[:1]) + word[1:] }

// anyContainer finds a container of a pod, an ephemeral one too; nil for none.
func anyContainer(pod *v1.Pod, name string) *v1.Container {
	for i := range pod.Spec.EphemeralContainers {
		if c := (*v1.Container)(&pod.Spec.EphemeralContainers[i].EphemeralContainerCommon); c.Name == name {
			return c
		}
	}
	return containerOf(pod, name)
}

// fieldPath is how an event names a container, as the kubelet's.
func fieldPath(pod *v1.Pod, container string) string {
	for _, c := range pod.Spec.InitContainers {
		if c.Name == container {
			return "spec.initContainers{" + container + "}"
		}
	}
	for _, c := range pod.Spec.EphemeralContainers {
		if c.Name == container {
			return "spec.ephemeralContainers{" + container + "}"
		}
	}
	return "spec.containers{" + container + "}"
}

// shown is how much of a journal a status shows: the attempts of its containers
// by number, all else by the newest of its times, which are the journal's.
type shown struct {
	terminal bool
	until    time.Time
	attempts map[string]int32
	waits    map[string]bool // for the next attempt
}

func shownBy(s *v1.PodStatus) *shown {
	n := &shown{terminalPhase(s.Phase), time.Time{}, map[string]int32{}, map[string]bool{}}
	later := func(t metav1.Time) {
		if t.After(n.until) {
			n.until = t.Time
		}
	}
	for _, c := range s.Conditions {
		if slices.Contains(ownConditions, c.Type) {
			later(c.LastTransitionTime)
		}
	}
	for _, c := range slices.Concat(s.InitContainerStatuses, s.ContainerStatuses, s.EphemeralContainerStatuses) {
		if attempt, err := strconv.ParseInt(c.ContainerID[strings.LastIndexByte(c.ContainerID, '/')+1:], 10, 32); err == nil {
			n.attempts[c.Name] = int32(attempt)
		}
		n.waits[c.Name] = c.State.Waiting != nil
		for _, state := range []v1.ContainerState{c.State, c.LastTerminationState} {
			if state.Running != nil {
				later(state.Running.StartedAt)
			}
			if state.Terminated != nil {
				later(state.Terminated.StartedAt)
				later(state.Terminated.FinishedAt)
			}
		}
	}
	return n
}

// has says that the status shows what the event of the journal says.
func (n *shown) has(e event) bool {
	if n.terminal {
		return true
	}
	switch e.Word {
	case "start", "backoff", "unhealthy", "hook", "kill", "unmounted":
		attempt, ok := n.attempts[e.Args[0]]
		switch {
		case !ok || e.num(1) > attempt:
			return false
		case e.num(1) < attempt || e.Word == "start":
			return true
		case e.Word == "backoff":
			return n.waits[e.Args[0]]
		}
	}
	return !e.Time.After(n.until)
}
