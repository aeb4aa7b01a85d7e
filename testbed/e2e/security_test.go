//go:build testbed

package e2e

import (
	"fmt"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// node is the compute node that the pod runs on.
func (p *pod) node() string {
	p.t.Helper()
	return login(p.t, "squeue -h -j "+p.awaitJob()+" -o %N")
}

// onNode runs a shell command line on a compute node as the HPC user.
func onNode(t testing.TB, node, line string) string {
	t.Helper()
	return login(t, fmt.Sprintf("srun --quiet --overlap --mem=10M -w %s sh -c '%s'", node, line))
}

// leftOn are the pod's scratch directories on a compute node.
func (p *pod) leftOn(node, job string) string {
	p.t.Helper()
	return onNode(p.t, node, "ls -d /tmp/knoc-*/"+job+".* 2>/dev/null; true")
}

func securityContext(f func(*v1.SecurityContext)) func(*v1.Pod) {
	return func(p *v1.Pod) {
		for i := range p.Spec.Containers {
			p.Spec.Containers[i].SecurityContext = &v1.SecurityContext{}
			f(p.Spec.Containers[i].SecurityContext)
		}
	}
}

// A container may write everywhere; what it wrote outside of its volumes is gone
// when it runs again, and nothing of it stays on the node.
func TestRootFilesystem(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	first := n.createOne(n.shell("root", `
		[ ! -e /new ] || exit 9
		echo x >/new && echo x >/tmp/new && echo x >/var/tmp/new && mkdir -p $HOME && echo x >$HOME/new || exit 8
		dd if=/dev/zero of=/tmp/large bs=1M count=80 2>/dev/null || exit 7
		mkdir -m 0 /none
		[ -e /data/once ] || { touch /data/once; sleep 3; exit 1; }
		hostname; cat /etc/hosts; hostname -i`, restart(v1.RestartPolicyOnFailure), emptyDir("data", "/data")))
	yes := true
	second := n.createOne(n.shell("read-only", `
		touch /new /tmp/new /var/tmp/new /bin/new 2>/dev/null && exit 9
		for f in /new /tmp/new /var/tmp/new $HOME/new; do ! [ -e $f ] || exit 8; done
		touch /data/new`, emptyDir("data", "/data"), securityContext(func(s *v1.SecurityContext) { s.ReadOnlyRootFilesystem = &yes })))
	first.await("a run", running("main"))
	node, job := first.node(), first.awaitJob()
	first.awaitPhase(v1.PodSucceeded)
	second.awaitPhase(v1.PodSucceeded)
	if c := status(first.now(), "main").RestartCount; c != 1 {
		t.Errorf("%d restarts, want 1", c)
	}
	if log := first.log(); !strings.HasPrefix(log, "root\n") || !strings.Contains(log, "\troot\n") || !strings.Contains(log, "10.77.0.1") {
		t.Errorf("host name and hosts file: %s", log)
	}
	if left := first.leftOn(node, job); left != "" {
		t.Errorf("left on %s: %s", node, left)
	}
}

func TestHostName(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	const script = `hostname; cat /etc/hosts`
	named := n.createOne(n.shell("named", script, func(p *v1.Pod) {
		p.Spec.Hostname, p.Spec.Subdomain = "web-0", "db"
		p.Spec.HostAliases = []v1.HostAlias{{IP: "192.0.2.1", Hostnames: []string{"one.example", "one"}}}
	}))
	full := n.createOne(n.shell("full", script, func(p *v1.Pod) {
		yes := true
		p.Spec.Hostname, p.Spec.Subdomain, p.Spec.SetHostnameAsFQDN = "w", "db", &yes
	}))
	host := n.createOne(n.shell("host", script, func(p *v1.Pod) { p.Spec.HostNetwork = true }))
	for p, want := range map[*pod][]string{
		named: {"web-0\n", "\tweb-0.db." + n.name + ".svc.cluster.local\tweb-0\n", "192.0.2.1\tone.example\tone\n"},
		full:  {"w.db." + n.name + ".svc.cluster.local\n"},
		host:  {"n"},
	} {
		p.awaitPhase(v1.PodSucceeded)
		log := p.log()
		if !strings.HasPrefix(log, want[0]) {
			t.Errorf("pod %s: host name in %q, want %q", p.name, log, want[0])
		}
		for _, text := range want[1:] {
			if !strings.Contains(log, text) {
				t.Errorf("pod %s: no %q in %q", p.name, text, log)
			}
		}
	}
}

// users are a pod's of its own: uid 1234, gid 5678, fsGroup 77, and one more.
func users(p *v1.Pod) {
	user, group, fs := int64(1234), int64(5678), int64(77)
	p.Spec.SecurityContext = &v1.PodSecurityContext{RunAsUser: &user, RunAsGroup: &group, FSGroup: &fs, SupplementalGroups: []int64{88, 1000620000}}
}

func TestUsers(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	n.configMap("settings", map[string]string{"key": "value"}, nil)
	mode, root, no := int32(0o400), int64(0), false
	p := n.createOne(n.shell("users", `
		id; id -G
		grep -E "^(NoNewPrivs|CapEff|CapBnd)" /proc/self/status
		cat /settings/key && echo x >/data/mine && mkdir -m 700 /data/private && echo x >/data/private/x && echo x >/tmp/x || exit 9
		touch /new 2>/dev/null && exit 8
		ls -ln / /data /settings/..data/key | grep -E " (data|mine|private|key)|/key$"
		echo to stdout >>/dev/stdout
		ls -n /settings/..data/
		until [ -e /data/end ]; do sleep 0.2; done`,
		users, appContainer("root", `
		until [ -d /data/private ]; do sleep 0.2; done
		id -u; id -G; chown 99:98 /bin/busybox && ls -ln /bin/busybox && rm -r /etc/group && mkdir -m 700 /new && chown 1234 /new || exit 7
		cat /data/private/x || exit 6
		grep -E "^(NoNewPrivs|CapEff)" /proc/self/status
		until [ -e /data/end ]; do sleep 0.2; done`),
		appContainer("dropped", `grep -E "^(NoNewPrivs|CapEff|CapBnd)" /proc/self/status; chown 1 /tmp 2>/dev/null && exit 5; exit 0`),
		emptyDir("data", "/data"),
		volume("settings", "/settings", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "settings"}, DefaultMode: &mode}}),
		func(p *v1.Pod) {
			p.Spec.Containers[1].SecurityContext = &v1.SecurityContext{RunAsUser: &root, RunAsGroup: &root}
			p.Spec.Containers[2].SecurityContext = &v1.SecurityContext{RunAsUser: &root, RunAsGroup: &root, AllowPrivilegeEscalation: &no, Capabilities: &v1.Capabilities{Drop: []v1.Capability{"ALL"}}}
		}))
	p.await("both containers", func(o *v1.Pod) bool { return running("main")(o) && running("root")(o) })
	node, job := p.node(), p.awaitJob()
	until(t, "root's work", func() bool { return strings.Contains(p.log("-c", "root"), "CapEff") })

	// kubectl exec is the container's user.
	if got := p.kubectl("exec", p.name, "-c", "main", "--", "sh", "-c", "id -u; id -g; id -G; hostname; pwd; cat /data/private/x; grep -E '^(NoNewPrivs|CapEff)' /proc/self/status"); got !=
		"1234\n5678\n5678 77 88 1000620000\nusers\n/\nx\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\n" {
		t.Errorf("kubectl exec: %q", got)
	}
	if got := p.kubectl("exec", p.name, "-c", "root", "--", "sh", "-c", "id -u; id -G; touch /data/end"); got != "0\n0 77 88 1000620000\n" {
		t.Errorf("kubectl exec as root: %q", got)
	}
	p.awaitPhase(v1.PodSucceeded)
	for c, want := range map[string][]string{
		"main": {"uid=1234(app) gid=5678", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "value", "to stdout",
			"drwxrwsrwx", "-rw-r--r--    1 1234     77 ", "drwx------    2 1234     77 ", "-r--r-----    1 0        77 "},
		"root":    {"0\n0 77 88 1000620000\n", " 99       98 ", "x\n", "CapEff:\t000001ffffffffff"},
		"dropped": {"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"},
	} {
		log := p.log("-c", c)
		for _, text := range want {
			if !strings.Contains(log, text) {
				t.Errorf("container %s: no %q in\n%s", c, text, log)
			}
		}
	}
	if left := p.leftOn(node, job); left != "" {
		t.Errorf("left on %s: %s", node, left)
	}
}

// What a killed job leaves belongs to other users; the next pod on that node
// removes it all the same.
func TestUsersOfAKilledJob(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("killed", "mkdir -m 700 /data/private; echo x >/data/private/x; mkdir -m 0 /tmp/none; echo up; exec sleep 1000", users, emptyDir("data", "/data")))
	p.awaitLog("up")
	node, job := p.node(), p.awaitJob()
	if p.leftOn(node, job) == "" {
		t.Fatal("no scratch while it runs")
	}
	login(t, "scancel --signal=KILL --full "+job)
	p.awaitEnd()
	until(t, "the job's end", func() bool { return login(t, "squeue -h -j "+job+" -o %T 2>/dev/null; true") == "" })
	if p.leftOn(node, job) == "" {
		t.Log("a killed job left nothing")
	}
	next := n.createOne(n.shell("next", "true", flags("--nodelist="+node)))
	next.awaitPhase(v1.PodSucceeded)
	if left := p.leftOn(node, job); left != "" {
		t.Errorf("left on %s: %s", node, left)
	}
}

// Not parallel: for a while nobody has subordinate ids.
func TestWithoutSubordinateIDs(t *testing.T) {
	file := "/var/lib/knoc-testbed/hpc-" + env("KNOC_SLURM") + "/etc.n[12]/subuid"
	loginRoot(t, "sed -i s/^hpcuser:/away-hpcuser:/ "+file)
	t.Cleanup(func() { loginRoot(t, "sed -i s/^away-hpcuser:/hpcuser:/ "+file) })
	n := newNamespace(t)
	p := n.createOne(n.shell("refused", "echo ran", users))
	if o := p.awaitEnd(); o.Status.Phase != v1.PodFailed || o.Status.Reason != "NoSubordinateIDs" || !strings.Contains(o.Status.Message, "/etc/subuid") {
		t.Errorf("%s %s: %s", o.Status.Phase, o.Status.Reason, o.Status.Message)
	}
	startKnoc(t, "e2e-ids", "--without-subids", "ignore")
	n = newNamespaceOn(t, "e2e-ids")
	p = n.createOne(n.shell("ignored", "id -u; echo x >/data/x", users, emptyDir("data", "/data")))
	p.awaitPhase(v1.PodSucceeded)
	if log := p.log(); log != "20077\n" {
		t.Errorf("log %q", log)
	}
	until(t, "the event that says so", func() bool {
		return strings.Contains(p.kubectl("get", "events", "--field-selector", "reason=NoSubordinateIDs"), "/etc/subuid")
	})
}
