package knoc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	corev1listers "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/tools/reference"
)

// clients are the connections to the API server. They differ in their rate
// limits only, as the kubelet's do: a burst of pods or of events must not keep
// the lease from being renewed.
type clients struct {
	pods, events, node kubernetes.Interface
}

// newClients makes the clients from a kubeconfig file (or a list of them, as in
// $KUBECONFIG), or with no path from the service account of the pod that knoc
// runs in. It talks to nobody yet. host is the API server's URL.
func newClients(kubeconfig, userAgent string) (c clients, host string, err error) {
	cfg, err := restConfig(kubeconfig)
	if err != nil {
		return clients{}, "", err
	}
	cfg.UserAgent = userAgent
	// client-go's own 5 a second would make 50 pods wait half a minute.
	cfg.QPS, cfg.Burst = 50, 100
	node := rest.CopyConfig(cfg)
	node.QPS = -1 // no limit: a handful of requests a minute
	node.Timeout = 10 * time.Second
	for _, x := range []struct {
		to   *kubernetes.Interface
		from *rest.Config
	}{{&c.pods, cfg}, {&c.events, cfg}, {&c.node, node}} {
		if *x.to, err = kubernetes.NewForConfig(x.from); err != nil { // makes its own rate limiter
			return clients{}, "", fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
		}
	}
	return c, cfg.Host, nil
}

func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		cfg, err := rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			return nil, errors.New("no kubeconfig: give --kubeconfig FILE, set KUBECONFIG, or run knoc in a pod of the cluster")
		}
		return cfg, err
	}
	rules := &clientcmd.ClientConfigLoadingRules{ExplicitPath: kubeconfig}
	if strings.ContainsRune(kubeconfig, filepath.ListSeparator) {
		rules = &clientcmd.ClientConfigLoadingRules{Precedence: filepath.SplitList(kubeconfig)}
	}
	cfg, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	return cfg, nil
}

// identity is who the API server takes knoc for: the node of that name, or ""
// for anybody else, such as a ServiceAccount. A node identity may do less
// (admission plugin NodeRestriction), which is known best before anything is made.
func identity(ctx context.Context, c kubernetes.Interface) (nodeName string, err error) {
	r, err := c.AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if err != nil {
		return "", err
	}
	// The same two facts by which kube-apiserver knows a node
	// (pkg/auth/nodeidentifier): the group and the user name's prefix.
	name, ok := strings.CutPrefix(r.Status.UserInfo.Username, "system:node:")
	if !ok || !slices.Contains(r.Status.UserInfo.Groups, "system:nodes") {
		return "", nil
	}
	return name, nil
}

// findClusterID is what tells this cluster's directories from another's on the
// HPC side: the UID of Service default/kubernetes, which every cluster has and
// every identity that knoc may run under can read.
func findClusterID(ctx context.Context, c kubernetes.Interface) (string, error) {
	svc, err := c.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
	if err != nil {
		return "", fmt.Errorf("the cluster's id is the UID of Service default/kubernetes: %w (--cluster-id sets another)", err)
	}
	return string(svc.UID), nil
}

// podInformers is a factory whose pods are those bound to the node, without
// what nobody here reads.
func podInformers(c kubernetes.Interface, node string) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(c, 0,
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.FieldSelector = onNode(node) }),
		informers.WithTransform(func(obj any) (any, error) {
			if pod, ok := obj.(*v1.Pod); ok {
				pod.ManagedFields = nil
			}
			return obj, nil
		}))
}

func onNode(node string) string {
	return fields.OneTermEqualSelector("spec.nodeName", node).String()
}

// kubePods is the loop's podAPI over client-go.
type kubePods struct {
	client   kubernetes.Interface
	lister   corev1listers.PodLister
	node     string
	recorder record.EventRecorder
}

var _ podAPI = (*kubePods)(nil)

func (k *kubePods) Pods() []*v1.Pod {
	pods, _ := k.lister.List(labels.Everything()) // reads a cache: the error is always nil
	return pods
}

func (k *kubePods) List(ctx context.Context) ([]*v1.Pod, error) {
	// resourceVersion "" is a read of etcd's own state, not of a cache that may
	// be behind: whether work is cancelled hangs on the answer.
	list, err := k.client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: onNode(k.node)})
	if err != nil {
		return nil, fmt.Errorf("listing the pods of node %s: %w", k.node, err)
	}
	pods := make([]*v1.Pod, len(list.Items))
	for i := range list.Items {
		pods[i] = &list.Items[i]
	}
	return pods, nil
}

func (k *kubePods) Delete(ctx context.Context, pod *v1.Pod) error {
	opts := metav1.NewDeleteOptions(0)
	opts.Preconditions = metav1.NewUIDPreconditions(string(pod.UID))
	err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, *opts)
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another pod of the same name
	}
	return err
}

func (k *kubePods) Event(pod *v1.Pod, container, eventtype, reason, message string) {
	var about runtime.Object = pod
	if container != "" {
		if ref, err := reference.GetPartialReference(scheme.Scheme, pod, fieldPath(pod, container)); err == nil {
			about = ref
		}
	}
	k.recorder.Event(about, eventtype, reason, shortened(message, 1024)) // the API's limit
}

// newRecorder starts writing events. The caller shuts the broadcaster down.
func newRecorder(ctx context.Context, c kubernetes.Interface, node string) (record.EventBroadcaster, record.EventRecorder) {
	b := record.NewBroadcaster(record.WithContext(ctx))
	b.StartRecordingToSink(&corev1client.EventSinkImpl{Interface: c.CoreV1().Events(metav1.NamespaceAll)})
	return b, b.NewRecorder(scheme.Scheme, v1.EventSource{Component: "knoc", Host: node})
}

// noEvents keeps virtual-kubelet's own events away ("Create pod in provider
// successfully" and such): knoc's say what happened to the job.
type noEvents struct{}

func (noEvents) Event(runtime.Object, string, string, string)          {}
func (noEvents) Eventf(runtime.Object, string, string, string, ...any) {}
func (noEvents) AnnotatedEventf(runtime.Object, map[string]string, string, string, string, ...any) {
}

// kubeObjects reads what pods name straight from the API server. There is no
// cache, so nothing is stale when a pod starts, and knoc needs no right to list
// the secrets of the whole cluster.
type kubeObjects struct {
	client   kubernetes.Interface
	services *serviceCache
}

var _ objects = kubeObjects{}

func (k kubeObjects) ConfigMap(ctx context.Context, namespace, name string) (*v1.ConfigMap, error) {
	return k.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, metav1.GetOptions{})
}

func (k kubeObjects) Secret(ctx context.Context, namespace, name string) (*v1.Secret, error) {
	return k.client.CoreV1().Secrets(namespace).Get(ctx, name, metav1.GetOptions{})
}

func (k kubeObjects) Services(ctx context.Context, namespace, name string) ([]v1.Service, error) {
	return k.services.get(namespace+"/"+name, func() ([]v1.Service, error) {
		opts := metav1.ListOptions{ResourceVersion: "0"} // from the API server's own cache
		if name != "" {
			opts.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
		}
		list, err := k.client.CoreV1().Services(namespace).List(ctx, opts)
		if err != nil {
			return nil, err
		}
		return list.Items, nil
	})
}

func (k kubeObjects) Token(ctx context.Context, pod *v1.Pod, audience string, seconds int64) (string, time.Time, error) {
	account := pod.Spec.ServiceAccountName
	if account == "" {
		account = "default"
	}
	spec := authenticationv1.TokenRequestSpec{
		ExpirationSeconds: &seconds,
		// The token dies with the pod; NodeRestriction wants it bound, with the UID.
		BoundObjectRef: &authenticationv1.BoundObjectReference{
			APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID,
		},
	}
	if audience != "" {
		spec.Audiences = []string{audience}
	}
	r, err := k.client.CoreV1().ServiceAccounts(pod.Namespace).CreateToken(ctx, account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	if err != nil {
		return "", time.Time{}, err
	}
	if s := r.Spec.ExpirationSeconds; s != nil { // what it was given
		seconds = *s
	}
	return r.Status.Token, renewAt(time.Now(), r.Status.ExpirationTimestamp.Time, seconds), nil
}

// statusClient is the PodsGetter that virtual-kubelet's PodController gets. It
// uses two methods of it, and both do something else here.
type statusClient struct {
	corev1client.PodsGetter
	lister corev1listers.PodLister
}

func (c statusClient) Pods(namespace string) corev1client.PodInterface {
	return statusPods{c.PodsGetter.Pods(namespace), c.lister.Pods(namespace)}
}

type statusPods struct {
	corev1client.PodInterface
	lister corev1listers.PodNamespaceLister
}

// Delete does nothing. virtual-kubelet deletes the object when the grace period
// is over, or at once when no container runs, without asking whether the job is
// gone; a StatefulSet would then start a second copy beside it. Only the loop
// deletes (podAPI.Delete).
func (statusPods) Delete(context.Context, string, metav1.DeleteOptions) error { return nil }

// UpdateStatus sends the difference to what is stored as a PATCH of pods/status,
// as the kubelet does (pkg/util/pod PatchPodStatus), where virtual-kubelet would
// PUT the whole object and revert labels and annotations that others changed.
//
// The difference is taken to the informer's copy, which may be behind, so the
// patch carries that copy's resourceVersion: when it is refused, the difference
// is taken once more, to the object itself.
func (c statusPods) UpdateStatus(ctx context.Context, pod *v1.Pod, _ metav1.UpdateOptions) (*v1.Pod, error) {
	stored, err := c.lister.Get(pod.Name)
	for try := 0; ; try++ {
		if err != nil {
			return nil, err
		}
		if stored.UID != pod.UID {
			return nil, apierrors.NewNotFound(v1.Resource("pods"), pod.Name)
		}
		var patch []byte
		if patch, err = statusPatch(stored, pod); err != nil {
			return nil, err
		}
		updated, patchErr := c.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		if !apierrors.IsConflict(patchErr) || try == 3 {
			return updated, patchErr
		}
		stored, err = c.Get(ctx, pod.Name, metav1.GetOptions{})
	}
}

// ownAnnotations are what knoc writes on pods. Annotations may go with a status
// patch, also from a node identity: the pods/status strategy keeps them, and
// NodeRestriction compares labels only (admitPodStatus).
var ownAnnotations = []string{AnnotationJobID}

// statusPatch is the strategic merge patch that turns the stored pod's status
// into the wanted pod's. The UID and the resourceVersion are preconditions.
func statusPatch(stored, want *v1.Pod) ([]byte, error) {
	old := v1.Pod{Status: stored.Status}
	wanted := v1.Pod{
		ObjectMeta: metav1.ObjectMeta{UID: want.UID, ResourceVersion: stored.ResourceVersion},
		Status:     mergeStatus(&stored.Status, &want.Status),
	}
	for _, key := range ownAnnotations {
		if v, ok := want.Annotations[key]; ok && v != stored.Annotations[key] {
			metav1.SetMetaDataAnnotation(&wanted.ObjectMeta, key, v)
		}
	}
	from, err := json.Marshal(old)
	if err != nil {
		return nil, fmt.Errorf("status of pod %s/%s: %w", want.Namespace, want.Name, err)
	}
	to, err := json.Marshal(wanted)
	if err != nil {
		return nil, fmt.Errorf("status of pod %s/%s: %w", want.Namespace, want.Name, err)
	}
	patch, err := strategicpatch.CreateTwoWayMergePatch(from, to, v1.Pod{})
	if err != nil {
		return nil, fmt.Errorf("status of pod %s/%s: %w", want.Namespace, want.Name, err)
	}
	return patch, nil
}

// ownConditions are the pod conditions that a kubelet writes, and therefore
// knoc; the others belong to the scheduler and to readiness gates.
var ownConditions = []v1.PodConditionType{
	v1.PodInitialized, v1.PodReady, v1.ContainersReady, v1.PodReadyToStartContainers,
}

// mergeStatus is the wanted status with everything of the stored one that is
// not knoc's to write (as the kubelet's mergePodStatus). DisruptionTarget is
// shared: what others set stays until knoc has its own.
func mergeStatus(stored, want *v1.PodStatus) v1.PodStatus {
	merged := *want.DeepCopy()
	merged.Conditions = nil
	mine := func(c v1.PodCondition) bool { return slices.Contains(ownConditions, c.Type) }
	same := func(list []v1.PodCondition, t v1.PodConditionType) int {
		return slices.IndexFunc(list, func(c v1.PodCondition) bool { return c.Type == t })
	}
	for _, c := range stored.Conditions {
		if !mine(c) && !(c.Type == v1.DisruptionTarget && same(want.Conditions, c.Type) >= 0) {
			merged.Conditions = append(merged.Conditions, c)
		}
	}
	for _, c := range want.Conditions {
		if !mine(c) && c.Type != v1.DisruptionTarget {
			continue
		}
		if i := same(stored.Conditions, c.Type); i >= 0 && stored.Conditions[i].Status == c.Status {
			c.LastTransitionTime = stored.Conditions[i].LastTransitionTime
		} else if c.LastTransitionTime.IsZero() {
			c.LastTransitionTime = metav1.Now()
		}
		merged.Conditions = append(merged.Conditions, c)
	}
	if merged.QOSClass == "" {
		merged.QOSClass = stored.QOSClass // immutable
	}
	if merged.ObservedGeneration == 0 {
		merged.ObservedGeneration = stored.ObservedGeneration
	}
	merged.NominatedNodeName = stored.NominatedNodeName
	merged.ResourceClaimStatuses = stored.ResourceClaimStatuses
	merged.ExtendedResourceClaimStatus = stored.ExtendedResourceClaimStatus
	merged.NodeAllocatableResourceClaimStatuses = stored.NodeAllocatableResourceClaimStatuses
	return merged
}
