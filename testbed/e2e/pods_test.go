//go:build testbed

package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// namespace is one of a test's own. At the end it is deleted, and everything
// that must hold for any pod is checked for each of its pods.
type namespace struct {
	t    testing.TB
	name string
	node string

	mu   sync.Mutex
	pods []*pod
}

// pod is one that a test has created.
type pod struct {
	t         testing.TB
	namespace string
	name      string
	uid       types.UID
	jobs      int  // that Slurm may have accepted for it
	requeued  bool // Slurm takes it back into the queue
}

// newNamespace is on the testbed's own node.
func newNamespace(t testing.TB) *namespace { return newNamespaceOn(t, env("KNOC_NODE")) }

func newNamespaceOn(t testing.TB, node string) *namespace {
	t.Helper()
	n := &namespace{t: t, node: node, name: fmt.Sprintf("e2e-%08x", rand.Uint32())}
	label := strings.Map(func(r rune) rune {
		if r == '/' || r == ' ' {
			return '_'
		}
		return r
	}, t.Name())
	n.object(&v1.Namespace{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}, ObjectMeta: metav1.ObjectMeta{Name: n.name, Labels: map[string]string{"knoc-e2e": label}}})
	t.Cleanup(n.close)
	until(t, "the default service account of "+n.name, func() bool {
		out, err := tryKubectl(nil, "-n", n.name, "get", "serviceaccount,configmap", "-o", "name")
		return err == nil && strings.Contains(out, "serviceaccount/default") && strings.Contains(out, "kube-root-ca.crt")
	})
	return n
}

// shell is a pod with one container "main" that runs a script; change adapts it.
func (n *namespace) shell(name, script string, change ...func(*v1.Pod)) *v1.Pod {
	p := &v1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: n.name, Annotations: map[string]string{}},
		Spec: v1.PodSpec{
			RestartPolicy: v1.RestartPolicyNever,
			NodeSelector:  map[string]string{v1.LabelHostname: n.node},
			Tolerations:   []v1.Toleration{{Key: "virtual-kubelet.io/provider", Operator: v1.TolerationOpExists}},
			Containers:    []v1.Container{container("main", script)},
		},
	}
	for _, f := range change {
		f(p)
	}
	return p
}

func container(name, script string) v1.Container {
	return v1.Container{Name: name, Image: env("KNOC_IMAGE_BUSYBOX"), Command: []string{"/bin/sh", "-c", script}}
}

// The usual changes to a pod.
func bound(p *v1.Pod) { // not by the scheduler, which keeps off a node that reports trouble
	p.Spec.NodeName, p.Spec.NodeSelector = p.Spec.NodeSelector[v1.LabelHostname], nil
}
func flags(f string) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Annotations["slurm-job.knoc.io/flags"] = f }
}

// patient has the pod stay when its node is not heard of: the control plane
// deletes others after five minutes.
func patient(p *v1.Pod) {
	p.Spec.Tolerations = append(p.Spec.Tolerations, v1.Toleration{Operator: v1.TolerationOpExists})
}
func restart(r v1.RestartPolicy) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.RestartPolicy = r }
}
func initContainer(name, script string) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.InitContainers = append(p.Spec.InitContainers, container(name, script)) }
}
func appContainer(name, script string) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.Containers = append(p.Spec.Containers, container(name, script)) }
}
func volume(name, path string, source v1.VolumeSource) func(*v1.Pod) { // in every container there is
	return func(p *v1.Pod) {
		p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: name, VolumeSource: source})
		for _, list := range [][]v1.Container{p.Spec.InitContainers, p.Spec.Containers} {
			for i := range list {
				list[i].VolumeMounts = append(list[i].VolumeMounts, v1.VolumeMount{Name: name, MountPath: path})
			}
		}
	}
}
func emptyDir(name, path string) func(*v1.Pod) {
	return volume(name, path, v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}})
}

// counted has the pod leave a line in a volume whenever it runs (see runs).
func counted(p *v1.Pod) {
	emptyDir("runs", "/runs")(p)
	c := &p.Spec.Containers[0]
	c.Command[2] = "echo run >>/runs/runs; " + c.Command[2]
}

// create creates the pods with one kubectl.
func (n *namespace) create(manifests ...*v1.Pod) []*pod {
	n.t.Helper()
	data, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "List", "items": manifests})
	if err != nil {
		n.t.Fatal(err)
	}
	out, err := tryKubectl(data, "create", "-o", "json", "-f", "-")
	if err != nil {
		n.t.Fatal(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	var pods []*pod
	for d := json.NewDecoder(strings.NewReader(out)); d.More(); {
		var p v1.Pod
		if err := d.Decode(&p); err != nil {
			n.t.Fatal(err)
		}
		pods = append(pods, &pod{n.t, n.name, p.Name, p.UID, 1, false})
	}
	n.pods = append(n.pods, pods...)
	return pods
}

func (n *namespace) createOne(p *v1.Pod) *pod { n.t.Helper(); return n.create(p)[0] }

// object creates any other object of the namespace, or itself.
func (n *namespace) object(o any) {
	n.t.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := tryKubectl(data, "-n", n.name, "create", "-f", "-"); err != nil {
		n.t.Fatal(err)
	}
}

func (n *namespace) configMap(name string, text map[string]string, binary map[string][]byte) {
	n.t.Helper()
	n.object(&v1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Name: name}, Data: text, BinaryData: binary})
}

func (n *namespace) secret(name string, data map[string][]byte) {
	n.t.Helper()
	n.object(&v1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, ObjectMeta: metav1.ObjectMeta{Name: name}, Data: data})
}

// await waits until the pod's object is as wanted, and gives that version.
func (p *pod) await(what string, wanted func(*v1.Pod) bool) *v1.Pod {
	p.t.Helper()
	now, ok := seen.wait(p.uid, limit, func(r *record) bool {
		return r != nil && r.last() != nil && (r.gone || wanted(r.last()))
	})
	if !ok || !wanted(now.last()) {
		p.t.Fatalf("waited for pod %s: %s", p.name, what)
	}
	return now.last()
}

func (p *pod) awaitPhase(phase v1.PodPhase) *v1.Pod {
	p.t.Helper()
	return p.await(string(phase), func(o *v1.Pod) bool {
		if o.Status.Phase != phase && ended(o) {
			p.t.Fatalf("pod %s is %s (%s: %s), want %s", p.name, o.Status.Phase, o.Status.Reason, o.Status.Message, phase)
		}
		return o.Status.Phase == phase
	})
}

func (p *pod) awaitEnd() *v1.Pod { p.t.Helper(); return p.await("an end", ended) }

// awaitJob waits until the pod shows its job's id.
func (p *pod) awaitJob() string {
	p.t.Helper()
	return jobID(p.await("annotation "+jobIDAnnotation, func(o *v1.Pod) bool { return jobID(o) != "" }))
}

// awaitGone waits until the API has the object no more.
func (p *pod) awaitGone() {
	p.t.Helper()
	if _, ok := seen.wait(p.uid, limit, func(r *record) bool { return r != nil && r.gone }); !ok {
		p.t.Fatalf("pod %s is still there", p.name)
	}
}

func (p *pod) now() *v1.Pod       { return seen.get(p.uid).last() }
func (p *pod) isGone() bool       { return seen.get(p.uid).gone }
func (p *pod) history() []*v1.Pod { return seen.get(p.uid).versions }

func (p *pod) kubectl(args ...string) string {
	p.t.Helper()
	return kubectl(p.t, append([]string{"-n", p.namespace}, args...)...)
}

// log is a container's whole log, as kubectl prints it.
func (p *pod) log(args ...string) string {
	p.t.Helper()
	return p.kubectl(append([]string{"logs", p.name}, args...)...)
}

// awaitLog waits until the log has the text; args are more of kubectl logs.
func (p *pod) awaitLog(text string, args ...string) {
	p.t.Helper()
	until(p.t, fmt.Sprintf("the log of pod %s has %q", p.name, text), func() bool {
		out, err := tryKubectl(nil, append([]string{"-n", p.namespace, "logs", p.name}, args...)...)
		return err == nil && strings.Contains(out, text)
	})
}

const jobIDAnnotation = "slurm-job.knoc.io/job-id"

func jobID(p *v1.Pod) string { return p.Annotations[jobIDAnnotation] }

func ended(p *v1.Pod) bool {
	return p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed
}

// status is a container's, of any kind; an empty one when there is none yet.
func status(p *v1.Pod, name string) v1.ContainerStatus {
	for _, list := range [][]v1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses, p.Status.EphemeralContainerStatuses} {
		for _, s := range list {
			if s.Name == name {
				return s
			}
		}
	}
	return v1.ContainerStatus{}
}

// exitCode is the code that a container ended with, -1 while it has not.
func exitCode(p *v1.Pod, name string) int32 {
	if t := status(p, name).State.Terminated; t != nil {
		return t.ExitCode
	}
	return -1
}

func running(name string) func(*v1.Pod) bool {
	return func(p *v1.Pod) bool { return status(p, name).State.Running != nil }
}

// close deletes the namespace and checks what holds for every pod.
func (n *namespace) close() {
	explained := n.t.Failed()
	if explained {
		n.explain()
	}
	// The control plane takes five seconds to begin with a namespace, and up to
	// sixteen until it looks again: the pods are deleted here, and nothing waits
	// for the rest (TestBasicNamespaceIsDeleted does).
	out, err := tryKubectl(nil, "delete", "namespace", n.name, "--ignore-not-found", "--wait=false")
	if err == nil {
		out, err = tryKubectl(nil, "-n", n.name, "delete", "pods", "--all", "--timeout=180s")
	}
	if err != nil {
		n.t.Errorf("%v: %s", err, out)
		if !explained {
			n.explain()
		}
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.pods) == 0 {
		return
	}
	// A pod that has ended goes at once, when its job may still be COMPLETING.
	var jobs map[types.UID][]job
	alive := func() (list []string) {
		jobs = jobsOf(n.t, n.pods...)
		for _, p := range n.pods {
			for _, j := range jobs[p.uid] {
				if j.alive() {
					list = append(list, fmt.Sprintf("pod %s is gone and left job %v", p.name, j))
				}
			}
		}
		return list
	}
	left := alive()
	for end := time.Now().Add(15 * time.Second); len(left) > 0 && time.Now().Before(end); left = alive() {
		time.Sleep(time.Second)
	}
	for _, l := range left {
		n.t.Error(l)
	}
	for _, p := range n.pods {
		p.checkHistory()
		if len(jobs[p.uid]) > p.jobs {
			n.t.Errorf("pod %s had %d jobs: %v", p.name, len(jobs[p.uid]), jobs[p.uid])
		}
	}
	var files string
	if !inTime(func() bool { files = remains(n.t, n.pods); return files == "" }) {
		n.t.Errorf("the pods are gone and left files on the cluster: %s\n%s", files, login(n.t, "cd ~/.knoc && ls -la "+files+" || :"))
	}
}

// checkHistory: whatever was done to the cluster, a pod's phase goes forwards
// only, unless its job is requeued, an end is final, and there is one job.
func (p *pod) checkHistory() {
	rank := map[v1.PodPhase]int{v1.PodPending: 0, v1.PodRunning: 1, v1.PodSucceeded: 2, v1.PodFailed: 2}
	var last *v1.Pod
	for _, o := range p.history() {
		if last != nil {
			was, is := last.Status.Phase, o.Status.Phase
			if rank[is] < rank[was] && !p.requeued || ended(last) && is != was {
				p.t.Errorf("pod %s went from %s to %s (%s: %s)", p.name, was, is, o.Status.Reason, o.Status.Message)
			}
			if id := jobID(last); id != "" && jobID(o) != id && p.jobs == 1 {
				p.t.Errorf("pod %s had job %s, then %q", p.name, id, jobID(o))
			}
			for _, s := range last.Status.ContainerStatuses {
				if status(o, s.Name).RestartCount < s.RestartCount {
					p.t.Errorf("pod %s: container %s had %d restarts, then %d", p.name, s.Name, s.RestartCount, status(o, s.Name).RestartCount)
				}
			}
		}
		last = o
	}
}

// explain logs what one wants to see of a test that failed.
func (n *namespace) explain() {
	show := func(title, out string, err error) {
		if err != nil {
			out += err.Error()
		}
		n.t.Logf("---- %s ----\n%s", title, strings.TrimSpace(out))
	}
	const most = 6 // pods; the rest mostly say the same
	n.mu.Lock()
	pods := n.pods
	n.mu.Unlock()
	for _, p := range pods[:min(most, len(pods))] {
		out, err := tryKubectl(nil, "-n", n.name, "get", "pod", p.name, "-o", "yaml", "--ignore-not-found")
		if out == "" && seen.get(p.uid).last() != nil {
			data, _ := json.MarshalIndent(p.now(), "", "  ")
			out = "(gone)\n" + string(data)
		}
		show("pod "+p.name, out, err)
		out, err = run(nil, "KNOC_LOGIN", fmt.Sprintf(`cd ~/.knoc/*/%[1]s 2>/dev/null && ls -lA . run cmd log 2>&1 && for f in job claim journal.* slurm.out submit.error log/*; do
			[ ! -e "$f" ] || { echo "== $f"; head -c 3000 "$f" || readlink "$f"; }; done; squeue -t all -n knoc-%[1]s`, p.uid))
		show("on the cluster: pod "+p.name, out, err)
	}
	out, err := tryKubectl(nil, "-n", n.name, "get", "events", "--sort-by=.lastTimestamp")
	show("events", out, err)
	log := env("KNOC_LOG")
	if n.node != env("KNOC_NODE") {
		log = ownLog(n.node)
	}
	out, err = execute(nil, "sh", "-c", `grep -v level=DEBUG "$1" | tail -n 60`, "sh", log)
	show("end of "+log, out, err)
}
