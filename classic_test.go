package knoc

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// nodeCLI is a ResourceManager as that of virtual-kubelet's node-cli.
type nodeCLI struct{}

func (nodeCLI) GetConfigMap(name, namespace string) (*v1.ConfigMap, error) {
	if namespace+"/"+name != "default/settings" {
		return nil, apierrors.NewNotFound(v1.Resource("configmaps"), name)
	}
	return &v1.ConfigMap{Data: map[string]string{"greeting": "hello"}}, nil
}

func (nodeCLI) GetSecret(name, namespace string) (*v1.Secret, error) {
	return nil, apierrors.NewNotFound(v1.Resource("secrets"), name)
}

// classicEnv sets the environment of the first KNoC for a cluster.
func classicEnv(t *testing.T, c *testCluster) {
	t.Helper()
	host, port, _ := strings.Cut(c.Addr, ":")
	for name, value := range map[string]string{
		"REMOTE_HOST": host, "REMOTE_PORT": port, "REMOTE_USER": c.User, "REMOTE_KEY": c.KeyFile,
		"KNOC_SSH_KNOWN_HOSTS": c.KnownHostsFile, "KNOC_CLUSTER_ID": "c1", "KNOC_PARTITION": "batch",
	} {
		t.Setenv(name, value)
	}
}

// A program that vendors knoc and drives virtual-kubelet itself.
func classicProviderFor(t *testing.T, c *testCluster) *KNOCProvider {
	t.Helper()
	classicEnv(t, c)
	p, err := NewProviderConfig(KNOCConfig{CPU: "8"}, "knoc", "Linux", "10.1.2.3", nodeCLI{}, 10250)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func classicPod(name, command string) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("0f3b3c2e-1111-4222-8333-" + fmt.Sprintf("%012x", len(name)*1000+int(name[0])))},
		Spec: v1.PodSpec{
			RestartPolicy: v1.RestartPolicyNever,
			Containers:    []v1.Container{{Name: "main", Image: "busybox", Command: []string{"sh", "-c", command}}},
		},
	}
}

func TestClassicProvider(t *testing.T) {
	c := newTestCluster(t)
	c.InstallSlurm()
	p := classicProviderFor(t, c)
	if n := c.connects.Load(); n != 0 {
		t.Errorf("%d connections before anything was asked for", n)
	}
	var mu sync.Mutex
	notified := map[string]v1.PodPhase{}
	p.NotifyPods(t.Context(), func(pod *v1.Pod) {
		mu.Lock()
		defer mu.Unlock()
		notified[pod.Name] = pod.Status.Phase
	})
	phase := func(name string) v1.PodPhase {
		mu.Lock()
		defer mu.Unlock()
		return notified[name]
	}
	old := p.Classic()
	pod := classicPod("web", "echo one; echo two; exit 3")
	if err := old.CreatePod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the pod has failed", func() bool { return phase("web") == v1.PodFailed })
	status, err := old.GetPodStatus(t.Context(), "default", "web")
	if err != nil {
		t.Fatal(err)
	}
	if s := status.ContainerStatuses; len(s) != 1 || s[0].State.Terminated == nil || s[0].State.Terminated.ExitCode != 3 {
		t.Errorf("container statuses %+v, want exit code 3", s)
	}
	for tail, want := range map[int]string{0: "one\ntwo\n", 1: "two\n", -1: "one\ntwo\n"} {
		if got, err := old.GetContainerLogs(t.Context(), "default", "web", "main", tail); err != nil || got != want {
			t.Errorf("tail %d: log %q, %v, want %q", tail, got, err, want)
		}
	}
	if pods, err := old.GetPods(t.Context()); err != nil || len(pods) != 1 || pods[0].Name != "web" {
		t.Errorf("pods %v, %v", pods, err)
	}
	if err := old.DeletePod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the pod is gone", func() bool {
		_, err := old.GetPod(t.Context(), "default", "web")
		return errdefs.IsNotFound(err)
	})
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestClassicExec(t *testing.T) {
	c := newTestCluster(t)
	p, _ := verbsProvider(t, c, runningJournal)
	old := p.Classic()
	uid := types.UID("0f3b3c2e-1111-4222-8333-444455556666")
	for _, test := range []struct {
		name string
		uid  types.UID
		want string
	}{
		{"default/web", "", ""},
		{"default-web", "", ""},
		{"", uid, ""},
		{"anything", uid, ""},
		{"web", "", "not known"},
		{"", "no-such-uid", "not known"},
		{"", "", "not known"},
	} {
		var out buffer
		err := old.ExecInContainer(test.name, test.uid, "main", []string{"echo", "hello"}, nil, &out, nil, false, nil, 0)
		switch {
		case test.want == "" && (err != nil || out.String() != "hello\n"):
			t.Errorf("%q %q: %q, %v", test.name, test.uid, out.String(), err)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%q %q: error %v, want %q", test.name, test.uid, err, test.want)
		}
	}
	begun := time.Now()
	err := old.ExecInContainer("default/web", "", "main", []string{"sleep", "60"}, nil, nil, nil, false, nil, 500*time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "no end within 500ms") || time.Since(begun) > 20*time.Second {
		t.Errorf("timeout: %v after %v", err, time.Since(begun))
	}
	// a-b/c and a/b-c are both a-b-c
	for _, name := range []types.NamespacedName{{Namespace: "a-b", Name: "c"}, {Namespace: "a", Name: "b-c"}} {
		pod := classicPod(name.Name, "true")
		pod.Namespace = name.Namespace
		setJournal(p, pod, "7", runningJournal)
	}
	if err := old.ExecInContainer("a-b-c", "", "main", []string{"true"}, nil, nil, nil, false, nil, 0); !errdefs.IsInvalidInput(err) {
		t.Errorf("ambiguous name: %v", err)
	}
}

func TestConfigureNode(t *testing.T) {
	p := classicProviderFor(t, newTestCluster(t))
	n := &v1.Node{}
	p.ConfigureNode(t.Context(), n)
	old := p.Classic()
	capacity := old.Capacity(t.Context())
	for name, want := range map[v1.ResourceName]string{"cpu": "8", "memory": "100Gi", "pods": "20"} {
		for what, list := range map[string]v1.ResourceList{"capacity": n.Status.Capacity, "allocatable": n.Status.Allocatable, "Capacity": capacity} {
			if got := list[name]; got.Cmp(resource.MustParse(want)) != 0 {
				t.Errorf("%s: %s is %s, want %s", what, name, got.String(), want)
			}
		}
	}
	if a := old.NodeAddresses(t.Context()); len(a) != 1 || a[0].Address != "10.1.2.3" || len(n.Status.Addresses) != 1 {
		t.Errorf("addresses %v, node %v", a, n.Status.Addresses)
	}
	if e := old.NodeDaemonEndpoints(t.Context()); e.KubeletEndpoint.Port != 10250 || n.Status.DaemonEndpoints != *e {
		t.Errorf("daemon endpoints %v, node %v", e, n.Status.DaemonEndpoints)
	}
	ready := false
	for _, c := range old.NodeConditions(t.Context()) {
		ready = ready || c.Type == v1.NodeReady && c.Status == v1.ConditionTrue
	}
	if !ready || len(n.Status.Conditions) == 0 {
		t.Errorf("conditions %v", n.Status.Conditions)
	}
	if old.OperatingSystem() != "Linux" || n.Status.NodeInfo.OperatingSystem != "linux" || n.Labels["kubernetes.io/os"] != "linux" {
		t.Errorf("operating system %q, node %q %v", old.OperatingSystem(), n.Status.NodeInfo.OperatingSystem, n.Labels)
	}
	if got := ValidOperatingSystems.Names(); !slices.Equal(got, []string{"Linux", "Windows"}) {
		t.Errorf("valid operating systems %v", got)
	}
}

func TestNewProvider(t *testing.T) {
	c := newTestCluster(t)
	classicEnv(t, c)
	file := filepath.Join(t.TempDir(), "config.json")
	c.writeFile(file, `{"knoc": {"memory": "32Gi"}, "*": {"pods": "7"}}`)
	p, err := NewProvider(file, "knoc", "", "", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[v1.ResourceName]string{"cpu": "20", "memory": "32Gi", "pods": "7"} {
		if got := p.Classic().Capacity(t.Context())[name]; got.String() != want {
			t.Errorf("%s is %s, want %s", name, got.String(), want)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	for _, test := range []struct {
		name string
		call func() error
		want string
	}{
		{"file", func() error { _, err := NewProvider(file+"x", "knoc", "", "", nil, 0); return err }, "config.jsonx"},
		{"quantity", func() error {
			_, err := NewProviderConfig(KNOCConfig{CPU: "many"}, "knoc", "", "", nil, 0)
			return err
		}, `cpu "many"`},
		{"windows", func() error {
			_, err := NewProviderConfig(KNOCConfig{}, "knoc", "Windows", "", nil, 0)
			return err
		}, "Linux only"},
		{"no host", func() error {
			t.Setenv("REMOTE_HOST", "")
			_, err := NewProviderConfig(KNOCConfig{}, "knoc", "", "", nil, 0)
			return err
		}, "REMOTE_HOST"},
	} {
		if err := test.call(); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", test.name, err, test.want)
		}
	}
}

func TestRemoteExecutionNames(t *testing.T) {
	valid := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9-]*[A-Za-z0-9]$`)
	long := strings.Repeat("x", 63)
	seen := map[string]string{}
	for _, pod := range []struct{ namespace, name, uid string }{
		{"default", "web", "0f3b3c2e-1111-4222-8333-444455556666"},
		{"default", "web", "0f3b3c2e-1111-4222-8333-444455556667"},
		{"other", "web", "0f3b3c2e-1111-4222-8333-444455556666"},
		{long, long, "0f3b3c2e-1111-4222-8333-444455556666"},
		{"default", "a", ""}, {"default", "b", ""},
		{"default", "web", "d1f02a6d4f3c"}, {"default", "web", "../../etc"}, {"default", "web", "; rm -rf /"},
		{strings.Repeat("n", 300), "web", strings.Repeat("u", 300)},
	} {
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.namespace, Name: pod.name, UID: types.UID(pod.uid)}}
		podName := BuildRemoteExecutionPodName(p)
		for _, container := range []string{"", "main", "side", "main-2", long, long + "y", "Ümlaut", "Umlaut", "a/b", "a_b", strings.Repeat("z", 300)} {
			// The image is no part of it: two containers may share one.
			name := BuildRemoteExecutionInstanceName(v1.Container{Name: container, Image: "busybox"}, p)
			if container == "" {
				name = podName
			}
			what := fmt.Sprintf("%.20q", []string{pod.namespace, pod.name, pod.uid, container})
			if other, ok := seen[name]; ok {
				t.Errorf("%s and %s are both %q", what, other, name)
			}
			seen[name] = what
			if !valid.MatchString(name) || len(name) > 164 || !strings.HasPrefix(name, podName) {
				t.Errorf("%s: %q (%d bytes) of pod %q", what, name, len(name), podName)
			}
			if name != podName && name != BuildRemoteExecutionInstanceName(v1.Container{Name: container, Image: "other"}, p) {
				t.Errorf("%s: the name depends on more than the names", what)
			}
		}
	}
}

func TestRemoteExecution(t *testing.T) {
	c := newTestCluster(t)
	c.InstallSlurm()
	p := classicProviderFor(t, c)
	pod := classicPod("web", `echo "$0" main; cat /dev/null; exit 3`)
	pod.Spec.Volumes = []v1.Volume{
		{Name: "shared", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		{Name: "settings", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "settings"}}}},
		{Name: "unused", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "missing"}}},
	}
	pod.Spec.Containers[0].VolumeMounts = []v1.VolumeMount{{Name: "shared", MountPath: "/shared"}, {Name: "settings", MountPath: "/etc/settings"}}
	side := *pod.Spec.Containers[0].DeepCopy()
	side.Name, side.Command = "side", []string{"sh", "-c", "exec sleep 300"}
	pod.Spec.Containers = append(pod.Spec.Containers, side)

	root := filepath.Join(c.Home, ".knoc/knoc-c1/classic")
	dir := func(container v1.Container) string {
		return filepath.Join(root, BuildRemoteExecutionInstanceName(container, pod))
	}
	journal := func(container v1.Container) string {
		b, _ := os.ReadFile(filepath.Join(dir(container), "journal.0"))
		return string(b)
	}
	for _, container := range pod.Spec.Containers {
		for range 2 { // the second does nothing
			if err := RemoteExecution(p, t.Context(), RemoteExecutionCreate, "docker://"+container.Image, pod, container); err != nil {
				t.Fatal(err)
			}
		}
	}
	waitUntil(t, "main has ended", func() bool { return strings.Contains(journal(pod.Spec.Containers[0]), "exit main 0 3") })
	waitUntil(t, "side has started", func() bool { return strings.Contains(journal(side), "start side 0") })
	if b, err := os.ReadFile(filepath.Join(dir(side), "vol/settings/greeting")); err != nil || string(b) != "hello" {
		t.Errorf("configmap: %q, %v", b, err)
	}
	c.writeFile(filepath.Join(dir(side), "vol/shared/file"), "x")
	if _, err := os.Stat(filepath.Join(dir(pod.Spec.Containers[0]), "vol/shared/file")); err != nil {
		t.Errorf("the emptyDir is not shared: %v", err)
	}
	// The loop knows nothing of them.
	if pods, err := p.GetPods(t.Context()); err != nil || len(pods) != 0 {
		t.Errorf("the loop's pods: %v, %v", pods, err)
	}
	for _, container := range pod.Spec.Containers {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for range 2 {
			if err := RemoteExecution(p, ctx, RemoteExecutionDelete, "", pod, container); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := os.Stat(dir(container)); !os.IsNotExist(err) {
			t.Errorf("directory of %s: %v, want it gone", container.Name, err)
		}
	}
	left, err := filepath.Glob(filepath.Join(root, "*"+string(pod.UID)+"*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := RemoteExecution(p, t.Context(), 2, "", pod, side); err == nil || !strings.Contains(err.Error(), "mode 2") {
		t.Errorf("mode 2: %v", err)
	}
	// What can never work is said, and nothing is made.
	pod.Spec.Volumes[1].ConfigMap = nil
	pod.Spec.Volumes[1].Projected = &v1.ProjectedVolumeSource{Sources: []v1.VolumeProjection{{ServiceAccountToken: &v1.ServiceAccountTokenProjection{Path: "token"}}}}
	err = RemoteExecution(p, t.Context(), RemoteExecutionCreate, "", pod, side)
	if err == nil || !strings.Contains(err.Error(), "automountServiceAccountToken: false") {
		t.Errorf("token: %v", err)
	}
}

// A stream that is cut anywhere leaves no half staged container.
func TestPrepareContainerDataCut(t *testing.T) {
	c := newTestCluster(t)
	c.InstallSlurm()
	p := classicProviderFor(t, c)
	if err := p.started(t.Context()); err != nil {
		t.Fatal(err)
	}
	pod := classicPod("web", "true")
	container := pod.Spec.Containers[0]
	name := BuildRemoteExecutionInstanceName(container, pod)
	dir := filepath.Join(c.Home, ".knoc/knoc-c1/classic", name)
	prepare := func() error {
		client, err := p.ssh.client(t.Context())
		if err != nil {
			return err
		}
		return PrepareContainerData(p, t.Context(), client, name, container, pod)
	}
	connected := func() bool {
		client, err := p.ssh.client(t.Context())
		if err != nil {
			return false
		}
		s, err := client.NewSession()
		if err != nil {
			return false
		}
		s.Close()
		return true
	}
	failed := 0
	for n := int64(500); n < 20000; n += 1500 {
		waitUntil(t, "a connection", connected)
		c.CutAfter(n)
		err := prepare()
		c.CutAfter(-1)
		_, missing := os.Stat(dir)
		if err == nil && missing != nil {
			t.Fatalf("cut after %d bytes: no error, yet %v", n, missing)
		}
		if err != nil {
			failed++
		}
		if missing == nil { // all was done, if not said
			if _, err := os.Stat(filepath.Join(dir, "ready")); err != nil {
				t.Errorf("cut after %d bytes: half a directory: %v", n, err)
			}
		}
	}
	if failed < 3 {
		t.Errorf("only %d cuts: the test is no test", failed)
	}
	waitUntil(t, "a connection", func() bool { return prepare() == nil })
	for _, f := range []string{"ready", "pod.sh", "meta"} {
		if _, err := os.Stat(filepath.Join(dir, f)); err != nil {
			t.Error(err)
		}
	}
	client, err := p.ssh.client(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := PrepareContainerData(p, t.Context(), client, "../x", container, pod); err == nil {
		t.Error("an instance name with a slash passes")
	}
}
