package knoc

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/virtual-kubelet/virtual-kubelet/errdefs"
	"github.com/virtual-kubelet/virtual-kubelet/node"
	"github.com/virtual-kubelet/virtual-kubelet/node/api"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/remotecommand"
	stats "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
)

// AnnotationJobID is the pod annotation with the id of the pod's Slurm job.
const AnnotationJobID = "slurm-job.knoc.io/job-id"

// KNOCProvider runs the pods of one node as Slurm jobs. It is virtual-kubelet's
// PodLifecycleHandler and PodNotifier.
//
// One goroutine, the loop (loop.go), owns all state and decides everything: it
// compares the API server's pods with directories, jobs and journals on the
// cluster. All methods only mark, kick, and read.
type KNOCProvider struct {
	cfg      Config
	node     NodeConfig
	objs     objects
	rewrites rewrites
	api      podAPI // nil under the classic API: pods come through CreatePod alone
	ssh      *sshClient
	remote   *remote
	log      *slog.Logger
	now      func() time.Time

	calls   chan func()   // what exchanges found, run by the loop
	kicked  chan struct{} // something changed in the API
	look    chan struct{} // the watch should look now
	isReady chan struct{} // closed once the remote directories were read

	mu      sync.RWMutex // only the loop writes what follows
	works   map[types.UID]*work
	state   nodeState
	changed func() // state changed

	notifier notifier
	usage    usage // stats.go
	metrics  *metrics
	looked   atomic.Int64 // when the watch last saw the cluster, in Unix nanoseconds
	lazy     *lazyLoop    // classic.go; nil under Run
}

// nodeState is what the node object shows of the cluster.
type nodeState struct {
	Resources nodeResources
	// Known says that sinfo has answered once.
	Known bool
	// Images are those of the cache.
	Images []v1.ContainerImage
	// Problem is the text of an SSH or slurmctld outage, "" when all is well.
	Problem string
}

// newProvider checks all that can be checked without the network.
func newProvider(cfg Config, node NodeConfig, objs objects, api podAPI) (*KNOCProvider, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.SSH.Logger = cfg.Logger
	client, err := newSSH(cfg.SSH)
	if err != nil {
		return nil, err
	}
	if cfg.Runtime == "" {
		cfg.Runtime = "apptainer"
	}
	rules, err := checkRewrites(cfg.ImageRewrites)
	if err != nil {
		return nil, err
	}
	base := cfg.NodeName + "-" + cfg.ClusterID
	if !remoteDirPattern.MatchString(base) {
		return nil, fmt.Errorf("node name %q with cluster id %q: only letters, digits and ._/@+- may be in them", cfg.NodeName, cfg.ClusterID)
	}
	p := &KNOCProvider{
		rewrites: rules,
		cfg:      cfg, node: node, objs: objs, api: api, ssh: client, log: cfg.Logger, now: time.Now,
		remote:  &remote{ssh: client, node: cfg.NodeName, base: base, root: cfg.RemoteDir, log: cfg.Logger},
		calls:   make(chan func()),
		kicked:  make(chan struct{}, 1),
		look:    make(chan struct{}, 1),
		isReady: make(chan struct{}),
		works:   map[types.UID]*work{},
		changed: func() {},
	}
	p.notifier.wake = make(chan struct{}, 1)
	p.metrics = newMetrics(p)
	client.metrics = p.metrics
	return p, nil
}

// adopted is closed once the remote directories were read: from then on GetPod
// and GetPods know all pods that have work on the cluster.
func (p *KNOCProvider) adopted() <-chan struct{} { return p.isReady }

// kick tells the loop that something changed in the API.
func (p *KNOCProvider) kick() { poke(p.kicked) }

// poke wakes the reader of a channel of capacity 1; a wake-up that waits already is enough.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func (p *KNOCProvider) nodeState() nodeState {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.state
}

// onNodeChange registers f, called by the loop when nodeState changed; it must not block.
func (p *KNOCProvider) onNodeChange(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed = f
}

// CreatePod has the loop look at the pod. It returns nil whatever comes: an
// error would make a pod with restartPolicy Never Failed for good, and the loop
// retries by itself. A pod that can never run gets status Failed.
func (p *KNOCProvider) CreatePod(_ context.Context, pod *v1.Pod) error {
	return p.classic(pod, false)
}

// UpdatePod has the loop look at the pod.
func (p *KNOCProvider) UpdatePod(_ context.Context, pod *v1.Pod) error {
	return p.classic(pod, false)
}

// DeletePod has the loop stop the pod's job. The pod stays known until its job
// is gone. A pod that is not known is NotFound, which virtual-kubelet takes as done.
func (p *KNOCProvider) DeletePod(_ context.Context, pod *v1.Pod) error {
	p.mu.RLock()
	_, known := p.works[pod.UID]
	p.mu.RUnlock()
	if !known {
		return errdefs.NotFoundf("pod %s/%s with uid %s is not known to the provider", pod.Namespace, pod.Name, pod.UID)
	}
	return p.classic(pod, true)
}

// classic hands a pod to the loop where no podAPI tells it of pods; else it
// only kicks.
func (p *KNOCProvider) classic(pod *v1.Pod, deleted bool) error {
	if p.api != nil {
		p.kick()
		return nil
	}
	if !validUID(pod.UID) {
		return errdefs.InvalidInputf("pod %s/%s: uid %q cannot name a directory and a job", pod.Namespace, pod.Name, pod.UID)
	}
	p.begin()
	pod = pod.DeepCopy()
	p.mu.Lock()
	defer p.mu.Unlock()
	w := p.works[pod.UID]
	if w == nil {
		w = &work{meta: metaOf(pod)}
		p.works[pod.UID] = w
	}
	w.pod, w.orphan, w.dirty = pod, w.orphan || deleted, true
	p.kick()
	return nil
}

// GetPod answers with the API server's current pod of that name and the status
// that knoc has for it.
func (p *KNOCProvider) GetPod(_ context.Context, namespace, name string) (*v1.Pod, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	w := p.named(namespace, name)
	if w == nil || w.pod == nil {
		return nil, errdefs.NotFoundf("pod %s/%s is not known to the provider", namespace, name)
	}
	return w.podWithStatus(), nil
}

// named finds a pod by name. Two pods of one name are here for as long as the
// job of the first is not gone: the one that the API server has now is meant.
func (p *KNOCProvider) named(namespace, name string) *work {
	var best *work
	for _, w := range p.works {
		if w.meta.Namespace == namespace && w.meta.Name == name && (best == nil || best.pod == nil || best.orphan) {
			best = w
		}
	}
	return best
}

// GetPodStatus is the status of GetPod's pod.
func (p *KNOCProvider) GetPodStatus(ctx context.Context, namespace, name string) (*v1.PodStatus, error) {
	pod, err := p.GetPod(ctx, namespace, name)
	if err != nil {
		return nil, err
	}
	return &pod.Status, nil
}

// GetPods are all pods that the API server has and knoc knows, ended ones too.
func (p *KNOCProvider) GetPods(context.Context) ([]*v1.Pod, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	var pods []*v1.Pod
	for _, w := range p.works {
		if w.pod != nil {
			pods = append(pods, w.podWithStatus())
		}
	}
	return pods, nil
}

// NotifyPods registers virtual-kubelet's callback for changed statuses.
func (p *KNOCProvider) NotifyPods(_ context.Context, notify func(*v1.Pod)) {
	p.begin()
	p.notifier.set(notify)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.works {
		w.dirty, w.notified = true, time.Time{}
	}
	p.kick()
}

// workView is what the kubelet API (exec.go, logs.go, stats.go) needs of a pod.
type workView struct {
	Pod      *v1.Pod // nil when the API server has none
	UID      string
	JobID    string          // "" before it is submitted
	Node     string          // compute node, "" before the job starts
	Dir      string          // absolute path of the pod's directory on the cluster
	Running  map[string]bool // by container name
	Attempts map[string]int  // newest attempt by container name; absent: never started
	JobEnded bool
}

// lookup finds a pod for the kubelet API; errdefs.NotFound when it is unknown.
func (p *KNOCProvider) lookup(namespace, name string) (workView, error) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	w := p.named(namespace, name)
	if w == nil {
		return workView{}, errdefs.NotFoundf("pod %s/%s is not known to the provider", namespace, name)
	}
	view := workView{
		UID: string(w.meta.UID), JobID: w.jobID, Dir: p.remote.dir + "/" + string(w.meta.UID),
		Running: map[string]bool{}, Attempts: map[string]int{}, JobEnded: w.over || w.has("done"),
	}
	if w.pod != nil {
		view.Pod = w.podWithStatus()
	}
	for _, e := range w.events {
		switch e.Word {
		case "host":
			view.Node = e.Args[0]
		case "start":
			view.Running[e.Args[0]] = true
			view.Attempts[e.Args[0]] = int(e.num(1))
		case "exit":
			view.Running[e.Args[0]] = false
		}
	}
	return view, nil
}

// notifier hands changed pods to virtual-kubelet from a goroutine of its own:
// its callback may block for seconds and must never hold up the loop. Of each
// pod only the newest waits.
type notifier struct {
	mu      sync.Mutex
	notify  func(*v1.Pod)
	waiting map[types.UID]*v1.Pod
	wake    chan struct{}
}

func (n *notifier) set(f func(*v1.Pod)) {
	n.mu.Lock()
	n.notify = f
	n.mu.Unlock()
	poke(n.wake)
}

func (n *notifier) send(pod *v1.Pod) {
	n.mu.Lock()
	if n.waiting == nil {
		n.waiting = map[types.UID]*v1.Pod{}
	}
	n.waiting[pod.UID] = pod
	n.mu.Unlock()
	poke(n.wake)
}

func (n *notifier) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.wake:
		}
		n.mu.Lock()
		notify, pods := n.notify, n.waiting
		if notify != nil {
			n.waiting = nil
		}
		n.mu.Unlock()
		if notify == nil {
			continue // sent when it is registered
		}
		for _, pod := range pods {
			notify(pod)
		}
	}
}

// The contract between virtual-kubelet and its providers as it was up to 0.9,
// in packages vkubelet and providers, for programs that still speak it.

// Provider is what virtual-kubelet asked of a provider.
type Provider interface {
	CreatePod(ctx context.Context, pod *v1.Pod) error
	UpdatePod(ctx context.Context, pod *v1.Pod) error
	DeletePod(ctx context.Context, pod *v1.Pod) error
	GetPod(ctx context.Context, namespace, name string) (*v1.Pod, error)
	// GetContainerLogs is the last tail lines of a container's log, all of it
	// when tail is 0 or less.
	GetContainerLogs(ctx context.Context, namespace, podName, containerName string, tail int) (string, error)
	// ExecInContainer runs a command in a container of the pod with that name
	// or UID.
	ExecInContainer(name string, uid types.UID, container string, cmd []string, in io.Reader, out, err io.WriteCloser, tty bool, resize <-chan remotecommand.TerminalSize, timeout time.Duration) error
	GetPodStatus(ctx context.Context, namespace, name string) (*v1.PodStatus, error)
	GetPods(context.Context) ([]*v1.Pod, error)
	Capacity(context.Context) v1.ResourceList
	NodeConditions(context.Context) []v1.NodeCondition
	NodeAddresses(context.Context) []v1.NodeAddress
	NodeDaemonEndpoints(context.Context) *v1.NodeDaemonEndpoints
	OperatingSystem() string
}

// PodNotifier is a provider that tells of changed pods by itself.
type PodNotifier interface {
	// NotifyPods registers the function to call with each pod whose status changed.
	NotifyPods(context.Context, func(*v1.Pod))
}

// NodeProvider tells how the node is.
type NodeProvider interface {
	Ping(context.Context) error
	NotifyNodeStatus(ctx context.Context, cb func(*v1.Node))
}

// PodMetricsProvider is a provider that measures its pods.
type PodMetricsProvider interface {
	GetStatsSummary(context.Context) (*stats.Summary, error)
}

// Names of operating systems.
const (
	OperatingSystemLinux   = "Linux"
	OperatingSystemWindows = "Windows"
)

// OperatingSystems is a set of operating systems.
type OperatingSystems map[string]bool

// ValidOperatingSystems are those that a kubelet can run on. knoc's nodes are
// Linux: NewProvider refuses the other.
var ValidOperatingSystems = OperatingSystems{OperatingSystemLinux: true, OperatingSystemWindows: true}

// Names are the operating systems' names, sorted.
func (o OperatingSystems) Names() []string { return slices.Sorted(maps.Keys(o)) }

// kubeletProvider is today's nodeutil.Provider. That package is not imported:
// it brings all of k8s.io/apiserver with it.
type kubeletProvider interface {
	node.PodLifecycleHandler
	GetContainerLogs(ctx context.Context, namespace, podName, containerName string, opts api.ContainerLogOpts) (io.ReadCloser, error)
	RunInContainer(ctx context.Context, namespace, podName, containerName string, cmd []string, attach api.AttachIO) error
	AttachToContainer(ctx context.Context, namespace, podName, containerName string, attach api.AttachIO) error
	GetStatsSummary(context.Context) (*stats.Summary, error)
	GetMetricsResource(context.Context) ([]*dto.MetricFamily, error)
	PortForward(ctx context.Context, namespace, pod string, port int32, stream io.ReadWriteCloser) error
}

var (
	_ kubeletProvider    = (*KNOCProvider)(nil)
	_ node.PodNotifier   = (*KNOCProvider)(nil)
	_ PodNotifier        = (*KNOCProvider)(nil)
	_ PodMetricsProvider = (*KNOCProvider)(nil)

	_ Provider           = adapter{}
	_ PodNotifier        = adapter{}
	_ PodMetricsProvider = adapter{}
	_ NodeProvider       = adapter{}
)
