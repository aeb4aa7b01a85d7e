//go:build testbed

package e2e

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// The tests named TestBasic… are also run on the other Slurm, without
// accounting, and with a stale shared home.

func TestBasicNodeShowsWhatSlurmHas(t *testing.T) {
	t.Parallel()
	var node v1.Node
	if err := json.Unmarshal([]byte(kubectl(t, "get", "node", env("KNOC_NODE"), "-o", "json")), &node); err != nil {
		t.Fatal(err)
	}
	var cpus, mem, gpus int64
	for l := range strings.Lines(login(t, "sinfo -h -N -p batch -o '%c %m %G'")) {
		var c, m, g int64
		if _, err := fmt.Sscanf(l, "%d %d gpu:%d", &c, &m, &g); err != nil {
			t.Fatalf("sinfo: %q: %v", l, err)
		}
		cpus, mem, gpus = cpus+c, mem+m, gpus+g
	}
	for name, want := range map[v1.ResourceName]int64{"cpu": cpus, "memory": mem << 20, "nvidia.com/gpu": gpus} {
		if q := node.Status.Allocatable[name]; q.Value() != want {
			t.Errorf("allocatable %s is %s, Slurm has %d", name, q.String(), want)
		}
	}
	if pods := node.Status.Allocatable["pods"]; pods.Value() < 1 {
		t.Errorf("allocatable pods is %s", pods.String())
	}
	for label, want := range map[string]string{v1.LabelOSStable: "linux", v1.LabelArchStable: "amd64", v1.LabelHostname: node.Name} {
		if node.Labels[label] != want {
			t.Errorf("label %s is %q, want %q", label, node.Labels[label], want)
		}
	}
	tainted := false
	for _, taint := range node.Spec.Taints {
		tainted = tainted || taint.Key == "virtual-kubelet.io/provider" && taint.Value == "knoc" && taint.Effect == v1.TaintEffectNoSchedule
	}
	if !tainted {
		t.Errorf("taints are %v", node.Spec.Taints)
	}
	if !strings.HasPrefix(node.Status.NodeInfo.KubeletVersion, "v1.") || len(node.Status.Addresses) == 0 || node.Status.DaemonEndpoints.KubeletEndpoint.Port == 0 {
		t.Errorf("kubelet version %q, addresses %v, port %d", node.Status.NodeInfo.KubeletVersion, node.Status.Addresses, node.Status.DaemonEndpoints.KubeletEndpoint.Port)
	}
	if holder := kubectl(t, "-n", "kube-node-lease", "get", "lease", node.Name, "-o", "jsonpath={.spec.holderIdentity}"); holder != node.Name {
		t.Errorf("the lease is held by %q", holder)
	}
}

func TestBasicLogExitCodeAndTimes(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	const text = "line 1\n\ttab 'quote' \"double\" $HOME `id` \\ äöü \x1b[1m\n\nno newline at the end"
	n.configMap("text", map[string]string{"text": text}, nil)
	withText := volume("text", "/text", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "text"}}})
	cases := []struct {
		script string // where $$ is one $, as everywhere in a command
		code   int32
		phase  v1.PodPhase
		reason string
	}{
		{"exit 0", 0, "Succeeded", "Completed"},
		{"exit 3", 3, "Failed", "Error"},
		{"kill -9 $$$$", 137, "Failed", "Error"},
	}
	var manifests []*v1.Pod
	for _, c := range cases {
		manifests = append(manifests, n.shell(fmt.Sprintf("code-%d", c.code), "cat /text/text; sleep 2; "+c.script, withText))
	}
	for i, p := range n.create(manifests...) {
		c := cases[i]
		o := p.awaitEnd()
		if got := p.log(); got != text {
			t.Errorf("%s: log is %q, want %q", p.name, got, text)
		}
		end := status(o, "main").State.Terminated
		if o.Status.Phase != c.phase || end == nil || end.ExitCode != c.code || end.Reason != c.reason {
			t.Errorf("%s: phase %s, container %+v; want %s, exit code %d, %s", p.name, o.Status.Phase, end, c.phase, c.code, c.reason)
			continue
		}
		j := p.endedJob()
		if jobID(o) != j.ID {
			t.Errorf("%s: annotation says job %q, Slurm %s", p.name, jobID(o), j.ID)
		}
		between(t, p.name+": container's start", end.StartedAt.Time, j.Start.Add(-time.Second), j.Start.Add(15*time.Second))
		between(t, p.name+": container's end", end.FinishedAt.Time, j.End.Add(-15*time.Second), j.End.Add(time.Second))
		between(t, p.name+": pod's start", o.Status.StartTime.Time, j.Start.Add(-time.Second), j.Start.Add(5*time.Second))
		if d := end.FinishedAt.Sub(end.StartedAt.Time); d < time.Second {
			t.Errorf("%s: ran for %v, want 2 s and more", p.name, d)
		}
		wasRunning := false
		for _, h := range p.history() {
			wasRunning = wasRunning || h.Status.Phase == v1.PodRunning
		}
		if !wasRunning {
			t.Errorf("%s: was never shown as Running", p.name)
		}
	}
}

func between(t testing.TB, what string, got, from, to time.Time) {
	t.Helper()
	if got.Before(from) || got.After(to) {
		t.Errorf("%s is %v, want it between %v and %v", what, got, from, to)
	}
}

func TestBasicAddressesAreTheComputeNodes(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", `echo "$IP"`, func(p *v1.Pod) {
		p.Spec.Containers[0].Env = []v1.EnvVar{{Name: "IP", ValueFrom: &v1.EnvVarSource{FieldRef: &v1.ObjectFieldSelector{FieldPath: "status.podIP"}}}}
	}))
	o := p.awaitPhase("Succeeded")
	want := login(t, "getent ahostsv4 "+p.endedJob().Node+" | awk 'NR==1{print $1}'")
	if o.Status.PodIP != want || o.Status.HostIP != want || strings.TrimSpace(p.log()) != want {
		t.Errorf("podIP %q, hostIP %q, in the container %q; the job ran on %s", o.Status.PodIP, o.Status.HostIP, p.log(), want)
	}
}

// Each writes a file and waits for the other's: they must run at the same time.
func TestBasicTwoContainersOfOneImageRunSideBySide(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	meet := func(me, other string) string {
		return fmt.Sprintf("echo this is %[1]s; touch /share/%[1]s; until ls /share | grep -q %[2]s; do sleep 0.2; done; echo met %[2]s", me, other)
	}
	p := n.createOne(n.shell("pod", meet("main", "second"), appContainer("second", meet("second", "main")+"; exit 4"), emptyDir("share", "/share")))
	o := p.awaitPhase("Failed")
	if exitCode(o, "main") != 0 || exitCode(o, "second") != 4 {
		t.Errorf("exit codes are %d and %d, want 0 and 4", exitCode(o, "main"), exitCode(o, "second"))
	}
	if got, want := p.log("-c", "main"), "this is main\nmet second\n"; got != want {
		t.Errorf("log of main is %q, want %q", got, want)
	}
	if got, want := p.log("-c", "second"), "this is second\nmet main\n"; got != want {
		t.Errorf("log of second is %q, want %q", got, want)
	}
}

func TestBasicInitContainersRunFirstAndInOrder(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo main >>/share/order; cat /share/order",
		initContainer("one", "sleep 2; echo one >>/share/order; sleep 1"),
		initContainer("two", "echo two >>/share/order; sleep 1"),
		emptyDir("share", "/share")))
	p.awaitPhase("Succeeded")
	if got, want := p.log(), "one\ntwo\nmain\n"; got != want {
		t.Errorf("order is %q, want %q", got, want)
	}
	for _, o := range p.history() {
		if o.Status.Phase == v1.PodRunning && exitCode(o, "two") != 0 {
			t.Errorf("was Running while an init container had not ended: %+v", o.Status.InitContainerStatuses)
		}
	}
}

func TestBasicFailedInitContainerEndsThePod(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo never", initContainer("one", "echo no luck; exit 4"), initContainer("two", "echo never")))
	o := p.awaitPhase("Failed")
	if exitCode(o, "one") != 4 || status(o, "two").State.Waiting == nil || status(o, "main").State.Waiting == nil {
		t.Errorf("init %+v, app %+v; want one to have ended with 4, the others to wait", o.Status.InitContainerStatuses, o.Status.ContainerStatuses)
	}
	if got := p.log("-c", "one"); got != "no luck\n" {
		t.Errorf("log of one is %q", got)
	}
	if got := login(t, fmt.Sprintf("cat %s/log/main.* %s/log/two.* 2>/dev/null || :", p.dir(), p.dir())); got != "" {
		t.Errorf("the others have run: %q", got)
	}
}

func TestBasicRestartOnFailureUntilItSucceeds(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo run >>/runs/runs; k=$(wc -l </runs/runs); echo this is run $k; [ $k -ge 2 ] || exit 5; sleep 5",
		emptyDir("runs", "/runs"), restart(v1.RestartPolicyOnFailure)))
	p.await("a second run", func(o *v1.Pod) bool { return status(o, "main").RestartCount == 1 })
	o := p.awaitPhase("Succeeded")
	s := status(o, "main")
	if s.RestartCount != 1 || s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.ExitCode != 5 || exitCode(o, "main") != 0 {
		t.Errorf("status is %+v", s)
	}
	if got := p.log(); got != "this is run 2\n" {
		t.Errorf("log is %q", got)
	}
	if got := p.log("--previous"); got != "this is run 1\n" {
		t.Errorf("log of the previous run is %q", got)
	}
}

func TestBasicRestartAlways(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "echo run >>/runs/runs; [ $(wc -l </runs/runs) -ge 2 ] && exec sleep 1000; exit 0", emptyDir("runs", "/runs"), restart(v1.RestartPolicyAlways)))
	p.await("back-off", func(o *v1.Pod) bool {
		w := status(o, "main").State.Waiting
		return w != nil && w.Reason == "CrashLoopBackOff"
	})
	o := p.await("a second run", func(o *v1.Pod) bool { return running("main")(o) && status(o, "main").RestartCount == 1 })
	if last := status(o, "main").LastTerminationState.Terminated; o.Status.Phase != v1.PodRunning || last == nil || last.ExitCode != 0 {
		t.Errorf("phase %s, last run %+v", o.Status.Phase, last)
	}
	p.kubectl("delete", "pod", p.name, "--timeout=120s")
	p.noJobAlive()
}

// What a container gets is compared by its hash, so that nothing on the way can
// mend it again.
func TestBasicFilesAndEnvironmentAreByteExact(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	random := make([]byte, 200<<10)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	hostile := "a 'b' \"c\" $(echo d) `e` ${HOME} \\n\n\n\ttab\u00e4\U0001F600 %s !x # ; & | > < * ? [ ] ~ = \n\n"
	n.configMap("map", map[string]string{"text": hostile, "empty": ""}, map[string][]byte{"binary": random})
	n.secret("secret", map[string][]byte{"key": []byte(hostile), "bin": random[:4096]})
	p := n.createOne(n.shell("pod", `for f in /map/* /secret/* /late/x /var/run/secrets/kubernetes.io/serviceaccount/*; do sha256sum "$f"; done
for v in LITERAL FROM_MAP FROM_SECRET EMPTY all_text; do eval "printf %s \"\$$$v\"" | sha256sum | sed "s/-/$v/"; done
echo "arg: $0 $1"; id -u; ls -ln /secret/..data/ | tail -n 1 | cut -c1-10
touch /map/text 2>/dev/null && echo configMap is writable; :`, func(p *v1.Pod) {
		c := &p.Spec.Containers[0]
		c.Command = append(c.Command, "$(LITERAL)", "$$(LITERAL) $(NONE)")
		c.Env = []v1.EnvVar{
			{Name: "LITERAL", Value: strings.ReplaceAll(hostile, "$", "$$")}, // $$ is Kubernetes' own escape
			{Name: "FROM_MAP", ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "map"}, Key: "text"}}},
			{Name: "FROM_SECRET", ValueFrom: &v1.EnvVarSource{SecretKeyRef: &v1.SecretKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "secret"}, Key: "key"}}},
			{Name: "EMPTY", Value: ""},
		}
		c.EnvFrom = []v1.EnvFromSource{{Prefix: "all_", ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "map"}}}}
	},
		volume("map", "/map", v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "map"}}}),
		volume("secret", "/secret", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "secret", DefaultMode: new(int32(0o400))}}),
		emptyDir("late", "/late"), initContainer("writes", "true"),
		func(p *v1.Pod) { // the app finds what an init container wrote
			p.Spec.InitContainers[0].VolumeMounts = []v1.VolumeMount{{Name: "late", MountPath: "/late"}}
			p.Spec.InitContainers[0].Command[2] = "printf x >/late/x"
		}))
	p.awaitPhase("Succeeded")
	log := p.log()
	ca := []byte(p.kubectl("get", "configmap", "kube-root-ca.crt", "-o", `jsonpath={.data.ca\.crt}`))
	sa := "/var/run/secrets/kubernetes.io/serviceaccount/"
	for name, want := range map[string][]byte{
		"/map/text": []byte(hostile), "/map/empty": nil, "/map/binary": random, "/secret/key": []byte(hostile), "/secret/bin": random[:4096], "/late/x": []byte("x"),
		sa + "ca.crt": ca, sa + "namespace": []byte(n.name),
		"LITERAL": []byte(hostile), "FROM_MAP": []byte(hostile), "FROM_SECRET": []byte(hostile), "EMPTY": nil, "all_text": []byte(hostile),
	} {
		if line := fmt.Sprintf("%x  %s\n", sha256.Sum256(want), name); !strings.Contains(log, line) {
			t.Errorf("%s is not as it should be", name)
		}
	}
	if want := "arg: " + hostile + " $(LITERAL) $(NONE)\n"; !strings.Contains(log, want) {
		t.Errorf("the log lacks %q", want)
	}
	if strings.Contains(log, "configMap is writable") || !strings.Contains(log, "-r--------") {
		t.Error("modes are not as they should be")
	}
	if t.Failed() {
		t.Logf("log:\n%s", log)
	}
	// The token is the service account's, for this very pod.
	token := login(t, "cat "+p.dir()+"/vol/kube-api-access-*/token")
	who, err := kubectlAs(t, token, "auth", "whoami", "-o", "json")
	if err != nil || !strings.Contains(who, "system:serviceaccount:"+n.name+":default") || !strings.Contains(who, string(p.uid)) {
		t.Errorf("the API server takes the token for %s %v", who, err)
	}
}

// kubectlAs runs kubectl with a bearer token.
func kubectlAs(t testing.TB, token string, args ...string) (string, error) {
	t.Helper()
	server := kubectl(t, "config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
	file := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":%q,"certificate-authority":%q}}],
"users":[{"name":"u","user":{"token":%q}}],"contexts":[{"name":"x","context":{"cluster":"c","user":"u"}}],"current-context":"x"}`,
		server, env("KNOC_PKI")+"/ca.crt", token)
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	return tryKubectl(nil, append([]string{"--kubeconfig", file}, args...)...)
}

func TestBasicMissingSecretIsWaitedFor(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	needs := volume("secret", "/secret", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "later"}})
	pods := n.create(n.shell("waits", "cat /secret/key", needs), n.shell("deleted", "true", needs),
		n.shell("optional", "ls /secret", volume("secret", "/secret", v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "other", Optional: new(true)}})))
	for _, p := range pods[:2] {
		p.await("a reason that names the secret", func(o *v1.Pod) bool {
			w := status(o, "main").State.Waiting
			return o.Status.Phase == v1.PodPending && w != nil && strings.Contains(w.Message, "later")
		})
	}
	pods[2].awaitPhase("Succeeded")
	pods[1].kubectl("delete", "pod", "deleted", "--timeout=60s")
	n.secret("later", map[string][]byte{"key": []byte("it came")})
	pods[0].awaitPhase("Succeeded")
	if got := pods[0].log(); got != "it came" {
		t.Errorf("log is %q", got)
	}
}

func TestBasicRequestsBecomeTheJobs(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	resources := func(cpu, mem string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Requests: v1.ResourceList{"cpu": resource.MustParse(cpu), "memory": resource.MustParse(mem)}}
	}
	p := n.createOne(n.shell("pod", "sleep 5", appContainer("second", "sleep 5"), initContainer("first", "true"), func(p *v1.Pod) {
		p.Spec.Containers[0].Resources = resources("1500m", "300Mi")
		p.Spec.Containers[0].Resources.Limits = v1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")}
		p.Spec.Containers[1].Resources = resources("600m", "200000001") // bytes: 190.7 MiB
		p.Spec.InitContainers[0].Resources = resources("1", "64Mi")
		p.Spec.ActiveDeadlineSeconds = new(int64(600))
		p.Spec.TerminationGracePeriodSeconds = new(int64(30))
	}))
	got := scontrol(t, p.awaitJob())
	got["NumNodes"] = strings.TrimSuffix(got["NumNodes"], "-1") // as long as it waits: from 1 to 1
	for key, want := range map[string]string{
		"JobName": "knoc-" + string(p.uid), "Comment": n.name + "/pod", "NumNodes": "1", "CPUs/Task": "3", "MinMemoryNode": "491M",
		"TimeLimit": "00:12:00", "Partition": "batch", "Requeue": "0", // (600 + 30 + 60) s, in whole minutes
	} {
		if got[key] != want {
			t.Errorf("scontrol says %s=%s, want %s", key, got[key], want)
		}
	}
	if gres := got["TresPerNode"] + got["TresPerJob"]; !regexp.MustCompile(`gpu:1$`).MatchString(gres) {
		t.Errorf("scontrol says TresPerNode=%s", gres)
	}
	p.awaitPhase("Succeeded")
}

func TestBasicPendingTellsWhySlurmWaits(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "true", flags("--hold")))
	p.await("Slurm's reason", func(o *v1.Pod) bool {
		w := status(o, "main").State.Waiting
		return o.Status.Phase == v1.PodPending && w != nil && w.Reason != "" && strings.Contains(w.Message, "JobHeldUser") && strings.Contains(w.Message, jobID(o))
	})
	login(t, "scontrol release "+p.awaitJob())
	p.awaitPhase("Succeeded")
}

func TestBasicFlagsAnnotation(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	p := n.createOne(n.shell("pod", "sleep 5", flags(" --nice=7 -p gpu '--nodelist=n1' ")))
	got := scontrol(t, p.awaitJob())
	if got["Nice"] != "7" || got["Partition"] != "gpu" || got["ReqNodeList"] != "n1" {
		t.Errorf("scontrol says Nice=%s Partition=%s ReqNodeList=%s", got["Nice"], got["Partition"], got["ReqNodeList"])
	}
	p.awaitPhase("Succeeded")
}

func TestBasicImageEntrypointAndCommand(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	app := func(command, args []string) func(*v1.Pod) {
		return func(p *v1.Pod) {
			p.Spec.Containers[0] = v1.Container{Name: "main", Image: env("KNOC_IMAGE_APP"), Command: command, Args: args}
		}
	}
	pods := n.create(n.shell("image", "", app(nil, nil)), n.shell("args", "", app(nil, []string{"a b", "$(id)"})), n.shell("command", "", app([]string{"echo", "c"}, []string{"d e"})))
	for i, want := range []string{"entry args=[hello two words]", "entry args=[a b $(id)]", "c d e\n"} {
		pods[i].awaitEnd()
		if got := pods[i].log(); !strings.HasPrefix(got, want) {
			t.Errorf("%s: log is %q, want %q", pods[i].name, got, want)
		}
	}
}

func TestBasicJobControllerRunsEachPodOnce(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	template := n.shell("", "echo done")
	n.object(map[string]any{
		"apiVersion": "batch/v1", "kind": "Job", "metadata": map[string]any{"name": "job"},
		"spec": map[string]any{"completions": 3, "parallelism": 3, "backoffLimit": 0, "template": map[string]any{"spec": template.Spec}},
	})
	kubectl(t, "-n", n.name, "wait", "--for=condition=Complete", "job/job", "--timeout=240s")
	out := kubectl(t, "-n", n.name, "get", "pods", "-o", `jsonpath={range .items[*]}{.status.phase}{"\n"}{end}`)
	if out != strings.Repeat("Succeeded\n", 3) {
		t.Errorf("pods are %q", out)
	}
}

func TestBasicFiftyPodsAtOnceRunOnceEach(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	var manifests []*v1.Pod
	for i := range 50 {
		manifests = append(manifests, n.shell("pod-"+strconv.Itoa(i), "true", counted))
	}
	pods := n.create(manifests...)
	for _, p := range pods {
		p.awaitPhase("Succeeded")
	}
	jobs := jobsOf(t, pods...)
	var files []string // only these: to look for another pod's hides it from its own test, for 30 s of a stale home
	for _, p := range pods {
		files = append(files, "*/"+string(p.uid)+"/vol/runs/runs")
	}
	counts := login(t, "cd ~/.knoc && wc -l "+strings.Join(files, " ")+" 2>/dev/null || :")
	for _, p := range pods {
		if len(jobs[p.uid]) != 1 {
			t.Errorf("pod %s has %d jobs: %v", p.name, len(jobs[p.uid]), jobs[p.uid])
		}
		if !regexp.MustCompile(`(?m)^ *1 .*/` + string(p.uid) + `/vol/runs/runs$`).MatchString(counts) {
			t.Errorf("pod %s did not run once", p.name)
		}
	}
}
