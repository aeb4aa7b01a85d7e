package knoc

import (
	"fmt"
	"os"
	"path/filepath"
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
	deadline   int64         // 0: none
	times      int           // how much faster the clock runs; 0: it does not
	before     func(w *scriptRun)
	env        func() []string
}

func (s story) run(t *testing.T, shell []string) {
	pod := scriptPod(s.policy, s.containers...)
	if s.grace != 0 {
		pod.Spec.TerminationGracePeriodSeconds = &s.grace
	}
	if s.deadline != 0 {
		pod.Spec.ActiveDeadlineSeconds = &s.deadline
	}
	w := stageScript(t, newBase(t), pod, nil)
	if s.times != 0 {
		w.patch("backoff=1 ", "backoff=10 ")
		w.hurry(s.times)
	}
	if s.before != nil {
		s.before(w)
	}
	var env []string
	if s.env != nil {
		env = s.env()
	}
	w.start(shell, "7", env...)
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
			most:       25 * time.Second,
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
			do:         func(w *scriptRun) { w.await("exit a 0 0") }, most: 25 * time.Second,
			check: func(w *scriptRun) { w.order("exit a 0 0", "kill i2 0 stop 3", "exit i2 0 137", "done 0") }},
		{name: "in a stop", policy: v1.RestartPolicyAlways,
			containers: []v1.Container{sidecar("i1", slow), sidecar("i2", slow), shContainer("a", `trap 'sleep 0.7; exit 0' TERM; echo up; while :; do sleep 0.1; done`)},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				w.signal(syscall.SIGTERM)
			}, most: 25 * time.Second,
			check: func(w *scriptRun) {
				w.order("stopping 30", "kill a 0 stop 30", "exit a 0 0", "exit i2 0 0", "exit i1 0 0", "done 0")
			}},
		{name: "in the init phase", policy: v1.RestartPolicyAlways,
			containers: []v1.Container{sidecar("i1", slow), shContainer("i2", untilTerm), shContainer("a", ":")}, exit: 1,
			do: func(w *scriptRun) {
				w.awaitLog("i2.0", "up")
				w.signal(syscall.SIGTERM)
			}, most: 25 * time.Second,
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

func post(h v1.LifecycleHandler) func(*v1.Container) {
	return func(c *v1.Container) {
		if c.Lifecycle == nil {
			c.Lifecycle = &v1.Lifecycle{}
		}
		c.Lifecycle.PostStart = &h
	}
}

func pre(h v1.LifecycleHandler) func(*v1.Container) {
	return func(c *v1.Container) {
		if c.Lifecycle == nil {
			c.Lifecycle = &v1.Lifecycle{}
		}
		c.Lifecycle.PreStop = &h
	}
}

func execHook(script string) v1.LifecycleHandler {
	return v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"sh", "-c", script}}}
}

func TestPodScriptHooks(t *testing.T) {
	term := func(log, text string) func(w *scriptRun) {
		return func(w *scriptRun) {
			w.awaitLog(log, text)
			w.signal(syscall.SIGTERM)
		}
	}
	tell(t, []story{
		{name: "postStart", policy: v1.RestartPolicyNever,
			containers: []v1.Container{
				having(shContainer("a", "until [ -e greeted ]; do sleep 0.05; done; sleep 0.5; exit 3"), post(execHook(`sleep 0.5; echo "it's $0"; : >greeted`))),
				shContainer("b", "[ -e greeted ]"),
			}, exit: 1,
			check: func(w *scriptRun) {
				w.order("start a 0", "hook a 0 post 0", "start b 0", "exit b 0 0", "done 1")
				w.order("exit a 0 3")
				if got := w.read("msg/a.0.post"); got != "it's sh\n" {
					w.t.Errorf("the hook's output is %q", got)
				}
			}},
		{name: "postStart of a container that comes late", policy: v1.RestartPolicyNever,
			containers: []v1.Container{having(shContainer("a", "sleep 0.3; : >up; sleep 0.7"), post(execHook("echo hello")))},
			before:     func(w *scriptRun) { w.write("late", "") },
			check:      func(w *scriptRun) { w.order("start a 0", "hook a 0 post 0", "exit a 0 0", "done 0") }},
		{name: "hooks that print without end", policy: v1.RestartPolicyNever, exit: 1,
			containers: []v1.Container{having(having(shContainer("a", untilTerm), post(execHook("head -c 3000000 /dev/zero"))), pre(execHook("head -c 3000000 /dev/zero; exit 3")))},
			do: func(w *scriptRun) {
				w.await("hook a 0 post 0")
				w.signal(syscall.SIGTERM)
			},
			check: func(w *scriptRun) {
				w.order("hook a 0 post 0", "hook a 0 pre 3", "exit a 0 4", "done 1")
				if post, pre := len(w.read("msg/a.0.post")), len(w.read("msg/a.0.pre")); post > 1024 || pre > 1024 {
					w.t.Errorf("%d and %d bytes of them are kept", post, pre)
				}
			}},
		{name: "postStart fails", policy: v1.RestartPolicyOnFailure,
			containers: []v1.Container{
				having(having(shContainer("a", "[ ! -e ran ] || exit 0; : >ran; "+untilTerm), post(execHook(`[ -e once ] || { : >once; echo no; exit 7; }; sleep 0.2`))), pre(execHook("echo farewell"))),
			},
			check: func(w *scriptRun) {
				w.order("start a 0", "hook a 0 post 7", "kill a 0 hook 30", "hook a 0 pre 0", "exit a 0 4", "backoff a 0 1", "start a 1", "exit a 1 0", "done 0")
				if post, pre := w.read("msg/a.0.post"), w.read("msg/a.0.pre"); post != "no\n" || pre != "farewell\n" {
					w.t.Errorf("texts %q %q", post, pre)
				}
			}},
		{name: "postStart of a container that ends", policy: v1.RestartPolicyNever, most: 25 * time.Second,
			containers: []v1.Container{having(shContainer("a", "exit 0"), post(execHook("exec sleep 100")))},
			check:      func(w *scriptRun) { w.order("start a 0", "exit a 0 0", "done 0") }},
		{name: "a sidecar is started after postStart", policy: v1.RestartPolicyNever,
			containers: []v1.Container{having(sidecar("i1", untilTerm), post(execHook("sleep 0.5"))), shContainer("i2", ":"), shContainer("a", ":")},
			check:      func(w *scriptRun) { w.order("start i1 0", "hook i1 0 post 0", "start i2 0", "exit a 0 0", "done 0") }},
		{name: "preStop", policy: v1.RestartPolicyNever, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{
				having(shContainer("a", untilTerm), pre(execHook("sleep 1; echo done; exit 2"))),
				having(shContainer("b", untilTerm), pre(v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 1}})),
			},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				term("b.0", "up")(w)
			},
			check: func(w *scriptRun) {
				w.order("stopping 30", "kill a 0 stop 30", "hook a 0 pre 2", "exit a 0 4", "done 1")
				w.order("kill b 0 stop 30", "hook b 0 pre 0", "exit b 0 4", "done 1")
			}},
		{name: "preStop takes all the time", policy: v1.RestartPolicyNever, exit: 1, grace: 2, most: 25 * time.Second,
			containers: []v1.Container{
				having(shContainer("a", untilTerm), pre(execHook("exec sleep 100"))),
				having(shContainer("b", ignoreAll), pre(v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 100}})),
			},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				term("b.0", "up")(w)
			},
			check: func(w *scriptRun) { // 2 s more are for TERM
				w.order("kill a 0 stop 2", "exit a 0 4", "done 1")
				w.order("kill b 0 stop 2", "exit b 0 137", "done 1")
			}},
		{name: "a shorter grace period ends preStop", policy: v1.RestartPolicyNever, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{having(shContainer("a", untilTerm), pre(execHook("echo in >in; exec sleep 100")))},
			do: func(w *scriptRun) {
				term("a.0", "up")(w)
				w.until("the hook", func() bool { return w.read("in") == "in\n" })
				w.command(1, "stop - 1")
				w.signal(syscall.SIGUSR1)
			},
			check: func(w *scriptRun) { w.order("kill a 0 stop 30", "stopping 1", "exit a 0 4", "done 1") }},
		{name: "no preStop without a grace period", policy: v1.RestartPolicyNever, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{having(shContainer("a", untilTerm), pre(execHook("exec sleep 100")))},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				w.command(1, "stop - 0")
				w.signal(syscall.SIGUSR1)
			},
			check: func(w *scriptRun) { w.order("kill a 0 stop 0", "exit a 0 4", "done 1") }},
		{name: "preStop of sidecars runs at once", policy: v1.RestartPolicyNever, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{
				having(sidecar("i1", untilTerm), pre(execHook("echo early"))),
				shContainer("a", `trap 'sleep 1; exit 4' TERM; echo up; while :; do sleep 0.1; done`),
			},
			do:    term("a.0", "up"),
			check: func(w *scriptRun) { w.order("hook i1 0 pre 0", "exit a 0 4", "exit i1 0 4", "done 1") }},
	})
}

// The order that probes give, and what their script is told.
func TestPodScriptProbes(t *testing.T) {
	// Becomes ready after a while; wants the first attempt ended.
	const probe = `echo "$* $KNOC_RESTART_COUNT $KNOC_POD_IP" >>probes
sleep 0.3
: >run/$1.started
kill -USR1 "$KNOC_SUPERVISOR"
[ "$2" = 0 ] && sleep 0.3 && echo "5 liveness" >run/$1.new && mv run/$1.new run/$1.kill && kill -USR1 "$KNOC_SUPERVISOR"
exec sleep 100
`
	probed := func(c *v1.Container) {
		c.StartupProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{}}}
	}
	tell(t, []story{
		{name: "liveness", policy: v1.RestartPolicyAlways, exit: 1, most: 25 * time.Second,
			before: func(w *scriptRun) { w.write("run/probe.sh", probe) },
			containers: []v1.Container{
				having(sidecar("i1", untilTerm), probed), shContainer("i2", "[ -e run/i1.started ]"),
				having(shContainer("a", `echo "pid $$$$"; `+untilTerm), probed),
			},
			do: func(w *scriptRun) {
				w.awaitLog("a.1", "up")
				w.awaitLog("i1.1", "up")
				w.signal(syscall.SIGTERM)
			},
			check: func(w *scriptRun) {
				w.order("start i1 0", "start i2 0", "exit i2 0 0", "start a 0", "kill a 0 liveness 5", "exit a 0 4", "backoff a 0 1", "start a 1", "kill a 1 stop 30", "exit a 1 4", "done 1")
				w.order("start i1 0", "kill i1 0 liveness 5", "exit i1 0 4", "start i1 1")
				pid := strings.Fields(w.read("log/a.1"))[1]
				if want := "a 1 " + pid + " 0"; !strings.Contains(w.read("probes"), want) {
					w.t.Errorf("%q is not in %q", want, w.read("probes"))
				}
			}},
		{name: "a container that ends takes its probes along", policy: v1.RestartPolicyNever, exit: 1, most: 25 * time.Second,
			before:     func(w *scriptRun) { w.write("run/probe.sh", probe) },
			containers: []v1.Container{having(shContainer("a", "exit 3"), probed), having(shContainer("b", "sleep 0.2"), probed)},
			check:      func(w *scriptRun) { w.order("start a 0", "exit a 0 3", "done 1") }},
		{name: "liveness and a deaf container", policy: v1.RestartPolicyNever, exit: 1, most: 25 * time.Second,
			before:     func(w *scriptRun) { w.write("run/probe.sh", strings.Replace(probe, "5 liveness", "1 liveness", 1)) },
			containers: []v1.Container{having(shContainer("a", ignoreAll), probed)},
			check:      func(w *scriptRun) { w.order("start a 0", "kill a 0 liveness 1", "exit a 0 137", "done 1") }},
	})
}

func TestPodScriptDeadline(t *testing.T) {
	tell(t, []story{
		{name: "to the second", policy: v1.RestartPolicyAlways, deadline: 4, exit: 1, grace: 7,
			containers: []v1.Container{shContainer("a", untilTerm)},
			check: func(w *scriptRun) {
				w.order("start a 0", "deadline", "stopping 7", "kill a 0 deadline 7", "exit a 0 4", "done 1")
				w.after("claim", "deadline", 4, 6)
			}},
		{name: "lowered", policy: v1.RestartPolicyAlways, deadline: 1000, exit: 1,
			containers: []v1.Container{shContainer("a", untilTerm)},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				w.command(1, "deadline - 3")
				w.command(2, "deadline - 500")
				w.signal(syscall.SIGUSR1)
			},
			check: func(w *scriptRun) {
				w.order("ack 0000000001", "ack 0000000002", "deadline", "kill a 0 deadline 30", "exit a 0 4", "done 1")
				w.after("claim", "deadline", 3, 5)
			}},
		{name: "set when it is over", policy: v1.RestartPolicyAlways, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{shContainer("a", "sleep 2; "+untilTerm)},
			do: func(w *scriptRun) {
				time.Sleep(1500 * time.Millisecond)
				w.command(1, "deadline - 1")
				w.signal(syscall.SIGUSR1)
			},
			check: func(w *scriptRun) { w.order("start a 0", "ack 0000000001", "deadline", "done 1") }},
		{name: "from the allocation's start", policy: v1.RestartPolicyAlways, deadline: 60, exit: 1, most: 25 * time.Second,
			env:        func() []string { return []string{fmt.Sprintf("SLURM_JOB_START_TIME=%d", time.Now().Unix()-56)} },
			containers: []v1.Container{shContainer("a", untilTerm)},
			check:      func(w *scriptRun) { w.order("start a 0", "deadline", "done 1") }},
		{name: "not reached", policy: v1.RestartPolicyNever, deadline: 4, most: 25 * time.Second,
			containers: []v1.Container{shContainer("a", ":")},
			check:      func(w *scriptRun) { w.never("deadline") }},
	})
}

// after says how many seconds lie between two facts.
func (w *scriptRun) after(from, to string, least, most float64) {
	w.t.Helper()
	var a, b time.Time
	for _, e := range parseJournal([]byte(w.read("journal.0"))) {
		fact := strings.Join(append([]string{e.Word}, e.Args...), " ")
		if a.IsZero() && strings.HasPrefix(fact, from) {
			a = e.Time
		}
		if b.IsZero() && strings.HasPrefix(fact, to) {
			b = e.Time
		}
	}
	if d := b.Sub(a).Seconds(); d < least || d > most {
		w.t.Errorf("%v s from %s to %s, want %v to %v; journal:\n%s", d, from, to, least, most, w.read("journal.0"))
	}
}

// Slurm sends ALRM before a time limit.
func TestPodScriptTimeLimit(t *testing.T) {
	limit := func(w *scriptRun) {
		w.awaitLog("a.0", "up")
		w.signal(syscall.SIGALRM)
	}
	end := func(seconds int64) func() []string {
		return func() []string {
			return []string{fmt.Sprintf("SLURM_JOB_END_TIME=%d", time.Now().Unix()+seconds)}
		}
	}
	a := []v1.Container{shContainer("a", untilTerm)}
	tell(t, []story{
		{name: "early", policy: v1.RestartPolicyAlways, exit: 1, grace: 1, env: end(20), containers: a, do: limit, most: 25 * time.Second,
			// Half of its time is the pod's own: 10 s of 20.
			check: func(w *scriptRun) {
				w.order("start a 0", "timelimit", "stopping 1", "exit a 0 4", "done 1")
				w.after("claim", "timelimit", 7, 15)
			}},
		{name: "late", policy: v1.RestartPolicyAlways, exit: 1, env: end(1), containers: a, do: limit, most: 25 * time.Second,
			check: func(w *scriptRun) { w.order("timelimit", "stopping 30", "exit a 0 4", "done 1") }},
		{name: "preempted", policy: v1.RestartPolicyAlways, exit: 1, env: end(3000), containers: a, do: limit, most: 25 * time.Second,
			check: func(w *scriptRun) {
				w.order("stopping 30", "exit a 0 4", "done 1")
				w.never("timelimit")
			}},
		{name: "as squeue tells", policy: v1.RestartPolicyAlways, exit: 1, containers: a, do: limit, most: 25 * time.Second,
			before: func(w *scriptRun) {
				squeue := "#!/bin/sh\n[ \"$*\" = '--noheader --jobs=7 --format=%e' ] && exec date -d @$(($(date +%s) + 5)) +%Y-%m-%dT%H:%M:%S\n"
				if err := os.WriteFile(filepath.Join(w.base.bin, "squeue"), []byte(squeue), 0o700); err != nil {
					w.t.Fatal(err)
				}
			},
			check: func(w *scriptRun) { w.order("start a 0", "timelimit", "stopping 30", "exit a 0 4", "done 1") }},
		// The first minute is 10 s here, time enough for a busy machine to get there.
		{name: "of a Slurm that tells no end", policy: v1.RestartPolicyAlways, exit: 1, times: 6, containers: a, most: 45 * time.Second,
			do: func(w *scriptRun) {
				limit(w)                     // nothing, in the first minute
				time.Sleep(11 * time.Second) // 66 s
				w.never("timelimit")
				w.signal(syscall.SIGALRM)
			},
			check: func(w *scriptRun) { w.order("timelimit", "stopping 30", "exit a 0 4", "done 1") }},
	})
}

// With a clock that runs faster.
func TestPodScriptClock(t *testing.T) {
	tell(t, []story{
		{name: "back-off doubles up to five minutes", policy: v1.RestartPolicyAlways, times: 200, exit: 1,
			containers: []v1.Container{shContainer("a", "exit 1")},
			do: func(w *scriptRun) {
				w.await("backoff a 6 300")
				w.signal(syscall.SIGTERM)
			},
			check: func(w *scriptRun) {
				w.order("backoff a 0 10", "start a 1", "backoff a 1 20", "backoff a 2 40", "backoff a 3 80", "backoff a 4 160", "backoff a 5 300", "start a 6", "backoff a 6 300")
			}},
		{name: "and begins again after ten minutes", policy: v1.RestartPolicyAlways, times: 200, exit: 1,
			containers: []v1.Container{shContainer("a", `echo x >>tries; [ "$(wc -l <tries)" != 3 ] || sleep 3.1; exit 1`)},
			do: func(w *scriptRun) {
				w.await("backoff a 3 20")
				w.signal(syscall.SIGTERM)
			},
			check: func(w *scriptRun) {
				w.order("backoff a 0 10", "backoff a 1 20", "start a 2", "exit a 2 1", "backoff a 2 10", "backoff a 3 20")
			}},
		{name: "an hour of grace", policy: v1.RestartPolicyNever, times: 1000, grace: 3600, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{sidecar("i1", ignoreAll), shContainer("a", ignoreAll)},
			do: func(w *scriptRun) {
				w.awaitLog("a.0", "up")
				w.signal(syscall.SIGTERM)
			},
			check: func(w *scriptRun) {
				w.order("stopping 3600", "kill a 0 stop 3600", "exit a 0 137", "done 1")
				w.after("stopping", "exit a", 3, 15)
			}},
		{name: "a deadline of an hour", policy: v1.RestartPolicyAlways, times: 1000, deadline: 3600, grace: 3600, exit: 1, most: 25 * time.Second,
			containers: []v1.Container{shContainer("a", untilTerm)},
			check: func(w *scriptRun) {
				w.order("start a 0", "deadline", "exit a 0 4", "done 1")
				w.after("claim", "deadline", 3, 15)
			}},
	})
}

func TestPodScriptMessages(t *testing.T) {
	fallback := func(c *v1.Container) {
		c.TerminationMessagePolicy = v1.TerminationMessageFallbackToLogsOnError
	}
	text := func(w *scriptRun, c, want string) {
		w.t.Helper()
		w.order("start "+c+" 0", "message "+c+" 0", "done 1")
		if got := w.read("msg/" + c + ".0"); got != want {
			w.t.Errorf("%s: message is %q, want %q", c, got, want)
		}
	}
	tell(t, []story{{name: "all", policy: v1.RestartPolicyNever, exit: 1,
		containers: []v1.Container{ // msg/NAME is where the path leads to
			shContainer("a", `ls -l msg/a | cut -c 1-10; printf "it's\nme" >msg/a`),
			shContainer("b", `echo no message; exit 1`),
			having(shContainer("c", `echo "the log"; exit 1`), fallback),
			having(shContainer("d", `echo "the log"; echo told >msg/d; exit 1`), fallback),
			having(shContainer("e", `echo "ended well"`), fallback),
			having(shContainer("f", `exit 1`), fallback),
			having(shContainer("g", `i=0; while [ $i -lt 100 ]; do i=$((i + 1)); echo $i; done; exit 1`), fallback),
			having(shContainer("h", `printf %05000d 7; exit 1`), fallback),
			shContainer("k", `printf %05000d 7 >msg/k; exit 1`),
		},
		check: func(w *scriptRun) {
			text(w, "a", "it's\nme")
			if got := w.read("log/a.0"); got != "-rw-------\n" {
				w.t.Errorf("the file is %q", got)
			}
			text(w, "c", "the log\n")
			text(w, "d", "told\n")
			var lines string
			for i := 21; i <= 100; i++ {
				lines += fmt.Sprintln(i)
			}
			text(w, "g", lines)
			text(w, "h", strings.Repeat("0", 2047)+"7")
			text(w, "k", strings.Repeat("0", 4096))
			for _, c := range []string{"b", "e", "f"} {
				w.never("message " + c + " 0")
			}
		}},
		{name: "each attempt its own", policy: v1.RestartPolicyOnFailure,
			containers: []v1.Container{shContainer("a", `[ ! -e once ] || exit 0; : >once; echo first >msg/a; exit 1`)},
			check: func(w *scriptRun) {
				w.order("message a 0", "exit a 0 1", "start a 1", "exit a 1 0")
				w.never("message a 1")
			}},
	})
}

func TestPodScriptOOM(t *testing.T) {
	setUp := func(cgroup, file string) func(w *scriptRun) {
		return func(w *scriptRun) {
			w.write("cgroup", cgroup)
			w.write("kills", "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n")
			dir := filepath.Join(w.dir, "fs", filepath.Dir(file))
			if err := os.MkdirAll(dir, 0o700); err != nil {
				w.t.Fatal(err)
			}
			if err := os.Symlink(filepath.Join(w.dir, "kills"), filepath.Join(w.dir, "fs", file)); err != nil {
				w.t.Fatal(err)
			}
			w.patch("/proc/self/cgroup", w.dir+"/cgroup")
			w.patch("/sys/fs/cgroup", w.dir+"/fs")
		}
	}
	containers := []v1.Container{
		shContainer("i1", "kill -9 $$$$ # for another reason"),
		shContainer("a", `sed -i s/4/5/ kills; kill -9 $$$$`),
	}
	containers[0].RestartPolicy = new(v1.ContainerRestartPolicyNever)
	containers[0].Name = "b"
	containers[0].Command[2] = "sleep 0.1; " + containers[0].Command[2]
	for _, s := range []struct{ name, cgroup, file string }{
		{"v2", "0::/job_1/task_0\n", "job_1/task_0/memory.events"},
		{"v1", "5:memory:/slurm/job_1\n0::/user.slice\n", "memory/slurm/job_1/memory.oom_control"},
	} {
		t.Run(s.name, func(t *testing.T) {
			tell(t, []story{{name: "killed", policy: v1.RestartPolicyNever, exit: 1, before: setUp(s.cgroup, s.file),
				containers: containers[1:],
				check:      func(w *scriptRun) { w.order("start a 0", "oom a 0", "exit a 0 137", "done 1") },
			}, {name: "not for memory", policy: v1.RestartPolicyNever, exit: 1, before: setUp(s.cgroup, s.file),
				containers: containers[:1],
				check: func(w *scriptRun) {
					w.order("exit b 0 137", "done 1")
					w.never("oom b 0")
				},
			}})
		})
	}
}
