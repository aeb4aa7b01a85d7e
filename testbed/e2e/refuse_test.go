//go:build testbed

package e2e

import (
	"regexp"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// A pod that can never run says so: Failed, with a reason, and a message that
// names what is wrong. Nothing of it comes to Slurm.
func TestBasicPodThatCannotRunFailsWithAReason(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	cases := []struct {
		name, message string
		change        func(*v1.Pod)
	}{
		{"hostpath", "hostPath", volume("v", "/v", v1.VolumeSource{HostPath: &v1.HostPathVolumeSource{Path: "/tmp"}})},
		{"csi", "csi", volume("v", "/v", v1.VolumeSource{CSI: &v1.CSIVolumeSource{Driver: "none"}})},
		{"nfs", "NFS", volume("v", "/v", v1.VolumeSource{NFS: &v1.NFSVolumeSource{Server: "s", Path: "/"}})},
		{"flag-owned", "--job-name", flags("--job-name=mine")},
		{"flag-wrap", "--wrap", flags("--wrap=reboot")},
		{"flag-word", "reboot", flags("--nice=1 reboot")},
		{"flag-newline", "newline", flags("--nice=1\n#SBATCH --wrap=x")},
		{"flag-quote", "unclosed", flags(`--nice="1`)},
	}
	var manifests []*v1.Pod
	for _, c := range cases {
		manifests = append(manifests, n.shell(c.name, "echo never", c.change))
	}
	pods := n.create(manifests...)
	for i, p := range pods {
		p.jobs = 0
		o := p.awaitPhase("Failed")
		if !regexp.MustCompile(`^[A-Z][A-Za-z]+$`).MatchString(o.Status.Reason) || !strings.Contains(o.Status.Message, cases[i].message) {
			t.Errorf("%s: reason %q, message %q; want a word, and text with %q", p.name, o.Status.Reason, o.Status.Message, cases[i].message)
		}
	}
	until(t, "events about the refused pods", func() bool {
		events := kubectl(t, "-n", n.name, "get", "events", "-o", `jsonpath={range .items[*]}{.type} {.message}{"\n"}{end}`)
		return strings.Contains(events, "Warning") && strings.Contains(events, "hostPath")
	})
}

// What only sbatch can know is said in its own words.
func TestBasicSbatchsOwnWordsFailThePod(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	pods := n.create(
		n.shell("partition", "true", flags("--partition=nonesuch")),
		n.shell("option", "true", flags("--nonsense=1")),
		n.shell("node", "true", flags("--nodelist=n99")))
	for i, words := range []string{"invalid partition", "nonsense", "node"} {
		p := pods[i]
		p.jobs = 0
		o := p.awaitPhase("Failed")
		if o.Status.Reason == "" || !regexp.MustCompile(words).MatchString(o.Status.Message) || !strings.Contains(o.Status.Message, "sbatch: ") {
			t.Errorf("%s: reason %q, message %q; want sbatch's text with %q", p.name, o.Status.Reason, o.Status.Message, words)
		}
	}
}

// As under a kubelet the pod waits, and a deletion does not.
func TestBasicImageThatIsNotThere(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "true", func(p *v1.Pod) {
		p.Spec.Containers[0].Image = strings.Replace(env("KNOC_IMAGE_BUSYBOX"), "busybox", "nonesuch", 1)
	}))
	o := p.await("a pull's back-off", func(o *v1.Pod) bool {
		w := status(o, "main").State.Waiting
		return w != nil && w.Reason == "ImagePullBackOff"
	})
	if w := status(o, "main").State.Waiting; o.Status.Phase != v1.PodPending || !strings.Contains(w.Message, "nonesuch") {
		t.Errorf("phase %s, waiting for %+v", o.Status.Phase, w)
	}
	p.kubectl("delete", "pod", "pod", "--timeout=60s")
}

// Somebody's scancel is not the pod's own end.
func TestScancelFromOutsideNamesWhoDidIt(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	pods := n.create(n.shell("running", "echo up; exec sleep 1000"), n.shell("pending", "true", flags("--hold")))
	pods[0].awaitLog("up")
	uid := login(t, "id -u")
	login(t, "scancel "+pods[0].awaitJob()+" "+pods[1].awaitJob())
	for _, p := range pods {
		o := p.awaitPhase("Failed")
		if o.Status.Reason == "" || !regexp.MustCompile(`\b`+uid+`\b`).MatchString(o.Status.Message) && accounting() {
			t.Errorf("%s: reason %q, message %q; want uid %s named", p.name, o.Status.Reason, o.Status.Message, uid)
		}
	}
}

func TestJobsTimeLimitEndsThePod(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "exec sleep 1000", flags("--time=1")))
	o := p.awaitPhase("Failed")
	if !strings.Contains(o.Status.Reason, "TimeLimit") || o.Status.Message == "" {
		t.Errorf("reason %q, message %q", o.Status.Reason, o.Status.Message)
	}
}

func TestBasicMemoryLimitIsOOMKilled(t *testing.T) {
	t.Parallel()
	if login(t, "scontrol show config | grep -c 'task/cgroup' || :") == "0" {
		t.Log("this machine's Slurm does not enforce memory: only that the pod ends is checked")
	}
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "head -c 400m /dev/zero | tail -c 300m | wc -c", flags("--mem=100M")))
	o := p.awaitEnd()
	if s := status(o, "main").State.Terminated; o.Status.Phase == v1.PodFailed && (s == nil || s.Reason != "OOMKilled") {
		t.Errorf("pod: reason %q, message %q; container %+v; want OOMKilled", o.Status.Reason, o.Status.Message, s)
	}
}
