package knoc

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// event is one line of a journal: a fact that pod.sh appended on the compute node.
type event struct {
	Time time.Time
	Word string   // one of journalArgs
	Args []string // fixed words, container names, integers, addresses
}

// journalArgs are the arguments of each word of a journal: w is any word, c a
// name that can be part of a file's, p a probe, h a hook, n an integer, x an exit
// code, b 0 or 1; * repeats the one before it any number of times, also none. What a container has
// to say is never here: it is in msg/, and these words tell where.
var journalArgs = map[string]string{
	"claim":      "n",    // job id
	"host":       "ww*",  // host name, addresses
	"pull":       "c",    // container whose image is being brought
	"pulled":     "cn*",  // container, milliseconds of the pull, and of all; KiB of the image
	"pullfailed": "cx",   // container, exit code; the text is in msg/<container>.pull
	"pullwait":   "cn",   // container, seconds until the next try
	"neverpull":  "c",    // container whose image is not there and must not be pulled
	"digest":     "cww",  // container, what of its image the sha256 is of (manifest or file), the sha256
	"image":      "cn",   // container, which of its images the next attempts have
	"start":      "cn",   // container, attempt
	"started":    "cn",   // container, attempt whose startup probe has passed
	"ready":      "cnb",  // container, attempt, by its readiness probe
	"turns":      "cn",   // container, attempt whose readiness is in msg/<container>.<attempt>.turn from here on
	"unhealthy":  "cnpn", // container, attempt, probe, failures in a row; msg/<container>.<attempt>.<probe>
	"hook":       "cnhx", // container, attempt, hook that ended, exit code
	"kill":       "cncn", // container, attempt, why it is being ended, grace seconds
	"oom":        "cn",   // container, attempt of which the kernel killed a process for memory
	"message":    "cn",   // container, attempt that left a termination message in msg/<container>.<attempt>
	"unmounted":  "cn",   // container, attempt that was not made, for want of a mount; the text is in msg/<container>.<attempt>
	"exit":       "cnx",  // container, attempt, exit code
	"backoff":    "cnn",  // container, attempt that ended, seconds
	"deadline":   "",     // activeDeadlineSeconds ran out
	"timelimit":  "",     // Slurm's time limit is about to end the job
	"stopping":   "n",    // grace seconds
	"ack":        "n",    // sequence number of a command
	"noids":      "w",    // what the node lacks for user ids of the pod's own
	"noshare":    "",     // the node lacks what a common process namespace needs
	"nodev":      "",     // nothing can be mounted below /dev
	"full":       "c",    // emptyDir that has become larger than its limit
	"nomount":    "c",    // volume that the node lacks; the text is in msg/<volume>.mount
	"done":       "b",    // 0: every app container's last run ended 0
}

// journalWords are the words that an argument p or h may be.
var journalWords = map[byte][]string{
	'p': {"startup", "readiness", "liveness"},
	'h': {"post", "pre"},
}

// fileWord is a name that may be part of a file's: as Kubernetes names
// containers, so that no journal can make knoc read another file than it should.
var fileWord = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)

// parseJournal reads a journal. A line that is none of its lines is skipped,
// and so is a last line without its end: it is still being written, or arrives
// in pieces through a network file system. Container names are the caller's to
// check.
func parseJournal(data []byte) []event {
	var events []event
	for line := range strings.Lines(string(data)) {
		line, whole := strings.CutSuffix(line, "\n")
		f := strings.Split(line, " ")
		if !whole || len(f) < 2 {
			continue
		}
		sec, err := strconv.ParseUint(f[0], 10, 40)
		shape, ok := journalArgs[f[1]]
		if err != nil || sec == 0 || !ok || !fits(f[2:], shape) {
			continue
		}
		events = append(events, event{time.Unix(int64(sec), 0), f[1], f[2:]})
	}
	return events
}

func fits(args []string, shape string) bool {
	if last, ok := strings.CutSuffix(shape, "*"); ok {
		// As many as there are beyond the one that repeats, which may be missing.
		shape = last[:len(last)-1] + strings.Repeat(last[len(last)-1:], max(0, len(args)-len(last)+1))
	}
	if len(args) != len(shape) {
		return false
	}
	for i, arg := range args {
		most := uint64(1<<31 - 1)
		switch shape[i] {
		case 'w':
			if arg == "" {
				return false
			}
			continue
		case 'c':
			if !fileWord.MatchString(arg) {
				return false
			}
			continue
		case 'p', 'h':
			if !slices.Contains(journalWords[shape[i]], arg) {
				return false
			}
			continue
		case 'x':
			most = 255
		case 'b':
			most = 1
		}
		// ParseUint takes no sign and, in base 10, no underscore.
		if n, err := strconv.ParseUint(arg, 10, 32); err != nil || n > most {
			return false
		}
	}
	return true
}

// num is an argument that parseJournal found to be an integer.
func (e event) num(i int) int32 {
	if i >= len(e.Args) {
		return 0
	}
	n, _ := strconv.ParseInt(e.Args[i], 10, 32)
	return int32(n)
}

// text is the name in msg/ of what a container or a tool had to say about this
// event, "" for none. What hooks print is there too, and never read: a kubelet
// does not show it either, since events are read by more people than logs.
func (e event) text() string {
	switch e.Word {
	case "message", "unmounted":
		return e.Args[0] + "." + strconv.Itoa(int(e.num(1)))
	case "unhealthy":
		return e.Args[0] + "." + strconv.Itoa(int(e.num(1))) + "." + e.Args[2]
	case "nomount":
		return e.Args[0] + ".mount"
	case "turns":
		return e.Args[0] + "." + strconv.Itoa(int(e.num(1))) + ".turn"
	case "pullfailed":
		return e.Args[0] + ".pull"
	}
	return ""
}
