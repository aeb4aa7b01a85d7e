package knoc

import (
	"path"
	"regexp"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// The runtime makes a small /dev for a container, in memory, and mounts nothing
// at a name that is not in it, such as the /dev/termination-log that every pod
// has by default. So a directory of the node's scratch takes its place, in which
// files and directories can be made: the runtime's own is mounted at .d in it, and
// its devices are links to there (see devices in pod.scratch.tmpl).

// runtimeDevices are the names in the runtime's /dev.
var runtimeDevices = []string{"fd", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"}

// plainPath is a relative path that needs no quotes in a script or in CSV.
var plainPath = regexp.MustCompile(`^[A-Za-z0-9_@+][A-Za-z0-9._@+-]*(/[A-Za-z0-9_@+][A-Za-z0-9._@+-]*)*$`)

// belowDev is what follows /dev/ in a path.
func belowDev(at string) (rest string, ok bool) { return strings.CutPrefix(at, "/dev/") }

// noDev is the event's text for a pod whose message cannot be read.
const noDev = "a terminationMessagePath below /dev cannot be read on the compute node: its container runtime is a set-uid install, or does not tell its SESSIONDIR; use a path elsewhere"

// devFiles are what a container has in a /dev of its own: the file of its
// termination message (” for none), then directories. It has the runtime's alone
// if there are none.
func devFiles(c *v1.Container, mounts []mount) []word {
	message := word(quote(""))
	var directories []word
	for _, m := range mounts {
		rest, ok := belowDev(m.Target)
		switch {
		case !ok || !plainPath.MatchString(rest) || inside(m.Target, mounts):
		case m.Source == "msg/"+c.Name:
			message = word(rest)
		default:
			directories = append(directories, word(rest))
		}
	}
	others := slices.ContainsFunc(directories, func(d word) bool { return !slices.Contains(runtimeDevices, string(d)) })
	if message == word(quote("")) && !others {
		return nil // what is mounted there has its place
	}
	return append([]word{message}, directories...)
}

// devOf are the devFiles of a container; nil also for one that is refused.
func devOf(pod *v1.Pod, c *v1.Container) []word {
	mounts, err := mountsOf(pod, c)
	if err != nil {
		return nil
	}
	return devFiles(c, messageMount(c, mounts))
}

// devMounts are the runtime's options for a /dev of the container's own.
func devMounts(c *v1.Container) word {
	return ifDev(`--mount type=bind,source="$scratch/` + c.Name + `/dev",destination=/dev --mount type=bind,source="$session/dev",destination=/dev/.d`)
}

// ifDev are words for where a container can have a /dev of its own.
func ifDev(words string) word { return word("${session:+" + words + "}") }

// inside says whether a path lies in what is mounted somewhere.
func inside(at string, mounts []mount) bool {
	return slices.ContainsFunc(mounts, func(m mount) bool { return strings.HasPrefix(at, m.Target+"/") })
}

// devices checks what is mounted below /dev.
func (k *checker) devices(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		mounts, err := mountsOf(pod, c)
		if err != nil {
			continue // said elsewhere
		}
		for _, m := range mounts {
			if why := checkDev(m.Target, true); why != "" && !inside(m.Target, mounts) {
				k.refuse("UnsupportedVolume", "container %s: a volume cannot be mounted at %q: %s; use another path", c.Name, m.Target, why)
			}
		}
	}
}

// checkDev says why something cannot be mounted at a path below /dev, "" for
// that it can. What is mounted is a directory, or a file.
func checkDev(at string, directory bool) string {
	rest, ok := belowDev(at)
	if !ok && (at != "/dev" || directory) {
		return ""
	}
	first, _, deeper := strings.Cut(rest, "/")
	switch {
	case at == "/dev":
		return "it is a directory"
	case !plainPath.MatchString(rest):
		return "below /dev there can be names of letters, digits and . _ @ + - only"
	case !slices.Contains(runtimeDevices, first):
		return ""
	case directory && !deeper && (first == "shm" || first == "mqueue"):
		return ""
	}
	return path.Join("/dev", first) + " is the runtime's own"
}
