package knoc

import (
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// stopSignals are the signals that the runtime hands on to a container, by
// number: shells know them by different names. The others are for the runtime
// itself, or stop a process for a while.
var stopSignals = map[string]int{
	"HUP": 1, "INT": 2, "QUIT": 3, "ILL": 4, "TRAP": 5, "ABRT": 6, "IOT": 6, "BUS": 7, "FPE": 8, "KILL": 9, "USR1": 10, "SEGV": 11,
	"USR2": 12, "PIPE": 13, "ALRM": 14, "TERM": 15, "STKFLT": 16, "XCPU": 24, "XFSZ": 25, "VTALRM": 26, "WINCH": 28,
	"IO": 29, "POLL": 29, "PWR": 30, "SYS": 31,
}

// stopNumber is a signal's on Linux; 0 for one that no container can be stopped by.
func stopNumber(s v1.Signal) int {
	name := strings.TrimPrefix(string(s), "SIG")
	for from, base := range map[string]int{"RTMIN+": 34, "RTMAX-": 64} {
		if text, ok := strings.CutPrefix(name, from); ok {
			switch n, err := strconv.Atoi(text); {
			case err != nil || n < 1 || n > 15 || n == 15 && base == 64:
				return 0
			case base == 64:
				return base - n
			default:
				return base + n
			}
		}
	}
	if name == "RTMAX" {
		return 64
	}
	return stopSignals[name]
}

// stopSignal is the number of the signal that a container names for its stop; 0
// for TERM.
func stopSignal(c *v1.Container) int {
	if c.Lifecycle == nil || c.Lifecycle.StopSignal == nil {
		return 0
	}
	n := stopNumber(*c.Lifecycle.StopSignal)
	if n == 15 {
		return 0
	}
	return n
}

// signals checks the signals that containers name for their stop.
func (k *checker) signals(pod *v1.Pod) {
	for _, c := range allContainers(pod) {
		if l := c.Lifecycle; l != nil && l.StopSignal != nil && stopNumber(*l.StopSignal) == 0 {
			k.refuse("UnsupportedField", "container %s: lifecycle.stopSignal: %q is not supported: the runtime does not hand it on; use another, such as SIGTERM, SIGINT, SIGQUIT or SIGUSR1", c.Name, *l.StopSignal)
		}
	}
}
