package knoc

import (
	"net/netip"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
)

// facts are a journal read as a whole.
type facts struct {
	claimed  time.Time
	stopping time.Time // when the job was first told to stop
	// deadline is when activeDeadlineSeconds ran out, timelimit when Slurm's own
	// limit was about to end the job.
	deadline, timelimit time.Time
	last                time.Time // of the last event
	ips                 []string
	runs                map[string]*runs // by container
	pulls               map[string]*pull // by container
	oomExplained        bool             // a run that the kernel killed for memory is too old to be here
	oomUnclear          bool             // it killed a process of one of several containers
	images              map[string]int32 // by container: which one its next run has
	digests             map[string]event // by container: of its newest run's image
	ended               bool             // the journal has its end
	code                int32            // of done
	full                string           // an emptyDir that became too large
	unmounted           string           // a volume that the node lacks
	noids               string           // what the node lacks for user ids of the pod's own
	noshare             bool             // no common process namespace could be made
}

// runs are the newest run of a container and the one before.
type runs struct {
	run
	before  *run
	skipped int32 // attempts whose image could not be pulled: they are no restarts
}

// run is one attempt of a container.
type run struct {
	attempt    int32
	image      int32     // 0: the one of pod.sh; see update.go
	start, end time.Time // end is zero while it runs
	code       int32
	backoff    time.Duration // until the next run; zero: none was announced
	hooked     bool          // its postStart hook has ended well
	started    bool          // its startup probe has passed
	ready      bool          // as its readiness probe found last
	turns      string        // the file in msg/ that has it; "": the journal
	oom        bool          // the kernel killed a process of it for memory
	message    bool          // it left a termination message
	killed     string        // why its supervisor ended it, "" for not at all
	unmounted  bool          // it never ran, for want of a mount; the message says more
	unpulled   bool          // it never ran, for its image could not be pulled
}

// exit is the code it ended with. A kubelet's container dies as a whole when
// the kernel kills one process of it for memory (memory.oom.group); here the
// others live on and may well end with 0, with their work done by half.
func (r *run) exit() int32 {
	if r.oom && r.code == 0 {
		return oomCode
	}
	return r.code
}

// pull is the bringing of a container's image.
type pull struct {
	failed   bool // the last try did
	trying   bool // one is under way
	waiting  bool // for the next one, after a while
	never    bool // the image is not there and must not be pulled
	failures int
}

const (
	// unknownCode is the exit code of a container whose own is not known, as the
	// kubelet's (TerminatePod in pkg/kubelet/status/status_manager.go).
	unknownCode = 137
	// oomCode is that of a process that the kernel killed.
	oomCode = 137
)

func newFacts(journal []event) *facts {
	f := &facts{runs: map[string]*runs{}, pulls: map[string]*pull{}, images: map[string]int32{}, digests: map[string]event{}}
	defer f.blame()
	for _, e := range journal {
		f.last = e.Time
		switch e.Word {
		case "claim":
			f.claimed = e.Time
		case "host":
			if len(e.Args) > 0 {
				f.ips = e.Args[1:]
			}
		case "pull", "pulled", "pullfailed", "pullwait", "neverpull":
			f.pulling(e)
		case "digest":
			f.digests[e.Args[0]] = e
		case "image":
			f.images[e.Args[0]] = e.num(1)
		case "start":
			f.begin(e)
		case "exit":
			// An exit whose start was not readable shows that there was one,
			// unless it is that of an attempt which got no image.
			known := f.of(e) != nil
			f.begin(e)
			if r := f.of(e); r != nil && r.end.IsZero() {
				r.end, r.code = e.Time, e.num(2)
				p := f.pulls[e.Args[0]]
				r.unpulled = !known && r.code != 0 && p != nil && p.failed
			}
		case "backoff":
			if r := f.of(e); r != nil && !r.end.IsZero() {
				r.backoff = time.Duration(e.num(2)) * time.Second
			}
		case "hook", "started", "ready", "turns", "kill", "oom", "message", "unmounted":
			if r := f.of(e); r != nil {
				r.note(e)
			}
		case "full":
			f.full = e.Args[0]
		case "nomount":
			f.unmounted = e.Args[0]
		case "noids":
			f.noids = e.Args[0]
		case "noshare":
			f.noshare = true
		case "stopping":
			f.stopping = firstTime(f.stopping, e.Time)
		case "deadline":
			f.deadline = firstTime(f.deadline, e.Time)
		case "timelimit":
			f.timelimit = firstTime(f.timelimit, e.Time)
		case "done":
			f.ended, f.code = true, e.num(0)
			return f
		}
	}
	return f
}

func firstTime(a, b time.Time) time.Time {
	if a.IsZero() {
		return b
	}
	return a
}

// note takes in a fact about this run.
func (r *run) note(e event) {
	switch e.Word {
	case "hook":
		if e.Args[2] == "post" && e.num(3) == 0 {
			r.hooked = true
		}
	case "started":
		r.started = true
	case "ready":
		r.ready = e.num(2) == 1
	case "turns":
		r.turns = e.text()
	case "kill":
		if r.killed == "" {
			r.killed = e.Args[2]
		}
	case "oom":
		r.oom = true
	case "message":
		r.message = true
	case "unmounted":
		r.unmounted = true
	}
}

// turn takes readiness from where it is kept when it changes all the time.
func (f *facts) turn(texts map[string]string) {
	for _, r := range f.runs {
		if r.turns != "" && texts[r.turns] != "" {
			r.ready = strings.HasPrefix(texts[r.turns], "1")
		}
	}
}

// blame decides whose the processes were that the kernel killed for memory. The
// containers of a job share their memory and one count of kills, so every run
// during which it rose is noted. Those that were killed themselves explain it,
// else those that failed. Of several that ended with 0 none can be told.
func (f *facts) blame() {
	var noted []*run
	worst := 0
	rank := func(r *run) int {
		switch r.code {
		case oomCode:
			return 3
		case 0:
			return 1
		}
		return 2
	}
	if f.oomExplained {
		worst = 3
	}
	for _, r := range f.runs {
		for _, r := range []*run{&r.run, r.before} {
			if r != nil && r.oom && !r.end.IsZero() {
				noted = append(noted, r)
				worst = max(worst, rank(r))
			}
		}
	}
	f.oomUnclear = worst == 1 && len(noted) > 1
	for _, r := range noted {
		if rank(r) < worst || f.oomUnclear {
			r.oom = false
		}
	}
}

// begin notes the run of a "start" or "exit", unless it is known already.
func (f *facts) begin(e event) {
	if len(e.Args) < 2 {
		return
	}
	r := f.runs[e.Args[0]]
	switch n := e.num(1); {
	case r == nil:
		f.runs[e.Args[0]] = &runs{run: run{attempt: n, image: f.images[e.Args[0]], start: e.Time}}
	case n > r.attempt:
		next := &runs{run: run{attempt: n, image: f.images[e.Args[0]], start: e.Time}, before: r.before, skipped: r.skipped}
		if before := r.run; before.unpulled {
			next.skipped++
		} else {
			if before.end.IsZero() {
				before.end, before.code = e.Time, unknownCode
			}
			next.before = &before
		}
		if old := r.before; old != nil && next.before != old && old.oom && old.code == oomCode {
			f.oomExplained = true
		}
		f.runs[e.Args[0]] = next
	}
}

// of is the run that the event is about, if it is one of the two that count.
func (f *facts) of(e event) *run {
	if len(e.Args) < 2 {
		return nil
	}
	r := f.runs[e.Args[0]]
	switch {
	case r == nil:
		return nil
	case r.attempt == e.num(1):
		return &r.run
	case r.before != nil && r.before.attempt == e.num(1):
		return r.before
	}
	return nil
}

func (f *facts) pulling(e event) {
	if len(e.Args) < 1 {
		return
	}
	p := f.pulls[e.Args[0]]
	if p == nil {
		p = &pull{}
		f.pulls[e.Args[0]] = p
	}
	p.trying = e.Word == "pull"
	switch e.Word {
	case "pulled":
		*p = pull{}
	case "pullfailed", "neverpull":
		p.failed, p.never, p.waiting = true, e.Word == "neverpull", false
		p.failures++
	case "pullwait":
		p.waiting = true
	}
}

// interrupted says that the job was told to stop though nobody deleted the pod.
// Its containers may well exit with 0 then, with their work undone.
func (f *facts) interrupted(pod *v1.Pod) bool {
	return pod.DeletionTimestamp == nil && !(f.stopping.IsZero() && f.deadline.IsZero() && f.timelimit.IsZero())
}

// terminating says that the pod is on its way to its end.
func (f *facts) terminating(pod *v1.Pod) bool {
	return pod.DeletionTimestamp != nil || f.interrupted(pod)
}

// killed: a container's last run ended as by SIGKILL, and nobody here did it.
func (f *facts) killed() bool {
	for _, r := range f.runs {
		if !r.end.IsZero() && r.code == oomCode && !r.oom && !r.unpulled && r.killed == "" {
			return true
		}
	}
	return false
}

// succeeded: every app container's last run ended with 0, and no init
// container's with another code. Sidecars do not count.
func (f *facts) succeeded(spec *v1.PodSpec) bool {
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		if r := f.runs[c.Name]; r != nil && r.exit() != 0 && !isSidecar(c) {
			return false
		}
	}
	for _, c := range spec.Containers {
		if r := f.runs[c.Name]; r == nil || r.end.IsZero() || r.exit() != 0 {
			return false
		}
	}
	return len(spec.Containers) > 0
}

// launched is the container's newest run, nil when none ever was.
func (f *facts) launched(c *v1.Container) *runs {
	if r := f.runs[c.Name]; r != nil && !(r.unpulled && r.before == nil) {
		return r
	}
	return nil
}

// up is the container's newest run, nil when a kubelet would still show it as
// being made: not before its postStart hook has ended.
func (f *facts) up(c *v1.Container) *runs {
	r := f.runs[c.Name]
	if r != nil && r.end.IsZero() && !r.hooked && c.Lifecycle != nil && c.Lifecycle.PostStart != nil {
		return nil
	}
	return r
}

// phase is the kubelet's getPhase for a pod whose work is not known to be over:
// Pending until every container has started, Running from then on. A sidecar
// that is starting again does not take a pod back to Pending.
func (f *facts) phase(spec *v1.PodSpec) v1.PodPhase {
	initialized := false
	for _, c := range spec.Containers {
		initialized = initialized || f.launched(&c) != nil
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		switch r := f.launched(c); {
		case r == nil, !isSidecar(c) && r.end.IsZero():
			return v1.PodPending
		case isSidecar(c) && r.end.IsZero() && !initialized && (f.up(c) == nil || c.StartupProbe != nil && !r.started):
			return v1.PodPending
		}
	}
	for i := range spec.Containers {
		c := &spec.Containers[i]
		if r := f.launched(c); r == nil || f.up(c) == nil && r.attempt == 0 {
			return v1.PodPending
		}
	}
	return v1.PodRunning
}

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
