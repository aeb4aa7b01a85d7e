package knoc

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

// having changes a container.
func having(c v1.Container, change func(*v1.Container)) v1.Container {
	change(&c)
	return c
}

func policy(p v1.ContainerRestartPolicy) func(*v1.Container) {
	return func(c *v1.Container) { c.RestartPolicy = &p }
}

func sidecar(name, script string) v1.Container {
	return having(shContainer(name, script), policy(v1.ContainerRestartPolicyAlways))
}

// order says in which order facts are to come; they need not be neighbours.
func (w *scriptRun) order(facts ...string) {
	w.t.Helper()
	got := w.facts("journal.0")
	at := 0
	for _, f := range facts {
		i := slices.Index(got[at:], f)
		if i < 0 {
			w.t.Errorf("no %q where it was expected, in %q\nstderr: %s", f, got, w.stderr.String())
			return
		}
		at += i + 1
	}
}

func (w *scriptRun) never(fact string) {
	w.t.Helper()
	if got := w.facts("journal.0"); slices.Contains(got, fact) {
		w.t.Errorf("%q is in %q", fact, got)
	}
}

// story is a pod's script that is run to its end under each shell.
type story struct {
	name       string
	policy     v1.RestartPolicy
	containers []v1.Container
	do         func(w *scriptRun)
	check      func(w *scriptRun)
	exit       int
	most       time.Duration // from do to the end; 0: it does not matter
	grace      int64         // 0: 30
}

func (s story) run(t *testing.T, shell []string) {
	pod := scriptPod(s.policy, s.containers...)
	if s.grace != 0 {
		pod.Spec.TerminationGracePeriodSeconds = &s.grace
	}
	w := stageScript(t, newBase(t), pod, nil)
	w.start(shell, "7")
	if s.do != nil {
		s.do(w)
	}
	began := time.Now()
	if code := w.end(); code != s.exit {
		t.Errorf("exit code %d, want %d; journal:\n%s\nstderr: %s", code, s.exit, w.read("journal.0"), w.stderr.String())
	}
	if took := time.Since(began); s.most > 0 && took > s.most {
		t.Errorf("it took %v to end, want at most %v; journal:\n%s", took, s.most, w.read("journal.0"))
	}
	s.check(w)
}

func tell(t *testing.T, stories []story) {
	t.Parallel()
	eachShell(t, func(t *testing.T, shell []string) {
		for _, s := range stories {
			t.Run(s.name, func(t *testing.T) {
				t.Parallel()
				s.run(t, shell)
			})
		}
	})
}

func TestPodScriptSidecars(t *testing.T) {
	// A sidecar that ends well by TERM, after a moment.
	slow := `trap 'echo bye; sleep 0.3; exit 0' TERM; echo up; while :; do sleep 0.05; done`
	tell(t, []story{
		{name: "in place and stopped in reverse", policy: v1.RestartPolicyNever,
			containers: []v1.Container{shContainer("i1", "sleep 0.2"), sidecar("i2", slow), shContainer("i3", "sleep 0.2"), sidecar("i4", slow), shContainer("a", "sleep 0.5"), shContainer("b", "sleep 0.5")},
			most:       15 * time.Second,
			check: func(w *scriptRun) {
				w.order("start i1 0", "exit i1 0 0", "start i2 0", "start i3 0", "exit i3 0 0", "start i4 0", "start a 0", "exit a 0 0", "kill i4 0 stop 30", "exit i4 0 0", "exit i2 0 0", "done 0")
				w.order("start i4 0", "start b 0", "exit b 0 0", "kill i4 0 stop 30", "done 0")
				for _, f := range w.facts("journal.0") {
					if strings.HasPrefix(f, "stopping") {
						w.t.Error("the end of the work is told as a stop")
					}
				}
				if i2, i4 := w.read("log/i2.0"), w.read("log/i4.0"); i2 != "up\nbye\n" || i4 != "up\nbye\n" {
					w.t.Errorf("logs %q %q", i2, i4)
				}
			}},
		{name: "restarted whenever they end", policy: v1.RestartPolicyNever,
			containers: []v1.Container{sidecar("i1", "exit 0"), sidecar("i2", "exit 3"), shContainer("a", "sleep 2")},
			check: func(w *scriptRun) {
				w.order("start i1 0", "exit i1 0 0", "backoff i1 0 1", "start i1 1", "exit i1 1 0", "done 0")
				w.order("start i2 0", "exit i2 0 3", "backoff i2 0 1", "start i2 1", "exit i2 1 3", "done 0")
			}},
		{name: "no word in the result", policy: v1.RestartPolicyNever,
			containers: []v1.Container{sidecar("i1", `trap 'exit 9' TERM; echo up; while :; do sleep 0.05; done`), shContainer("a", "sleep 0.5; exit 4")}, exit: 1,
			check: func(w *scriptRun) { w.order("exit a 0 4", "kill i1 0 stop 30", "exit i1 0 9", "done 1") }},
		{name: "after a failed init container", policy: v1.RestartPolicyNever,
			containers: []v1.Container{sidecar("i1", untilTerm), shContainer("i2", "sleep 0.3; exit 5"), sidecar("i3", untilTerm), shContainer("a", ":")}, exit: 1,
			check: func(w *scriptRun) {
				w.order("start i1 0", "exit i2 0 5", "exit i1 0 4", "done 1")
				w.never("start i3 0")
				w.never("start a 0")
			}},
		{name: "deaf ones within one grace period", policy: v1.RestartPolicyNever, grace: 3,
			containers: []v1.Container{sidecar("i1", ignoreAll), sidecar("i2", ignoreAll), shContainer("a", "sleep 0.5")},
			do:         func(w *scriptRun) { w.await("exit a 0 0") }, most: 9 * time.Second,
			check: func(w *scriptRun) { w.order("exit a 0 0", "kill i2 0 stop 3", "exit i2 0 137", "done 0") }},
		{name: "in a stop", policy: v1.RestartPolicyAlways,
			containers: []v1.Container{sidecar("i1", slow), sidecar("i2", slow), shContainer("a", `trap 'sleep 0.7; exit 0' TERM; echo up; while :; do sleep 0.1; done`)},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				w.signal(syscall.SIGTERM)
			}, most: 8 * time.Second,
			check: func(w *scriptRun) {
				w.order("stopping 30", "kill a 0 stop 30", "exit a 0 0", "exit i2 0 0", "exit i1 0 0", "done 0")
			}},
		{name: "in the init phase", policy: v1.RestartPolicyAlways,
			containers: []v1.Container{sidecar("i1", slow), shContainer("i2", untilTerm), shContainer("a", ":")}, exit: 1,
			do: func(w *scriptRun) {
				w.awaitLog("i2.0", "up")
				w.signal(syscall.SIGTERM)
			}, most: 5 * time.Second,
			check: func(w *scriptRun) {
				w.order("stopping 30", "kill i2 0 stop 30", "exit i2 0 4", "exit i1 0 0", "done 1")
				w.never("start a 0")
			}},
	})
}

func TestPodScriptOwnPolicies(t *testing.T) {
	rule := func(op v1.ContainerRestartRuleOnExitCodesOperator, codes ...int32) func(*v1.Container) {
		return func(c *v1.Container) {
			c.RestartPolicyRules = append(c.RestartPolicyRules, v1.ContainerRestartRule{
				Action: v1.ContainerRestartRuleActionRestart, ExitCodes: &v1.ContainerRestartRuleOnExitCodes{Operator: op, Values: codes},
			})
		}
	}
	const in, notIn = v1.ContainerRestartRuleOnExitCodesOpIn, v1.ContainerRestartRuleOnExitCodesOpNotIn
	never, onFailure := policy(v1.ContainerRestartPolicyNever), policy(v1.ContainerRestartPolicyOnFailure)
	// Ends with its arguments' codes, one after the other.
	codes := `echo x >>"$0.tries"; n=$(wc -l <"$0.tries"); shift $((n - 1)); exit "$1"`
	tell(t, []story{
		{name: "never in a pod of always", policy: v1.RestartPolicyAlways,
			containers: []v1.Container{having(shContainer("a", codes, "3", "0"), never), having(shContainer("b", codes, "3", "0"), onFailure)}, exit: 1,
			check: func(w *scriptRun) {
				w.never("start a 1")
				w.order("exit b 0 3", "backoff b 0 1", "exit b 1 0", "done 1")
			}},
		{name: "init containers of their own", policy: v1.RestartPolicyNever,
			containers: []v1.Container{having(shContainer("i1", codes, "3", "0"), onFailure), shContainer("a", ":")},
			check:      func(w *scriptRun) { w.order("exit i1 0 3", "exit i1 1 0", "exit a 0 0", "done 0") }},
		{name: "always in a pod of never", policy: v1.RestartPolicyNever, exit: 1,
			containers: []v1.Container{having(shContainer("a", `[ -e "$0.once" ] || { : >"$0.once"; exit 0; }; `+untilTerm), policy(v1.ContainerRestartPolicyAlways)), shContainer("b", ":")},
			do: func(w *scriptRun) {
				w.awaitLog("a.1", "up")
				w.signal(syscall.SIGTERM)
			},
			check: func(w *scriptRun) { w.order("exit a 0 0", "backoff a 0 1", "start a 1", "exit a 1 4", "done 1") }},
		{name: "rules", policy: v1.RestartPolicyNever, exit: 1,
			containers: []v1.Container{
				having(having(shContainer("a", codes, "3", "7", "4"), never), rule(in, 3, 7)),
				having(having(shContainer("b", codes, "3", "1", "0"), never), rule(notIn, 0, 9)),
				having(having(having(shContainer("c", codes, "3", "1", "9", "2"), never), rule(in, 3)), rule(notIn, 2, 3)),
				having(having(shContainer("i1", codes, "42", "0"), never), rule(notIn, 1)),
				having(having(shContainer("i2", codes, "0"), never), rule(in, 0)),
			},
			check: func(w *scriptRun) {
				w.order("exit i1 0 42", "backoff i1 0 1", "exit i1 1 0", "exit i2 0 0", "done 1")
				w.order("exit a 0 3", "backoff a 0 1", "exit a 1 7", "exit a 2 4", "done 1")
				w.order("exit b 0 3", "exit b 1 1", "exit b 2 0", "done 1")
				w.order("exit c 0 3", "exit c 1 1", "exit c 2 9", "exit c 3 2", "done 1")
				w.never("start i2 1")
			}},
	})
	if diff := cmp.Diff([]exitRule(nil), exitRules(&v1.Container{}, false)); diff != "" {
		t.Error(diff)
	}
}
