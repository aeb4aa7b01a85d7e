//go:build testbed

package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// newImage puts an image with a digest of its own into the open registry and
// returns its name. Its manifest is another image's with a note.
func newImage(t testing.TB, repository string) (image, tag, digest string) {
	t.Helper()
	tag = fmt.Sprintf("e2e-%08x", rand.Uint32())
	registry, _, _ := strings.Cut(env("KNOC_IMAGE_BUSYBOX"), "/")
	url := "http://" + registry + "/v2/" + repository + "/manifests/"
	const kind = "application/vnd.oci.image.manifest.v1+json"
	text := command(t, "KNOC_CLOUD_EXEC", "curl", "-sSf", "-H", "Accept: "+kind, url+"latest")
	var manifest map[string]any
	if err := json.Unmarshal([]byte(text), &manifest); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	manifest["annotations"] = map[string]string{"for": tag}
	data, err := json.Marshal(manifest)
	if err != nil {
		t.Fatal(err)
	}
	out := command(t, "KNOC_CLOUD_EXEC", "curl", "-sSf", "-D", "-", "-X", "PUT", "-H", "Content-Type: "+kind, "--data-binary", string(data), url+tag)
	for line := range strings.Lines(out) {
		if d, ok := strings.CutPrefix(strings.ToLower(line), "docker-content-digest: "); ok {
			digest = strings.TrimSpace(d)
		}
	}
	if digest == "" {
		t.Fatalf("no digest in %q", out)
	}
	return registry + "/" + repository + ":" + tag, tag, digest
}

// manifestPulls counts the requests for a manifest in the registry's own log: a
// pull has one.
func manifestPulls(t testing.TB, repository string, names ...string) (count int) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(filepath.Dir(env("KNOC_LOG")), "registry-5000.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		count += strings.Count(string(data), `"GET /v2/`+repository+"/manifests/"+name+" ")
	}
	return count
}

func TestManyPodsOneNewImage(t *testing.T) {
	t.Parallel()
	image, tag, digest := newImage(t, "busybox")
	n := newNamespace(t)
	var manifests []*v1.Pod
	for i := range 20 {
		manifests = append(manifests, n.shell(fmt.Sprintf("p%d", i), "echo hello", func(p *v1.Pod) {
			p.Spec.Containers[0].Image = image
			p.Spec.Containers[0].ImagePullPolicy = v1.PullIfNotPresent
		}))
	}
	for _, p := range n.create(manifests...) {
		p.awaitPhase(v1.PodSucceeded)
		want := strings.TrimSuffix(image, ":"+tag) + "@" + digest
		if got := p.now().Status.ContainerStatuses[0].ImageID; got != want {
			t.Errorf("image id %q, want %q", got, want)
		}
	}
	if got := manifestPulls(t, "busybox", tag, digest); got != 1 {
		t.Errorf("the image was pulled %d times", got)
	}
}

// The image's own program, with no shell, and what the pod says instead of it.
func TestImageProgram(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	registry, _, _ := strings.Cut(env("KNOC_IMAGE_BUSYBOX"), "/")
	tests := map[string]struct {
		change func(c *v1.Container)
		want   string
	}{
		"own":     {func(c *v1.Container) {}, `[hello][$(id) "two" words]`},
		"args":    {func(c *v1.Container) { c.Args = []string{"it's", "$HOME"} }, `[it's][$HOME]`},
		"command": {func(c *v1.Container) { c.Command = []string{"/printf", "%s"}; c.Args = []string{"x"} }, "x"},
		"workdir": {func(c *v1.Container) {
			c.Image, c.Command = env("KNOC_IMAGE_APP"), []string{"pwd"}
		}, "/work"},
		"app": {func(c *v1.Container) { c.Image, c.Args = env("KNOC_IMAGE_APP"), []string{"a b"} }, "entry args=[a b] pwd=/work"},
		"dir": {func(c *v1.Container) {
			c.Image, c.Command, c.WorkingDir = env("KNOC_IMAGE_APP"), []string{"pwd"}, "/tmp"
		}, "/tmp"},
	}
	pods := map[string]*pod{}
	for name, tc := range tests {
		pods[name] = n.createOne(n.shell(name, "", func(p *v1.Pod) {
			c := &p.Spec.Containers[0]
			c.Image, c.Command = registry+"/static:latest", nil
			tc.change(c)
		}))
	}
	for name, tc := range tests {
		pods[name].awaitPhase(v1.PodSucceeded)
		if got := pods[name].log(); !strings.HasPrefix(got, tc.want) {
			t.Errorf("%s: log %q, want %q", name, got, tc.want)
		}
	}
}

// A private image with, without and with the wrong secret, and with one that is
// not there; once from the service account.
func TestImagePrivate(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	server := env("KNOC_PRIVATE_SERVER")
	config := func(password string) []byte {
		text, err := json.Marshal(map[string]any{"auths": map[string]any{server: map[string]string{"username": env("KNOC_PRIVATE_USER"), "password": password}}})
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	for name, password := range map[string]string{"good": env("KNOC_PRIVATE_PASS"), "wrong": "not-" + env("KNOC_PRIVATE_PASS")} {
		n.object(&v1.Secret{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"}, ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: n.name},
			Type: v1.SecretTypeDockerConfigJson, Data: map[string][]byte{v1.DockerConfigJsonKey: config(password)}})
	}
	n.object(&v1.ServiceAccount{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ServiceAccount"}, ObjectMeta: metav1.ObjectMeta{Name: "puller", Namespace: n.name},
		ImagePullSecrets: []v1.LocalObjectReference{{Name: "good"}}})
	private := func(name string, change func(*v1.PodSpec)) *pod {
		return n.createOne(n.shell(name, "echo hello", func(p *v1.Pod) {
			p.Spec.Containers[0].Image = env("KNOC_IMAGE_PRIVATE")
			p.Spec.Containers[0].ImagePullPolicy = v1.PullIfNotPresent
			change(&p.Spec)
		}))
	}
	with := func(names ...string) func(*v1.PodSpec) {
		return func(s *v1.PodSpec) {
			for _, name := range names {
				s.ImagePullSecrets = append(s.ImagePullSecrets, v1.LocalObjectReference{Name: name})
			}
		}
	}
	good := []*pod{private("good", with("good")), private("second", with("wrong", "good")), private("account", func(s *v1.PodSpec) { s.ServiceAccountName = "puller" })}
	for _, p := range good {
		p.awaitPhase(v1.PodSucceeded)
	}
	missing := private("missing", with("none"))
	for _, p := range []*pod{private("without", with()), private("wrong", with("wrong")), missing} {
		p.await("a pull that is not allowed", func(p *v1.Pod) bool {
			w := p.Status.ContainerStatuses[0].State.Waiting
			return w != nil && w.Reason == "ErrImagePull" && strings.Contains(w.Message, "authentication required")
		})
	}
	missing.awaitEvent("FailedToRetrieveImagePullSecret : Unable to retrieve some image pull secrets (none); attempting to pull the image may not succeed.")
}

func TestImageTrouble(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	registry, _, _ := strings.Cut(env("KNOC_IMAGE_BUSYBOX"), "/")
	missing := n.createOne(n.shell("missing", "", func(p *v1.Pod) {
		p.Spec.Containers[0].Image = registry + "/nothing:1"
		p.Spec.Containers = append(p.Spec.Containers, container("other", "sleep 1000"))
	}))
	_, tag, _ := newImage(t, "busybox")
	never := n.createOne(n.shell("never", "echo hello", func(p *v1.Pod) {
		p.Spec.Containers[0].Image = registry + "/busybox:" + tag
		p.Spec.Containers[0].ImagePullPolicy = v1.PullNever
	}))
	missing.await("ErrImagePull or ImagePullBackOff beside a running container", func(p *v1.Pod) bool {
		var waiting, running bool
		for _, s := range p.Status.ContainerStatuses {
			waiting = waiting || s.State.Waiting != nil && s.State.Waiting.Reason == "ImagePullBackOff" && strings.Contains(s.State.Waiting.Message, "manifest unknown")
			running = running || s.Name == "other" && s.State.Running != nil
		}
		return waiting && running && p.Status.Phase == v1.PodPending
	})
	never.await("ErrImageNeverPull", func(p *v1.Pod) bool {
		w := p.Status.ContainerStatuses[0].State.Waiting
		return w != nil && w.Reason == "ErrImageNeverPull" && strings.HasSuffix(w.Message, "is not present with pull policy of Never")
	})
	pulled := n.createOne(n.shell("pulled", "echo hello", func(p *v1.Pod) {
		p.Spec.Containers[0].Image = registry + "/busybox:" + tag
	}))
	pulled.awaitPhase(v1.PodSucceeded)
	never.awaitPhase(v1.PodSucceeded) // healed
}

// A job whose image cannot be had does not keep its place: it is held in the queue
// until the pod gets another image. One that is held goes at once.
func TestImageParked(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	registry, _, _ := strings.Cut(env("KNOC_IMAGE_BUSYBOX"), "/")
	var pods []*pod
	for _, name := range []string{"healed", "deleted"} {
		p := n.createOne(n.shell(name, "echo hello", func(p *v1.Pod) { p.Spec.Containers[0].Image = registry + "/nothing:" + name }))
		p.requeued = true
		pods = append(pods, p)
	}
	job := map[*pod]string{}
	for _, p := range pods {
		job[p] = p.awaitJob()
		until(t, "the job is held", func() bool {
			out := login(t, "squeue --noheader --format='%T %r' --jobs="+job[p])
			return strings.HasPrefix(out, "PENDING") && strings.Contains(out, "held")
		})
		p.await("still in back-off", func(p *v1.Pod) bool {
			w := p.Status.ContainerStatuses[0].State.Waiting
			return p.Status.Phase == v1.PodPending && w != nil && w.Reason == "ImagePullBackOff" && strings.Contains(w.Message, "manifest unknown")
		})
	}
	pods[1].kubectl("delete", "pod", pods[1].name, "--wait=false")
	pods[0].setImage("main", env("KNOC_IMAGE_BUSYBOX"))
	pods[1].awaitGone()
	pods[0].awaitPhase(v1.PodSucceeded)
	if got := pods[0].log(); got != "hello\n" {
		t.Errorf("log %q", got)
	}
}

// The Node lists what the cache has.
func TestImageOnNode(t *testing.T) {
	t.Parallel()
	n := newNamespace(t)
	n.createOne(n.shell("pod", "true")).awaitPhase(v1.PodSucceeded)
	want := env("KNOC_IMAGE_BUSYBOX")
	until(t, "the Node lists "+want, func() bool {
		return strings.Contains(kubectl(t, "get", "node", n.node, "-o", "jsonpath={.status.images[*].names}"), `"`+want+`"`)
	})
}
