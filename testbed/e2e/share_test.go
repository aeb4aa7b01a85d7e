//go:build testbed

package e2e

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// The containers of a pod see each other's processes, also with users of their
// own; an ephemeral container with a target sees them too.
func TestSharedProcesses(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	shared := func(p *v1.Pod) {
		yes := true
		p.Spec.ShareProcessNamespace = &yes
		p.Spec.Containers[0].LivenessProbe = shProbe("test -e /proc/1", 3)
		p.Spec.Containers[0].ReadinessProbe = shProbe("ps | grep -q '[s]leep 4321'", 1)
	}
	const main = `id -u; trap 'echo bye; exit 5' TERM; touch /written || exit 9; cat /proc/1/comm; while :; do sleep 0.2; done`
	pods := n.create(
		n.shell("plain", main, appContainer("other", "exec sleep 4321"), shared, grace(10)),
		n.shell("users", strings.Replace(main, "/written", "/tmp/written", 1), appContainer("other", "exec sleep 4321"), shared, users, grace(10)),
		n.shell("codes", "exit 3", appContainer("other", "exit 42"), shared, func(p *v1.Pod) {
			p.Spec.Containers[0].LivenessProbe, p.Spec.Containers[0].ReadinessProbe = nil, nil
		}))
	for _, p := range pods[:2] {
		p.await("ready", func(o *v1.Pod) bool { return status(o, "main").Ready && running("other")(o) })
		if out := p.kubectl("exec", p.name, "-c", "other", "--", "ps"); !strings.Contains(out, "sleep 4321") || !strings.Contains(out, "trap 'echo bye") || !strings.Contains(out, "sleep 2147483647") {
			t.Errorf("%s: the other container sees\n%s", p.name, out)
		}
		p.debug("debugger", "ps; ls /proc/1 >/dev/null && kill -0 1 && echo reached; sleep 1000", "--target=main")
		p.awaitLog("sleep 4321", "-c", "debugger")
		if events := p.kubectl("get", "events", "-o", "jsonpath={.items[*].message}"); strings.Contains(events, "targetContainerName") {
			t.Errorf("%s: %s", p.name, events)
		}
	}
	if o := pods[2].awaitEnd(); exitCode(o, "main") != 3 || exitCode(o, "other") != 42 {
		t.Errorf("codes: %+v", o.Status.ContainerStatuses)
	}
	for _, p := range pods[:2] {
		p.kubectl("delete", "pod", p.name, "--wait=true", "--timeout=60s")
		if o := p.now(); exitCode(o, "main") != 5 || exitCode(o, "other") != 143 || status(o, "main").RestartCount != 0 {
			t.Errorf("%s: %+v", p.name, o.Status.ContainerStatuses)
		}
	}
}
