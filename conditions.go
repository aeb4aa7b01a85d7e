package knoc

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// setConditions sets the conditions that are a kubelet's, with its reasons and
// messages (pkg/kubelet/status/generate.go), and DisruptionTarget where the
// cluster took the job away. All others are left as they are.
func setConditions(pod *v1.Pod, s *v1.PodStatus, o *observed, f *facts, end *podEnd) {
	// A condition changed when the facts did, which may be long before they were
	// read.
	at := f.last
	if o.class() == ended && o.Job.End.After(at) {
		at = o.Job.End
	}
	if at.IsZero() {
		at = pod.CreationTimestamp.Time
	}
	set := func(kind v1.PodConditionType, status bool, reason, message string) {
		c := v1.PodCondition{
			Type: kind, Status: v1.ConditionFalse, Reason: reason, Message: message,
			ObservedGeneration: pod.Generation, LastTransitionTime: metav1.Time{Time: at},
		}
		if status {
			c.Status = v1.ConditionTrue
		}
		for i := range s.Conditions {
			if old := &s.Conditions[i]; old.Type == kind {
				if old.Status == c.Status || old.LastTransitionTime.After(at) {
					c.LastTransitionTime = old.LastTransitionTime
				}
				c.LastProbeTime = old.LastProbeTime
				*old = c
				return
			}
		}
		s.Conditions = append(s.Conditions, c)
	}
	isTrue := func(c v1.PodCondition) bool { return c.Status == v1.ConditionTrue }

	if end != nil && end.disruption && !slices.ContainsFunc(s.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.DisruptionTarget && isTrue(c) // somebody else's, with another reason
	}) {
		set(v1.DisruptionTarget, true, end.reason, end.message)
	}
	set(v1.PodReadyToStartContainers, !f.last.IsZero() && end == nil, "", "")

	done, reason, message := initialized(pod, s, f)
	set(v1.PodInitialized, done, reason, message)

	ready, reason, message := containersReady(pod, s)
	set(v1.ContainersReady, ready, reason, message)
	if ready {
		if missing := missingGates(pod, s); len(missing) > 0 {
			ready, reason, message = false, "ReadinessGatesNotReady", strings.Join(missing, ", ")
		}
	}
	set(v1.PodReady, ready, reason, message)
}

func initialized(pod *v1.Pod, s *v1.PodStatus, f *facts) (bool, string, string) {
	if s.Phase == v1.PodSucceeded {
		return true, "PodCompleted", ""
	}
	for _, c := range pod.Spec.Containers {
		if f.launched(&c) != nil {
			return true, "", "" // app containers start only after that
		}
	}
	var missing []string
	for i, c := range s.InitContainerStatuses {
		if isSidecar(&pod.Spec.InitContainers[i]) && !*c.Started || !isSidecar(&pod.Spec.InitContainers[i]) && !c.Ready {
			missing = append(missing, c.Name)
		}
	}
	if len(missing) > 0 {
		return false, "ContainersNotInitialized", fmt.Sprintf("containers with incomplete status: %s", missing)
	}
	return true, "", ""
}

func containersReady(pod *v1.Pod, s *v1.PodStatus) (bool, string, string) {
	switch s.Phase {
	case v1.PodSucceeded:
		return false, "PodCompleted", ""
	case v1.PodFailed:
		return false, "PodFailed", ""
	}
	var unready []string
	for i, c := range s.InitContainerStatuses {
		if isSidecar(&pod.Spec.InitContainers[i]) && !c.Ready {
			unready = append(unready, c.Name)
		}
	}
	for _, c := range s.ContainerStatuses {
		if !c.Ready {
			unready = append(unready, c.Name)
		}
	}
	if len(unready) > 0 {
		return false, "ContainersNotReady", fmt.Sprintf("containers with unready status: %s", unready)
	}
	return true, "", ""
}

// missingGates are the sentences about readiness gates that are not True.
func missingGates(pod *v1.Pod, s *v1.PodStatus) []string {
	var missing []string
	for _, gate := range pod.Spec.ReadinessGates {
		i := slices.IndexFunc(s.Conditions, func(c v1.PodCondition) bool { return c.Type == gate.ConditionType })
		switch {
		case i < 0:
			missing = append(missing, fmt.Sprintf("corresponding condition of pod readiness gate %q does not exist.", gate.ConditionType))
		case s.Conditions[i].Status != v1.ConditionTrue:
			missing = append(missing, fmt.Sprintf("the status of pod readiness gate %q is not \"True\", but %v", gate.ConditionType, s.Conditions[i].Status))
		}
	}
	return missing
}
