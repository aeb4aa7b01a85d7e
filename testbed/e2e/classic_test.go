//go:build testbed

package e2e

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path"
	"strings"
	"sync"
	"testing"
	"time"

	classic "github.com/CARV-ICS-FORTH/knoc"
	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
)

// oneConfigMap is the ResourceManager of a program that vendors knoc.
type oneConfigMap struct{}

func (oneConfigMap) GetConfigMap(name, namespace string) (*v1.ConfigMap, error) {
	if name != "settings" {
		return nil, apierrors.NewNotFound(v1.Resource("configmaps"), name)
	}
	return &v1.ConfigMap{Data: map[string]string{"greeting": "hello from " + namespace}}, nil
}

func (oneConfigMap) GetSecret(name, namespace string) (*v1.Secret, error) {
	return nil, apierrors.NewNotFound(v1.Resource("secrets"), name)
}

// classicProvider is made the way the first KNoC was: from its environment.
func classicProvider(t *testing.T) *classic.KNOCProvider {
	t.Helper()
	user, address, _ := strings.Cut(env("KNOC_SSH"), "@")
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		host, port = address, "22"
	}
	registry, _, _ := strings.Cut(env("KNOC_IMAGE_BUSYBOX"), "/")
	for name, value := range map[string]string{
		"REMOTE_HOST": host, "REMOTE_PORT": port, "REMOTE_USER": user, "REMOTE_KEY": env("KNOC_SSH_KEY"),
		"KNOC_CLUSTER_ID": "e2e", "KNOC_PARTITION": "batch", "KNOC_INSECURE_REGISTRY": registry,
	} {
		t.Setenv(name, value)
	}
	p, err := classic.NewProviderConfig(classic.KNOCConfig{CPU: "4"}, "knoc-classic", classic.OperatingSystemLinux, "127.0.0.1", oneConfigMap{}, 10250)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

func classicPod(name string, containers ...v1.Container) *v1.Pod {
	grace := int64(2)
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: uuid.NewUUID()},
		Spec:       v1.PodSpec{RestartPolicy: v1.RestartPolicyNever, TerminationGracePeriodSeconds: &grace, Containers: containers},
	}
	return pod
}

// sink is a writer as ExecInContainer wants it.
type sink struct{ bytes.Buffer }

func (*sink) Close() error { return nil }

func TestClassicProviderRunsAPod(t *testing.T) {
	kp := classicProvider(t)
	var p classic.Provider = kp.Classic()
	var mu sync.Mutex
	phases := map[types.UID]v1.PodPhase{}
	kp.NotifyPods(t.Context(), func(pod *v1.Pod) {
		mu.Lock()
		defer mu.Unlock()
		phases[pod.UID] = pod.Status.Phase
	})
	pod := classicPod("classic", container("main", "echo one; echo two; until [ -e /tmp/end ]; do sleep 0.2; done; exit 3"))
	if err := p.CreatePod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	in := func(phase v1.PodPhase) func() bool {
		return func() bool { mu.Lock(); defer mu.Unlock(); return phases[pod.UID] == phase }
	}
	until(t, "the pod to run", in(v1.PodRunning))
	until(t, "its log", func() bool {
		log, err := p.GetContainerLogs(t.Context(), "default", "classic", "main", 1)
		return err == nil && log == "two\n"
	})
	var out, errOut sink
	err := p.ExecInContainer("default-classic", "", "main", []string{"sh", "-c", "wc -c; echo oops >&2; touch /tmp/end"}, strings.NewReader("12345"), &out, &errOut, false, nil, time.Minute)
	if err != nil || strings.TrimSpace(out.String()) != "5" || errOut.String() != "oops\n" {
		t.Errorf("exec: %q, %q, %v", out.String(), errOut.String(), err)
	}
	until(t, "the pod to fail", in(v1.PodFailed))
	status, err := p.GetPodStatus(t.Context(), "default", "classic")
	if err != nil {
		t.Fatal(err)
	}
	if c := status.ContainerStatuses; len(c) != 1 || c[0].State.Terminated == nil || c[0].State.Terminated.ExitCode != 3 {
		t.Errorf("container statuses %+v, want exit code 3", c)
	}
	if err := p.DeletePod(t.Context(), pod); err != nil {
		t.Fatal(err)
	}
	until(t, "the pod to be gone", func() bool {
		_, err := p.GetPod(t.Context(), "default", "classic")
		return errdefs.IsNotFound(err)
	})
	if left := login(t, "squeue --noheader --name=knoc-"+string(pod.UID)); left != "" {
		t.Errorf("its job is still there: %s", left)
	}
}

func TestClassicRemoteExecution(t *testing.T) {
	p := classicProvider(t)
	mounts := []v1.VolumeMount{{Name: "shared", MountPath: "/shared"}, {Name: "settings", MountPath: "/settings"}}
	first := container("first", "cat /settings/greeting >/shared/first; sleep 1000")
	second := container("second", "until [ -s /shared/first ]; do sleep 0.2; done; cat /shared/first; exit 4")
	first.VolumeMounts, second.VolumeMounts = mounts, mounts
	pod := classicPod("parts", first, second)
	pod.Spec.Volumes = []v1.Volume{
		{Name: "shared", VolumeSource: v1.VolumeSource{EmptyDir: &v1.EmptyDirVolumeSource{}}},
		{Name: "settings", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "settings"}}}},
	}
	dir := func(c v1.Container) string {
		return path.Join(".knoc/knoc-classic-e2e/classic", classic.BuildRemoteExecutionInstanceName(c, pod))
	}
	for _, c := range pod.Spec.Containers {
		if err := classic.RemoteExecution(p, t.Context(), classic.RemoteExecutionCreate, "docker://"+c.Image, pod, c); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "the second container to end with 4", func() bool {
		return strings.Contains(login(t, "cat "+dir(second)+"/journal.0 2>/dev/null || true"), " exit second 0 4\n")
	})
	if log := login(t, "cat "+dir(second)+"/log/second.0"); log != "hello from default" {
		t.Errorf("log of the second container: %q", log)
	}
	for _, c := range pod.Spec.Containers {
		if err := classic.RemoteExecution(p, t.Context(), classic.RemoteExecutionDelete, "", pod, c); err != nil {
			t.Fatal(err)
		}
	}
	if left := login(t, fmt.Sprintf("squeue --noheader --format=%%j | grep %s; ls .knoc/knoc-classic-e2e/classic | grep %s; true", pod.UID, pod.UID)); left != "" {
		t.Errorf("left on the cluster: %s", left)
	}

	// PrepareContainerData works over the caller's own connection.
	key, err := ssh.ParsePrivateKey(keyFile(t))
	if err != nil {
		t.Fatal(err)
	}
	user, address, _ := strings.Cut(env("KNOC_SSH"), "@")
	known, err := knownhosts.New(env("KNOC_SSH_KNOWN_HOSTS"))
	if err != nil {
		t.Fatal(err)
	}
	client, err := ssh.Dial("tcp", address, &ssh.ClientConfig{User: user, Auth: []ssh.AuthMethod{ssh.PublicKeys(key)}, HostKeyCallback: known})
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	name := classic.BuildRemoteExecutionInstanceName(first, pod)
	if err := classic.PrepareContainerData(p, t.Context(), client, name, first, pod); err != nil {
		t.Fatal(err)
	}
	if got := login(t, "cat "+dir(first)+"/vol/settings/greeting"); got != "hello from default" {
		t.Errorf("staged configmap: %q", got)
	}
	if err := classic.RemoteExecution(p, t.Context(), classic.RemoteExecutionDelete, "", pod, first); err != nil {
		t.Fatal(err)
	}
}

func keyFile(t *testing.T) []byte {
	t.Helper()
	key, err := os.ReadFile(env("KNOC_SSH_KEY"))
	if err != nil {
		t.Fatal(err)
	}
	return key
}
