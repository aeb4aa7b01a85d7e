package knoc

import (
	"strconv"
	"strings"
	"time"
)

// event is one line of a journal: a fact that pod.sh appended on the compute node.
type event struct {
	Time time.Time
	Word string   // claim, host, start, exit, backoff, stopping, ack, done
	Args []string // fixed words, container names, integers, addresses
}

// journalArgs are the arguments of each word of a journal: w is any word, n an
// integer, c an exit code, b 0 or 1; * repeats the one before it any number of
// times, also none.
var journalArgs = map[string]string{
	"claim":    "n",   // job id
	"host":     "ww*", // host name, addresses
	"start":    "wn",  // container, attempt
	"exit":     "wnc", // container, attempt, exit code
	"backoff":  "wnn", // container, attempt that ended, seconds
	"stopping": "n",   // grace seconds
	"ack":      "n",   // sequence number of a command
	"done":     "b",   // 0: every app container's last run ended 0
}

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
