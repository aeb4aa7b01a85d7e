package knoc

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	dto "github.com/prometheus/client_model/go"
	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	statsv1alpha1 "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

func condition(t v1.PodConditionType, s v1.ConditionStatus, at int64) v1.PodCondition {
	return v1.PodCondition{Type: t, Status: s, LastTransitionTime: metav1.Unix(at, 0)}
}

func TestStatusPatch(t *testing.T) {
	stored := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "p", UID: "u1", ResourceVersion: "7",
			Labels:      map[string]string{"app": "new"},
			Annotations: map[string]string{"their": "new"},
			Finalizers:  []string{"their/finalizer"},
		},
		Spec: v1.PodSpec{NodeName: "knoc"},
		Status: v1.PodStatus{
			Phase: v1.PodPending, QOSClass: v1.PodQOSBurstable,
			Conditions: []v1.PodCondition{
				condition(v1.PodScheduled, v1.ConditionTrue, 1),
				condition("example.org/gate", v1.ConditionFalse, 1),
				condition(v1.PodInitialized, v1.ConditionTrue, 1),
				condition(v1.PodReady, v1.ConditionFalse, 1),
				condition(v1.DisruptionTarget, v1.ConditionTrue, 1),
			},
			ResourceClaimStatuses: []v1.PodResourceClaimStatus{{Name: "claim"}},
		},
	}
	// What the provider sends: an older copy of the object with its own status.
	want := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "p", UID: "u1", ResourceVersion: "3",
			Labels:      map[string]string{"app": "old"},
			Annotations: map[string]string{"their": "old", "slurm-job.knoc.io/job-id": "42"},
		},
		Status: v1.PodStatus{
			Phase: v1.PodRunning, PodIP: "10.1.1.1", PodIPs: []v1.PodIP{{IP: "10.1.1.1"}},
			Conditions: []v1.PodCondition{
				condition(v1.PodInitialized, v1.ConditionTrue, 9),
				condition(v1.PodReady, v1.ConditionTrue, 9),
				condition("example.org/gate", v1.ConditionTrue, 9),
			},
			ContainerStatuses: []v1.ContainerStatus{{Name: "c", Ready: true}},
		},
	}
	patch, err := statusPatch(stored, want)
	if err != nil {
		t.Fatal(err)
	}
	var content struct {
		Metadata map[string]any
		Spec     any
	}
	if err := json.Unmarshal(patch, &content); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(map[string]any{
		"uid": "u1", "resourceVersion": "7",
		"annotations": map[string]any{"slurm-job.knoc.io/job-id": "42"},
	}, content.Metadata); d != "" || content.Spec != nil {
		t.Fatalf("metadata or spec: %s %s", d, patch)
	}

	// What the API server makes of it.
	before, _ := json.Marshal(stored)
	after, err := strategicpatch.StrategicMergePatch(before, patch, v1.Pod{})
	if err != nil {
		t.Fatal(err)
	}
	var got v1.Pod
	if err := json.Unmarshal(after, &got); err != nil {
		t.Fatal(err)
	}
	expected := stored.DeepCopy()
	expected.Annotations["slurm-job.knoc.io/job-id"] = "42"
	expected.Status.Phase, expected.Status.PodIP, expected.Status.PodIPs = v1.PodRunning, "10.1.1.1", want.Status.PodIPs
	expected.Status.ContainerStatuses = want.Status.ContainerStatuses
	expected.Status.Conditions = []v1.PodCondition{
		condition(v1.PodScheduled, v1.ConditionTrue, 1),
		condition("example.org/gate", v1.ConditionFalse, 1), // not knoc's to write
		condition(v1.DisruptionTarget, v1.ConditionTrue, 1),
		condition(v1.PodInitialized, v1.ConditionTrue, 1), // unchanged, so its time is
		condition(v1.PodReady, v1.ConditionTrue, 9),
	}
	if d := cmp.Diff(expected, &got); d != "" {
		t.Fatal(d)
	}

	// Nothing to say: only the preconditions are left.
	patch, err = statusPatch(stored, stored)
	if err != nil {
		t.Fatal(err)
	}
	if s := string(patch); s != `{"metadata":{"resourceVersion":"7","uid":"u1"}}` {
		t.Fatal(s)
	}
}

// statusClientOf is a statusClient whose informer knows these pods.
func statusClientOf(client *fake.Clientset, known ...*v1.Pod) statusClient {
	f := podInformers(client, "knoc")
	pods := f.Core().V1().Pods()
	for _, p := range known {
		pods.Informer().GetStore().Add(p)
	}
	return statusClient{client.CoreV1(), pods.Lister()}
}

func TestUpdateStatusAfterAConflict(t *testing.T) {
	live := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1", ResourceVersion: "8"}}
	live.Status.Reason = "written meanwhile"
	stale := live.DeepCopy()
	stale.ResourceVersion, stale.Status.Reason = "7", ""

	client := fake.NewClientset(live)
	var patches []string
	client.PrependReactor("patch", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		p := a.(clienttesting.PatchAction)
		patches = append(patches, p.GetSubresource()+" "+string(p.GetPatch()))
		if strings.Contains(string(p.GetPatch()), `"resourceVersion":"7"`) {
			return true, nil, apierrors.NewConflict(v1.Resource("pods"), "p", errors.New("changed"))
		}
		return false, nil, nil
	})
	want := stale.DeepCopy()
	want.Status.Phase = v1.PodRunning
	if _, err := statusClientOf(client, stale).Pods("ns").UpdateStatus(context.Background(), want, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]string{
		`status {"metadata":{"resourceVersion":"7","uid":"u1"},"status":{"phase":"Running"}}`,
		`status {"metadata":{"resourceVersion":"8","uid":"u1"},"status":{"phase":"Running","reason":null}}`,
	}, patches); d != "" {
		t.Fatal(d)
	}
}

func TestStatusClientLeavesOthersAlone(t *testing.T) {
	old := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "old"}}
	now := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "new"}}
	client := fake.NewClientset(now)
	pods := statusClientOf(client, now).Pods("ns")
	if _, err := pods.UpdateStatus(context.Background(), old, metav1.UpdateOptions{}); !apierrors.IsNotFound(err) {
		t.Fatalf("status of another pod of the name: %v", err)
	}
	// virtual-kubelet believes that it deletes; the object stays.
	if err := pods.Delete(context.Background(), "p", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if len(client.Actions()) != 0 {
		t.Fatalf("the API server was asked: %v", client.Actions())
	}
}

func TestKubePodsDelete(t *testing.T) {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"}}
	for _, c := range []struct {
		name   string
		answer error
		fails  bool
	}{
		{"deleted", nil, false},
		{"gone", apierrors.NewNotFound(v1.Resource("pods"), "p"), false},
		{"another UID", apierrors.NewConflict(v1.Resource("pods"), "p", errors.New("uid")), false},
		{"forbidden", apierrors.NewForbidden(v1.Resource("pods"), "p", errors.New("no")), true},
	} {
		client := fake.NewClientset()
		var opts metav1.DeleteOptions
		client.PrependReactor("delete", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
			opts = a.(clienttesting.DeleteActionImpl).DeleteOptions
			return true, nil, c.answer
		})
		err := (&kubePods{client: client}).Delete(context.Background(), pod)
		if (err != nil) != c.fails {
			t.Errorf("%s: %v", c.name, err)
		}
		if opts.GracePeriodSeconds == nil || *opts.GracePeriodSeconds != 0 || opts.Preconditions == nil || *opts.Preconditions.UID != "u1" {
			t.Errorf("%s: options %+v", c.name, opts)
		}
	}
}

func TestKubePodsList(t *testing.T) {
	client := fake.NewClientset(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}})
	pods, err := (&kubePods{client: client, node: "knoc"}).List(context.Background())
	if err != nil || len(pods) != 1 || pods[0].Name != "p" {
		t.Fatalf("%v %v", pods, err)
	}
	opts := client.Actions()[0].(clienttesting.ListActionImpl).ListOptions
	if opts.FieldSelector != "spec.nodeName=knoc" || opts.ResourceVersion != "" {
		t.Fatalf("options %+v", opts)
	}
}

func TestToken(t *testing.T) {
	client := fake.NewClientset()
	var asked *authenticationv1.TokenRequest
	var account string
	client.PrependReactor("create", "serviceaccounts", func(a clienttesting.Action) (bool, runtime.Object, error) {
		create := a.(clienttesting.CreateActionImpl)
		asked, account = create.GetObject().(*authenticationv1.TokenRequest), create.Namespace+"/"+create.Name+"/"+create.Subresource
		return true, &authenticationv1.TokenRequest{Status: authenticationv1.TokenRequestStatus{Token: "t"}}, nil
	})
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"}}
	for _, c := range []struct {
		audience  string
		audiences []string
	}{{"", nil}, {"vault", []string{"vault"}}} {
		token, _, err := kubeObjects{client: client}.Token(context.Background(), pod, c.audience, 3607)
		if err != nil || token != "t" || account != "ns/default/token" {
			t.Fatalf("%s %s %v", token, account, err)
		}
		seconds := int64(3607)
		if d := cmp.Diff(authenticationv1.TokenRequestSpec{
			Audiences: c.audiences, ExpirationSeconds: &seconds,
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "p", UID: "u1"},
		}, asked.Spec); d != "" {
			t.Fatal(d)
		}
	}
}

func TestIdentity(t *testing.T) {
	for _, c := range []struct {
		user   string
		groups []string
		want   string
	}{
		{"system:node:knoc", []string{"system:nodes", "system:authenticated"}, "knoc"},
		{"system:node:knoc", []string{"system:authenticated"}, ""},
		{"system:serviceaccount:knoc:knoc", []string{"system:serviceaccounts"}, ""},
	} {
		client := fake.NewClientset()
		client.PrependReactor("create", "selfsubjectreviews", func(clienttesting.Action) (bool, runtime.Object, error) {
			return true, &authenticationv1.SelfSubjectReview{Status: authenticationv1.SelfSubjectReviewStatus{
				UserInfo: authenticationv1.UserInfo{Username: c.user, Groups: c.groups}}}, nil
		})
		if got, err := identity(context.Background(), client); err != nil || got != c.want {
			t.Errorf("%s %v: %q %v", c.user, c.groups, got, err)
		}
	}
}

func TestRestConfigSaysWhatIsMissing(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := restConfig(""); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if _, err := restConfig(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("this is no kubeconfig"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := restConfig(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatal(err)
	}
}

// testEngine is a provider that notes what it is told.
type testEngine struct {
	mu      sync.Mutex
	created []string
	notify  func(*v1.Pod)
	changed func()
	state   nodeState
	ready   chan struct{}
	kicks   chan struct{}
	fail    chan error
}

func newTestEngine() *testEngine {
	return &testEngine{ready: make(chan struct{}), kicks: make(chan struct{}, 100), fail: make(chan error, 1)}
}

func (e *testEngine) CreatePod(_ context.Context, pod *v1.Pod) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.created = append(e.created, pod.Name)
	return nil
}

func (e *testEngine) pods() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return strings.Join(e.created, " ")
}

func (e *testEngine) UpdatePod(context.Context, *v1.Pod) error { return nil }
func (e *testEngine) DeletePod(context.Context, *v1.Pod) error { return nil }
func (e *testEngine) GetPod(context.Context, string, string) (*v1.Pod, error) {
	return nil, errdefs.NotFound("no such pod")
}
func (e *testEngine) GetPodStatus(context.Context, string, string) (*v1.PodStatus, error) {
	return nil, errdefs.NotFound("no such pod")
}
func (e *testEngine) GetPods(context.Context) ([]*v1.Pod, error) { return nil, nil }
func (e *testEngine) NotifyPods(_ context.Context, f func(*v1.Pod)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.notify = f
}
func (e *testEngine) GetContainerLogs(ctx context.Context, _, _, _ string, _ api.ContainerLogOpts) (io.ReadCloser, error) {
	if ctx.Value(tailNone{}) != nil {
		return io.NopCloser(strings.NewReader("")), nil
	}
	return io.NopCloser(strings.NewReader("a line of log\n")), nil
}
func (e *testEngine) RunInContainer(context.Context, string, string, string, []string, api.AttachIO) error {
	return nil
}
func (e *testEngine) GetStatsSummary(context.Context) (*statsv1alpha1.Summary, error) {
	return &statsv1alpha1.Summary{}, nil
}

func (e *testEngine) AttachToContainer(context.Context, string, string, string, api.AttachIO) error {
	return nil
}
func (e *testEngine) PortForward(context.Context, string, string, int32, io.ReadWriteCloser) error {
	return nil
}
func (e *testEngine) GetMetricsResource(context.Context) ([]*dto.MetricFamily, error) {
	return nil, nil
}

func (e *testEngine) run(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-e.fail:
		return err
	}
}
func (e *testEngine) adopted() <-chan struct{} { return e.ready }
func (e *testEngine) kick() {
	select {
	case e.kicks <- struct{}{}:
	default:
	}
}
func (e *testEngine) nodeState() nodeState {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.state
}
func (e *testEngine) onNodeChange(f func()) { e.changed = f }
func (e *testEngine) setState(s nodeState) {
	e.mu.Lock()
	e.state = s
	e.mu.Unlock()
	e.changed()
}

var _ engine = (*testEngine)(nil)

// eventually waits for something that other goroutines bring about.
func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if f() {
			return
		}
	}
	t.Fatalf("%s: not in 10 s", what)
}

// startServe runs serve against a fake API server.
func startServe(t *testing.T, client *fake.Clientset, e *testEngine) (n *virtualNode, end func() error) {
	t.Helper()
	logger := slog.New(slog.DiscardHandler)
	n, err := newVirtualNode(Config{}.withDefaults(), NodeConfig{})
	if err != nil {
		t.Fatal(err)
	}
	kube := clients{client, client, client}
	factory := podInformers(client, "knoc")
	ctx, cancel := context.WithCancel(context.Background())
	broadcaster, recorder := newRecorder(ctx, client, "knoc")
	pods := &kubePods{client, factory.Core().V1().Pods().Lister(), "knoc", recorder}
	result := make(chan error, 1)
	go func() { result <- serve(ctx, logger, kube, factory, n, pods, e, nil, nil) }()
	var once sync.Once
	end = func() (err error) {
		once.Do(func() {
			cancel()
			err = <-result
			broadcaster.Shutdown()
		})
		return err
	}
	t.Cleanup(func() { end() })
	return n, end
}

func TestServe(t *testing.T) {
	ctx := context.Background()
	client := fake.NewClientset()
	e := newTestEngine()
	_, end := startServe(t, client, e)

	node := func() *v1.Node {
		n, err := client.CoreV1().Nodes().Get(ctx, "knoc", metav1.GetOptions{})
		if err != nil {
			return &v1.Node{}
		}
		return n
	}
	has := func(typ v1.NodeConditionType, s v1.ConditionStatus) func() bool {
		return func() bool {
			for _, c := range node().Status.Conditions {
				if c.Type == typ {
					return c.Status == s
				}
			}
			return false
		}
	}
	// The node is there, Ready and leased although the cluster was not read yet.
	eventually(t, "node", has(v1.NodeReady, v1.ConditionTrue))
	if taints := node().Spec.Taints; len(taints) != 1 || taints[0].ToString() != defaultTaint {
		t.Fatalf("taints %v", taints)
	}
	eventually(t, "lease", func() bool {
		l, err := client.CoordinationV1().Leases(v1.NamespaceNodeLease).Get(ctx, "knoc", metav1.GetOptions{})
		return err == nil && l.Spec.RenewTime != nil
	})

	// A pod only kicks the loop until then.
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u1"}, Spec: v1.PodSpec{NodeName: "knoc"}}
	if _, err := client.CoreV1().Pods("ns").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-e.kicks:
	case <-time.After(10 * time.Second):
		t.Fatal("no kick")
	}
	if got := e.pods(); got != "" {
		t.Fatalf("CreatePod(%s) before the directories were read", got)
	}
	close(e.ready)
	eventually(t, "CreatePod", func() bool { return e.pods() == "p" })

	// What the provider says arrives as a patch of the status.
	pod = pod.DeepCopy()
	pod.Status.Phase = v1.PodRunning
	e.notify(pod)
	eventually(t, "status", func() bool {
		p, err := client.CoreV1().Pods("ns").Get(ctx, "p", metav1.GetOptions{})
		return err == nil && p.Status.Phase == v1.PodRunning
	})

	// An outage is a condition and no more; its end too.
	e.setState(nodeState{Problem: "slurmctld does not answer"})
	eventually(t, "outage", has(v1.NodeNetworkUnavailable, v1.ConditionTrue))
	e.setState(nodeState{Known: true, Resources: nodeResources{CPUs: 8, MemoryMB: 1024}})
	eventually(t, "its end", has(v1.NodeNetworkUnavailable, v1.ConditionFalse))
	eventually(t, "capacity", func() bool { return node().Status.Capacity.Cpu().Value() == 8 })

	// Somebody deletes the node.
	if err := client.CoreV1().Nodes().Delete(ctx, "knoc", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the node again", has(v1.NodeReady, v1.ConditionTrue))

	for _, a := range client.Actions() {
		switch {
		case a.GetVerb() == "update" && a.GetResource().Resource == "pods",
			a.GetVerb() == "delete" && a.GetResource().Resource == "pods",
			a.GetVerb() == "list" && (a.GetResource().Resource == "secrets" || a.GetResource().Resource == "configmaps" || a.GetResource().Resource == "services"):
			t.Errorf("unwanted request: %s %s", a.GetVerb(), a.GetResource().Resource)
		}
	}
	if err := end(); err != nil {
		t.Fatal(err)
	}
}

func TestServeEndsWithTheLoop(t *testing.T) {
	e := newTestEngine()
	client := fake.NewClientset()
	logger := slog.New(slog.DiscardHandler)
	n, err := newVirtualNode(Config{}.withDefaults(), NodeConfig{})
	if err != nil {
		t.Fatal(err)
	}
	factory := podInformers(client, "knoc")
	e.fail <- errFenced
	err = serve(context.Background(), logger, clients{client, client, client}, factory, n,
		&kubePods{lister: factory.Core().V1().Pods().Lister()}, e, nil, nil)
	if !errors.Is(err, errFenced) {
		t.Fatal(err)
	}
}

func TestVKLogger(t *testing.T) {
	var b strings.Builder
	l := vkLogger{slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))}
	// virtual-kubelet's own adapter panics at this one.
	l.WithField("pod", "ns/p").WithError(errors.New("boom")).Error(errors.New("an error value"))
	l.WithFields(map[string]any{"k": 1}).Warnf("n %d", 2)
	l.Error("Force deleting pod in running state")
	l.Debug("hidden")
	want := "level=ERROR msg=\"an error value\" pod=ns/p error=boom\nlevel=WARN msg=\"n 2\" k=1\n"
	if b.String() != want {
		t.Fatalf("got %q", b.String())
	}
}
