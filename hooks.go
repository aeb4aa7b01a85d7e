package knoc

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// hookArgv is a hook as one simple command of pod.sh; $1 of a preStop hook is how
// many seconds it may take. Programs are run as they are written: the kubelet
// expands no $(VAR) in them either. HTTP hooks are run/probe.sh's.
func hookArgv(c *v1.Container, kind string, h *v1.LifecycleHandler) []word {
	if h == nil {
		return nil
	}
	var argv []word
	if kind == "pre" {
		argv = append(argv, "timeout", "-k", "1", `"$1"`)
	}
	switch {
	case h.Exec != nil:
		argv = append(argv, "sh", "run/enter.sh", word(c.Name), "--")
		for _, s := range h.Exec.Command {
			argv = append(argv, quote(s))
		}
	case h.Sleep != nil:
		argv = []word{"sleep", word(strconv.FormatInt(max(0, h.Sleep.Seconds), 10))}
	default:
		argv = append(argv, "sh", "run/probe.sh", "--hook", word(c.Name), word(kind))
	}
	return argv
}

// hooks checks the hooks of all containers.
func (k *checker) hooks(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		for _, h := range containerHooks(c) {
			switch {
			case h.LifecycleHandler == nil:
			case h.Exec == nil && h.Sleep == nil && h.HTTPGet == nil && h.TCPSocket == nil:
				k.refuse("InvalidPod", "container %s: %s has no handler; give it exec, httpGet or sleep", c.Name, h.Field)
			case h.Exec != nil && len(h.Exec.Command) == 0:
				k.refuse("InvalidPod", "container %s: %s.exec has no command", c.Name, h.Field)
			}
		}
	}
}

// messagePath is where a container leaves its termination message.
func messagePath(c *v1.Container) string {
	if c.TerminationMessagePath == "" {
		return v1.TerminationMessagePathDefault
	}
	return path.Clean(c.TerminationMessagePath)
}

// messageMount is the file for a container's termination message, in the
// container. A volume at that path has its place, as with a kubelet; in a volume
// that lies around it the runtime makes an empty file to mount it at.
func messageMount(c *v1.Container, mounts []mount) []mount {
	at := messagePath(c)
	if slices.ContainsFunc(mounts, func(m mount) bool { return m.Target == at }) {
		return mounts
	}
	return append(mounts, mount{Source: "msg/" + c.Name, Target: at})
}

// messages checks the paths of termination messages.
func (k *checker) messages(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		if err := checkMessagePath(pod, c); err != nil {
			k.refuse("UnsupportedField", "container %s: terminationMessagePath: %v", c.Name, err)
		}
		switch c.TerminationMessagePolicy {
		case "", v1.TerminationMessageReadFile, v1.TerminationMessageFallbackToLogsOnError:
		default:
			k.refuse("InvalidPod", "container %s: terminationMessagePolicy: %q: must be File or FallbackToLogsOnError", c.Name, c.TerminationMessagePolicy)
		}
	}
}

func checkMessagePath(pod *v1.Pod, c *v1.Container) error {
	at := messagePath(c)
	if !strings.HasPrefix(at, "/") || at == "/" || strings.ContainsFunc(at, func(r rune) bool { return r < ' ' || r == 0x7f || strings.ContainsRune(`:,"\`, r) }) {
		return fmt.Errorf("%q is not supported; use an absolute path without : , \" \\ and control characters", c.TerminationMessagePath)
	}
	mounts, err := mountsOf(pod, c)
	if err != nil {
		return nil // said elsewhere
	}
	if slices.ContainsFunc(mounts, func(m mount) bool { return m.Target == at }) || inside(at, mounts) {
		return nil
	}
	if why := checkDev(at, false); why != "" {
		return fmt.Errorf("%q is not supported: %s; use another path", at, why)
	}
	return nil
}
